"""Slots by name, pattern or class, as PEFT's `target_modules`; what a host computes plays no part here.

    entry                      chooses
    "encoder.layers.0"         that submodule: the exact name comes first
    "q_proj", "attn.q_proj"    every submodule whose name ends like this, after a dot
    "*.mlp", "blocks.[0-3]"    every submodule with a weight matrix whose name fits; `*` also stands for dots
    re.compile(r".*\\.[qv]")    the same by a regular expression for the whole name
    nn.Linear                  every submodule of the class

Each name is matched once: a submodule under two names counts as its first one, unless its other name is given exactly.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

SlotPattern = str | re.Pattern[str] | type[nn.Module]
Slots = SlotPattern | Sequence[SlotPattern] | Mapping[Any, str]
"""One entry, several, or a table from entry to topology; also the words "auto" and "linear", each by itself."""
AUTO = "auto"
LINEAR = ("linear", "all-linear")
"""Words for every linear layer; the second is PEFT's."""


@dataclass
class MatchedSlots:
    """The submodules that the user's entries choose."""

    names: list[str] = field(default_factory=list)
    """In the order of the model or, if all entries are exact names, in the user's."""
    topologies: dict[str, str] = field(default_factory=dict)
    """What the user stated, by name."""
    exact: set[str] = field(default_factory=set)
    """Names that must be slots; one that a pattern chose is left out if it cannot be."""


def match_slots(model: nn.Module, slots: Slots) -> MatchedSlots:
    """The submodules that `slots` chooses; an entry that chooses none raises."""
    entries = [slots] if isinstance(slots, (str, re.Pattern, type)) else slots
    if not isinstance(entries, Collection):
        raise TypeError(
            f'slots must be "auto", "linear", a name, pattern or class of submodules, a list or a table of them, '
            f"got {slots!r}"
        )
    if not entries:
        raise ValueError('slots is empty: name at least one submodule, or pass "auto"')
    modules, found = submodules(model), MatchedSlots()
    first_names = canonical_names(model)
    for entry in entries:
        names = _matches(entry, modules, first_names)
        if isinstance(entry, str) and names == [entry]:
            _check_new(entry, found, first_names)
            found.exact.add(entry)
        taken = {first_names[name] for name in found.names}
        found.names += [name for name in names if first_names[name] not in taken]
        if isinstance(entries, Mapping):
            found.topologies |= {name: entries[entry] for name in names if name not in found.topologies}
    if found.exact != set(found.names):
        place = {name: index for index, name in enumerate(modules)}
        found.names.sort(key=lambda name: place[first_names[name]])
    return found


def submodules(model: nn.Module) -> dict[str, nn.Module]:
    """Every submodule under each of its names."""
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if name}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """The first name of the submodule behind each name; torch's hooks and traces know it under that one."""
    first = {module: name for name, module in model.named_modules()}
    return {name: first[module] for name, module in submodules(model).items()}


def has_weight_matrix(module: nn.Module) -> bool:
    """Whether a submodule has weights of two dimensions or more, other than tables of embeddings."""
    tables = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
    return any(p.dim() > 1 and id(p) not in tables for p in module.parameters())


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer: torch's, or the `Conv1D` of transformers, which GPT-2 is made of."""
    kind = type(module)
    return isinstance(module, nn.Linear) or (kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."))


def never_runs(module: nn.Module) -> bool:
    """Whether this only holds other modules."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _matches(entry: SlotPattern, modules: dict[str, nn.Module], first_names: dict[str, str]) -> list[str]:
    """Names that an entry chooses, one per submodule."""
    once = [name for name in modules if first_names[name] == name]
    if isinstance(entry, type):
        if not issubclass(entry, nn.Module):
            raise TypeError(f"a class of submodules is a subclass of nn.Module such as nn.Linear, got {entry.__name__}")
        names = [name for name in once if isinstance(modules[name], entry)]
    elif isinstance(entry, str):
        if entry in modules:
            return [entry]
        if _is_glob(entry):
            names = [name for name in once if fnmatchcase(name, entry) and _may_match(modules[name])]
        else:
            names = [name for name in once if name.endswith("." + entry)]
    elif isinstance(entry, re.Pattern):
        names = [name for name in once if entry.fullmatch(name) and _may_match(modules[name])]
    else:
        raise ValueError(f"the model has no submodule {entry!r}: names are strings; write {str(entry)!r}")
    if not names:
        raise ValueError(_no_match(entry, modules))
    return names


def _is_glob(entry: str) -> bool:
    return any(sign in entry for sign in "*?[")


def _may_match(module: nn.Module) -> bool:
    return has_weight_matrix(module) and not never_runs(module)


def _no_match(entry: SlotPattern, modules: dict[str, nn.Module]) -> str:
    known = list(modules)
    if isinstance(entry, type):
        kinds = sorted({type(module).__name__ for module in modules.values()})
        return f"the model has no submodule of class {entry.__name__}; it has {', '.join(kinds[:12])}"
    if isinstance(entry, re.Pattern) or _is_glob(entry):
        pattern = entry.pattern if isinstance(entry, re.Pattern) else entry
        hint = "" if isinstance(entry, re.Pattern) else "; a regular expression is given as re.compile(...)"
        close = _close(re.sub(r"[^\w.]", "", pattern), known)
        return f"no submodule with weights has a name that fits {pattern!r}; {close}{hint}"
    if entry in (AUTO, *LINEAR):
        return f"the model has no submodule {entry!r}; the word {entry!r} stands by itself, not in a list"
    if entry in {type(module).__name__ for module in modules.values()}:
        return f"the model has no submodule {entry!r}; a class is given as such, for instance slots=nn.Linear"
    return f"the model has no submodule {entry!r}; {_close(entry, known)}"


def _close(name: str, known: list[str]) -> str:
    """A hint: names whose last part is close, the most similar first, else names that are close as a whole."""
    last_parts = {other: other.rpartition(".")[2] for other in known}
    close_ends = difflib.get_close_matches(name.rpartition(".")[2], set(last_parts.values()), n=1)
    close = [other for other in known if last_parts[other] in close_ends]
    close.sort(key=lambda other: -difflib.SequenceMatcher(None, name, other).ratio())
    close = close or difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    return f"did you mean {', '.join(close[:4])}?" if close else f"it has {', '.join(known[:12])}"


def _check_new(name: str, found: MatchedSlots, first_names: dict[str, str]) -> None:
    for other in found.exact:
        if other == name:
            raise ValueError(f"each slot may be named once, got {name} several times")
        if first_names[other] == first_names[name]:
            raise ValueError(f"each slot may be named once: {other} and {name} are the same submodule")

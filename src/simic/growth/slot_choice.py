"""Which submodules of a traced host become slots: what "auto" and "linear" choose, and what patterns leave out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from simic.growth.example import first_tensor, tensors
from simic.growth.notices import warn_user
from simic.growth.slot_patterns import MatchedSlots, has_weight_matrix, is_linear
from simic.growth.slot_shape import AmbiguousShapeError

if TYPE_CHECKING:
    from simic.growth.slot_discovery import TracedHost

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MOST_TOLD = 5
"""Reasons in one message."""
_log = logging.getLogger("simic")


def choose_auto(host: TracedHost) -> list[str]:
    """For "auto": the blocks of a host. What was chosen and what was left out is told."""
    chosen, unclear = find_blocks(host)
    if unclear:
        warn_user(
            f"slots that auto leaves out because their shape can be read in several ways: {', '.join(unclear)}; "
            'to grow there, state their topology: slots={"name": "sequence"} for (N, L, C), "conv" for (N, C, ...)',
        )
    if not chosen:
        names = ", ".join(name for name in host.outputs if name)
        raise ValueError(f"found no submodule that could be a slot; name them: slots=[...] from {names}")
    _log.info("slots=auto chose %d submodules: %s", len(chosen), ", ".join(chosen))
    return chosen


def choose_linear(host: TracedHost) -> list[str]:
    """For "linear": every linear layer that can be a slot, except those that make the host's output."""
    names, reasons = find_linear(host)
    if not names:
        raise ValueError('the model has no linear layers, so slots="linear" finds nothing; name submodules instead')
    chosen = [name for name in names if name not in reasons]
    if not chosen:
        raise ValueError(f"no linear layer can be a slot: {_told(reasons)}")
    _log.info("slots=linear chose %d of %d linear layers", len(chosen), len(names))
    if reasons:
        _log.info("linear layers left out: %s", _told(reasons))
    return chosen


def drop_unusable(host: TracedHost, matched: MatchedSlots) -> list[str]:
    """The matched names that can be slots; an exact name that cannot is kept, so that its own error is raised."""
    by_pattern = [name for name in matched.names if name not in matched.exact]
    reasons = host.refused(by_pattern, matched.topologies)
    if reasons and len(reasons) == len(matched.names):
        raise ValueError(f"no submodule that slots names can be a slot: {_told(reasons)}")
    if reasons:
        _log.warning("submodules that the pattern in slots leaves out: %s", _told(reasons))
    if by_pattern:
        _log.info("slots chose %d submodules", len(matched.names) - len(reasons))
    return [name for name in matched.names if name not in reasons]


def find_blocks(host: TracedHost) -> tuple[list[str], list[str]]:
    """Blocks with weights that feed others, which are members of containers or submodules without any.

    Those of unclear shape are the second list.
    """
    chosen: list[str] = []
    unclear: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        for own_name, child in module.named_children():
            if own_name == "parametrizations" and is_parametrized(module):
                continue
            name = prefix + own_name
            is_member = isinstance(module, _CONTAINERS)
            if not is_member and (isinstance(child, _CONTAINERS) or _holds_blocks(host, name, child)):
                visit(child, name + ".")
            elif not _has_features(host, name, child):
                # A block whose output is the host's output is a head; its parts are not blocks.
                if not is_member or isinstance(child, _CONTAINERS) or not _is_output(host, name):
                    visit(child, name + ".")
            else:
                try:
                    host.site(name, None)
                except AmbiguousShapeError:
                    if host.used is None or name in host.used:
                        unclear.append(name)
                except ValueError:
                    visit(child, name + ".")
                else:
                    chosen.append(name)

    visit(host.model, "")
    return chosen, unclear


def find_linear(host: TracedHost) -> tuple[list[str], dict[str, str]]:
    """Names of all linear layers, and the reasons of those that "linear" does not choose."""
    names = [name for name, module in host.model.named_modules() if name and is_linear(module)]
    heads = {name: "it makes the host's output" for name in names if _is_head(host, name)}
    return names, heads | host.refused([name for name in names if name not in heads], {})


def _told(reasons: Mapping[str, str]) -> str:
    shown = [
        reason if repr(name) in reason else f"{name}: {reason}" for name, reason in list(reasons.items())[:_MOST_TOLD]
    ]
    more = len(reasons) - len(shown)
    return "; ".join(shown) + (f"; and {more} more, see simic.find_slots(model, example_input)" if more else "")


def _holds_blocks(host: TracedHost, prefix: str, module: nn.Module) -> bool:
    """Whether a container inside a submodule has members of several layers, which are better slots than the whole."""
    for name, inner in module.named_modules():
        if isinstance(inner, _CONTAINERS):
            for member, child in inner.named_children():
                path = ".".join(filter(None, (prefix, name, member)))
                if next(child.children(), None) is not None and _has_features(host, path, child):
                    return True
    return False


def _has_features(host: TracedHost, name: str, module: nn.Module) -> bool:
    """Whether a submodule has weights, runs once and outputs a tensor that is not the host's own output."""
    outputs = host.outputs.get(name, [])
    tensor = first_tensor(outputs[0]) if len(outputs) == 1 else None
    return tensor is not None and has_weight_matrix(module) and not _is_output(host, name)


def _is_output(host: TracedHost, name: str) -> bool:
    """Whether the host returns all that this submodule puts out, as it is or reshaped."""
    outputs = [first_tensor(output) for output in host.outputs.get(name, [])]
    return any(
        tensor is not None and final.numel() == tensor.numel() and _is_part(final, tensor)
        for tensor in outputs
        for final in tensors(host.result)
    )


def _is_head(host: TracedHost, name: str) -> bool:
    """Whether the host returns what this layer puts out, as it is, reshaped or in part."""
    embeddings = getattr(host.model, "get_output_embeddings", None)
    if callable(embeddings) and embeddings() is host.model.get_submodule(name):
        return True
    outputs = [first_tensor(output) for output in host.outputs.get(name, [])]
    return any(tensor is not None and _is_part(final, tensor) for tensor in outputs for final in tensors(host.result))


def _is_part(final: Tensor, tensor: Tensor) -> bool:
    has_memory = all(each.layout is torch.strided and not each.is_meta for each in (final, tensor))
    # Keys and values that a host returns for its cache are views too, but with a dimension more: the heads'.
    if final is tensor or not has_memory or final.dim() > tensor.dim():
        return final is tensor
    return final.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()

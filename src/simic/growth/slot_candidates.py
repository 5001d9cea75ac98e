"""`find_slots`: what could be a slot of a host, what may grow there, and why something is left out."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from simic.growth.example import ExampleInput, first_tensor
from simic.growth.model import GrowableModel
from simic.growth.slot_choice import find_blocks, find_linear
from simic.growth.slot_discovery import TracedHost
from simic.growth.slot_patterns import AUTO, LINEAR, Slots, has_weight_matrix, match_slots, never_runs
from simic.growth.slot_shape import SlotShape
from simic.storage.printable import printable

_WIDTH = 160
"""Characters in a line of the printed table."""


@dataclass(frozen=True, kw_only=True)
class SlotCandidate:
    """A submodule that may be a slot, or the reason why it cannot."""

    name: str
    kind: str
    """Its class."""
    runs: int
    """Calls in one pass on the example input."""
    output_shape: tuple[int, ...] | None
    """Of the first call; None if it puts out no tensor."""
    shape: SlotShape | None
    """What a seed must keep there; None if it cannot be a slot."""
    grows: tuple[str, ...]
    """Where a seed may grow: "behind" the submodule, "beside" it."""
    auto: bool
    """Whether `slots="auto"` chooses it."""
    reason: str
    """Why it cannot be a slot, or why nothing can grow beside it; "" if there is nothing to say."""


class SlotCandidates(list[SlotCandidate]):
    """A list that prints as a table."""

    @property
    def names(self) -> list[str]:
        """Names of those that can be slots, for `GrowableModel(slots=...)`."""
        return [candidate.name for candidate in self if candidate.grows]

    def __repr__(self) -> str:
        table = Table(title=f"{len(self.names)} of {len(self)} submodules can be slots")
        for name in ("name", "class", "output", "runs", "kind of slot", "grows", "auto", "note"):
            table.add_column(name, overflow="fold")
        for row in self:
            table.add_row(
                Text(printable(row.name)),
                Text(printable(row.kind)),
                "-" if row.output_shape is None else str(row.output_shape),
                str(row.runs),
                "-" if row.shape is None else str(row.shape),
                ", ".join(row.grows) or "-",
                "yes" if row.auto else "",
                Text(printable(row.reason)),
            )
        out = StringIO()
        Console(file=out, width=_WIDTH).print(table)
        return out.getvalue().rstrip()


def find_slots(model: nn.Module, example_input: ExampleInput, slots: Slots | None = None) -> SlotCandidates:
    """What could be a slot of a model: every submodule with a weight matrix, or those that `slots` names.

    Args:
        model: The host, which is left as it is.
        example_input: As for GrowableModel.
        slots: What GrowableModel takes, so that a pattern can be tried. Submodules without weights, such as activation
            functions, may be slots too if they are named.

    Returns:
        A list that prints as a table. Its `names` are those of the usable slots; each row has `name`, `kind`, `runs`,
        `output_shape`, `shape`, `grows`, `auto` and `reason` (why it cannot be a slot).

    Raises:
        ValueError: A name or pattern matches nothing.

    Example:
        >>> simic.find_slots(net, x[:2], "linear").names
        ['0']
    """
    if isinstance(model, GrowableModel):
        raise ValueError(
            "the model is a GrowableModel already, its slots are model.slot_names; for other candidates pass model.host"
        )
    host = TracedHost(model, example_input)
    auto, reasons, topologies = find_blocks(host)[0], dict[str, str](), dict[str, str]()
    if slots is None:
        every = [(name, part) for name, part in model.named_modules() if name]
        names = [name for name, part in every if has_weight_matrix(part) and not never_runs(part)]
    elif isinstance(slots, str) and slots == AUTO:
        names = auto
    elif isinstance(slots, str) and slots in LINEAR:
        names, reasons = find_linear(host)
    else:
        matched = match_slots(model, slots)
        names, topologies = matched.names, matched.topologies
    reasons |= host.refused([name for name in names if name not in reasons], topologies)
    sites = {site.name: site for site in host.sites([name for name in names if name not in reasons], topologies)}
    found = SlotCandidates()
    for name in names:
        outputs, site = host.outputs[host.first_names[name]], sites.get(name)
        tensor = first_tensor(outputs[0]) if outputs else None
        beside = site is not None and site.input is not None
        found.append(
            SlotCandidate(
                name=name,
                kind=type(model.get_submodule(name)).__name__,
                runs=len(outputs),
                output_shape=None if tensor is None else tuple(tensor.shape),
                shape=None if site is None else site.shape,
                grows=() if site is None else ("behind", "beside") if beside else ("behind",),
                auto=name in auto,
                reason=reasons.get(name, "") if site is None or beside else f"not beside: {site.why_no_input}",
            )
        )
    return found

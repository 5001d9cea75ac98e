"""A forward pass of stacked hosts: segment by segment, with the seeds of each segment's slots behind and beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from simic.stacked.layers import Run, run_segments
from simic.stacked.parameters import Parameters
from simic.stacked.seed_groups import SlotPlan, blend_seeds
from simic.stacked.structure import Structure


class Kept(NamedTuple):
    """Activations (M, B, ...) that a pass kept at a slot."""

    h: Tensor  # before the slot's seeds
    x: Tensor  # the input of its segment

    def of(self, rows: Tensor) -> Kept:
        """Those of some hosts."""
        return Kept(self.h[rows], self.x[rows])


def run_hosts(
    structure: Structure,
    parameters_of: Callable[[int], Parameters],
    start: Tensor | tuple[int, Kept],
    plan: Sequence[SlotPlan],
    keep: Collection[int],
    run: Run,
) -> tuple[Tensor, dict[int, Kept]]:
    """Outputs from the inputs (M, B, ...), or from a slot and what a pass kept there; and what this pass keeps.

    `parameters_of` returns those of a segment.
    """
    kept: dict[int, Kept] = {}

    def after_segment(index: int, h: Tensor, x: Tensor, first: int = 0) -> Tensor:
        for slot in structure.slots_of(index)[first:]:
            if slot in keep:
                kept[slot] = Kept(h.detach(), x.detach())
            h = blend_seeds(h, x, plan[slot])
        return h

    if isinstance(start, Tensor):
        x, segment = start, 0
    else:
        slot, (h, x) = start
        index, seat = divmod(slot, structure.seeds_per_slot)
        x, segment = after_segment(index, h, x, seat), index + 1
    out = run_segments(
        structure.segments,
        parameters_of,
        x,
        after_segment,
        start=segment,
        overwriting=structure.overwriting,
        run=run,
    )
    return out, kept

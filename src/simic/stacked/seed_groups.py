"""Seeds of many hosts in one slot: who speaks in a pass, and the activation with all of them blended in.

Shapes: N hosts, R of them in a group. Activations are (N, B, *their own shape).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.blend import OPERATORS, straight_through
from simic.stacked.layers import run_stacked
from simic.stacked.parameters import StackedParameters


@dataclass
class SeedGroup:
    """Seeds of one blueprint and operator in one slot of several hosts."""

    slot: int
    operator: str
    parts: dict[str, nn.Module]  # branch and, for the gate operator, gate: their structure, not their weights
    hosts: np.ndarray  # (R,) whose they are
    matrices: dict[str, StackedParameters]  # the weights of each part

    @property
    def num_parameters(self) -> int:
        """Of one seed, its gate included."""
        return sum(matrix.rows.shape[1] for matrix in self.matrices.values())


@dataclass(frozen=True)
class ActiveSeeds:
    """Seeds of one group that speak in a pass, and in which rows of the activation."""

    group: SeedGroup
    rows: Tensor | None  # which of the group; None for all
    at: Tensor  # where in the activation
    alpha: Tensor  # (R, 1, ...)
    straight: bool = False
    """Heard only by its own gradient: straight-through incubation."""
    learns: bool = True


@dataclass(frozen=True)
class SlotPlan:
    """All voices of a slot; the rows of an activation are sorted by who touches them, and put back afterwards."""

    active_seeds: list[ActiveSeeds]
    sorted_rows: Tensor  # those that no seed touches, then voice by voice
    back: Tensor
    sizes: list[int]
    in_place: bool  # one voice touches all rows, in order

    @classmethod
    def of(cls, active_seeds: list[ActiveSeeds], num_rows: int) -> SlotPlan:
        """The choir of these voices over an activation of so many hosts."""
        silent = torch.ones(num_rows, dtype=torch.bool)
        for active in active_seeds:
            silent[active.at] = False
        rows = torch.cat([silent.nonzero().squeeze(1), *(active.at for active in active_seeds)])
        sizes = [int(silent.sum()), *(len(active.at) for active in active_seeds)]
        in_place = len(active_seeds) == 1 and not sizes[0] and bool((rows == torch.arange(num_rows)).all())
        return cls(active_seeds, rows, rows.argsort(), sizes, in_place)


def blend_seeds(h: Tensor, plan: SlotPlan) -> Tensor:
    """The activation with every voice blended in."""
    if not plan.active_seeds:
        return h
    if plan.in_place:
        return _blended(h, plan.active_seeds[0])
    rearranged = _Rearranged.apply(h, plan.sorted_rows, plan.back)
    assert isinstance(rearranged, Tensor)
    silent, *parts = rearranged.split(plan.sizes)
    spoken = [_blended(part, active) for part, active in zip(parts, plan.active_seeds, strict=True)]
    together = _Rearranged.apply(torch.cat([silent, *spoken]), plan.back, plan.sorted_rows)
    assert isinstance(together, Tensor)
    return together


def _blended(h: Tensor, active: ActiveSeeds) -> Tensor:
    group = active.group
    own: dict[str, dict[str, Tensor]] = {}
    for part, matrix in group.matrices.items():
        leaves = matrix.by_name if active.learns else {name: leaf.detach() for name, leaf in matrix.by_name.items()}
        own[part] = (
            leaves
            if active.rows is None
            else {name: leaf.index_select(0, active.rows) for name, leaf in leaves.items()}
        )
    heard = h.detach() if active.straight else h
    branch = run_stacked(group.parts["branch"], own["branch"], heard)
    if active.straight:
        return straight_through(h, branch)
    gate = run_stacked(group.parts["gate"], own["gate"], h) if "gate" in own else None
    return OPERATORS[group.operator](h, branch, active.alpha, gate)


class _Rearranged(torch.autograd.Function):
    """Rows in another order; cheaper than indexing, whose gradient must reckon with rows that come twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[1]), None, None

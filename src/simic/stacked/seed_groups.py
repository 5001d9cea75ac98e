"""The seeds of one slot in N hosts: groups that run together, and the plan by which they are blended into a pass.

Shapes: N hosts, R seeds in a group, B samples. Activations are (N, B, *their own shape).

Seeds with the same blueprint and operator in a slot form a group with stacked parameters (R, ...). In a forward pass
the rows of the slot's activation are gathered group by group, every group runs as one module, and the rows are
scattered back. Six hosts, two of them without a seed in this slot:

    host                0     1     2     3     4     5
    seed                mlp   -     norm  mlp   -     norm

    sorted_rows         1  4  |  0  3  |  2  5        gather: rows without a seed first, then group by group
                        as is |  mlp   |  norm        one call per group
    restore             2  0  4  3  1  5              scatter: where each host's row is in the sorted order
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.blend import OPERATORS, straight_through
from simic.stacked.layers import run_stacked
from simic.stacked.parameters import StackedParameters, take_rows

GroupKey = tuple[int, str, str]
"""Slot, blueprint, operator."""


@dataclass
class SeedGroup:
    """Seeds of one blueprint and operator in one slot of several hosts."""

    slot: int
    operator: str
    parts: dict[str, nn.Module]  # the branch and, for the gate operator, the gate; used for their structure only
    hosts: np.ndarray  # (R,) the host of each row
    matrices: dict[str, StackedParameters]  # the parameters of each part

    @property
    def num_parameters(self) -> int:
        """Parameters of one seed, its gate included."""
        return sum(matrix.rows.shape[1] for matrix in self.matrices.values())


@dataclass(frozen=True)
class ActiveSeeds:
    """Seeds of one group that take part in a pass."""

    group: SeedGroup
    rows: Tensor | None  # their rows in the group; None for all
    at: Tensor  # their rows in the activation
    alpha: Tensor  # (R,)
    straight: bool  # straight-through incubation: output unchanged, gradient for the seed only
    learns: bool  # whether the seeds' parameters receive gradients


@dataclass(frozen=True)
class SlotPlan:
    """Which seeds are active in a slot during one pass, and how the rows of the activation are rearranged for them."""

    active_seeds: list[ActiveSeeds]
    sorted_rows: Tensor
    restore: Tensor
    sizes: list[int]  # rows without a seed, then those of each of `active_seeds`
    already_sorted: bool  # one group covers all rows in order, so nothing needs to be rearranged


def plan_slot(
    groups: Iterable[SeedGroup], hosts: np.ndarray, alpha: np.ndarray, straight: np.ndarray, *, learns: bool
) -> SlotPlan:
    """Plan a slot for a pass of `hosts` (M,), given its groups and the alpha (N,) of every host.

    Seeds are active where alpha > 0, and where `straight` (N,) says that they learn straight-through.
    """
    row_of_host = np.full(len(alpha), -1)
    row_of_host[hosts] = np.arange(len(hosts))
    active_seeds = []
    for group in groups:
        in_pass = row_of_host[group.hosts] >= 0
        for is_straight, mask in ((False, alpha > 0), (True, straight)):
            if not (rows := np.flatnonzero(in_pass & mask[group.hosts])).size:
                continue
            owners = group.hosts[rows]
            active_seeds.append(
                ActiveSeeds(
                    group=group,
                    rows=None if len(rows) == len(group.hosts) else torch.from_numpy(rows),
                    at=torch.from_numpy(row_of_host[owners]),
                    alpha=torch.from_numpy(alpha[owners]).to(group.matrices["branch"].rows),
                    straight=is_straight,
                    learns=learns,
                )
            )
    return _arrange(active_seeds, len(hosts))


def _arrange(active_seeds: list[ActiveSeeds], num_rows: int) -> SlotPlan:
    untouched = torch.ones(num_rows, dtype=torch.bool)
    for active in active_seeds:
        untouched[active.at] = False
    rows = torch.cat([untouched.nonzero().squeeze(1), *(active.at for active in active_seeds)])
    sizes = [int(untouched.sum()), *(len(active.at) for active in active_seeds)]
    already_sorted = len(active_seeds) == 1 and not sizes[0] and bool((rows == torch.arange(num_rows)).all())
    return SlotPlan(active_seeds, rows, rows.argsort(), sizes, already_sorted)


def blend_seeds(h: Tensor, plan: SlotPlan) -> Tensor:
    """The activation h of a slot with all active seeds blended in."""
    if not plan.active_seeds:
        return h
    if plan.already_sorted:
        return _blend_group(h, plan.active_seeds[0])
    untouched, *parts = _permute(h, plan.sorted_rows, plan.restore).split(plan.sizes)
    blended = [_blend_group(part, active) for part, active in zip(parts, plan.active_seeds, strict=True)]
    return _permute(torch.cat([untouched, *blended]), plan.restore, plan.sorted_rows)


def _blend_group(h: Tensor, active: ActiveSeeds) -> Tensor:
    group = active.group
    own = {
        part: take_rows(matrix.by_name, active.rows, constant=not active.learns)
        for part, matrix in group.matrices.items()
    }
    if active.straight:
        # Detached input: the seed learns, but its gradient does not reach the host.
        return straight_through(h, run_stacked(group.parts["branch"], own["branch"], h.detach()))
    branch = run_stacked(group.parts["branch"], own["branch"], h)
    gate = run_stacked(group.parts["gate"], own["gate"], h) if "gate" in own else None
    return OPERATORS[group.operator](h, branch, active.alpha.view(-1, *[1] * (h.dim() - 1)), gate)


def _permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted = _Permute.apply(x, order, inverse)
    assert isinstance(permuted, Tensor)
    return permuted


class _Permute(torch.autograd.Function):
    """`x.index_select(0, order)` for a permutation.

    The backward pass of index_select adds up, since an index may occur twice; that of a permutation is a mere gather.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None

"""The seeds of one slot in N hosts: groups with stacked parameters, and the plan by which they join a pass.

Shapes: N hosts, M of them in a pass, R seeds that are active in it, B samples, C features. Activations are
(M, B, *their own shape); those of feature and conv slots lie in memory as (M, C, ..., B), samples last.

Seeds with the same blueprint in a slot form a group, and so do their gates. A pass runs the seeds with one hidden layer
together (see `two_layer`) and every other group by itself, and then blends all outputs into the activation at once.
Seeds are sorted by their blend operator, so that each operator works on a range, and then by group. Six hosts:

    host                0     1     2     3     4     5
    seed                mlp   -     norm  glu   -     mlp
    operator            gate        add   add         multiply

    at                  3  2  | 5        | 0          rows of the activation, sorted by operator
                        add   | multiply | gate
    groups of rows      mlp and glu: seeds 0, 2, 3;  norm: seed 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.blend import straight_through
from simic.stacked.blend import Blending, blend
from simic.stacked.layers import run_stacked
from simic.stacked.parameters import StackedParameters, take_rows
from simic.stacked.two_layer import BlockPlan, Seeds, TwoLayer, plan_blocks, run_blocks

GroupKey = tuple[int, str]
"""Slot, and a blueprint or GATE."""
GATE = "(gate)"
"""Name of the group of a slot's gates; no blueprint can have it, because names are identifiers."""
OPERATORS = ("add", "multiply", "gate")
"""Blend operators in the order in which seeds are sorted."""


@dataclass
class SeedGroup:
    """Seeds of one blueprint in one slot of several hosts, or the gates of that slot."""

    slot: int
    name: str
    module: nn.Module  # a branch or a gate; used for its structure only
    hosts: np.ndarray  # (R,) the host of each row
    parameters: StackedParameters
    two_layer: TwoLayer | None = None  # how the seeds run together with those of other blueprints, if they can
    start: int = 0  # of its parameters in the slot's vector


class Batch(NamedTuple):
    """Seeds of one group that run as one module."""

    group: SeedGroup
    rows: Tensor | None  # their rows in the group; None for all
    at: Tensor  # their rows in the activation
    number: Tensor  # (r,) their numbers among the seeds of the pass; unused for gates and straight-through seeds

    def run(self, h: Tensor, *, learns: bool) -> Tensor:
        """The outputs for the rows of an activation (M, B, ...)."""
        own = take_rows(self.group.parameters.by_name, self.rows, constant=not learns)
        return run_stacked(self.group.module, own, h)


@dataclass(frozen=True)
class SlotPlan:
    """Which seeds are active in a slot during one pass, how they run and how they are blended in."""

    samples_last: bool
    learns: bool  # whether the seeds' parameters receive gradients
    blending: Blending | None  # None if no seed is blended in
    blocks: BlockPlan | None
    vector: Tensor | None  # the parameters of all seeds that can run in blocks
    batches: list[Batch]
    rows: Tensor | None  # of the activation that the batches read, one after the other; None for all, in order
    order: Tensor | None  # sorts the outputs of the batches by number; None if they are sorted or there are blocks
    gates: Batch | None
    straight: list[Batch]  # seeds in straight-through incubation


class SlotSeeds(NamedTuple):
    """All seeds of a slot, from which passes are planned."""

    groups: Sequence[SeedGroup]
    gates: SeedGroup | None
    vector: Tensor | None  # see SlotPlan
    features: int | None  # of a feature slot, else None
    samples_last: bool  # whether activations lie in memory with samples innermost
    rank: int  # dimensions of an activation without the first
    operator: np.ndarray  # (N,) index into OPERATORS


def plan_slot(
    slot: SlotSeeds, hosts: np.ndarray, alpha: np.ndarray, straight: np.ndarray, like: Tensor, *, learns: bool
) -> SlotPlan:
    """Plan a slot for a pass of `hosts` (M,), given the alpha (N,) of every host.

    Seeds are active where alpha > 0, and where `straight` (N,) says that they learn straight-through. Numbers become
    tensors with the dtype and device of `like`.
    """
    device = like.device
    row_of_host = np.full(len(alpha), -1)
    row_of_host[hosts] = np.arange(len(hosts))
    owners = hosts[(alpha[hosts] > 0) & _is_member(slot.groups, len(alpha))[hosts]]
    group_of_host = np.zeros(len(alpha), dtype=np.int64)
    for index, group in enumerate(slot.groups):
        group_of_host[group.hosts] = index
    owners = owners[np.lexsort((group_of_host[owners], slot.operator[owners]))]
    number_of_host = np.full(len(alpha), -1)
    number_of_host[owners] = np.arange(len(owners))
    in_blocks, batches, numbers = list[Seeds](), list[Batch](), list[np.ndarray]()
    for group in slot.groups:
        if not (rows := np.flatnonzero(number_of_host[group.hosts] >= 0)).size:
            continue
        number = number_of_host[group.hosts[rows]]
        if group.two_layer is not None:
            in_blocks.append(Seeds(group.two_layer, group.parameters.shapes, group.start, rows, number))
        else:
            batches.append(_batch(group, rows, number, row_of_host, device))
            numbers.append(number)
    at, (multiply, gate) = row_of_host[owners], np.searchsorted(slot.operator[owners], (1, 2)).tolist()
    blending = Blending(
        at=torch.from_numpy(at).to(device),
        alpha=torch.from_numpy(alpha[owners]).to(like).view(-1, *[1] * slot.rank),
        multiply=slice(multiply, gate),
        gate=slice(gate, len(owners)),
    )
    return SlotPlan(
        samples_last=slot.samples_last,
        learns=learns,
        blending=blending if len(owners) else None,
        blocks=_plan_blocks(slot, in_blocks, at, device) if in_blocks else None,
        vector=slot.vector,
        batches=batches,
        rows=_rows(numbers, at, len(hosts), device),
        order=None if in_blocks else _order(numbers, device),
        gates=_plan_gates(slot, owners[gate:], row_of_host, device) if gate < len(owners) else None,
        straight=[
            _batch(group, rows, rows, row_of_host, device)
            for group in slot.groups
            if (rows := np.flatnonzero((row_of_host[group.hosts] >= 0) & straight[group.hosts])).size
        ],
    )


def _plan_blocks(slot: SlotSeeds, seeds: Sequence[Seeds], at: np.ndarray, device: torch.device) -> BlockPlan:
    assert slot.features is not None
    assert slot.vector is not None
    return plan_blocks(seeds, at, slot.features, slot.vector.numel(), device)


def _plan_gates(slot: SlotSeeds, owners: np.ndarray, row_of_host: np.ndarray, device: torch.device) -> Batch:
    assert slot.gates is not None
    row_of_gate = np.empty(len(row_of_host), dtype=np.int64)
    row_of_gate[slot.gates.hosts] = np.arange(len(slot.gates.hosts))
    rows = row_of_gate[owners]
    return _batch(slot.gates, rows, rows, row_of_host, device)


def _is_member(groups: Iterable[SeedGroup], num_hosts: int) -> np.ndarray:
    """Whether each host has a seed in one of these groups (N,)."""
    member = np.zeros(num_hosts, dtype=bool)
    for group in groups:
        member[group.hosts] = True
    return member


def _batch(
    group: SeedGroup, rows: np.ndarray, number: np.ndarray, row_of_host: np.ndarray, device: torch.device
) -> Batch:
    every = len(rows) == len(group.hosts) and bool((rows == np.arange(len(rows))).all())
    return Batch(
        group=group,
        rows=None if every else torch.from_numpy(rows).to(device),
        at=torch.from_numpy(row_of_host[group.hosts[rows]]).to(device),
        number=torch.from_numpy(number).to(device),
    )


def _rows(numbers: Sequence[np.ndarray], at: np.ndarray, num_rows: int, device: torch.device) -> Tensor | None:
    """The rows of an activation that several batches read, one after the other; None for all, in order."""
    rows = at[np.concatenate(numbers)] if numbers else np.arange(num_rows)
    return None if np.array_equal(rows, np.arange(num_rows)) else torch.from_numpy(rows).to(device)


def _order(numbers: Sequence[np.ndarray], device: torch.device) -> Tensor | None:
    """Sorts the outputs of several batches, one after the other, by the numbers of their seeds."""
    order = np.argsort(np.concatenate(numbers)) if numbers else np.arange(0)
    return None if (order == np.arange(len(order))).all() else torch.from_numpy(order).to(device)


def blend_seeds(h: Tensor, plan: SlotPlan) -> Tensor:
    """The activation h of a slot with all active seeds blended in."""
    for batch in plan.straight:
        # Detached input: the seed learns, but its gradient does not reach the host.
        own = h.index_select(0, batch.at)
        out = straight_through(own, batch.run(own.detach(), learns=plan.learns))
        h = h.index_copy(0, batch.at, out.to(h.dtype))
    if (blending := plan.blending) is None:
        return h
    # Images of a single host lie in memory as torch's own layers leave them.
    if h.dim() > 3 and plan.samples_last and h.stride(1) > 1:
        plan = replace(plan, samples_last=False)
    rows = h.movedim(1, -1) if plan.samples_last else h
    out = blend(rows, _outputs(rows, plan), _gates(rows, plan), blending)
    return out.movedim(-1, 1) if plan.samples_last else out


def _outputs(h: Tensor, plan: SlotPlan) -> Tensor:
    """Outputs (R, ...) of all active seeds, in the memory layout of h."""
    outputs = []
    if plan.batches:
        # One selection for all batches: in the backward pass each would fill a gradient of the whole activation.
        chosen = h if plan.rows is None else h.index_select(0, plan.rows)
        parts = chosen.split([len(batch.at) for batch in plan.batches]) if len(plan.batches) > 1 else [chosen]
        outputs = [_run(batch, own, plan) for batch, own in zip(plan.batches, parts, strict=True)]
    if plan.blocks is not None:
        assert plan.vector is not None
        y = run_blocks(h, plan.vector if plan.learns else plan.vector.detach(), plan.blocks)
        for batch, own in zip(plan.batches, outputs, strict=True):
            y = y.index_add(0, batch.number, own.to(y.dtype))
        return y
    y = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return y if plan.order is None else y.index_select(0, plan.order)


def _gates(h: Tensor, plan: SlotPlan) -> Tensor | None:
    return None if plan.gates is None else _run(plan.gates, h.index_select(0, plan.gates.at), plan)


def _run(batch: Batch, own: Tensor, plan: SlotPlan) -> Tensor:
    out = batch.run(own.movedim(-1, 1) if plan.samples_last else own, learns=plan.learns)
    return out.movedim(1, -1) if plan.samples_last else out

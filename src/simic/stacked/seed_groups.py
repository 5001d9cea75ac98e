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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.blend import straight_through
from simic.growth.slot_shape import Reads, SlotShape
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Incubation, Stage
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
    reads: Reads = "output"
    two_layer: TwoLayer | None = None  # how the seeds run together with those of other blueprints, if they can
    start: int = 0  # of its parameters in the slot's vector

    def learns(self, state: SlotState, incubation: Incubation) -> np.ndarray:
        """Which rows receive a gradient (R,): those of seeds blended in, and of seeds in training."""
        in_training = state.stage[self.hosts, self.slot] == Stage.TRAINING
        # The straight-through output does not depend on the gate.
        trains = self.name != GATE or incubation != "straight_through"
        return (state.alpha[self.hosts, self.slot] > 0) | (in_training & trains)


class Batch(NamedTuple):
    """Seeds of one group that run as one module."""

    group: SeedGroup
    rows: Tensor | None  # their rows in the group; None for all
    at: Tensor  # their rows in the activation
    number: Tensor  # (r,) their numbers among the seeds of the pass; unused for gates and straight-through seeds

    def run(self, h: Tensor, *, learns: bool) -> Tensor:
        """The outputs for the rows of what they read (r, B, ...)."""
        own = take_rows(self.group.parameters.by_name, self.rows, constant=not learns)
        return run_stacked(self.group.module, own, h)


class Selection(NamedTuple):
    """Batches that read the same activation."""

    reads: Reads
    rows: Tensor | None  # that they read, one batch after the other; None for all rows, in order
    batches: list[Batch]


@dataclass(frozen=True)
class SlotPlan:
    """Which seeds are active in a slot during one pass, how they run and how they are blended in."""

    samples_last: bool
    learns: bool  # whether the seeds' parameters receive gradients
    blending: Blending | None  # None if no seed is blended in
    blocks: list[BlockPlan]  # of seeds behind the segment, and of those beside it
    vector: Tensor | None  # the parameters of all seeds that can run in blocks
    selections: list[Selection]
    order: Tensor | None  # sorts the outputs of the batches by number; None if they are sorted or there are blocks
    gates: Batch | None
    straight: list[Batch]  # seeds in straight-through incubation
    reads_input: bool  # whether some seeds that are blended in are beside the segment

    @property
    def batches(self) -> list[Batch]:
        """All that run by themselves, in the order of their outputs."""
        return [batch for selection in self.selections for batch in selection.batches]


class SlotSeeds:
    """All seeds of a slot, from which passes are planned; valid until the groups change."""

    def __init__(
        self,
        groups: Sequence[SeedGroup],
        gates: SeedGroup | None,
        vector: Tensor | None,
        shape: SlotShape,
        operator: np.ndarray,
    ) -> None:
        self.groups, self.gates, self.shape = groups, gates, shape
        self.vector = vector  # see SlotPlan
        self.operator = operator  # (N,) index into OPERATORS
        self.group_of = np.full(len(operator), -1)  # (N,) index of the group of each host's seed, -1 for none
        self.row_of = np.zeros(len(operator), dtype=np.int64)  # (N,) its row in the group
        for index, group in enumerate(groups):
            self.group_of[group.hosts], self.row_of[group.hosts] = index, np.arange(len(group.hosts))


def plan_slot(
    slot: SlotSeeds, hosts: np.ndarray, alpha: np.ndarray, straight: np.ndarray, like: Tensor, *, learns: bool
) -> SlotPlan:
    """Plan a slot for a pass of `hosts` (M,), which may name a host several times, with an alpha (M,) for each.

    Seeds are active where alpha > 0, and where `straight` (M,) says that they learn straight-through. Numbers become
    tensors with the dtype and device of `like`.
    """
    device = like.device
    group_of, row_of = slot.group_of[hosts], slot.row_of[hosts]
    at = np.flatnonzero((alpha > 0) & (group_of >= 0))
    at = at[np.lexsort((group_of[at], slot.operator[hosts[at]]))]
    order = np.lexsort((row_of[at], group_of[at]))  # numbers group by group, in the order of the group's rows
    ends = np.searchsorted(group_of[at[order]], np.arange(len(slot.groups) + 1)).tolist()
    in_blocks: dict[Reads, list[Seeds]] = {}
    alone: dict[Reads, list[tuple[Batch, np.ndarray]]] = {}
    for group, start, end in zip(slot.groups, ends, ends[1:], strict=False):
        if start == end:
            continue
        number = order[start:end]
        rows = row_of[at[number]]
        if group.two_layer is not None:
            seeds = Seeds(group.two_layer, group.parameters.shapes, group.start, rows, number)
            in_blocks.setdefault(group.reads, []).append(seeds)
        else:
            batch = _batch(group, rows, at[number], number, device)
            alone.setdefault(group.reads, []).append((batch, number))
    multiply, gate = np.searchsorted(slot.operator[hosts[at]], (1, 2)).tolist()
    blending = Blending(
        at=torch.from_numpy(at).to(device),
        alpha=torch.from_numpy(alpha[at]).to(like).view(-1, *[1] * slot.shape.rank),
        multiply=slice(multiply, gate),
        gate=slice(gate, len(at)),
    )
    return SlotPlan(
        samples_last=slot.shape.topology != "sequence",
        learns=learns,
        blending=blending if len(at) else None,
        blocks=[_plan_blocks(slot, own, reads, at, device) for reads, own in in_blocks.items()],
        vector=slot.vector,
        selections=[
            Selection(reads, _rows([number for _, number in own], at, len(hosts), device), [batch for batch, _ in own])
            for reads, own in alone.items()
        ],
        order=None if in_blocks else _order([number for own in alone.values() for _, number in own], device),
        gates=_plan_gates(slot, hosts, at[gate:], device) if gate < len(at) else None,
        straight=[
            _batch(group, row_of[own], own, own, device)
            for index, group in enumerate(slot.groups)
            if (own := np.flatnonzero(straight & (group_of == index))).size
        ],
        reads_input="input" in in_blocks or "input" in alone,
    )


def _plan_blocks(
    slot: SlotSeeds, seeds: Sequence[Seeds], reads: Reads, at: np.ndarray, device: torch.device
) -> BlockPlan:
    assert slot.vector is not None
    return plan_blocks(seeds, at, slot.shape, reads, slot.vector.numel(), device)


def _plan_gates(slot: SlotSeeds, hosts: np.ndarray, at: np.ndarray, device: torch.device) -> Batch:
    assert slot.gates is not None
    row_of = np.zeros(len(slot.operator), dtype=np.int64)
    row_of[slot.gates.hosts] = np.arange(len(slot.gates.hosts))
    return _batch(slot.gates, row_of[hosts[at]], at, at, device)


def _batch(group: SeedGroup, rows: np.ndarray, at: np.ndarray, number: np.ndarray, device: torch.device) -> Batch:
    every = len(rows) == len(group.hosts) and bool((rows == np.arange(len(rows))).all())
    return Batch(
        group=group,
        rows=None if every else torch.from_numpy(rows).to(device),
        at=torch.from_numpy(at).to(device),
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


def blend_seeds(h: Tensor, x: Tensor, plan: SlotPlan) -> Tensor:
    """The activation h of a slot with all active seeds blended in; x is the input of the slot's segment."""
    for batch in plan.straight:
        # Detached input: the seed learns, but its gradient does not reach the host.
        own = h.index_select(0, batch.at)
        read = own if batch.group.reads == "output" else x.index_select(0, batch.at)
        out = straight_through(own, batch.run(read.detach(), learns=plan.learns))
        h = h.index_copy(0, batch.at, out.to(h.dtype))
    if (blending := plan.blending) is None:
        return h
    # Images of a single host lie in memory as torch's own layers leave them.
    if h.dim() > 3 and plan.samples_last and h.stride(1) > 1:
        plan = replace(plan, samples_last=False)
    rows = h.movedim(1, -1) if plan.samples_last else h
    out = blend(rows, _outputs(rows, x, plan), _gates(rows, plan), blending)
    return out.movedim(-1, 1) if plan.samples_last else out


def _outputs(h: Tensor, x: Tensor, plan: SlotPlan) -> Tensor:
    """Outputs (R, ...) of all active seeds, in the memory layout of h."""
    if plan.samples_last and plan.reads_input:
        x = x.movedim(1, -1)
    outputs = []
    for selection in plan.selections:
        # One selection for all batches: in the backward pass each would fill a gradient of the whole activation.
        source, batches = h if selection.reads == "output" else x, selection.batches
        chosen = source if selection.rows is None else source.index_select(0, selection.rows)
        parts = chosen.split([len(batch.at) for batch in batches]) if len(batches) > 1 else [chosen]
        outputs += [_run(batch, own, plan) for batch, own in zip(batches, parts, strict=True)]
    if plan.blocks:
        assert plan.vector is not None
        vector = plan.vector if plan.learns else plan.vector.detach()
        y, *others = (run_blocks(h if own.reads == "output" else x, vector, own) for own in plan.blocks)
        for other in others:
            y = y + other
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

"""Whole passes of stacked feature hosts as tapes: training steps, and evaluation with all its ablations at once.

Shapes: N hosts, S slots, C features, B samples, K classes. Activations are (rows, C, B).

The parameters stay in the optimizer's vector. A pass needs them in other places: each layer of all hosts as one
contiguous tensor, seeds in blocks with padding between. They are copied there by one call and, after the backward pass,
gradients are copied back by one call. Two hosts with a weight w and a bias b, and a seed s of two parameters in a block
of three:

    vector      w0 b0 w1 b1 s0 s1                     and a zero behind it, for padding
    arena       w0 w1 | b0 b1 | s0 s1 0               layer by layer, block by block
    gradients   likewise, and a zero behind them, for parameters that have no part in the pass

An evaluation adds a row for every seed that it measures: a copy of its host's activation before the slot, which then
goes its own way with that seed switched. Hosts 0 to 2, seeds measured in slot 0 of host 1 and in slot 1 of hosts 1, 2:

    rows        segment 0: 0 1 2    slot 0, segment 1: 0 1 2 1    slot 1, segment 2: 0 1 2 1 1 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from simic.stacked.parameters import StackedParameters
from simic.stacked.seed_groups import Batch, SlotPlan
from simic.stacked.structure import Structure
from simic.stacked.tape import Node, Nodes, Tape, aten, put_module, take
from simic.stacked.tape_seeds import SlotInputs, SlotNodes, put_seeds, take_inputs
from simic.stacked.two_layer import BlockPlan


class PassPlan(NamedTuple):
    """Who takes part in a pass: the host of each row, segment by segment, and the seeds of each slot."""

    hosts: Sequence[np.ndarray]  # (rows,) per segment
    added: Sequence[Tensor | None]  # per slot: the rows that become its rows, if some are added
    slots: Sequence[SlotPlan]


class _Claim(NamedTuple):
    start: int
    shape: tuple[int, ...]


class Arena:
    """Parameters in the places where a pass needs them, and their gradients."""

    def __init__(self, vector: Tensor) -> None:
        """`vector` holds all parameters, and a zero behind them."""
        self._vector, self._size, self._indices = vector, 0, list[np.ndarray]()

    def claim(self, index: np.ndarray) -> _Claim:
        """A place for the elements `index` of the vector; -1 stands for the zero."""
        claim = _Claim(self._size, index.shape)
        self._indices.append(index.reshape(-1))
        self._size += index.size
        return claim

    def claim_rows(self, parameters: StackedParameters, rows: np.ndarray, prefix: str = "") -> dict[str, _Claim]:
        """Places for some rows of the stacked parameters whose names begin with `prefix`, by the rest of the name."""
        claims, start = {}, int(parameters.rows.storage_offset())
        first = rows[:, None] * parameters.rows.shape[1]
        for name, shape in parameters.shapes.items():
            if name.startswith(prefix):
                index = first + np.arange(start, start + shape.numel())
                claims[name[len(prefix) :]] = self.claim(index.reshape(len(rows), *shape))
            start += shape.numel()
        return claims

    def allocate(self, *, learns: bool) -> None:
        """Make room for all that was claimed."""
        index = np.concatenate(self._indices)
        end = self._vector.numel() - 1
        self._index = torch.from_numpy(np.where(index < 0, end, index))
        self.values = self._vector.new_empty(self._size)
        self._gradients = None
        if learns:
            back = np.full(end + 1, self._size)
            back[index] = np.arange(self._size)  # what is written at -1 is cut off
            self._back, self._gradients = torch.from_numpy(back[:-1]), self._vector.new_zeros(self._size + 1)

    def node(self, claim: _Claim) -> Node:
        """What was claimed; call it after `allocate`."""
        start, shape = claim
        place = slice(start, start + int(np.prod(shape)))
        grad = None if self._gradients is None else self._gradients[place].view(shape)
        return Node(self.values[place].view(shape), grad)

    def nodes(self, claims: Mapping[str, _Claim]) -> Nodes:
        """The same by name."""
        return {name: self.node(claim) for name, claim in claims.items()}

    def load(self) -> None:
        """Copy the present parameters here."""
        torch.index_select(self._vector, 0, self._index, out=self.values)

    def unload(self, gradient: Tensor) -> None:
        """Copy the gradients to a vector of all parameters."""
        assert self._gradients is not None
        torch.index_select(self._gradients, 0, self._back, out=gradient)


class _SlotClaims(NamedTuple):
    buffers: list[_Claim]
    batches: list[dict[str, _Claim]]
    gates: dict[str, _Claim] | None


class Pass:
    """A pass of stacked hosts with memory of its own, for one number of samples and until the plan changes."""

    def __init__(
        self, structure: Structure, plan: PassPlan, vector: Tensor, *, inputs: int, samples: int, learns: bool
    ) -> None:
        self._arena, self.tape = Arena(vector), Tape(learns)
        self.x = vector.new_empty(len(plan.hosts[0]), inputs, samples)
        self.samples, self.hosts = samples, torch.from_numpy(plan.hosts[-1])  # (rows,) whose output each row is
        segments = [
            self._arena.claim_rows(structure.hosts, hosts, f"{name}.")
            for name, hosts in zip(structure.segment_names, plan.hosts, strict=True)
        ]
        slots = [self._claim_slot(slot) for slot in plan.slots]
        self._arena.allocate(learns=learns)
        h = Node(self.x, None)
        for index, segment in enumerate(structure.segments):
            own = structure.slots_of(index)
            reads = self._take_inputs(h, [(plan.added[slot], plan.slots[slot]) for slot in own])
            h = put_module(self.tape, segment, self._arena.nodes(segments[index]), h)
            for slot, read in zip(own, reads, strict=True):
                if (added := plan.added[slot]) is not None:
                    h = take(self.tape, h, added)
                h = put_seeds(self.tape, h, plan.slots[slot], self._slot_nodes(slots[slot]), read)
        self.out = h
        """Outputs (rows, K, B) and their gradient."""

    def _claim_slot(self, plan: SlotPlan) -> _SlotClaims:
        gates = None if plan.gates is None else self._claim_batch(plan.gates)
        buffers = [self._claim_buffer(plan.vector, blocks) for blocks in plan.blocks]
        return _SlotClaims(buffers, [self._claim_batch(batch) for batch in plan.batches], gates)

    def _claim_buffer(self, vector: Tensor | None, plan: BlockPlan) -> _Claim:
        assert vector is not None
        index, places, chosen = np.full(sum(plan.sizes), -1), plan.places, plan.chosen
        own = np.arange(len(places)) if chosen is None else chosen.numpy()
        index[places] = int(vector.storage_offset()) + own
        return self._arena.claim(index)

    def _claim_batch(self, batch: Batch) -> dict[str, _Claim]:
        parameters = batch.group.parameters
        rows = np.arange(len(parameters.rows)) if batch.rows is None else batch.rows.numpy()
        return self._arena.claim_rows(parameters, rows)

    def _slot_nodes(self, claims: _SlotClaims) -> SlotNodes:
        gates = None if claims.gates is None else self._arena.nodes(claims.gates)
        batches = [self._arena.nodes(own) for own in claims.batches]
        return SlotNodes([self._arena.node(own) for own in claims.buffers], batches, gates)

    def _take_inputs(self, x: Node, slots: Sequence[tuple[Tensor | None, SlotPlan]]) -> list[SlotInputs]:
        """What the seeds beside a segment read of its input x, slot by slot; each slot may add rows."""
        inputs, origin = [], None
        for added, plan in slots:
            if added is not None:
                origin = added if origin is None else origin[added]
            inputs.append(take_inputs(self.tape, x, plan, origin))
        return inputs

    def run(self, x: Tensor) -> Tensor:
        """Outputs (rows, B, K) for inputs (N, B, C); valid until the next run."""
        self.x.copy_(x.transpose(1, 2))
        self._arena.load()
        self.tape.run()
        return self.out.value.transpose(1, 2)

    def run_backward(self, gradient: Tensor) -> None:
        """Write the gradient with respect to all parameters to a vector, given that of `out`."""
        self.tape.run_backward()
        self._arena.unload(gradient)


class TrainingStep:
    """Mean cross entropy of each host on its batch, and the gradient with respect to all parameters."""

    def __init__(self, structure: Structure, plan: PassPlan, vector: Tensor, *, inputs: int, samples: int) -> None:
        self._pass = Pass(structure, plan, vector, inputs=inputs, samples=samples, learns=True)
        logits, grad = self._pass.out
        self._log_probability, self._target = torch.empty_like(logits), torch.empty_like(logits)
        softmax = partial(aten._log_softmax.out, logits, 1, False, out=self._log_probability)
        softmax_backward = aten._log_softmax_backward_data.out
        self._pass.tape.add(softmax)
        self._pass.tape.add_backward(
            partial(softmax_backward, self._target, self._log_probability, 1, logits.dtype, out=grad)
        )
        self.samples, self.gradient = samples, vector.new_empty(vector.numel() - 1)

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        """The losses (N,) of a batch (N, B, C) with targets (N, B); `gradient` then holds that of their sum."""
        index = y.unsqueeze(1)
        # The gradient of the mean of -log p(target) with respect to all log-probabilities.
        self._target.zero_().scatter_(1, index, -1 / y.shape[1])
        self._pass.run(x)
        losses = self._log_probability.gather(1, index).mean((1, 2)).neg_()
        self._pass.run_backward(self.gradient)
        return losses

"""The seeds of a slot on a tape: those with one hidden layer in blocks, others by themselves, then blended in.

Shapes: M rows of the activation, R seeds, C features, B samples, K hidden units per block (see `two_layer`).

The calls compute what `seed_groups.blend_seeds` computes, under the same `SlotPlan`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from simic.stacked.blend import Blending
from simic.stacked.seed_groups import SlotPlan
from simic.stacked.tape import Node, Nodes, Tape, aten, put_module, take
from simic.stacked.two_layer import BlockPlan


class SlotNodes(NamedTuple):
    """What the seeds of a slot need besides the slot's activation."""

    buffers: list[Node]  # of each block plan
    batches: list[Nodes]  # the parameters of each batch
    gates: Nodes | None


class SlotInputs(NamedTuple):
    """What the seeds beside a segment read, row by row; None for those behind it."""

    blocks: list[Node | None]
    batches: list[Node | None]


def take_inputs(tape: Tape, x: Node, plan: SlotPlan, origin: Tensor | None) -> SlotInputs:
    """Of the input x of a slot's segment; call it before the segment, which writes the gradient of x, is put there.

    `origin` is the row of x that each row of the slot's activation comes from, if some were added on the way.
    """

    def own(rows: Tensor) -> Node:
        return take(tape, x, rows if origin is None else origin[rows])

    return SlotInputs(
        [own(blocks.source) if blocks.reads == "input" else None for blocks in plan.blocks],
        [own(batch.at) if batch.group.reads == "input" else None for batch in plan.batches],
    )


def put_seeds(tape: Tape, h: Node, plan: SlotPlan, nodes: SlotNodes, inputs: SlotInputs) -> Node:
    """The activation h of a slot with all active seeds blended in."""
    blending = plan.blending
    if blending is None:
        return h
    y = tape.node(len(blending.at), *h.value.shape[1:], like=h.value)
    for number, (blocks, buffer, x) in enumerate(zip(plan.blocks, nodes.buffers, inputs.blocks, strict=True)):
        read = take(tape, h, blocks.source) if x is None else x
        _put_blocks(tape, read, y, blocks, buffer, first=number == 0)
    for batch, own, x in zip(plan.batches, nodes.batches, inputs.batches, strict=True):
        out = put_module(tape, batch.group.module, own, take(tape, h, batch.at) if x is None else x)
        tape.add(partial(y.value.index_copy_, 0, batch.number, out.value))
        if tape.learns:
            tape.add_backward(partial(torch.index_select, y.grad, 0, batch.number, out=out.grad))
    gate = None
    if plan.gates is not None and nodes.gates is not None:
        gate = put_module(tape, plan.gates.group.module, nodes.gates, take(tape, h, plan.gates.at))
    return _put_blend(tape, h, y, gate, blending)


def _put_blocks(tape: Tape, x: Node, y: Node, plan: BlockPlan, buffer: Node, *, first: bool) -> None:
    """Write the outputs of the seeds in blocks to y, and zeros for the others; or add them, if not the `first`.

    x is what each block reads.
    """
    weight, first_bias, out, out_bias = plan.split(buffer.value)
    owner, samples = plan.owner[: plan.num_out], x.value.shape[2]
    hidden = tape.node(plan.num_hidden, plan.block, samples, like=x.value)
    tape.add(partial(torch.baddbmm, first_bias, weight.transpose(1, 2), x.value, out=hidden.value))
    if tape.learns:
        grad_first, grad_first_bias, _, _ = plan.split(buffer.grad)
        tape.add_backward(
            partial(torch.bmm, x.value, hidden.grad.transpose(1, 2), out=grad_first),
            partial(torch.sum, hidden.grad, 2, keepdim=True, out=grad_first_bias),
            partial(torch.bmm, weight, hidden.grad, out=x.grad),
        )
    active = _put_activations(tape, hidden, plan)
    # Parts of outputs and their gradients are used at once, so they may lie where later the gradient of x is written.
    shared = tape.learns and plan.in_features == plan.features
    parts = x.grad[: plan.num_out] if shared else x.value.new_empty(plan.num_out, plan.features, samples)
    tape.add(
        partial(torch.bmm, out, active.value, out=parts),
        partial(y.value.copy_ if first else y.value.add_, out_bias.expand_as(y.value)),
        partial(y.value.index_add_, 0, owner, parts),
    )
    if tape.learns:
        _, _, grad_out, grad_out_bias = plan.split(buffer.grad)
        tape.add_backward(
            partial(torch.sum, y.grad, 2, keepdim=True, out=grad_out_bias),
            partial(torch.index_select, y.grad, 0, owner, out=parts),
            partial(torch.bmm, parts, active.value.transpose(1, 2), out=grad_out),
            partial(torch.bmm, out.transpose(1, 2), parts, out=active.grad),
        )


def _put_activations(tape: Tape, hidden: Node, plan: BlockPlan) -> Node:
    """The hidden units after their activation, without gates. Gradients share their memory with those of `hidden`."""
    active = rows_of(hidden, slice(0, plan.num_out))
    active = Node(torch.empty_like(active.value), active.memory)
    linear, gates = slice(0, plan.gated.start), slice(plan.num_out, plan.num_hidden)
    if linear.stop:
        tape.add(partial(active.value[linear].copy_, hidden.value[linear]))
    if gates.stop > gates.start:
        before, gate, after = rows_of(hidden, plan.gated), rows_of(hidden, gates), rows_of(active, plan.gated)
        opened = torch.empty_like(gate.value)
        tape.add(
            partial(torch.sigmoid, gate.value, out=opened),
            partial(torch.mul, before.value, opened, out=after.value),
        )
        if tape.learns:
            tape.add_backward(
                partial(torch.mul, after.grad, before.value, out=gate.grad),
                partial(aten.sigmoid_backward.grad_input, gate.grad, opened, grad_input=gate.grad),
                partial(after.grad.mul_, opened),
            )
    if plan.gelu.stop > plan.gelu.start:
        before, after = rows_of(hidden, plan.gelu), rows_of(active, plan.gelu)
        tape.add(partial(aten.gelu.out, before.value, out=after.value))
        if tape.learns:
            tape.add_backward(partial(aten.gelu_backward.grad_input, after.grad, before.value, grad_input=before.grad))
    return active


def _put_blend(tape: Tape, h: Node, y: Node, gate: Node | None, blending: Blending) -> Node:
    """The activation with the outputs y blended in; its gradient and that of h share their memory.

    So the residual path needs no call in the backward pass, and all other gradients are added to it.
    """
    out, alpha = tape.node_over(h), blending.alpha
    change = y.grad if tape.learns else torch.empty_like(y.value)  # not needed any more when the gradient is written
    tape.add(partial(torch.mul, y.value, alpha, out=change))
    backward = []
    if tape.learns:
        backward += [partial(torch.index_select, out.grad, 0, blending.at, out=y.grad), partial(y.grad.mul_, alpha)]
    if blending.multiply.stop > blending.multiply.start:
        backward += _put_product(tape, h, rows_of(y, blending.multiply), change[blending.multiply], blending)
    if gate is not None:
        own = rows_of(y, blending.gate)
        tape.add(partial(change[blending.gate].mul_, gate.value))
        if tape.learns:
            product = torch.empty_like(own.value)
            backward += [
                partial(torch.mul, own.grad, own.value, out=product),
                partial(torch.sum, product, 1, keepdim=True, out=gate.grad),
                partial(own.grad.mul_, gate.value),
            ]
    tape.add(partial(out.value.copy_, h.value), partial(out.value.index_add_, 0, blending.at, change))
    tape.add_backward(*backward)
    return out


def _put_product(tape: Tape, h: Node, y: Node, change: Tensor, blending: Blending) -> list[partial]:
    """Write alpha h tanh(y) to `change`; returns the backward calls, which turn the gradient of alpha s into that of y.

    It lies in the gradient of y; s is the output that the operator blends in.
    """
    at, alpha = blending.at[blending.multiply], blending.alpha[blending.multiply]
    own, bounded = torch.empty_like(y.value), torch.empty_like(y.value)
    tape.add(
        partial(torch.index_select, h.value, 0, at, out=own),
        partial(torch.tanh, y.value, out=bounded),
        partial(torch.mul, own, bounded, out=change),
        partial(change.mul_, alpha),
    )
    if not tape.learns:
        return []
    product = torch.empty_like(own)
    calls = [
        partial(torch.mul, y.grad, own, out=product),
        partial(y.grad.mul_, bounded),
    ]
    if h.memory is not None:
        calls.append(partial(h.grad.index_add_, 0, at, y.grad))
    return [*calls, partial(aten.tanh_backward.grad_input, product, bounded, grad_input=y.grad)]


def rows_of(node: Node, rows: slice) -> Node:
    """A range of rows that shares the memory of all."""
    return Node(node.value[rows], None if node.memory is None else node.memory[rows])

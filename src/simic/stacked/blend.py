"""Blending the seeds of a slot into its activation: all hosts and all operators at once.

Shapes: M hosts in a pass, R seeds, sorted by their blend operator. The activation h is (M, ...), the outputs y of the
seeds are (R, ...), gates g are (gated seeds, ...) with size 1 where they broadcast. The formulas are those of
`growth.blend`:

    add       h + alpha y
    multiply  h + alpha h tanh(y)
    gate      h + alpha g y
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blending:
    """Where seeds are blended in, and how."""

    at: Tensor  # (R,) rows of the activation
    alpha: Tensor  # (R, 1, ...), broadcasts over an output
    multiply: slice  # seeds of this operator
    gate: slice


def blend(h: Tensor, y: Tensor, gate: Tensor | None, blending: Blending) -> Tensor:
    """The activation with the outputs y of all seeds blended in."""
    out = _Blend.apply(h, y, gate, blending)
    assert isinstance(out, Tensor)
    return out


class _Blend(torch.autograd.Function):
    """Written out with its gradient, because autograd would copy the activation for each operator."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, gate: Tensor | None, blending: Blending) -> Tensor:
        change, own, bounded = y * blending.alpha, None, None
        if blending.multiply.stop > blending.multiply.start:
            own, bounded = h.index_select(0, blending.at[blending.multiply]), y[blending.multiply].tanh()
            torch.mul(own, bounded * blending.alpha[blending.multiply], out=change[blending.multiply])
        if gate is not None:
            change[blending.gate] *= gate
        ctx.save_for_backward(y, gate, own, bounded)
        ctx.blending = blending
        change = change.to(h.dtype)
        # A single host may lie in memory in any order, in which only a plain sum is fast.
        return h + change if len(h) == 1 else h.index_add(0, blending.at, change)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, gate, own, bounded = ctx.saved_tensors
        blending: Blending = ctx.blending
        grad_h, grad_gate = grad, None
        own_grad = grad if len(grad) == 1 else grad.index_select(0, blending.at)
        grad_y = own_grad.to(y.dtype) * blending.alpha
        if own is not None:
            part = grad_y[blending.multiply]
            grad_h = grad.index_add(0, blending.at[blending.multiply], (part * bounded).to(grad.dtype))
            part.mul_(own).mul_(1 - bounded * bounded)
        if gate is not None:
            part = grad_y[blending.gate]
            grad_gate = (part * y[blending.gate]).sum_to_size(gate.shape)
            part.mul_(gate)
        return grad_h, grad_y, grad_gate, None

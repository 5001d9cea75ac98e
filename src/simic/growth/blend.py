"""Blend operators: pure functions of the host's activation h, the seed's branch output and alpha.

A seed as a whole computes s = h + branch; alpha 0 returns h, alpha 1 blends s in fully.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Alpha = float | Tensor
"""One number, or for stacked hosts a tensor that broadcasts over the activation."""


def blend_add(h: Tensor, branch: Tensor, alpha: Alpha, gate: Tensor | None = None) -> Tensor:
    """h + alpha (s - h)."""
    if isinstance(alpha, Tensor):
        return torch.addcmul(h, alpha, branch)
    return torch.add(h, branch, alpha=alpha)


def blend_multiply(h: Tensor, branch: Tensor, alpha: Alpha, gate: Tensor | None = None) -> Tensor:
    """h (1 + alpha tanh(s - h)); tanh bounds the factor to (0, 2), so a bad seed cannot flip the host's sign."""
    if isinstance(alpha, Tensor):
        return torch.addcmul(h, h, alpha * torch.tanh(branch))
    return torch.addcmul(h, h, torch.tanh(branch), value=alpha)


def blend_gate(h: Tensor, branch: Tensor, alpha: Alpha, gate: Tensor | None = None) -> Tensor:
    """h + alpha g (s - h), where g in (0, 1) is the seed's learned gate for this sample or position."""
    assert gate is not None, "the gate operator needs a gate"
    if isinstance(alpha, Tensor):
        return torch.addcmul(h, alpha * gate, branch)
    return torch.addcmul(h, gate, branch, value=alpha)


OPERATORS: dict[str, Callable[[Tensor, Tensor, Alpha, Tensor | None], Tensor]] = {
    "add": blend_add,
    "multiply": blend_multiply,
    "gate": blend_gate,
}


def straight_through(h: Tensor, branch: Tensor) -> Tensor:
    """The value of h with the gradient of h + branch (straight-through estimator)."""
    # A branch that overflows gives inf - inf = NaN, which must not reach the host.
    return h + torch.nan_to_num(branch - branch.detach(), nan=0.0)

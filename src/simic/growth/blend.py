"""How a seed's voice joins the host's: blend operators and gradient isolation, as pure tensor functions.

h is the host's activation in the slot, `branch` what the seed adds to it: the seed as a whole is s = h + branch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Alpha = float | Tensor
"""One number, or a tensor that broadcasts over the activation where many networks are blended at once."""


def blend_add(h: Tensor, branch: Tensor, alpha: Alpha, gate: Tensor | None = None) -> Tensor:
    """h + alpha (s - h)."""
    if isinstance(alpha, Tensor):
        return torch.addcmul(h, alpha, branch)
    return torch.add(h, branch, alpha=alpha)


def blend_multiply(h: Tensor, branch: Tensor, alpha: Alpha, gate: Tensor | None = None) -> Tensor:
    """h (1 + alpha tanh(s - h)): a bad seed can damp the host or double it, but not flip its sign."""
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
    """The host's value exactly, with the gradient of h + branch: the seed hears a loss that it does not change."""
    # A branch that overflows leaves the host alone: infinity minus itself counts as nothing.
    return h + torch.nan_to_num(branch - branch.detach(), nan=0.0)

"""Lower precision for the forward passes of stacked hosts, and the loss scale that float16 needs.

Shapes: N hosts, E elements of all parameters, rows of the optimizer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from simic.stacked.config import Precision

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
"""Finite steps in a row after which the scale is doubled."""


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Products and convolutions inside run in this precision."""
    return torch.autocast(device.type, _DTYPES[precision]) if precision in _DTYPES else nullcontext()


class LossScale:
    """A factor on the loss of each host that keeps small float16 gradients from vanishing.

    A step whose gradient overflows is skipped and halves the factor of that host; many finite ones in a row double it.
    """

    def __init__(self, num_hosts: int, device: torch.device) -> None:
        self.scale = torch.full((num_hosts,), INITIAL_SCALE, device=device)
        self.finite_steps = torch.zeros(num_hosts, device=device)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """The state, one row per host."""
        return self.scale, self.finite_steps

    def reset(self, hosts: Tensor) -> None:
        """Begin anew for some hosts."""
        self.scale[hosts], self.finite_steps[hosts] = INITIAL_SCALE, 0.0

    def update(self, finite: Tensor) -> None:
        """Adapt the factors to whether the gradient of each host was finite (N,)."""
        self.finite_steps.add_(1.0).mul_(finite)
        grown = self.finite_steps >= GROWTH_INTERVAL
        self.scale.mul_(torch.where(finite, 1.0 + grown, 0.5))
        self.finite_steps.mul_(~grown)

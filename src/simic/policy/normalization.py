"""Running mean and variance, of observations and of returns. Only the learner updates them, between rollouts.

Workers get a copy with the weights. An update reads no value back from the device, so nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without float64."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


class RunningMoments(nn.Module):
    """Mean and variance (F,) of all rows so far, or exponential moving averages if `decay` is given."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int, *, decay: float | None = None) -> None:
        super().__init__()
        if decay is not None and not 0 < decay < 1:
            raise ValueError(f"decay must be between 0 and 1, or None to weigh all rows equally, got {decay}")
        self.decay = decay
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor, times: Tensor | None = None) -> None:
        """Add rows (n, F), each once or as many times as given (n,)."""
        if not len(rows):
            return
        rows = rows.to(self.mean)
        if times is None:
            self.merge(rows.mean(0), rows.var(0, correction=0), torch.full_like(self.count, len(rows)))
            return
        count = times.to(self.count).sum()
        share = (times.to(self.count) / count.clamp(min=1)).unsqueeze(-1)
        mean = (share * rows).sum(0)
        self.merge(mean, (share * (rows - mean) ** 2).sum(0), count)

    def merge(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Add `count` rows by their mean and variance (F,): Chan's parallel algorithm, or one moving-average step."""
        # The first rows replace the initial values, which are no measurement.
        share = count / (self.count + count).clamp(min=1)
        if self.decay is not None:
            share = torch.where((self.count > 0) & (count > 0), 1 - self.decay, share)
        difference = mean - self.mean
        self.variance += share * (variance - self.variance) + share * (1 - share) * difference**2
        self.mean += share * difference
        self.count += count

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device in its widest precision: not every device has float64."""
        target = fn(torch.empty(0, device=self.mean.device)).device
        for name in ("mean", "variance", "count"):
            self._buffers[name] = getattr(self, name).to(widest_float(target))
        return super()._apply(fn, recurse)


class Normalizer(RunningMoments):
    """Standardizes by the running mean and standard deviation; the identity before the first update."""

    _offset: Tensor
    _scale: Tensor
    _limit: Tensor

    def __init__(self, size: int, *, enabled: bool = True, limit: float = 5.0) -> None:
        super().__init__(size)
        self.enabled, self.limit = enabled, limit
        # Derived from the moments once per update, in the precision of the values, and used in every forward pass.
        for name, start in (("_offset", 0.0), ("_scale", 1.0), ("_limit", float("inf"))):
            self.register_buffer(name, torch.full((size,), start), persistent=False)

    def update(self, rows: Tensor, times: Tensor | None = None) -> None:
        """Add rows (n, F), each once or as many times as given (n,)."""
        super().update(rows, times)
        self._derive()

    def forward(self, values: Tensor) -> Tensor:
        """Standardized values (..., F), clipped to `limit` standard deviations."""
        if not self.enabled:
            return values
        return ((values - self._offset) * self._scale).clamp(-self._limit, self._limit)

    @torch.no_grad()
    def _derive(self) -> None:
        known = self.count > 0
        self._offset.copy_(torch.where(known, self.mean, 0.0))
        # A feature that was constant so far has untrained weights: it stays 0 even if it changes later.
        scale = (self.variance + 1e-4).rsqrt() * (self.variance > 1e-8)
        self._scale.copy_(torch.where(known, scale, 1.0))
        self._limit.copy_(torch.where(known, self.limit, float("inf")))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._derive()

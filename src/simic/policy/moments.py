"""Running means and variances: of observations, of returns. Float64, updated by the learner only.

They are read by every network that shares them and written by one caller between rollouts, from one thread; a worker
gets a copy with the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RunningMoments(nn.Module):
    """Mean and variance (F,) over all rows seen, or exponentially forgetting ones if `decay` is given."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int, *, decay: float | None = None) -> None:
        super().__init__()
        if decay is not None and not 0 < decay < 1:
            raise ValueError(f"decay must be between 0 and 1, or None to forget nothing, got {decay}")
        self.decay = decay
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Take in rows (n, F): Chan's parallel merge, or one step of an exponential average."""
        if not len(rows):
            return
        rows = rows.to(self.mean)
        mean, variance = rows.mean(0), rows.var(0, correction=0)
        # The first rows replace the starting values, which nobody measured.
        share = len(rows) / (self.count + len(rows))
        if self.decay is not None and self.count > 0:
            share = torch.full_like(self.count, 1 - self.decay)
        difference = mean - self.mean
        self.variance += share * (variance - self.variance) + share * (1 - share) * difference**2
        self.mean += share * difference
        self.count += len(rows)


class Normalizer(RunningMoments):
    """Subtracts the running mean and divides by the running deviation; passes values through until it saw some."""

    _offset: Tensor
    _scale: Tensor
    _limit: Tensor

    def __init__(self, size: int, *, enabled: bool = True, limit: float = 5.0) -> None:
        super().__init__(size)
        self.enabled, self.limit = enabled, limit
        # What the statistics come to, in the precision of values: derived once, used in every pass.
        for name, start in (("_offset", 0.0), ("_scale", 1.0), ("_limit", float("inf"))):
            self.register_buffer(name, torch.full((size,), start), persistent=False)

    def update(self, rows: Tensor) -> None:
        """Take in rows (n, F)."""
        super().update(rows)
        self._derive()

    def forward(self, values: Tensor) -> Tensor:
        """Values (..., F), cut at `limit` deviations."""
        if not self.enabled:
            return values
        return ((values - self._offset) * self._scale).clamp(-self._limit, self._limit)

    @torch.no_grad()
    def _derive(self) -> None:
        if self.count > 0:
            self._offset.copy_(self.mean)
            # What never varied was never learned from: should it differ one day, it must not drown the rest.
            self._scale.copy_((self.variance + 1e-4).rsqrt() * (self.variance > 1e-8))
            self._limit.fill_(self.limit)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._derive()

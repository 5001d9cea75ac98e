"""The data sets of N hosts as resident tensors, and batches in an order drawn from each host's own rng seed.

Shapes: N hosts, B samples per batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from simic.tasks.data import Data


class StackedData:
    """Data sets of N hosts; hosts that share a data set share its memory."""

    def __init__(self, data: Sequence[Data], rng_seeds: Sequence[int], *, batch_size: int) -> None:
        self.batch_size = min(batch_size, len(data[0].train_x))
        self._data = list(data)
        self._generators = [_generator(rng_seed) for rng_seed in rng_seeds]
        self._stack()

    @property
    def steps_per_host_epoch(self) -> int:
        """Full batches in the training split; remaining samples are left out of the host epoch."""
        return len(self._data[0].train_x) // self.batch_size

    def reset(self, hosts: np.ndarray, data: Sequence[Data], rng_seeds: Sequence[int]) -> None:
        """Give some hosts new data sets and generators."""
        for host, own, rng_seed in zip(hosts, data, rng_seeds, strict=True):
            self._data[host], self._generators[host] = own, _generator(rng_seed)
        self._stack()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One host epoch: inputs (N, B, ...) and targets (N, B, ...), every host in its own random order."""
        samples = self.steps_per_host_epoch * self.batch_size
        size = len(self._data[0].train_x)
        orders = torch.stack([torch.randperm(size, generator=g)[:samples] for g in self._generators])
        for start in range(0, samples, self.batch_size):
            chosen = orders[:, start : start + self.batch_size]
            yield self._take("train_x", chosen), self._take("train_y", chosen)

    def split(self, name: str, samples: slice) -> tuple[Tensor, Tensor]:
        """Inputs and targets (N, samples, ...) from the validation or test split; shared data are not copied."""
        x, y = (self._stacked[f"{name}_{suffix}"][:, samples] for suffix in ("x", "y"))
        if self._shared:
            x, y = (part.expand(len(self._data), *part.shape[1:]) for part in (x, y))
        return x, y

    def size(self, name: str) -> int:
        """Number of samples in a split."""
        return self._stacked[f"{name}_y"].shape[1]

    def _stack(self) -> None:
        self._shared = all(own is self._data[0] for own in self._data)
        sources = self._data[:1] if self._shared else self._data
        names = [f"{split}_{suffix}" for split in ("train", "validation", "test") for suffix in ("x", "y")]
        self._stacked = {name: torch.stack([getattr(own, name) for own in sources]) for name in names}

    def _take(self, name: str, chosen: Tensor) -> Tensor:
        stacked = self._stacked[name]
        if self._shared:
            return stacked[0][chosen]
        # One gather over all hosts: host n's sample m is row n * (samples per host) + m of the flattened data.
        flat = stacked.flatten(0, 1)
        return flat[chosen + stacked.shape[1] * torch.arange(len(self._data)).unsqueeze(1)]


def _generator(rng_seed: int) -> torch.Generator:
    # A stream of its own: the plain rng seed initializes the weights.
    return torch.Generator().manual_seed(int(np.random.SeedSequence([rng_seed, 1]).generate_state(1)[0]))

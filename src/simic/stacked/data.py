"""The data sets of N hosts as resident tensors, and batches in an order drawn from each host's own rng seed.

Shapes: N hosts, B samples per batch, C features. Batches of features are (N, B, C), in memory (N, C, B); see
`feature_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from simic.tasks.augmentation import Augment, augmented
from simic.tasks.data import Data

GATHER_LIMIT = 1 << 21
"""Bytes of inputs that are gathered at once, whole batches; more than the cache holds would be slower."""


class StackedData:
    """Data sets of N hosts; hosts that share a data set share its memory."""

    def __init__(
        self,
        data: Sequence[Data],
        rng_seeds: Sequence[int],
        *,
        batch_size: int,
        device: torch.device | None = None,
        augment: Augment | None = None,
    ) -> None:
        """`augment` changes the inputs of every training batch, host by host, drawing from the host's generator."""
        self._augment, self.device = augment, device or torch.device("cpu")
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

    def copy_hosts(self, origin: StackedData, sources: np.ndarray, targets: np.ndarray) -> None:
        """Give the hosts `targets` (M,) the data and the coming batches of the hosts `sources` of `origin`."""
        given = [(origin._data[source], origin._generators[source].clone_state()) for source in sources]
        new_data = any(self._data[target] is not data for target, (data, _) in zip(targets, given, strict=True))
        for target, (data, generator) in zip(targets, given, strict=True):
            self._data[target], self._generators[target] = data, generator
        if new_data:
            self._stack()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One host epoch: inputs (N, B, ...) and targets (N, B, ...), every host in its own random order."""
        samples = self.steps_per_host_epoch * self.batch_size
        size = len(self._data[0].train_x)
        # Drawn on the CPU, host by host, so that results do not depend on the device or on the other hosts.
        orders = torch.stack([torch.randperm(size, generator=g)[:samples] for g in self._generators]).to(self.device)
        if not self._shared:  # host n's sample m is row n * (samples per host) + m of the flattened data
            orders = orders + size * torch.arange(len(self._data), device=self.device).unsqueeze(1)
        x, y = (self._stacked[name].flatten(0, 1) for name in ("train_x", "train_y"))
        at_once = max(1, GATHER_LIMIT // (len(self._data) * self.batch_size * x[0].numel() * x.element_size()))
        for start in range(0, samples, at_once * self.batch_size):
            chosen = orders[:, start : start + at_once * self.batch_size]
            for inputs, targets in zip(self._gather(x, chosen), self._gather(y, chosen), strict=True):
                yield self._augmented(inputs), targets

    def _augmented(self, inputs: Tensor) -> Tensor:
        """The inputs (N, B, ...) of a batch, each host's changed by itself: the same as if it trained alone."""
        augment = self._augment
        if augment is None:
            return inputs
        pairs = zip(inputs, self._generators, strict=True)
        changed = torch.stack([augmented(augment, own, generator) for own, generator in pairs])
        return torch.empty_like(inputs).copy_(changed)  # in the same order in memory: features lie samples last

    def _gather(self, source: Tensor, chosen: Tensor) -> Sequence[Tensor]:
        """Batches (N, B, ...) of the samples `chosen` (N, several batches), gathered at once."""
        together = source.index_select(0, chosen.flatten()).view(len(chosen), -1, self.batch_size, *source.shape[1:])
        if source.dim() == 2 and source.is_floating_point():  # features: samples last
            return together.permute(1, 0, 3, 2).contiguous().transpose(2, 3).unbind()
        return together.transpose(0, 1).contiguous().unbind()

    def split(self, name: str, samples: slice) -> tuple[Tensor, Tensor]:
        """Inputs and targets (N, samples, ...) from the validation or test split; shared data are not copied."""
        x, y = (self._stacked[f"{name}_{suffix}"][:, samples] for suffix in ("x", "y"))
        if self._shared:
            x, y = (part.expand(len(self._data), *part.shape[1:]) for part in (x, y))
        return x, y

    def size(self, name: str) -> int:
        """Number of samples in a split."""
        return self._stacked[f"{name}_y"].shape[1]

    def num_targets(self, name: str) -> int:
        """Number of targets of a host in a split: of sequences one for each place."""
        return self._stacked[f"{name}_y"][0].numel()

    def _stack(self) -> None:
        self._shared = all(own is self._data[0] for own in self._data)
        sources = self._data[:1] if self._shared else self._data
        names = [f"{split}_{suffix}" for split in ("train", "validation", "test") for suffix in ("x", "y")]
        parts = {name: [getattr(own, name) for own in sources] for name in names}
        # One data set for all stays where it is: it may be large.
        self._stacked = {
            name: (own[0].unsqueeze(0) if len(own) == 1 else torch.stack(own)).to(self.device)
            for name, own in parts.items()
        }
        for name in ("validation_x", "test_x"):
            x = self._stacked[name]
            if x.dim() == 3 and x.is_floating_point():  # features: samples last
                self._stacked[name] = x.transpose(1, 2).contiguous().transpose(1, 2)


def _generator(rng_seed: int) -> torch.Generator:
    # A stream of its own: the plain rng seed initializes the weights.
    return torch.Generator().manual_seed(int(np.random.SeedSequence([rng_seed, 1]).generate_state(1)[0]))

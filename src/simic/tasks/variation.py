"""HostVariation: what differs between the hosts of one task: problem, data size, balance, label noise, learning rate.

The data of all hosts have the shapes of the task's own data, so that hosts can be stacked. A host is determined by the
task and its rng seed; global generators are not used.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from simic.tasks.data import Data
from simic.tasks.problems import Problem, Traits, generate_data


@dataclass(frozen=True, kw_only=True, eq=False)
class HostTask:
    """Data and learning rate of one host."""

    data: Data = field(repr=False)
    learning_rate: float
    traits: Traits
    """Properties that were drawn, for analysis."""


@dataclass(frozen=True, kw_only=True)
class HostVariation:
    """What hosts are drawn from, each field independently and uniformly; a value listed twice is twice as likely."""

    problems: tuple[Problem, ...] = ()
    """Problems that new data are generated from; without any, all hosts share the task's own data."""
    data_share: tuple[float, ...] = (1.0,)
    """Share of distinct training samples; they are repeated to the common length."""
    label_noise: tuple[float, ...] = (0.0,)
    """Share of distinct training samples with a wrong label; validation and test labels are correct."""
    balance: tuple[float, ...] = (1.0,)
    """Frequency of the rarest class relative to the most frequent one, in training samples; those between are in
    geometric steps. For plain classes only, not for sequences or numbers as labels."""
    rate_factor: tuple[float, float] = (1.0, 1.0)
    """Range of the factor on the task's learning rate, log-uniform."""
    stream: tuple[int, ...] = ()
    """Separates the random streams of tasks that use the same rng seeds."""

    def __post_init__(self) -> None:
        if not self.data_share or not all(0 < share <= 1 for share in self.data_share):
            raise ValueError(f"data_share must list shares above 0 and up to 1, got {self.data_share}")
        if not self.label_noise or not all(0 <= share < 1 for share in self.label_noise):
            raise ValueError(f"label_noise must list shares from 0 to below 1, got {self.label_noise}")
        if not self.balance or not all(0 < share <= 1 for share in self.balance):
            raise ValueError(f"balance must list ratios above 0 and up to 1, got {self.balance}")
        if not 0 < self.rate_factor[0] <= self.rate_factor[1]:
            raise ValueError(f"rate_factor must be a range above zero, least first, got {self.rate_factor}")

    def host(self, reference: Data, learning_rate: float, rng_seed: int) -> HostTask:
        """The host of this rng seed; its data are `reference` itself if nothing changes."""
        if rng_seed < 0:
            raise ValueError(f"rng_seed must not be negative, got {rng_seed}")
        # The length comes first, because a seed sequence ignores trailing zeros.
        rng = np.random.default_rng([len(self.stream), *self.stream, rng_seed])
        data, traits = self._problem(reference, rng)
        share, noise = float(rng.choice(self.data_share)), float(rng.choice(self.label_noise))
        drawn: Traits = {}
        if self.balance != (1.0,) and not data.is_regression and data.train_y.dim() == 1:
            drawn["balance"] = float(rng.choice(self.balance))
            data = _unbalanced(data, drawn["balance"], rng)
        data, data_size = _fewer_samples(data, share, rng)
        data = _mislabelled(data, data_size, noise, rng)
        low, high = self.rate_factor
        rate = learning_rate * math.exp(rng.uniform(math.log(low), math.log(high)))
        drawn |= {"data_size": data_size, "label_noise": noise, "learning_rate": rate}
        return HostTask(data=data, learning_rate=rate, traits=traits | drawn)

    def _problem(self, reference: Data, rng: np.random.Generator) -> tuple[Data, Traits]:
        if not self.problems:
            return reference, {}
        return generate_data(
            self.problems[rng.integers(len(self.problems))],
            rng,
            sizes=(len(reference.train_x), len(reference.validation_x), len(reference.test_x)),
            shape=tuple(reference.train_x.shape[1:]),
            num_classes=reference.num_classes,
        )


def _unbalanced(data: Data, balance: float, rng: np.random.Generator) -> Data:
    """The data with training samples drawn anew, classes in random order of frequency."""
    labels = data.train_y.numpy()
    if balance == 1:
        return data
    weight = balance ** (rng.permutation(data.num_classes) / (data.num_classes - 1))
    chance = weight[labels] / weight[labels].sum()
    size = max(data.num_classes, round(len(labels) * float(weight.mean())))
    few = rng.choice(len(labels), size, replace=False, p=chance)
    chosen = torch.from_numpy(few)[torch.arange(len(labels)) % size]
    return replace(data, train_x=data.train_x[chosen], train_y=data.train_y[chosen])


def _fewer_samples(data: Data, share: float, rng: np.random.Generator) -> tuple[Data, int]:
    """The data with a subset of the training samples, repeated to the same length; and the subset's size."""
    total = len(data.train_x)
    size = max(1, round(share * total))
    if size == total:
        return data, total
    chosen = torch.from_numpy(rng.choice(total, size, replace=False))[torch.arange(total) % size]
    return replace(data, train_x=data.train_x[chosen], train_y=data.train_y[chosen]), size


def _mislabelled(data: Data, data_size: int, noise: float, rng: np.random.Generator) -> Data:
    """The data with a share of wrong training labels; copies of a sample have the same label.

    A wrong class is any other class, a wrong number that of another sample.
    """
    labels = data.train_y[:data_size].numpy().copy()
    labels = labels if data.is_regression else labels.reshape(-1)
    wrong = rng.choice(len(labels), round(noise * len(labels)), replace=False)
    if not wrong.size:
        return data
    if data.is_regression:
        labels[wrong] = labels[rng.permutation(wrong)]
    else:
        labels[wrong] = (labels[wrong] + rng.integers(1, data.num_classes, wrong.size)) % data.num_classes
    distinct = torch.from_numpy(labels).reshape(data.train_y[:data_size].shape)
    return replace(data, train_y=_repeated(distinct, len(data.train_y)))


def _repeated(samples: Tensor, length: int) -> Tensor:
    return samples[torch.arange(length) % len(samples)]

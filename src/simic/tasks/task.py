"""Task: a data set, a host that learns it, and how the host is trained and judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from simic.growth.isolation import evaluating
from simic.tasks.augmentation import Augment, augmented
from simic.tasks.data import Data
from simic.tasks.hosts import check_positive
from simic.tasks.problems import Traits
from simic.tasks.variation import HostTask, HostVariation

EVALUATION_CHUNK = 2_000
"""Samples per forward pass of `evaluate`."""
Optimizer = Literal["adamw", "sgd"]
SGD_MOMENTUM = 0.9
"""Momentum of hosts trained with SGD."""


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits (..., K) and targets (...), averaged over all leading dimensions."""
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Share of targets (...), in [0, 1], whose logit is the greatest of (..., K)."""
    return (logits.argmax(dim=-1) == targets).float().mean()


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared difference of outputs and targets (..., outputs)."""
    return (outputs - targets).square().mean()


def explained_variance(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the variance of standardised targets (..., outputs) that outputs explain, in [0, 1]."""
    return (1 - mean_squared_error(outputs, targets)).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long hosts are trained, and what controllers know of it.

    Length(host_epochs=24)                                as planned
    Length(host_epochs=24, planned=48)                    stopped half way, without notice
    Length(host_epochs=24, told=False, anneal=False)      nobody knows when training ends
    """

    host_epochs: int
    """Host epochs of an episode, each with a decision before it."""
    planned: int | None = None
    """Host epochs that were planned, at least as many; None for just these."""
    told: bool = True
    """Whether controllers are told how many are planned."""
    anneal: bool = True
    """Anneal the learning rate to zero along a cosine over the planned host epochs."""

    def __post_init__(self) -> None:
        if self.host_epochs < 1:
            raise ValueError(f"host_epochs must be at least 1, got {self.host_epochs}")
        if self.planned is not None and self.planned < self.host_epochs:
            raise ValueError(f"planned must be at least host_epochs ({self.host_epochs}), got {self.planned}")

    @property
    def told_host_epochs(self) -> int:
        """What controllers are told; 0 for nothing."""
        return self.planned_host_epochs if self.told else 0

    def rate_factor(self, host_epoch: np.ndarray) -> np.ndarray:
        """The factor on the learning rate in host epochs (...), counted from 0."""
        share = host_epoch / self.planned_host_epochs
        return (1 + np.cos(np.pi * share)) / 2 if self.anneal else np.ones_like(share)

    @property
    def planned_host_epochs(self) -> int:
        """Host epochs that were planned."""
        return self.host_epochs if self.planned is None else self.planned


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What hosts learn, and how they are trained.

    >>> task = simic.Task(data=data, make_host=make_host, slots=("stem",), batch_size=16, learning_rate=1e-2)
    >>> task.steps_per_host_epoch
    2
    """

    name: str = "unnamed"
    """Set by the registry to the name that the task is registered under."""
    data: Data = field(repr=False)
    make_host: Callable[[], nn.Sequential]
    """Builds a fresh host; its weights come from torch's global rng, which the caller seeds."""
    host_of_width: Callable[[int], Callable[[], nn.Sequential]] | None = None
    """Width -> function that builds the same host in that width; None for hosts that have no width."""
    slots: tuple[str, ...]
    """Segments of the host after which a seed may grow."""
    batch_size: int
    learning_rate: float
    """Learning rate of the optimizer; hosts may vary it."""
    optimizer: Optimizer = "adamw"
    """SGD has momentum 0.9."""
    variation: HostVariation = field(default_factory=HostVariation)
    """What differs from host to host; by default nothing."""
    traits: Traits = field(default_factory=dict)
    """Properties that were drawn to make the task, for analysis; its hosts inherit them."""
    loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy
    """(logits, targets) -> mean loss over the batch."""
    metric: Callable[[Tensor, Tensor], Tensor] = accuracy
    """(logits, targets) -> mean score over the batch, in [0, 1], the higher the better."""
    length: Length | None = None
    """How long hosts are trained; None leaves it to the settings of the run."""
    augment: Augment | None = None
    """(inputs of a training batch, generator) -> changed inputs, drawn from the generator; see `CropAndFlip`."""

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, learning_rate=self.learning_rate)
        if isinstance(self.slots, str):
            raise ValueError(f"slots must be a tuple of segments, got the text {self.slots!r}: write ({self.slots!r},)")
        if not self.slots:
            raise ValueError(f"task {self.name} needs at least one slot, got none: name a segment of its host")
        if self.augment is not None and not callable(self.augment):
            raise ValueError(f"augment must be a function (inputs, generator) -> inputs, got {self.augment!r}")
        if self.optimizer not in get_args(Optimizer):
            raise ValueError(f"optimizer must be one of {', '.join(get_args(Optimizer))}, got {self.optimizer!r}")

    def draw(self, rng_seed: int) -> HostTask:
        """Data and learning rate of the host with this rng seed; shapes are the same for all hosts."""
        host = self.variation.host(self.data, self.learning_rate, rng_seed)
        return replace(host, traits=self.traits | host.traits)

    def for_host(self, host: HostTask) -> Task:
        """The task of one drawn host, to train that host alone."""
        return replace(
            self,
            data=host.data,
            learning_rate=host.learning_rate,
            variation=HostVariation(),
            traits=self.traits | host.traits,
        )

    def widened(self, width: int) -> Task:
        """The same task for hosts of another width, to measure what parameters gain without growth."""
        if self.host_of_width is None:
            raise ValueError(f"hosts of task {self.name} come in one width: give it a host_of_width")
        return replace(self, make_host=self.host_of_width(width))

    @property
    def random_guess_loss(self) -> float:
        """Cross entropy of uniform probabilities; the squared error of the mean of standardised numbers."""
        return 1.0 if self.data.is_regression else math.log(self.data.num_classes)

    @property
    def steps_per_host_epoch(self) -> int:
        """Batches in one pass over the training split."""
        return math.ceil(len(self.data.train_x) / self.batch_size)

    def train_batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One host epoch in an order drawn from `generator`; the last batch may be smaller."""
        order = torch.randperm(len(self.data.train_x), generator=generator)
        for chosen in order.split(self.batch_size):
            x = self.data.train_x[chosen]
            yield x if self.augment is None else augmented(self.augment, x, generator), self.data.train_y[chosen]


def evaluate(model: nn.Module, task: Task, split: str = "validation") -> dict[str, float]:
    """Mean loss and accuracy of `model` in eval mode on a split; every module's training flag is restored."""
    x, y = task.data.split(split)
    totals = torch.zeros(2)
    with evaluating(model):
        for inputs, targets in zip(x.split(EVALUATION_CHUNK), y.split(EVALUATION_CHUNK), strict=True):
            logits = model(inputs)
            totals += len(inputs) * torch.stack([task.loss(logits, targets), task.metric(logits, targets)])
    loss, score = (totals / len(x)).tolist()
    return {"loss": loss, "accuracy": score}

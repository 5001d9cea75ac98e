"""Tasks: a data set, a host to learn it, and how to train and judge it; the presets and `make_task`."""

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from simic.growth.isolation import evaluating
from simic.tasks import DEFAULT_TASK
from simic.tasks.data import Data, load_cifar10, load_digits, load_fashion, load_mnist1d
from simic.tasks.files import FILES
from simic.tasks.hosts import check_positive, conv_host, mlp_host, slot_names, transformer_host
from simic.tasks.problems import Spirals, Teacher, Traits, load_spirals, load_teacher
from simic.tasks.text import load_chars
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What a host learns, and from what."""

    name: str
    data: Data = field(repr=False)
    make_host: Callable[[], nn.Sequential]
    """Builds a fresh host; its weights come from torch's global rng, which the caller seeds."""
    host_of_width: Callable[[int], Callable[[], nn.Sequential]] | None = None
    """From a width to what builds the same host of that width; None where hosts have no width."""
    slots: tuple[str, ...]
    """Segments of the host after which a seed may grow."""
    batch_size: int
    learning_rate: float
    """Of the optimizer; a drawn host has its own."""
    optimizer: Optimizer = "adamw"
    """SGD has momentum 0.9."""
    draws: HostVariation = field(default_factory=HostVariation)
    """What differs from host to host; by default nothing."""
    traits: Traits = field(default_factory=dict)
    """What was drawn to make the task, for analysis; its hosts inherit them."""
    loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy
    """(logits, targets) -> mean loss over the batch."""
    metric: Callable[[Tensor, Tensor], Tensor] = accuracy
    """(logits, targets) -> mean score over the batch, in [0, 1], the higher the better."""

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, learning_rate=self.learning_rate)
        if not self.slots:
            raise ValueError(f"task {self.name} needs at least one slot, got none: name a segment of its host")
        if self.optimizer not in get_args(Optimizer):
            raise ValueError(f"optimizer must be one of {', '.join(get_args(Optimizer))}, got {self.optimizer!r}")

    def draw(self, rng_seed: int) -> HostTask:
        """Data and learning rate of one host, of the same shapes for all: determined by the task and the rng seed."""
        host = self.draws.host(self.data, self.learning_rate, rng_seed)
        return replace(host, traits=self.traits | host.traits)

    def for_host(self, host: HostTask) -> "Task":
        """The task as one drawn host sees it, to train that host alone."""
        return replace(
            self,
            data=host.data,
            learning_rate=host.learning_rate,
            draws=HostVariation(),
            traits=self.traits | host.traits,
        )

    def widened(self, width: int) -> "Task":
        """The same task for hosts of another width: what parameters are worth without growth."""
        if self.host_of_width is None:
            raise ValueError(f"hosts of task {self.name} come in one width: give it a host_of_width")
        return replace(self, make_host=self.host_of_width(width))

    @property
    def random_guess_loss(self) -> float:
        """Cross entropy of a guess that knows nothing."""
        return math.log(self.data.num_classes)

    @property
    def steps_per_host_epoch(self) -> int:
        """Batches in one pass over the training split."""
        return math.ceil(len(self.data.train_x) / self.batch_size)

    def train_batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One host epoch in an order drawn from `generator`: every sample once, the last batch perhaps smaller."""
        order = torch.randperm(len(self.data.train_x), generator=generator)
        for chosen in order.split(self.batch_size):
            yield self.data.train_x[chosen], self.data.train_y[chosen]


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


HostBuilder = Callable[[Data, int, int], Callable[[], nn.Sequential]]
"""(data, width, num_slots) -> make_host."""
MLP = Callable[[int, int, int, int], nn.Sequential]
"""(in_features, width, depth, num_classes) -> host."""


def mlp_for(data: Data, width: int, num_slots: int, *, host: MLP = mlp_host) -> Callable[[], nn.Sequential]:
    """An MLP host for these inputs."""
    return partial(host, data.train_x.shape[1], width, num_slots, data.num_classes)


def conv_for(data: Data, width: int, num_slots: int) -> Callable[[], nn.Sequential]:
    """A convolutional host for these inputs."""
    channels, dims = data.train_x.shape[1], data.train_x.ndim - 2
    return partial(conv_host, channels, width, num_slots - 1, data.num_classes, dims)


def transformer_for(data: Data, width: int, num_slots: int) -> Callable[[], nn.Sequential]:
    """A causal transformer host for these tokens."""
    return partial(transformer_host, data.num_classes, data.train_x.shape[1], width, num_slots - 1)


def at_width(host: HostBuilder, data: Data, num_slots: int, width: int) -> Callable[[], nn.Sequential]:
    """What builds a host of this width."""
    return host(data, width, num_slots)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named task; widths are small enough that growth pays."""

    load: Callable[..., Data]
    """Takes train_size and, if it reads files, data_dir."""
    host: HostBuilder
    width: int
    num_slots: int = 3
    batch_size: int
    learning_rate: float
    draws: HostVariation = field(default_factory=HostVariation)


PRESETS: dict[str, Preset] = {
    "digits-mlp": Preset(
        load=partial(load_digits, flat=True), host=mlp_for, width=8, batch_size=64, learning_rate=3e-3
    ),
    "digits-cnn": Preset(load=load_digits, host=conv_for, width=6, batch_size=64, learning_rate=1e-2),
    "mnist1d-cnn": Preset(load=load_mnist1d, host=conv_for, width=6, batch_size=128, learning_rate=1e-2),
    "mnist1d-shuffled": Preset(
        load=partial(load_mnist1d, shuffled=True), host=conv_for, width=6, batch_size=128, learning_rate=1e-2
    ),
    "spirals-mlp": Preset(
        load=load_spirals,
        host=mlp_for,
        width=8,
        batch_size=64,
        learning_rate=1e-2,
        draws=HostVariation(problems=(Spirals(turns=(0.0, 0.5, 1.0, 1.5, 2.0), noise=(0.05, 0.1, 0.2)),)),
    ),
    "teacher-mlp": Preset(
        load=load_teacher,
        host=mlp_for,
        width=8,
        batch_size=64,
        learning_rate=1e-2,
        draws=HostVariation(problems=(Teacher(hidden=(0, 0, 4, 8, 16)),)),
    ),
    "fashion-cnn": Preset(load=load_fashion, host=conv_for, width=8, batch_size=128, learning_rate=1e-2),
    "cifar10-cnn": Preset(load=load_cifar10, host=conv_for, width=12, batch_size=128, learning_rate=1e-2),
    "chars-transformer": Preset(load=load_chars, host=transformer_for, width=16, batch_size=64, learning_rate=3e-3),
}
"""A new task is one loader, a host in hosts.py if none fits, and one row here; one in files.py if it reads any."""


def make_task(
    name: str = DEFAULT_TASK,
    *,
    width: int | None = None,
    num_slots: int | None = None,
    train_size: int | None = None,
    data_dir: str | Path | None = None,
) -> Task:
    """A preset task, with its own sizes where none are given; the host has one segment per slot, and a head."""
    preset = _find_preset(name)
    width = preset.width if width is None else width
    num_slots = preset.num_slots if num_slots is None else num_slots
    check_positive(width=width, num_slots=num_slots)
    options: dict[str, object] = {} if train_size is None else {"train_size": train_size}
    if data_dir is not None:
        if name not in FILES:
            raise ValueError(
                f"task {name} reads no files, got data_dir {str(data_dir)!r}: leave out --data-dir (data_dir)"
            )
        options["data_dir"] = Path(data_dir)
    data = preset.load(**options)
    return Task(
        name=name,
        data=data,
        make_host=preset.host(data, width, num_slots),
        host_of_width=partial(at_width, preset.host, data, num_slots),
        slots=slot_names(num_slots),
        batch_size=preset.batch_size,
        learning_rate=preset.learning_rate,
        draws=preset.draws,
    )


def _find_preset(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    close = difflib.get_close_matches(name, PRESETS)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise ValueError(f"task must be a preset, got {name!r}: {hint}The presets are {', '.join(PRESETS)}")

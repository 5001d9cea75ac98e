"""Recipe: data, kind of host and hyperparameters from which tasks of any width and depth are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from simic.tasks.augmentation import Augment, CropAndFlip
from simic.tasks.data import Data, load_cifar10, load_digits, load_fashion, load_mnist1d
from simic.tasks.hosts import check_positive, conv_host, mlp_host, resnet_host, slot_names, transformer_host
from simic.tasks.problems import Problem, Spirals, Teacher, load_spirals, load_teacher
from simic.tasks.task import Length, Task, explained_variance, mean_squared_error
from simic.tasks.text import load_chars
from simic.tasks.tokens import load_tokens
from simic.tasks.variation import HostVariation

HostBuilder = Callable[[Data, int, int], Callable[[], nn.Sequential]]
"""(data, depth, width) -> make_host."""
MLP = Callable[[int, int, int, int], nn.Sequential]
"""(in_features, width, depth, num_classes) -> host."""


def mlp_for(data: Data, depth: int, width: int, *, host: MLP = mlp_host) -> Callable[[], nn.Sequential]:
    """Builds MLPs for these inputs."""
    return partial(host, data.train_x.shape[1], width, depth, data.num_classes)


def conv_for(data: Data, depth: int, width: int) -> Callable[[], nn.Sequential]:
    """Builds convolutional networks for these inputs."""
    channels, dims = data.train_x.shape[1], data.train_x.ndim - 2
    return partial(conv_host, channels, width, depth - 1, data.num_classes, dims)


def resnet_for(data: Data, depth: int, width: int) -> Callable[[], nn.Sequential]:
    """Builds ResNets with batch norm for these inputs."""
    channels, dims = data.train_x.shape[1], data.train_x.ndim - 2
    return partial(resnet_host, channels, width, depth - 1, data.num_classes, dims)


def transformer_for(data: Data, depth: int, width: int) -> Callable[[], nn.Sequential]:
    """Builds causal transformers for these tokens."""
    return partial(transformer_host, data.num_classes, data.train_x.shape[1], width, depth - 1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What tasks are built from."""

    load: Callable[..., Data]
    """Takes train_size and, if it reads files, data_dir."""
    host: HostBuilder
    width: int = 8
    num_slots: int = 3
    batch_size: int
    learning_rate: float
    problems: tuple[Problem, ...] = ()
    """See `HostVariation.problems`."""
    host_epochs: int | None = None
    """Host epochs of an episode; None leaves them to the settings."""
    augment: Augment | None = None
    """See `Task.augment`."""

    def build(
        self,
        *,
        width: int | None = None,
        num_slots: int | None = None,
        depth: int | None = None,
        train_size: int | None = None,
        data_dir: Path | None = None,
        **load_options: Any,
    ) -> Task:
        """A task whose host has `depth` segments before the head, the first `num_slots` of them with a slot.

        Further options go to `load`.
        """
        width = self.width if width is None else width
        num_slots = self.num_slots if num_slots is None else num_slots
        depth = num_slots if depth is None else depth
        check_positive(width=width, num_slots=num_slots)
        options = {"train_size": train_size, "data_dir": data_dir, **load_options}
        data = self.load(**{name: value for name, value in options.items() if value is not None})
        return Task(
            data=data,
            make_host=self.host(data, depth, width),
            host_of_width=partial(self.host, data, depth),
            slots=slot_names(num_slots),
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            variation=HostVariation(problems=self.problems),
            **_judged_by(data),
            augment=self.augment,
            length=None if self.host_epochs is None else Length(host_epochs=self.host_epochs),
        )


def _judged_by(data: Data) -> dict[str, Any]:
    """Loss and metric of a task, where they are not those of classes."""
    return {"loss": mean_squared_error, "metric": explained_variance} if data.is_regression else {}


# Built-in tasks; widths are small enough that growth pays.
DIGITS_MLP = Recipe(load=partial(load_digits, flat=True), host=mlp_for, batch_size=64, learning_rate=3e-3)
DIGITS_CNN = Recipe(load=load_digits, host=conv_for, width=6, batch_size=64, learning_rate=1e-2)
MNIST1D_CNN = Recipe(load=load_mnist1d, host=conv_for, width=6, batch_size=128, learning_rate=1e-2)
MNIST1D_SHUFFLED = replace(MNIST1D_CNN, load=partial(load_mnist1d, shuffled=True))
_SPIRALS = Spirals(turns=(0.0, 0.5, 1.0, 1.5, 2.0), noise=(0.05, 0.1, 0.2))
SPIRALS_MLP = Recipe(load=load_spirals, host=mlp_for, batch_size=64, learning_rate=1e-2, problems=(_SPIRALS,))
TEACHER_MLP = replace(SPIRALS_MLP, load=load_teacher, problems=(Teacher(hidden=(0, 0, 4, 8, 16)),))
FASHION_CNN = Recipe(load=load_fashion, host=conv_for, batch_size=128, learning_rate=1e-2)
CIFAR10_CNN = Recipe(load=load_cifar10, host=conv_for, width=12, batch_size=128, learning_rate=1e-2)
CIFAR10_RESNET = Recipe(
    load=partial(load_cifar10, train_size=None),
    host=resnet_for,
    num_slots=10,
    batch_size=128,
    learning_rate=3e-3,
    augment=CropAndFlip(),
)
"""ResNet-20 of half the width, on all of CIFAR-10: 69,000 parameters, 10 slots."""
CIFAR10_RESNET8 = replace(CIFAR10_RESNET, num_slots=4)
"""ResNet-8 of half the width: 20,000 parameters, 4 slots."""
CHARS_TRANSFORMER = Recipe(load=load_chars, host=transformer_for, width=16, batch_size=64, learning_rate=3e-3)
TINYSTORIES = Recipe(load=load_tokens, host=transformer_for, width=48, num_slots=4, batch_size=32, learning_rate=3e-3)
"""A transformer of 3 blocks on subword tokens: 160,000 parameters, 4 slots."""

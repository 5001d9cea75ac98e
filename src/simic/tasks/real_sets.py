"""Tasks on real data, none of which a shipped controller was trained on: the sets of `simic evaluate --suite real`.

Widths follow one rule and were not tuned: the least width at which a host has at least `fewest_parameters` of its set,
a fifth of the training samples, but 5,000 or more. Learning rates are those of simic's tasks of the same kind. Host
epochs are as many as let one host train in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from simic.tasks.data import Data, load_fashion, load_mnist
from simic.tasks.image_hosts import patch_conv_host, resnet_host
from simic.tasks.recipe import Recipe, mlp_for, transformer_for
from simic.tasks.tabular import load_table
from simic.tasks.text import WINDOW_LENGTH, load_book

ImageHost = Callable[[int, int, int, int], nn.Sequential]
"""(in_channels, width, num_blocks, num_classes) -> host."""
BOOK_CHARACTERS = 7_500 * WINDOW_LENGTH + 1
"""Of these 7,500 windows 5,000 are for training."""


def fewest_parameters(train_size: int) -> int:
    """The parameters that the host of a set with so many training samples has at least."""
    return max(5_000, train_size // 5)


def image_host_for(data: Data, depth: int, width: int, *, host: ImageHost) -> Callable[[], nn.Sequential]:
    """Builds networks for images."""
    return partial(host, data.train_x.shape[1], width, depth - 1, data.num_classes)


CONV = partial(image_host_for, host=patch_conv_host)
RESNET = partial(image_host_for, host=resnet_host)

FASHION_CNN_10K = Recipe(
    load=partial(load_fashion, validation_size=2_000),
    host=CONV,
    width=16,
    num_slots=3,
    batch_size=128,
    learning_rate=1e-2,
    host_epochs=12,
)
FASHION_MLP_60K = Recipe(
    load=partial(load_fashion, flat=True, train_size=None),
    host=mlp_for,
    width=14,
    num_slots=4,
    batch_size=256,
    learning_rate=3e-3,
    host_epochs=16,
)
MNIST_CNN = replace(FASHION_CNN_10K, load=partial(load_mnist, validation_size=2_000))
LETTER_MLP = Recipe(
    load=partial(load_table, name="letter", target="lettr"),
    host=mlp_for,
    width=27,
    num_slots=6,
    batch_size=128,
    learning_rate=3e-3,
    host_epochs=24,
)
SATELLITE_MLP = Recipe(
    load=partial(load_table, name="satellite", target="classes"),
    host=mlp_for,
    width=39,
    num_slots=3,
    batch_size=64,
    learning_rate=3e-3,
    host_epochs=24,
)
DNA_MLP = Recipe(
    load=partial(load_table, name="dna", target="Class"),
    host=mlp_for,
    width=22,
    num_slots=3,
    batch_size=64,
    learning_rate=3e-3,
    host_epochs=24,
)
MOBY_TRANSFORMER = Recipe(
    load=partial(load_book, characters=BOOK_CHARACTERS),
    host=transformer_for,
    width=12,
    num_slots=4,
    batch_size=64,
    learning_rate=3e-3,
    host_epochs=16,
)
FASHION_RESNET = replace(FASHION_CNN_10K, host=RESNET, width=4, num_slots=4)

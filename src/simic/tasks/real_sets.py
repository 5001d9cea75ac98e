"""Tasks on real data, none of which a shipped controller was trained on: the sets of `simic evaluate --suite real`.

Widths follow one rule and were not tuned: the least width at which a host has at least `fewest_parameters` of its set,
a fifth of the training samples, but 5,000 or more; a transformer's is a multiple of its 4 heads. Learning rates are
those of simic's tasks of the same kind. Host epochs are as many as let one host train in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from simic.tasks.data import Data, load_fashion, load_mnist
from simic.tasks.recipe import HostBuilder, Recipe, conv_for, mlp_for, resnet_for, transformer_for
from simic.tasks.tabular import load_table
from simic.tasks.text import WINDOW_LENGTH, load_book

PATCH_SIZE = 4
"""Rows and columns of the patches that hosts for images read."""
BOOK_CHARACTERS = 3_000 * WINDOW_LENGTH + 1
"""Of these 3,000 windows 2,000 are for training."""


def fewest_parameters(train_size: int) -> int:
    """The parameters that the host of a set with so many training samples has at least."""
    return max(5_000, train_size // 5)


def with_patches(make_host: Callable[[], nn.Sequential]) -> nn.Sequential:
    """A convolutional host whose stem reads patches of the image, side by side, instead of every pixel's neighbours.

    All that follows then runs on a quarter of the rows and columns, which makes hosts of images of 28x28 cheap.
    """
    host = make_host()
    stem = host.get_submodule("stem")
    assert isinstance(stem, nn.Sequential)
    first = stem[0]
    assert isinstance(first, nn.Conv2d)
    stem[0] = nn.Conv2d(first.in_channels, first.out_channels, PATCH_SIZE, stride=PATCH_SIZE, bias=False)
    return host


def patches_for(data: Data, depth: int, width: int, *, host: HostBuilder) -> Callable[[], nn.Sequential]:
    """Builds convolutional networks that read patches of these images."""
    return partial(with_patches, host(data, depth, width))


FASHION_CNN_10K = Recipe(
    load=partial(load_fashion, validation_size=2_000),
    host=partial(patches_for, host=conv_for),
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
    host_epochs=12,
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
    host_epochs=12,
)
FASHION_RESNET = replace(FASHION_CNN_10K, host=partial(patches_for, host=resnet_for), width=4, num_slots=4)

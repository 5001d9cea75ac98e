"""Data sets as resident tensors, split in three: train (gradient), validation (controller), test (evaluation only).

Splits are drawn with the constant SPLIT_RNG_SEED, so a data set is the same in every process. Loaders are cached and
their tensors are shared: never write into them.
"""

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from simic.tasks import mnist1d
from simic.tasks.files import CIFAR10_DIR, cifar10_files, fashion_files, mnist_files

Samples = tuple[NDArray, NDArray]
"""Inputs and labels."""
SPLIT_RNG_SEED = 20
"""Rng seed of the assignment of samples to splits."""
MNIST1D_RNG_SEED = 1
"""Rng seed of the samples of mnist1d."""
SHUFFLE_RNG_SEED = 2
"""Rng seed of the permutation of the points of shuffled mnist1d."""
SCALE_CHUNK = 1_000
"""Samples that are normalised at once."""
CIFAR10_RECORD = 1 + 3 * 32 * 32
"""Bytes of one image: a label, then the red, green and blue planes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Inputs and labels of the three splits: classes as integers, or standardised numbers to predict as floats.

    >>> splits = {f"{name}_x": x[:32] for name in ("train", "validation", "test")}
    >>> data = simic.Data(**splits, train_y=y[:32], validation_y=y[:32], test_y=y[:32], num_classes=2)
    >>> data.is_regression
    False
    """

    train_x: Tensor
    train_y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    """Labels are 0 to num_classes - 1. For regression it is the number of outputs, and labels are (M, outputs)."""

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            x, y = self.split(name)
            if len(x) != len(y) or len(x) == 0:
                raise ValueError(
                    f"{name} needs at least one input and a label for each, got {len(x)} inputs and {len(y)} labels"
                )
            if y.is_floating_point():
                if y.shape[1:] != (self.num_classes,) or not torch.isfinite(y).all():
                    raise ValueError(
                        f"{name} targets that are no integers must be finite numbers of shape (samples, "
                        f"{self.num_classes}), got shape {tuple(y.shape)}"
                    )
            elif y.min() < 0 or y.max() >= self.num_classes:
                raise ValueError(
                    f"{name} labels must lie in 0..{self.num_classes - 1}, got {int(y.min())}..{int(y.max())}: "
                    "increase num_classes or correct the labels"
                )

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers to predict, not classes."""
        return self.train_y.is_floating_point()

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """Inputs and labels of one split.

        Args:
            name: "train", "validation" or "test".

        Returns:
            Inputs (M, ...) and labels.

        Raises:
            ValueError: There is no such split.
        """
        splits = {
            "train": (self.train_x, self.train_y),
            "validation": (self.validation_x, self.validation_y),
            "test": (self.test_x, self.test_y),
        }
        if name not in splits:
            raise ValueError(f"split must be one of {', '.join(splits)}, got {name!r}")
        return splits[name]


@cache
def load_digits(*, flat: bool = False, train_size: int | None = None) -> Data:
    """scikit-learn's 1,797 embedded 8x8 digits, 60/20/20: inputs (N, 1, 8, 8), or (N, 64) if flat."""
    from sklearn.datasets import load_digits as sklearn_digits  # slow to import

    pixels, labels = map(np.asarray, sklearn_digits(return_X_y=True))
    shape = (-1, 64) if flat else (-1, 1, 8, 8)
    test, validation, train = deal((pixels.reshape(shape), labels), (360, 360), train_size=train_size)
    return normalised(train=train, validation=validation, test=test)


@cache
def load_mnist1d(*, shuffled: bool = False, train_size: int | None = None) -> Data:
    """mnist1d, 4,000/1,000/1,000 inputs (N, 1, 40); `shuffled` permutes the points, the same way in every sample."""
    curves, labels = mnist1d.generate(6_000, rng_seed=MNIST1D_RNG_SEED)
    if shuffled:
        curves = curves[:, np.random.default_rng(SHUFFLE_RNG_SEED).permutation(mnist1d.NUM_POINTS)]
    test, validation, train = deal((curves[:, None], labels), (1_000, 1_000), train_size=train_size)
    return normalised(train=train, validation=validation, test=test)


@cache
def load_fashion(
    *,
    flat: bool = False,
    train_size: int | None = 10_000,
    validation_size: int = 5_000,
    data_dir: Path | None = None,
) -> Data:
    """Fashion-MNIST, inputs (N, 1, 28, 28), or (N, 784) if flat: train and validation of the official 60,000."""
    return _load_idx(fashion_files(data_dir), flat, train_size, validation_size)


@cache
def load_mnist(
    *,
    flat: bool = False,
    train_size: int | None = 10_000,
    validation_size: int = 5_000,
    data_dir: Path | None = None,
) -> Data:
    """MNIST, as Fashion-MNIST."""
    return _load_idx(mnist_files(data_dir), flat, train_size, validation_size)


def _load_idx(paths: Sequence[Path], flat: bool, train_size: int | None, validation_size: int) -> Data:
    """Images and labels of four IDX files: some of the first pair for validation, the second for testing."""
    images, labels, test_images, test_labels = map(read_idx, paths)
    if images.ndim != 3 or images.shape[1:] != test_images.shape[1:]:
        raise ValueError(
            f"{paths[0]} and {paths[2]} must hold images of one size, got {images.shape} and {test_images.shape}: "
            "fetch them again"
        )
    images, test_images = (x.reshape(len(x), -1) if flat else x[:, None] for x in (images, test_images))
    validation, train = deal((images, labels), (validation_size,), train_size=train_size)
    return normalised(train=train, validation=validation, test=(test_images, test_labels))


@cache
def load_cifar10(*, train_size: int | None = 10_000, data_dir: Path = CIFAR10_DIR) -> Data:
    """CIFAR-10, inputs (N, 3, 32, 32): train and a tenth for validation of the five batches, the official test."""
    *batches, test = (_read_cifar10(path) for path in cifar10_files(data_dir))
    images, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    validation, train = deal((images, labels), (max(1, len(images) // 10),), train_size=train_size)
    return normalised(train=train, validation=validation, test=test)


def _read_cifar10(path: Path) -> Samples:
    """Images (N, 3, 32, 32) and labels of one file."""
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % CIFAR10_RECORD:
        raise ValueError(
            f"{path} must hold images of {CIFAR10_RECORD} bytes each, got {len(content)} bytes: fetch it again"
        )
    records = content.reshape(-1, CIFAR10_RECORD)
    if records[:, 0].max() > 9:
        raise ValueError(f"{path} must hold labels from 0 to 9, got {records[:, 0].max()}: fetch it again")
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The byte array in an IDX file, decompressed if its name ends in .gz."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} must be a whole gzip file, got {error!r}: fetch it again") from error
    # Header: two zero bytes, 8 for unsigned bytes, the number of dimensions, then each size as a big-endian uint32.
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} must be an IDX file of bytes (0x000008..), got 0x{content[:4].hex()}: fetch it again")
    header_size = 4 + 4 * content[3]
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, header_size, 4)]
    expected = header_size + math.prod(shape)
    if len(content) != expected:
        raise ValueError(f"{path} must hold {expected} bytes for shape {shape}, got {len(content)}: fetch it again")
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


def deal(samples: Samples, held_out: Sequence[int], *, train_size: int | None) -> Iterator[Samples]:
    """Shuffle and split: one split of each size in `held_out`, then train_size samples of the rest (all if None)."""
    x, y = samples
    if len(x) != len(y):
        raise ValueError(f"every input needs a label, got {len(x)} inputs and {len(y)} labels: correct the files")
    available = len(x) - sum(held_out)
    if train_size is None:
        train_size = available
    if not 1 <= train_size <= available:
        raise ValueError(f"train_size must lie in 1..{available} for this data set, got {train_size}: choose within it")
    order = np.random.default_rng(SPLIT_RNG_SEED).permutation(len(x))
    # Held-out splits come first, so that they do not depend on train_size.
    for start, size in zip(accumulate(held_out, initial=0), (*held_out, train_size), strict=True):
        chosen = order[start : start + size]
        yield x[chosen], y[chosen]


def normalised(*, train: Samples, validation: Samples, test: Samples, num_classes: int = 10) -> Data:
    """The splits with inputs normalised by the mean and standard deviation of the training inputs."""
    mean, std = train[0].mean(dtype=np.float64), train[0].std(dtype=np.float64)
    train, validation, test = ((_scaled(x, mean, std), y) for x, y in (train, validation, test))
    return as_data(train=train, validation=validation, test=test, num_classes=num_classes)


def _scaled(x: NDArray, mean: np.float64, std: np.float64) -> NDArray[np.float32]:
    """(x - mean) / std, computed in float64 and some samples at a time, which bounds the memory."""
    scaled = np.empty(x.shape, np.float32)
    for start in range(0, len(x), SCALE_CHUNK):
        scaled[start : start + SCALE_CHUNK] = (x[start : start + SCALE_CHUNK] - mean) / std
    return scaled


def as_data(*, train: Samples, validation: Samples, test: Samples, num_classes: int) -> Data:
    """The splits as tensors: inputs float32 (int64 for tokens), labels int64 (float32 for regression)."""
    tensors = {}
    for name, (x, y) in (("train", train), ("validation", validation), ("test", test)):
        x_type = np.int64 if np.issubdtype(x.dtype, np.integer) else np.float32
        y_type = np.float32 if np.issubdtype(y.dtype, np.floating) else np.int64
        tensors[f"{name}_x"] = torch.from_numpy(np.ascontiguousarray(x, x_type))
        tensors[f"{name}_y"] = torch.from_numpy(np.ascontiguousarray(y, y_type))
    return Data(**tensors, num_classes=num_classes)

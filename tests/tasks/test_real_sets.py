"""The tasks on real data: widths by the rule, data from the files, hosts of the promised size."""

import gzip
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from simic.evaluation.candidates import count_parameters, width_for
from simic.evaluation.suites import SUITES
from simic.tasks import real_sets
from simic.tasks.data import Data, load_mnist
from simic.tasks.registry import TASKS, make_task
from simic.tasks.text import load_book

SHAPES = {
    "fashion-cnn-10k": (10_000, (1, 28, 28), 10),
    "fashion-mlp-60k": (55_000, (784,), 10),
    "mnist-cnn": (10_000, (1, 28, 28), 10),
    "letter-mlp": (12_000, (16,), 26),
    "satellite-mlp": (3_861, (36,), 6),
    "dna-mlp": (1_912, (180,), 3),
    "moby-transformer": (2_000, (32,), 76),
    "fashion-resnet": (10_000, (1, 28, 28), 10),
}
"""Training samples, shape of an input and classes of every set."""


def recipe_of(name: str) -> real_sets.Recipe:
    return getattr(real_sets, name.upper().replace("-", "_"))


def data_of(name: str) -> Data:
    """One sample of these shapes."""
    _, shape, classes = SHAPES[name]
    x = torch.zeros(1, *shape)
    y = torch.zeros(1, *(shape if name == "moby-transformer" else ()), dtype=torch.long)
    return Data(train_x=x, train_y=y, validation_x=x, validation_y=y, test_x=x, test_y=y, num_classes=classes)


def test_every_set_of_the_suite_is_listed():
    assert set(SHAPES) == set(SUITES["real"].tasks)
    assert [name for name in SHAPES if TASKS[name].own_loop] == ["fashion-resnet"]


@pytest.mark.parametrize("name", SHAPES)
def test_the_width_is_the_least_that_the_rule_allows(name):
    recipe = recipe_of(name)
    host_of_width = partial(recipe.host, data_of(name), recipe.num_slots)
    least = width_for(host_of_width, real_sets.fewest_parameters(SHAPES[name][0]))
    if name == "moby-transformer":  # heads share the width evenly
        least = -(-least // 4) * 4
    assert recipe.width == least
    assert 5_000 <= count_parameters(host_of_width(recipe.width)) <= 200_000
    assert 3 <= recipe.num_slots <= 12


@pytest.mark.parametrize("name", SHAPES)
def test_the_files_have_these_shapes(name):
    try:
        task = make_task(name)
    except FileNotFoundError:
        pytest.skip("no data: make data")
    samples, shape, classes = SHAPES[name]
    assert task.data.train_x.shape == (samples, *shape)
    assert task.data.num_classes == classes
    assert task.make_host()(task.data.train_x[:2]).shape[-1] == classes
    assert task.length is not None
    assert task.length.host_epochs == recipe_of(name).host_epochs


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mnist-cnn", [(6, 7), (6, 4), (6, 2)]), ("fashion-resnet", [(6, 7), (6, 7), (12, 4), (24, 2)])],
)
def test_hosts_of_images_read_patches(name, expected):
    recipe = recipe_of(name)
    host = recipe.host(data_of(name), recipe.num_slots, 6)()
    x, resolutions = torch.rand(2, 1, 28, 28), []
    for segment in list(host)[:-1]:
        x = segment(x)
        resolutions.append((x.shape[1], x.shape[2]))
    assert resolutions == expected


def write_mnist(directory: Path) -> None:
    """5,020 images of 2x2 pixels that hold their index modulo 250, packed as the files of Debian are."""
    directory.mkdir()
    for part, size in (("train", 5_020), ("t10k", 10)):
        index = np.arange(size)
        arrays = {"images-idx3": np.broadcast_to((index % 250)[:, None, None], (size, 2, 2)), "labels-idx1": index % 10}
        for kind, array in arrays.items():
            header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            content = gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)
            (directory / f"{part}-{kind}-ubyte.gz").write_bytes(content)


def test_mnist_is_found_in_its_directory_or_the_one_above(tmp_path):
    write_mnist(tmp_path / "mnist")
    images = load_mnist(train_size=20, data_dir=tmp_path)
    rows = load_mnist(train_size=20, flat=True, data_dir=tmp_path / "mnist")
    assert images.train_x.shape == (20, 1, 2, 2)
    assert torch.equal(images.train_x.flatten(1), rows.train_x)
    assert images.test_y.tolist() == [*range(10)]


def test_images_of_two_sizes_are_refused(tmp_path):
    write_mnist(tmp_path / "mnist")
    header = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (10, 3, 3))
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + bytes(90), mtime=0))
    with pytest.raises(ValueError, match=r"images of one size, got \(5020, 2, 2\) and \(10, 3, 3\): fetch them again"):
        load_mnist(train_size=20, data_dir=tmp_path)


def test_missing_mnist_is_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"MNIST needs train-images-idx3-ubyte.gz .* run `make data`"):
        load_mnist(data_dir=tmp_path)


def test_a_book_is_cut(tmp_path):
    path = tmp_path / "moby_dick.txt"
    path.write_text("Call me Ishmael. " * 60, encoding="utf-8")
    whole, cut = (load_book(characters=count, data_dir=tmp_path) for count in (10_000, 12 * 32 + 1))
    assert sum(len(whole.split(name)[0]) for name in ("train", "validation", "test")) == 1_019 // 32
    assert sum(len(cut.split(name)[0]) for name in ("train", "validation", "test")) == 12
    assert torch.equal(cut.train_x[:, 1:], cut.train_y[:, :-1])
    with pytest.raises(FileNotFoundError, match=r"the book .*nowhere does not exist: run `make data`"):
        load_book(characters=100, data_dir=tmp_path / "nowhere")

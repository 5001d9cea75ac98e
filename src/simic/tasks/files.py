"""Files that tasks read: where they are looked for, and errors that say where to get them. Nothing here loads torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

DATA_DIR = Path("data")
"""Where `make data` puts its files."""
CIFAR10_DIR = Path("cifar-10-batches-bin")
"""What the archive of CIFAR-10's binary version unpacks to."""
FASHION_DIR = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist installs its files."""
TEXT_FILE = "input.txt"
"""The text in a directory."""
BOOK_FILE = "moby_dick.txt"
STORIES_DIR = Path("tinystories")
STORIES_FILES = (TEXT_FILE, "TinyStoriesV2-GPT4-train.txt", "TinyStories-train.txt")
"""Texts that a directory of stories may hold, under the names of their publishers."""


def fashion_files(data_dir: Path | None = None) -> list[Path]:
    """Training images and labels of Fashion-MNIST, then those for testing, compressed or not."""
    directory = FASHION_DIR if data_dir is None and FASHION_DIR.is_dir() else _subdirectory(data_dir, "fashion-mnist")
    return _idx_files("Fashion-MNIST", directory, "install Debian's package dataset-fashion-mnist, run `make data`")


def mnist_files(data_dir: Path | None = None) -> list[Path]:
    """Training images and labels of MNIST, then those for testing, compressed or not."""
    return _idx_files("MNIST", _subdirectory(data_dir, "mnist"), "run `make data`")


def table_file(name: str, data_dir: Path | None = None) -> Path:
    """The table `name`.csv in a directory, or the file itself."""
    given = data_dir or DATA_DIR
    path = given / f"{name}.csv" if given.is_dir() or data_dir is None else given
    if not path.is_file():
        raise FileNotFoundError(
            f"the table {path} does not exist: run `make data`, or name a CSV file, or a directory that holds "
            f"{name}.csv, with --data-dir (data_dir)"
        )
    return path


def book_files(data_dir: Path | None = None) -> list[Path]:
    """Moby Dick: moby_dick.txt in a directory, or the file itself."""
    given = data_dir or DATA_DIR
    path = given / BOOK_FILE if given.is_dir() or data_dir is None else given
    if not path.is_file():
        raise FileNotFoundError(
            f"the book {path} does not exist: run `make data`, or name a text file, or a directory that holds "
            f"{BOOK_FILE}, with --data-dir (data_dir)"
        )
    return [path]


def cifar10_files(data_dir: Path | None = None) -> list[Path]:
    """The five training batches of CIFAR-10, then the test batch."""
    directory = data_dir or CIFAR10_DIR
    paths = [directory / f"{name}.bin" for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"CIFAR-10 needs {path.name} but {directory} has none: fetch cifar-10-binary.tar.gz from "
                "https://www.cs.toronto.edu/~kriz/cifar.html, unpack it here, or name its directory with --data-dir "
                "(data_dir)"
            )
    return paths


def text_files(data_dir: Path | None = None) -> list[Path]:
    """The text in a directory, or the file itself; none if the text is generated."""
    if data_dir is None:
        return []
    path = data_dir / TEXT_FILE if data_dir.is_dir() else data_dir
    if not path.is_file():
        raise FileNotFoundError(
            f"the text {path} does not exist: name a text file, or a directory that holds {TEXT_FILE}, with --data-dir "
            "(data_dir), or leave it out to use generated text"
        )
    return [path]


def story_files(data_dir: Path | None = None) -> list[Path]:
    """The text in a directory, or the file itself; and the package that cuts it into tokens must be installed."""
    if find_spec("tokenizers") is None:
        raise ValueError("tinystories needs the package tokenizers: pip install 'simic-rl[text]'")
    place = data_dir or STORIES_DIR
    for path in [place / name for name in STORIES_FILES] if place.is_dir() else [place]:
        if path.is_file():
            return [path]
    got = f"{place} has none" if place.is_dir() else f"{place} does not exist"
    raise FileNotFoundError(
        f"tinystories needs a text but {got}: fetch {STORIES_FILES[1]} from "
        "https://huggingface.co/datasets/roneneldan/TinyStories, or name any text file, or a directory that holds "
        f"{TEXT_FILE}, with --data-dir (data_dir)"
    )


def _subdirectory(data_dir: Path | None, name: str) -> Path:
    """`name` in the directory that was given or that `make data` fills; the given one itself if it has none."""
    found = (data_dir or DATA_DIR) / name
    return found if data_dir is None or found.is_dir() else data_dir


def _idx_files(title: str, directory: Path, remedy: str) -> list[Path]:
    names = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return [_find_idx(title, directory, name, remedy) for name in names]


def _find_idx(title: str, directory: Path, name: str, remedy: str) -> Path:
    """`name` in `directory`, compressed or not."""
    for path in (directory / f"{name}.gz", directory / name):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{title} needs {name}.gz (or {name}) but {directory} has neither: {remedy}, or name the directory that holds "
        "the files with --data-dir (data_dir)"
    )

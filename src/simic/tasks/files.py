"""Files that tasks read: where they are looked for, and errors that say where to get them. Nothing here loads torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

CIFAR10_DIR = Path("cifar-10-batches-bin")
"""What the archive of CIFAR-10's binary version unpacks to."""
FASHION_DIR = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist installs its files."""
TEXT_FILE = "input.txt"
"""The text in a directory."""
STORIES_DIR = Path("tinystories")
STORIES_FILES = (TEXT_FILE, "TinyStoriesV2-GPT4-train.txt", "TinyStories-train.txt")
"""Texts that a directory of stories may hold, under the names of their publishers."""


def fashion_files(data_dir: Path | None = None) -> list[Path]:
    """Training images and labels of Fashion-MNIST, then those for testing, compressed or not."""
    return [
        _find_idx(data_dir or FASHION_DIR, f"{part}-{kind}-ubyte")
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    ]


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
    raise FileNotFoundError(
        f"tinystories needs a text but {place} has none: fetch {STORIES_FILES[1]} from "
        "https://huggingface.co/datasets/roneneldan/TinyStories, or name any text file, or a directory that holds "
        f"{TEXT_FILE}, with --data-dir (data_dir)"
    )


def _find_idx(data_dir: Path, name: str) -> Path:
    """`name` in `data_dir`, compressed or not."""
    for path in (data_dir / f"{name}.gz", data_dir / name):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"Fashion-MNIST needs {name}.gz (or {name}) but {data_dir} has neither: install Debian's package "
        "dataset-fashion-mnist, or name the directory that holds the files with --data-dir (data_dir)"
    )

"""Tables as data sets: CSV files with a header, one row per sample, one column of classes.

A column of numbers becomes one feature, standardised by the training rows. Any other column is a factor: one feature
per level, 1 where the row has it and 0 elsewhere.

    size,colour,class              features: size, colour=green, colour=red
    1.5,red,yes           ->       ( ., 0, 1)   class 1 of (no, yes)
    0.5,green,no                   ( ., 1, 0)   class 0
"""

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simic.tasks.data import Data, as_data, deal
from simic.tasks.files import table_file

HELD_OUT_SHARE = 1 / 5
"""Share of the rows that go to validation, and again to test."""


@cache
def load_table(*, name: str, target: str, train_size: int | None = None, data_dir: Path | None = None) -> Data:
    """The table `name`.csv, inputs (N, features): the column `target` holds the classes, which are sorted by name.

    `data_dir` is the file itself, or a directory that holds it.
    """
    path = table_file(name, data_dir)
    header, columns = _read_columns(path)
    if target not in header:
        raise ValueError(f"{path} must have the column {target!r} with the classes, got {', '.join(header):.200}")
    if len(header) < 2:
        raise ValueError(f"{path} must have a column beside {target!r}, got none: add the inputs")
    classes, labels = np.unique(columns[header.index(target)], return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"{path} must have at least 2 classes in column {target!r}, got {len(classes)}")
    held_out = int(HELD_OUT_SHARE * len(labels))
    if not held_out:
        raise ValueError(f"{path} must have at least {round(1 / HELD_OUT_SHARE)} rows for 3 splits, got {len(labels)}")
    features, is_number = _features([column for title, column in zip(header, columns, strict=True) if title != target])
    test, validation, train = deal((features, labels), (held_out, held_out), train_size=train_size)
    mean, std = (np.where(is_number, own, rest) for own, rest in ((train[0].mean(0), 0), (train[0].std(0), 1)))
    std[std == 0] = 1  # a constant column stays, as zeros, so that shapes do not depend on train_size
    train, validation, test = (((x - mean) / std, y) for x, y in (train, validation, test))
    return as_data(train=train, validation=validation, test=test, num_classes=len(classes))


def _read_columns(path: Path) -> tuple[list[str], list[tuple[str, ...]]]:
    """The header, and the cells of every column."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = csv.reader(file)
    except (ValueError, csv.Error) as error:  # no header at all, or bytes that are not text
        raise ValueError(f"{path} must be a CSV file in UTF-8 with a header, got {error}: fetch it again") from error
    if len(set(header)) < len(header):
        raise ValueError(f"{path} must name every column differently, got {', '.join(header):.200}")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header) or not all(cell.strip() for cell in row):
            got = f"{len(row)} cells" if len(row) != len(header) else "an empty cell"
            raise ValueError(
                f"{path} line {number} must have {len(header)} cells, none of them empty, got {got}: leave out rows "
                "with missing values"
            )
    if not rows:
        raise ValueError(f"{path} must have rows below its header, got none: fetch it again")
    return header, list(zip(*rows, strict=True))


def _features(columns: Sequence[Sequence[str]]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Features (N, F) of the columns, and whether each stems from a column of numbers (F,)."""
    parts, is_number = [], []
    for column in columns:
        numbers = _numbers(column)
        if numbers is None:
            levels, codes = np.unique(column, return_inverse=True)
            numbers = np.eye(len(levels))[codes]
            is_number += [False] * len(levels)
        else:
            is_number.append(True)
        parts.append(numbers.reshape(len(column), -1))
    return np.concatenate(parts, axis=1), np.array(is_number)


def _numbers(column: Sequence[str]) -> NDArray[np.float64] | None:
    """A column as numbers, or None if it is a factor; nan and inf are names."""
    try:
        numbers = np.array(column, dtype=np.float64)
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None

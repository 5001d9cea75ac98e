"""Series: texts or numbers over time, written with repeated values counted.

in the event    ["dormant", "dormant", "dormant", "training", 0.1, None]
in the file     [["dormant", 3], "training", 0.1, null]
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any

Series = list[str | float | None]
"""Texts or finite numbers; None where nothing was measured."""
MAX_VALUES = 50_000
"""Values in all series of one field of an event: counted repetitions must not fill the memory."""
MIN_RUN = 3
"""Repetitions from which on counting them is shorter."""


def rounded(values: Iterable[float], digits: int = 4) -> Series:
    """Numbers with so many significant digits; None for those that are not finite."""
    # Adding 0 turns -0.0 into 0.0.
    return [float(f"{value:.{digits}g}") + 0.0 if math.isfinite(value) else None for value in values]


def write_series(values: Series) -> list[Any]:
    """The series as JSON values."""
    written: list[Any] = []
    for value, run in groupby(values):
        times = sum(1 for _ in run)
        written += [[value, times]] if times >= MIN_RUN else [value] * times
    return written


class SeriesReader:
    """The inverse of `write_series`, for series that together have at most `MAX_VALUES` values."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def read(self, saved: Any) -> Series:
        """The values of one series; anything else raises a ValueError or TypeError."""
        values: Series = []
        for item in saved:
            value, times = item if isinstance(item, list) else (item, 1)
            if type(times) is not int or not 0 < times <= self._left:
                raise ValueError(f"a value is repeated {times!r} times, with room for {self._left}")
            self._left -= times
            values += [value if value is None or isinstance(value, str) else _finite(value)] * times
        return values


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a value of a series is {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a number of a series is {number}")
    return number

"""What workers import for benchmarks/cluster.py: jobs that sleep instead of playing episodes.

So two cores can pretend to be many workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np


class PretendJob(NamedTuple):
    """Takes as long as a group of episodes, and sends back as much."""

    seconds: float
    arrays: tuple[int, ...]
    """Bytes of each array of the result."""


def pretend(common: Any, job: PretendJob) -> list[np.ndarray]:
    """Sleep instead of computing."""
    time.sleep(job.seconds)
    return [np.zeros(size, np.uint8) for size in job.arrays]


class Sleeper:
    """An actor whose answers are a long time coming."""

    def sleep(self, seconds: float) -> None:
        """Do nothing."""
        time.sleep(seconds)


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """All arrays in plain data."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item)

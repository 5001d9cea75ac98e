"""Pool backend without workers: jobs run in this process, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from simic.workers.protocol import Fault, JobFunction, Pool, PoolStatus


class InProcessPool(Pool):
    """An exception of a job propagates unchanged."""

    def __init__(self, function: JobFunction) -> None:
        self.function, self.faults = function, list[Fault]()

    def stream(self, common: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the job, result) in the order of the jobs."""
        for index, job in enumerate(jobs):
            yield index, self.function(common, job)

    def status(self) -> PoolStatus:
        """No workers, nothing in flight."""
        return PoolStatus()

    def close(self) -> None:
        """Nothing to release."""

"""The pool protocol: run many jobs, wherever they run.

A job is a pure function of its arguments, so its result does not depend on the backend, the number of workers, the
order of jobs or how often a worker died. A new backend is a class with these methods and a line in `build.BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

JobFunction = Callable[[Any, Any], Any]
"""`function(common, job) -> result`. Workers import it by name, so it must be defined in a module."""


class WorkerError(RuntimeError):
    """A job raised in a worker. It is not retried: the same job would raise again."""


class JobRefusedError(WorkerError, ValueError):
    """A job raised a ValueError, whose message says what to change; the cause has the worker's traceback."""


class WorkersDiedError(WorkerError, OSError):
    """Workers died repeatedly: most likely the machine is at fault (exit code 4), not the job's code."""


@dataclass(frozen=True)
class Fault:
    """A worker that died, and the job it was running; -1 if it was idle."""

    pid: int
    exit_code: int | None
    job: int


class Pool(Protocol):
    """Runs `function(common, job)` for many jobs; `common` is what all jobs of a call share."""

    faults: list[Fault]
    """Workers that died since the list was last cleared. Their jobs were run again."""

    def stream(self, common: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the job, result) in the order of completion."""
        ...

    def close(self) -> None:
        """Stop all workers immediately and drop unfinished jobs. The next `stream` starts new workers."""
        ...

    def run(self, common: Any, jobs: Sequence[Any]) -> list[Any]:
        """Return all results in the order of the jobs."""
        results: list[Any] = [None] * len(jobs)
        for index, result in self.stream(common, jobs):
            results[index] = result
        return results

"""The pool protocol: run many jobs, wherever they run.

A job is a pure function of its arguments, so its result does not depend on the backend, the number of workers, the
order of jobs or how often a worker died. A new backend is a class with these methods and a line in `build.BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

JobFunction = Callable[[Any, Any], Any]
"""`function(common, job) -> result`. Workers import it by name, so it must be defined in a module."""
Check = Callable[[], None]
"""Raises on a machine that cannot run the jobs, because data are missing for example; picklable."""


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
    error: str
    """How it died, such as its exit code."""
    job: int
    node: str = ""
    """The machine it ran on; empty for this one."""

    def __str__(self) -> str:
        """For progress displays."""
        where = f" on node {self.node}" if self.node else ""
        if self.pid < 0:
            return f"a worker{where} could not be used: {self.error}"
        rerun = f", job {self.job} is run again" if self.job >= 0 else ""
        return f"worker {self.pid}{where} died ({self.error}){rerun}"


@dataclass(frozen=True)
class PoolStatus:
    """What a pool is doing now."""

    workers: int = 0
    nodes: int = 1
    in_flight: int = 0
    """Jobs that workers have."""
    lost: int = 0
    """Jobs that were run again because their worker died, since the pool was made."""

    def __str__(self) -> str:
        """For progress displays; empty while everything is on this machine and in order."""
        parts = [f"{self.workers} workers on {self.nodes} nodes"] if self.nodes > 1 else []
        parts += [f"{self.in_flight} jobs in flight"] if parts and self.in_flight else []
        return ", ".join([*parts, *([f"{self.lost} jobs lost and run again"] if self.lost else [])])


class Pool(Protocol):
    """Runs `function(common, job)` for many jobs; `common` is what all jobs of a call share."""

    faults: list[Fault]
    """Workers that died since the list was last cleared. Their jobs were run again."""

    def start(self) -> dict[str, Mapping[str, Any]]:
        """Start workers, check other machines if there are any, and return the facts of those by name.

        The first `stream` does this too. Called beforehand, workers on this machine start while the caller prepares its
        work, and what other machines lack is reported before any work is done.
        """
        return {}

    def warning(self) -> str | None:
        """What a user should know about the machines that were checked."""
        return None

    def stream(self, common: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the job, result) in the order of completion.

        Jobs are handed out in their order. Between two results the caller may do something else: workers go on with
        the jobs that they have. The next call must wait until all results are taken, or the pool is closed.
        """
        ...

    def status(self) -> PoolStatus:
        """What the pool is doing now."""
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

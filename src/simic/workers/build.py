"""Create the pool that runs jobs: the only place that knows all backends."""

from __future__ import annotations

from collections.abc import Callable

from simic.workers.in_process import InProcessPool
from simic.workers.local_processes import LocalProcessPool
from simic.workers.protocol import JobFunction, Pool

BACKENDS: dict[str, Callable[[JobFunction, int], Pool]] = {
    "in_process": lambda function, workers: InProcessPool(function),
    "local_processes": LocalProcessPool,
}


def make_pool(function: JobFunction, *, workers: int = 0, backend: str | None = None) -> Pool:
    """A pool with `workers` workers; without workers, jobs run in this process. Worker processes start on first use."""
    if workers < 0:
        raise ValueError(f"workers must not be negative, got {workers}")
    backend = backend or ("local_processes" if workers else "in_process")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return BACKENDS[backend](function, workers)

"""Create the pool that runs jobs: the only place that knows all backends."""

from __future__ import annotations

from collections.abc import Callable

from simic.workers.in_process import InProcessPool
from simic.workers.local_processes import LocalProcessPool
from simic.workers.placement import DEFAULT_WORKERS, Placement, check_backend
from simic.workers.protocol import Check, JobFunction, Pool


def _local(function: JobFunction, placement: Placement, check: Check | None) -> Pool:
    """Nothing is checked: this machine was, before the pool was asked for."""
    workers = DEFAULT_WORKERS if placement.workers is None else placement.workers
    return LocalProcessPool(function, workers) if workers else InProcessPool(function)


def _ray(function: JobFunction, placement: Placement, check: Check | None) -> Pool:
    check_backend("ray")
    from simic.workers.ray_pool import RayPool

    return RayPool(function, placement, check)


BACKENDS: dict[str, Callable[[JobFunction, Placement, Check | None], Pool]] = {"local": _local, "ray": _ray}


def make_pool(function: JobFunction, placement: Placement | None = None, *, check: Check | None = None) -> Pool:
    """A pool for these jobs, by default in this process. Workers start on first use.

    `check` runs on every other machine before its first job.
    """
    placement = placement or Placement(workers=0)
    if placement.backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {placement.backend!r}")
    return BACKENDS[placement.backend](function, placement, check)

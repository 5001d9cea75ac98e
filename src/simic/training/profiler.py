"""A trace of one update's learning, by torch's profiler, on whatever device there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from simic.files import check_regular, writing
from simic.ppo.metrics import UpdateMetrics
from simic.ppo.rollout import Rollout
from simic.training.run import Run

PROFILED_UPDATE = 2
"""Of those that this process does; in the first, libraries warm up."""


@contextmanager
def profiled(run: Run, directory: Path | None) -> Iterator[None]:
    """Profile one update of a run, and write the trace to a directory; None does nothing."""
    if directory is None:
        yield
        return
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"update_{run.update + PROFILED_UPDATE - 1}.json"
    check_regular(path)  # now: torch would follow a link, and an error after the update would cost the run
    plain, updates = run.agent.update, 0

    def update(rollout: Rollout) -> UpdateMetrics:
        nonlocal updates
        updates += 1
        if updates != PROFILED_UPDATE:
            return plain(rollout)
        with profile(activities=_activities()) as trace:
            metrics = plain(rollout)
        trace.export_chrome_trace(str(path))
        return metrics

    run.agent.update = update
    try:
        yield
    finally:
        run.agent.update = plain


def _activities() -> list[ProfilerActivity]:
    """Of the CPU and of every accelerator in use; MPS has no activity of its own, its work shows up on the CPU's."""
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    if torch.xpu.is_available():
        found.append(ProfilerActivity.XPU)
    return found

"""A trace of one update's learning, or of a few gradient steps, by torch's profiler, on whatever device there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from simic.ppo.metrics import UpdateMetrics
from simic.ppo.rollout import Rollout
from simic.storage.files import check_regular, writing
from simic.training.run import Run

PROFILED_UPDATE = 2
"""Of those that this process does, if there are so many; in the first, libraries warm up."""
PROFILED_STEPS = range(2, 6)
"""The gradient steps of imitation and IQL that are profiled."""


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
    chosen = min(PROFILED_UPDATE, run.updates - run.update)

    def update(rollout: Rollout) -> UpdateMetrics:
        nonlocal updates
        updates += 1
        if updates != chosen:
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


@contextmanager
def profiled_steps(directory: Path | None) -> Iterator[None]:
    """Profile some gradient steps of whatever optimizer, and write the trace to a directory; None does nothing."""
    if directory is None:
        yield
        return
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    trace, steps = profile(activities=_activities()), 0

    def finish() -> None:
        trace.stop()
        trace.export_chrome_trace(str(directory / f"steps_{PROFILED_STEPS[0]}-{steps}.json"))

    def count(optimizer: object, args: object, kwargs: object) -> None:
        nonlocal steps
        steps += 1
        if steps == PROFILED_STEPS[0] - 1:
            trace.start()
        elif steps == PROFILED_STEPS[-1]:
            finish()

    hook = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        hook.remove()
        if PROFILED_STEPS[0] - 1 <= steps < PROFILED_STEPS[-1]:
            finish()


def _activities() -> list[ProfilerActivity]:
    """Of the CPU and of every accelerator in use; MPS has no activity of its own, its work shows up on the CPU's."""
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    if torch.xpu.is_available():
        found.append(ProfilerActivity.XPU)
    return found

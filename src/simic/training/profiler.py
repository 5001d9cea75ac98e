"""Traces by torch's profiler: of one PPO update, or of a few gradient steps of imitation and IQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from simic.storage.files import check_regular, writing

PROFILED_UPDATE = 2
"""The update of this process that is profiled, or its last if there are fewer; libraries warm up in the first."""
PROFILED_STEPS = range(2, 6)
"""The gradient steps of imitation and IQL that are profiled."""


class UpdateProfiler:
    """Profiles one of the updates `first` to `last - 1` and writes the trace to a directory; None profiles nothing."""

    def __init__(self, directory: Path | None, first: int, last: int) -> None:
        self._update, self._path = min(first + PROFILED_UPDATE, last) - 1, None
        if directory is not None:
            self._path = _make(directory) / f"update_{self._update}.json"
            check_regular(
                self._path
            )  # now: torch would follow a link, and an error after the update would cost the run

    @contextmanager
    def around(self, update: int) -> Iterator[None]:
        """Trace what is done inside, if this update is the profiled one."""
        if self._path is None or update != self._update:
            yield
            return
        with profile(activities=_activities()) as trace:
            yield
        trace.export_chrome_trace(str(self._path))


@contextmanager
def profiled_steps(directory: Path | None) -> Iterator[None]:
    """Profile some gradient steps of any optimizer and write the trace to a directory; None profiles nothing."""
    if directory is None:
        yield
        return
    _make(directory)
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


def _make(directory: Path) -> Path:
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def _activities() -> list[ProfilerActivity]:
    """CPU and every accelerator in use; work on MPS shows up in the CPU's activity."""
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    if torch.xpu.is_available():
        found.append(ProfilerActivity.XPU)
    return found

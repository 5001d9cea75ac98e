"""Traces by torch's profiler: of one PPO update and a rollout for it, or of a few steps of imitation and IQL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from simic.storage.files import check_regular, writing
from simic.storage.printable import printable

PROFILED_UPDATE = 2
"""The update of this process that is profiled, or its last if there are fewer; libraries warm up in the first."""
PROFILED_STEPS = range(2, 6)
"""The gradient steps of imitation and IQL that are profiled."""


class UpdateProfiler:
    """Profiles one of the updates `first` to `last - 1`: the learner, and the rollout of one group of hosts.

    Two traces are written to a directory; None profiles nothing.
    """

    def __init__(self, directory: Path | None, first: int, last: int) -> None:
        self._update, self._path, self._rollout = min(first + PROFILED_UPDATE, last) - 1, None, None
        if directory is not None:
            _make(directory)
            self._path = directory / f"update_{self._update}.json"
            # Absolute, because a worker need not run in the same directory.
            self._rollout = directory.absolute() / f"rollout_{self._update}.json"
            for path in (self._path, self._rollout):
                check_regular(path)  # now: torch would follow a link, and an error after the update would cost the run

    @contextmanager
    def around(self, update: int) -> Iterator[None]:
        """Trace what is done inside, if this update is the profiled one."""
        if self._path is None or update != self._update:
            yield
            return
        with profile(activities=_activities()) as trace:
            yield
        trace.export_chrome_trace(str(self._path))

    def rollout_path(self, update: int) -> str | None:
        """The file for the trace of one group's rollout; None if this update is not the profiled one."""
        return str(self._rollout) if self._rollout is not None and update == self._update else None


@contextmanager
def profiled_rollout(path: str | None) -> Iterator[None]:
    """Trace what is done inside and write it to a file; None profiles nothing.

    Runs in the process that plays the group. The episodes are worth more than their trace: if it cannot be written,
    for instance because the worker's disk is full, that is only said.
    """
    if path is None:
        yield
        return
    with profile(activities=_activities()) as trace:
        yield
    try:
        _make(Path(path).parent)  # a worker on another machine writes there
        check_regular(Path(path))
        trace.export_chrome_trace(path)  # torch itself reports a full disk on stderr, and goes on
    except OSError as error:
        print(f"simic: the trace of a rollout is not written: {printable(error)}", file=sys.stderr)


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

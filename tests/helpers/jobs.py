"""Jobs for worker processes, which import them from here by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any


def power(common: int, job: int) -> tuple[int, int]:
    """Also returns the process that ran it."""
    return common**job, os.getpid()


def add(common: int, job: int) -> int:
    """The sum."""
    return common + job


OFFSETS: dict[str, int] = {}
"""What plugins registered."""


def add_offset(common: str, job: int) -> int:
    """Needs what a plugin registered under the name `common`."""
    return OFFSETS[common] + job


def slow_power(common: int, job: int) -> tuple[int, int]:
    """Takes 0.2 seconds; jobs from 100 on take an hour."""
    time.sleep(0.2 if job < 100 else 3600)
    return power(common, job)


def _die() -> None:
    time.sleep(0.2)  # until the result of the job before has been sent: it would be lost as well
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(common: Path, job: int) -> int:
    """The first worker that runs job 2 is killed by it."""
    if job == 2 and not common.exists():
        common.touch()
        _die()
    return job * 10


def die_always(common: Any, job: int) -> int:
    """Job 1 kills every worker."""
    if job == 1:
        _die()
    return job


def fail(common: Any, job: int) -> int:
    """Job 1 raises."""
    if job == 1:
        raise KeyError("the bug")
    return job


def threads(common: Any, job: int) -> int:
    """The number of threads torch uses."""
    import torch

    return torch.get_num_threads()


def large(common: bytes, job: int) -> bytes:
    """Transfers more than the buffer of a pipe holds, both ways."""
    return common * (job + 1)


def worker_number(common, job):
    """The number of the worker that runs this, after long enough for the other worker to get a job too."""
    from simic.workers import devices

    time.sleep(0.5)
    return devices._worker_number, os.getpid()


def count_and_fail(common: Path, job: int) -> int:
    """Job 1 leaves a file for each of its runs, then raises."""
    if job == 1:
        (common / str(time.time_ns())).touch()
        raise ValueError("job 1 cannot be done: choose another")
    return job


def refuse_here() -> None:
    """A check that no machine passes."""
    raise FileNotFoundError("there are no data in /data: put them there")


def sleep_and_tell(common: float, job: int) -> int:
    """Sleeps; returns the process."""
    time.sleep(common)
    return os.getpid()


def open_file(common: str, job: int) -> Any:
    """Returns what is no plain data."""
    return open(common)


def hold(megabytes: int, ready: Any, done: Any) -> None:
    """Holds memory until it is told to end."""
    held = bytearray(b"x") * (megabytes << 20)
    ready.set()
    done.wait(60)
    del held


def touch(directory: Path, name: str) -> str:
    """Leave a file with this name."""
    (directory / name).touch()
    return name

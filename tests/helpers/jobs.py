"""Jobs for worker processes, who import them from here by name."""

import os
import signal
import time
from pathlib import Path
from typing import Any


def power(common: int, job: int) -> tuple[int, int]:
    """Harmless; says who did it."""
    return common**job, os.getpid()


def slow_power(common: int, job: int) -> tuple[int, int]:
    """Takes a while; jobs from 100 on take for ever."""
    time.sleep(0.2 if job < 100 else 3600)
    return power(common, job)


def die_once(common: Path, job: int) -> int:
    """The first to take job 2 is killed in the middle of it."""
    if job == 2 and not common.exists():
        common.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return job * 10


def die_always(common: Any, job: int) -> int:
    """Nobody survives job 1."""
    if job == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return job


def fail(common: Any, job: int) -> int:
    """Job 1 has a bug."""
    if job == 1:
        raise KeyError("the bug")
    return job


def threads(common: Any, job: int) -> int:
    """How many threads torch uses."""
    import torch

    return torch.get_num_threads()


def large(common: bytes, job: int) -> bytes:
    """More than a pipe holds, both ways."""
    return common * (job + 1)

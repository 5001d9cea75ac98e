"""Peak memory of this process and of its workers."""

from __future__ import annotations

import multiprocessing
import re
import resource
import sys
from pathlib import Path

_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB", re.MULTILINE)


def peak_memory() -> dict[str, float]:
    """Megabytes of peak resident memory: `learner` is this process, `workers` all its living worker processes.

    Workers on other machines are not counted; where there is no /proc, neither are those on this one.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes, on macOS bytes
    found = {"learner": peak / (2**20 if sys.platform == "darwin" else 2**10)}
    workers = [_peak_of(process.pid) for process in multiprocessing.active_children()]
    if known := [peak for peak in workers if peak is not None]:
        found["workers"] = sum(known)
    return {name: round(megabytes, 1) for name, megabytes in found.items()}


def _peak_of(pid: int | None) -> float | None:
    """None if the process is gone or the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = _PEAK.search(status)
    return int(match[1]) / 2**10 if match else None

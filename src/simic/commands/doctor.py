"""simic doctor: versions, threads, memory, disk and data sets of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simic.tasks.files import FASHION_DIR

ENVIRONMENT_ERROR = 4
NEEDED_MEMORY = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check the machine: versions, threads, memory, disk, data sets."""

    def run(self) -> int:
        """Print one line per finding; exit code 4 if something that every run needs is missing."""
        healthy = True
        for found, text in _needed():
            print(f"{'ok     ' if found else 'missing'} {text}")
            healthy &= found
        for text in _optional():
            print(f"        {text}")
        return 0 if healthy else ENVIRONMENT_ERROR


def _needed() -> Iterator[tuple[bool, str]]:
    from simic.training.build import FREE_BYTES, versions

    for package, version in versions().items():
        yield version != "not installed", f"{package} {version}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield True, f"{cores} CPU cores; training uses one thread per process"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield memory >= NEEDED_MEMORY, f"{memory / 2**30:.1f} GB of memory"
    free = shutil.disk_usage(Path.cwd()).free
    yield free >= FREE_BYTES, f"{free / 2**30:.1f} GB free on disk here"


def _optional() -> Iterator[str]:
    import torch

    accelerators = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    present = [name for name, module in accelerators.items() if module.is_available()]
    yield f"accelerators: {', '.join(present) or 'none (not needed)'}"
    where = f"found in {FASHION_DIR}" if FASHION_DIR.is_dir() else "not found: install Debian's dataset-fashion-mnist"
    yield f"Fashion-MNIST {where}"

"""What this machine has: versions, threads, memory, disk, data sets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from simic.tasks.files import FASHION_DIR
from simic.training.build import FREE_BYTES, versions

ENVIRONMENT_ERROR = 4
NEEDED_MEMORY = 2 * 2**30


def print_diagnosis() -> int:
    """Print what was found, one line each; 4 if something that every run needs is missing."""
    fine = True
    for good, text in _findings():
        print(f"{'ok     ' if good else 'missing'} {text}")
        fine &= good
    for text in _optional():
        print(f"        {text}")
    return 0 if fine else ENVIRONMENT_ERROR


def _findings() -> Iterator[tuple[bool, str]]:
    for package, version in versions().items():
        yield version != "not installed", f"{package} {version}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield True, f"{cores} CPU cores; training uses one thread per process"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield memory >= NEEDED_MEMORY, f"{memory / 2**30:.1f} GB of memory"
    free = shutil.disk_usage(Path.cwd()).free
    yield free >= FREE_BYTES, f"{free / 2**30:.1f} GB free on disk here"


def _optional() -> Iterator[str]:
    accelerators = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    present = [name for name, module in accelerators.items() if module.is_available()]
    yield f"accelerators: {', '.join(present) or 'none (not needed)'}"
    where = f"found in {FASHION_DIR}" if FASHION_DIR.is_dir() else "not found: install Debian's dataset-fashion-mnist"
    yield f"Fashion-MNIST {where}"

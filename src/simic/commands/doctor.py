"""simic doctor: versions, threads, memory, disk and data sets of this machine; or what a Ray cluster has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from simic.tasks.files import FASHION_DIR
from simic.workers.node_checks import differing_bits, missing_on
from simic.workers.node_probe import probe
from simic.workers.placement import Placement, check_backend

ENVIRONMENT_ERROR = 4
NEEDED_MEMORY = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check the machine, or a Ray cluster: versions, threads, memory, disk, data sets."""

    address: str | None = None
    """Check every node of a Ray cluster instead: HOST:PORT, or `auto` for the one that this machine belongs to."""

    def run(self) -> int:
        """Print one line per finding; exit code 4 if something that every run needs is missing."""
        if self.address is not None:
            return self._check_cluster(self.address)
        healthy = True
        for found, text in _needed():
            print(f"{'ok     ' if found else 'missing'} {text}")
            healthy &= found
        for text in _optional():
            print(f"        {text}")
        return 0 if healthy else ENVIRONMENT_ERROR

    def _check_cluster(self, address: str) -> int:
        """One line per node; exit code 4 if one cannot work together with this machine."""
        placement = Placement(backend="ray", address=address)
        check_backend("ray")
        from simic.workers.ray_cluster import RayConnection
        from simic.workers.ray_thread import RayThread

        thread = RayThread()
        connection = thread.call(RayConnection, placement, None)
        try:
            nodes = thread.call(connection.probe_all)
        finally:
            connection.close(thread)
        own, healthy = probe(), bool(nodes)
        for name, facts in nodes.items():
            problem = missing_on(name, facts, own)
            parts = [f"{facts['cpus']} CPUs", f"{facts['gpus']:g} GPUs", f"{facts['memory'] / 2**30:.1f} GB"]
            parts += [f"{package} {facts[package] or 'missing'}" for package in ("simic", "torch", "numpy", "python")]
            parts += [f"{facts['machine']} {facts['instructions']}".strip()]
            print(f"{'missing' if problem else 'ok     '} node {name}: {', '.join(parts)}")
            if problem:
                healthy = False
                print(f"        {problem}")
        cpus = sum(facts["cpus"] for facts in nodes.values())
        print(f"        {len(nodes)} nodes with room for {cpus} workers (one per CPU) at {connection.address}")
        if warning := differing_bits(nodes, own):
            print(f"        {warning}")
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

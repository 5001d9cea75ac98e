"""Placement: where jobs run. Results do not depend on it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

Backend = Literal["local", "ray"]
RAY_ONLY = ("address", "gpus_per_worker")
"""What only the backend ray reads."""
DEFAULT_WORKERS = 2
"""Worker processes on one machine."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How many workers run jobs, and on which machines."""

    workers: int | None = None
    """Processes that train hosts: by default 2, or with an address one per CPU of the cluster; 0 uses the main process.
    The result is the same."""
    backend: Backend = "local"
    """Where workers run: processes of this machine (local), or a Ray cluster (ray). The result is the same."""
    address: str | None = None
    """The Ray cluster for backend ray: HOST:PORT, or `auto` for the one that this machine belongs to. By default Ray is
    started on this machine."""
    gpus_per_worker: float = 0.0
    """GPUs, or the share of one, that backend ray reserves for each worker."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"workers must not be negative, got {self.workers}")
        if not 0 <= self.gpus_per_worker < float("inf"):
            raise ValueError(f"gpus_per_worker must not be negative, got {self.gpus_per_worker}")
        if self.backend == "ray":
            if self.workers == 0:
                raise ValueError("backend ray needs at least one worker, got workers = 0: leave out one of them")
            if self.address is not None:
                check_address(self.address)


def check_backend(backend: str) -> None:
    """Raise if the package that a backend needs is missing."""
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("backend ray needs Ray, which is not installed: pip install 'simic-rl[cluster]'")


def check_address(address: str) -> None:
    """Raise unless this is `auto` or HOST:PORT."""
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and "/" not in host):
        raise ValueError(f"address must be auto or HOST:PORT, such as 10.0.0.1:6379, got {address!r}")

"""Which device a worker uses: where a machine has several of a kind, its workers share them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_worker_number = 0


def set_worker_number(number: int) -> None:
    """Say which worker this process is; a process without a number is worker 0."""
    global _worker_number
    _worker_number = number


def own_device(name: str) -> torch.device:
    """The device of this name that this process computes on: workers 0, 1, 2, ... use cuda:0, cuda:1, cuda:0, ..."""
    import torch

    device = torch.device(name)
    count = getattr(torch, name).device_count() if name in ("cuda", "xpu") else 1
    return torch.device(name, _worker_number % count) if count > 1 else device

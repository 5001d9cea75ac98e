"""HostsConfig: how stacked hosts compute. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """How the hosts of a group compute."""

    precision: Precision = "float32"
    """Precision of the hosts' forward passes (autocast); losses, parameters and optimizer stay in float32, and float16
    scales the loss. Saves time on accelerators, not on CPUs."""
    compile: bool = False
    """Compile the segments of hosts with torch.compile. It needs a C++ compiler and some ten seconds for each
    architecture; hosts of a few hundred parameters are slower with it."""

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}")

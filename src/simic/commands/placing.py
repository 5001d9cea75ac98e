"""The flags of evaluate and plan that say where hosts are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simic.workers.placement import RAY_ONLY, Placement, check_backend


def placement_of(given: Mapping[str, Any]) -> Placement:
    """The placement that flags ask for; raises if it cannot work here, or if a flag would do nothing."""
    placement = Placement(**given)
    for name in RAY_ONLY:
        if name in given and placement.backend != "ray":
            raise ValueError(f"--{name.replace('_', '-')} is for --backend ray: add that, or leave it out")
    check_backend(placement.backend)
    return placement

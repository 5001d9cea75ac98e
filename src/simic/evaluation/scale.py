"""Scale: the one factor by which the baseline static_scaled widens every host. Nothing here loads torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from simic import pretrained
from simic.control.plan import MAX_BYTES
from simic.storage.files import write_file
from simic.storage.json_files import read_json

FACTOR = "parameter_factor"
"""The only key of a scale's file, by which it is told from a plan."""
MAX_FACTOR = 1024.0
REMEDY = "`simic plan --kind scale` writes one"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large every host is from the start."""

    parameter_factor: float
    """Every host has the least width with at least this multiple of its parameters."""

    def __post_init__(self) -> None:
        factor = self.parameter_factor
        if type(factor) not in (int, float) or not 1 <= factor <= MAX_FACTOR:
            raise ValueError(f"{FACTOR} must be a number from 1 to {MAX_FACTOR:g}, got {factor!r:.60}")

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_file(path, json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")


def load_scale(path: Path | None = None) -> Scale:
    """The scale in a JSON file, or the one that ships with simic, the best found on training tasks."""
    if path is None:
        with resources.as_file(pretrained.SCALE) as shipped:
            return load_scale(shipped)
    table = _read(path)
    try:
        if not isinstance(table, dict) or set(table) != {FACTOR}:
            raise ValueError(f"its only key must be {FACTOR}")
        return Scale(**table)
    except ValueError as error:
        raise ValueError(f"{path} holds no scale: {error}; {REMEDY}") from None


def holds_scale(path: Path) -> bool:
    """Whether a JSON file is meant as a scale; other files are plans."""
    table = _read(path)
    return isinstance(table, dict) and FACTOR in table


def _read(path: Path) -> Any:
    return read_json(path, max_bytes=MAX_BYTES, remedy="`simic plan` writes one")

"""Results of jobs as plain data: what another machine sends back is arrays, numbers and texts, never code.

A dataclass or named tuple of simic travels as its name and its fields, and is made anew by the receiver:

    EpisodeRecord(task="mlp", score=array, ...)   ->   {"$class": "simic.environment.episodes:EpisodeRecord",
                                                        "fields": {"task": "mlp", "score": array, ...}}
"""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

SCALARS = (bool, int, float, str, bytes, type(None))


def to_plain(value: Any) -> Any:
    """A result as plain data; raises TypeError for anything that is none."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be sent back by a worker: use numbers")
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in SCALARS:
        return value
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    kind = type(value)
    if _is_record(kind) and kind.__module__.startswith("simic."):
        content = {name: to_plain(getattr(value, name)) for name in _field_names(kind)}
        return {"$class": f"{kind.__module__}:{kind.__qualname__}", "fields": content}
    raise TypeError(f"a worker can send back arrays and plain data, not a {kind.__name__}")


def from_plain(value: Any) -> Any:
    """What `to_plain` was given. Arrays are copied, so that they are writable and hold no shared memory.

    The sender is not trusted: anything but plain data, or a class that is no record of simic, raises TypeError.
    """
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if type(value) in SCALARS:
        return value
    if type(value) in (list, tuple):
        items = [from_plain(item) for item in value]
        return tuple(items) if type(value) is tuple else items
    if type(value) is not dict:
        raise TypeError(f"a worker sent back a {type(value).__name__}, which is no plain data")
    if "$class" not in value:
        return {key: from_plain(item) for key, item in value.items()}
    return _find_record(value["$class"])(**from_plain(value["fields"]))


def array_bytes(value: Any) -> int:
    """Bytes of all arrays in plain data."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(array_bytes, value.values()))
    return sum(map(array_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _find_record(name: Any) -> type:
    module, _, own = str(name).partition(":")
    found = getattr(importlib.import_module(module), own, None) if module.startswith("simic.") else None
    if not (isinstance(found, type) and _is_record(found) and found.__module__ == module):
        raise TypeError(f"a worker sent back {name!r}, which is no record of simic")
    return found


def _field_names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind._fields)


def _is_record(kind: type) -> bool:
    """Whether a class is a dataclass or a named tuple."""
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))

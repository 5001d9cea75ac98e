"""Checkpoints of version 1, written by simic 0.1: a directory of three files. They are read, never written.

update_000123/state.safetensors   the tensors
              state.json          the tree, with the names of the tensors
              manifest.json       format, update, metric, about; size and SHA-256 of the other files and of itself
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from simic.storage.bundle import unpack_tree
from simic.storage.files import read_file
from simic.storage.json_files import parse_json

TENSORS, TREE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
MAX_BYTES = {TENSORS: 2**30, TREE: 2**24, MANIFEST: 2**22}


def read_directory(path: Path, *, with_state: bool = True) -> dict[str, Any]:
    """The record that version 2 stores in one bundle, every file verified; without `with_state` torch is not loaded."""
    content = read_file(path / MANIFEST, max_bytes=MAX_BYTES[MANIFEST])
    try:
        record = parse_json(content, path / MANIFEST)
        if content != seal(record) or record["version"] != 1:
            raise ValueError
        promised = {name: (record["files"][name]["size"], record["files"][name]["sha256"]) for name in (TENSORS, TREE)}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"{path / MANIFEST} is damaged: it does not match its checksum; use another checkpoint"
        ) from None
    contents = {}
    for name, expected in promised.items():
        found = contents[name] = read_file(path / name, max_bytes=MAX_BYTES[name])
        if (len(found), hashlib.sha256(found).hexdigest()) != expected:
            raise ValueError(f"{path / name} is damaged: it does not match its checksum; use another checkpoint")
    state = _load_state(path, contents) if with_state else None
    return {name: record.get(name) for name in ("format", "update", "metric", "about")} | {"version": 2, "state": state}


def _load_state(path: Path, contents: dict[str, bytes]) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return unpack_tree(contents[TREE].decode(), load(contents[TENSORS]))
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} holds no simic state ({what}); use another checkpoint") from None


def seal(record: dict[str, Any]) -> bytes:
    """A manifest as bytes, with the checksum of the rest of it."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return _dump(rest | {"sha256": hashlib.sha256(_dump(rest)).hexdigest()})


def _dump(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

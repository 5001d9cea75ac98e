"""Bundles: nested state in one safetensors file, tensors as tensors, everything else as JSON in its header. No pickle.

A tree consists of dicts, lists, tuples, numbers, strings, booleans, None, torch tensors and numpy arrays. JSON marks
what it cannot express, and safetensors stores the tensors under the names that the JSON text mentions:

    {"step": (3, inf), "w": tensor}   ->   {"step": {"$tuple": [3, {"$float": "inf"}]}, "w": {"$tensor": "0"}}

    file: header length (8 bytes) | header {"__metadata__": {format, sha256, tree, version}, "0": {dtype, ...}} | data

torch is imported only to pack and to load tensors: `peek_bundle` serves commands that list runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simic.storage.files import open_file, write_file
from simic.storage.json_files import check_values, parse_json

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "simic-bundle"
VERSION = 1
MAX_HEADER_BYTES = 2**25
"""Names, shapes and everything that is not a tensor; 100,000 tensors take a third of it."""
MAX_HEADER_VALUES = 5_000_000

# The checksum covers dtypes as torch prints them; the header has safetensors' names.
_DTYPES = {"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_DTYPES |= {
    f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}
_DTYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}


class BundleError(ValueError):
    """A file that cannot be read as a bundle."""


class BundleVersionError(BundleError):
    """A bundle of a version that this simic cannot read."""


def save_bundle(path: str | Path, tree: Any) -> None:
    """Write a tree of plain values and tensors to one safetensors file, atomically. Equal trees give equal bytes.

    Args:
        path: The file. A symbolic link there is replaced, not followed.
        tree: Nested dicts, lists and tuples of numbers, texts, tensors and numpy arrays.

    Raises:
        TypeError: The tree holds something else.

    Example:
        >>> simic.save_bundle("state.safetensors", {"step": 3, "weights": torch.ones(2)})
        >>> simic.load_bundle("state.safetensors")["step"]
        3
    """
    write_file(path, encode_bundle(tree))


def encode_bundle(tree: Any) -> bytes:
    """The content of a bundle file."""
    from safetensors.torch import save

    document, tensors = _pack_tree(tree)
    content = save(tensors)
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:start]), content[start:]
    checksum = _checksum(document, header, lambda begin, end: data[begin:end])
    # Sorted, because safetensors itself writes metadata in random order.
    metadata = {"format": FORMAT, "sha256": checksum, "tree": document, "version": str(VERSION)}
    text = json.dumps({"__metadata__": metadata} | header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # alignment that safetensors requires
    if len(text) > MAX_HEADER_BYTES:
        raise BundleError(
            f"the tree has {len(text):,} bytes besides its tensors, {MAX_HEADER_BYTES:,} are allowed: save less"
        )
    return len(text).to_bytes(8, "little") + text + data


def load_bundle(path: str | Path, *, max_bytes: int | None = None, follow_links: bool = True) -> Any:
    """Read what `save_bundle` wrote. Nothing in the file is executed.

    Args:
        path: The file.
        max_bytes: Refuse larger files.
        follow_links: Whether `path` may be a symbolic link.

    Returns:
        The tree.

    Raises:
        ValueError: The file is damaged, foreign, or larger than `max_bytes` (BundleError).

    Example:
        >>> simic.save_bundle("state.safetensors", {"step": 3})
        >>> simic.load_bundle("state.safetensors")
        {'step': 3}
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    document = _read_document(path, max_bytes, follow_links)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise BundleError(f"{path} is not a readable safetensors file ({error}); use another file") from None
    return _parse_tree(path, document, tensors)


def peek_bundle(path: str | Path, *, max_bytes: int | None = None, follow_links: bool = True) -> Any:
    """The tree of a bundle with None for every tensor and array. The checksum is verified; torch is not imported."""
    return _parse_tree(Path(path), _read_document(Path(path), max_bytes, follow_links), None)


def unpack_tree(document: str, tensors: dict[str, Tensor] | None) -> Any:
    """The tree of a JSON text, with these very tensors in it; with None instead of tensors if there are none."""

    def unpack(value: Any) -> Any:
        if isinstance(value, list):
            return [unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"$tensor": name}:
                return tensors[name] if tensors is not None else None
            case {"$numpy": name}:
                return tensors[name].numpy() if tensors is not None else None
            case {"$float": text}:
                return float(text)
            case {"$tuple": items}:
                return tuple(unpack(item) for item in items)
            case {"$items": pairs}:
                return {unpack(key): unpack(item) for key, item in pairs}
        return {key: unpack(item) for key, item in value.items()}

    return unpack(parse_json(document, "the tree"))


def _pack_tree(tree: Any) -> tuple[str, dict[str, Tensor]]:
    """The tree as JSON text, and CPU copies of the tensors that the text names. A shared tensor is stored once."""
    import numpy as np
    import torch

    tensors: dict[str, Tensor] = {}
    seen: dict[tuple, str] = {}

    def store(tensor: Tensor) -> str:
        # A copy: safetensors refuses tensors that share memory or are not contiguous.
        tensors[name := str(len(tensors))] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    def pack(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            identity = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, str(value.device))
            if value.numel() == 0 or identity not in seen:
                seen[identity] = store(value)
            return {"$tensor": seen[identity]}
        if isinstance(value, np.ndarray):
            return {"$numpy": store(torch.from_numpy(np.array(value, order="C")))}
        if isinstance(value, np.generic):
            return pack(value.item(), where)
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": str(value)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            items = [pack(item, f"{where}/{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, dict):
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            packed = [(key, pack(item, f"{where}/{key}")) for key, item in value.items()]
            return dict(packed) if plain else {"$items": [[pack(key, where), item] for key, item in packed]}
        raise TypeError(f"cannot save {where or 'the tree'}: {type(value).__name__} is neither tensor, array nor JSON")

    return json.dumps(check_values(pack(tree, ""), "the tree", remedy="save less"), allow_nan=False), tensors


def _read_document(path: Path, max_bytes: int | None, follow_links: bool) -> str:
    """The JSON text of a bundle whose checksum is correct."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    with open(open_file(path, os.O_RDONLY, follow_links=follow_links), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise BundleError(f"{path} has {size:,} bytes, {max_bytes:,} are allowed: it is not the expected file")
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:  # parsing takes several times as much memory
            raise BundleError(
                f"{path} is not a readable safetensors file: its header has {length:,} bytes, {MAX_HEADER_BYTES:,} are "
                "allowed; use another file"
            )

        def read(begin: int, end: int) -> bytes:
            file.seek(8 + length + begin)
            return file.read(end - begin)

        try:
            header = parse_json(file.read(length), "its header", max_values=MAX_HEADER_VALUES)
            metadata = header.pop("__metadata__", {})
            if metadata.get("format") != FORMAT:
                found = metadata.get("format")
                raise BundleError(f"{path} was not written by simic: its format is {found!r}, not {FORMAT!r}")
            if metadata.get("version") != str(VERSION):
                found = metadata.get("version")
                raise BundleVersionError(f"{path} has bundle version {found}, this simic reads {VERSION}")
            # Tensors fill the data section without overlap: a hostile header cannot make us read the same bytes often.
            spans = sorted(entry["data_offsets"] for entry in header.values())
            ends = [0, *(end for _, end in spans)]
            fits = [begin for begin, _ in spans] == ends[:-1] and ends == sorted(ends) and ends[-1] == size - 8 - length
            if not fits or metadata["sha256"] != _checksum(metadata["tree"], header, read):
                raise BundleError(f"{path} is damaged: its content does not match its checksum; use another file")
            return metadata["tree"]
        except BundleError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise BundleError(f"{path} is not a readable safetensors file ({error}); use another file") from None


def _checksum(document: str, header: dict[str, Any], read: Callable[[int, int], bytes]) -> str:
    """SHA-256 of the JSON text and of every tensor's name, dtype, shape and bytes, in the order of their names."""
    digest = hashlib.sha256(document.encode())
    for name, entry in sorted(header.items()):
        digest.update(f"{name} torch.{_DTYPES[entry['dtype']]} {tuple(entry['shape'])}".encode())
        digest.update(read(*entry["data_offsets"]))
    return digest.hexdigest()


def _parse_tree(path: Path, document: str, tensors: dict[str, Tensor] | None) -> Any:
    try:
        return unpack_tree(document, tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} holds no simic state ({type(error).__name__}: {error}); use another file") from None

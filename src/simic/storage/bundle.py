"""One file for nested state: tensors as safetensors, the rest as JSON in its header. No pickle, written atomically.

A tree is made of dicts, lists, tuples, numbers, strings, booleans, None, torch tensors and numpy arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from simic.storage.files import write_file
from simic.storage.json_files import check_values, parse_json

FORMAT = "simic-bundle"
VERSION = 1
MAX_HEADER_BYTES = 2**25
"""Of names, shapes and everything that is no tensor; 100,000 tensors take a third of it."""


class BundleError(ValueError):
    """A file that cannot be read as a bundle."""


def save_bundle(path: str | Path, tree: Any) -> None:
    """Write `tree` to `path`, the same tree as the same bytes. A crash leaves either the old file or the new one.

    A symbolic link at `path` is replaced by the file; what it points to stays as it is.
    """
    document, tensors = pack_tree(tree)
    metadata = {"format": FORMAT, "version": str(VERSION), "tree": document, "sha256": _digest(document, tensors)}
    content = _in_order(save(tensors, metadata))
    _check_header(Path(path), content[:8])
    write_file(path, content)


def _in_order(content: bytes) -> bytes:
    """The same file with its metadata sorted; safetensors writes them in another order every time."""
    start, end = 8, 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[start:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for it
    return len(text).to_bytes(8, "little") + text + content[end:]


def _check_header(path: Path, start: bytes) -> None:
    """Raise if the header, whose size the first 8 bytes of a file tell, would take too much memory to read."""
    size = int.from_bytes(start, "little")
    if size > MAX_HEADER_BYTES:
        raise BundleError(
            f"{path} is not a readable safetensors file: its header has {size:,} bytes, {MAX_HEADER_BYTES:,} may be"
        )


def load_bundle(path: str | Path, *, max_bytes: int | None = None) -> Any:
    """Read what `save_bundle` wrote; a damaged or foreign file, or one beyond `max_bytes`, raises BundleError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if max_bytes is not None and path.stat().st_size > max_bytes:
        raise BundleError(
            f"{path} has {path.stat().st_size:,} bytes, {max_bytes:,} are allowed: it holds something else"
        )
    with open(path, "rb") as file:
        _check_header(path, file.read(8))
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise BundleError(f"{path} is not a readable safetensors file ({error}); use another checkpoint") from None
    if metadata.get("format") != FORMAT:
        raise BundleError(f"{path} was not written by simic: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("version") != str(VERSION):
        raise BundleError(f"{path} has bundle version {metadata.get('version')}, this simic reads {VERSION}")
    if metadata.get("sha256") != _digest(metadata.get("tree", ""), tensors):
        raise BundleError(f"{path} is damaged: its content does not match its checksum; use another checkpoint")
    try:
        return unpack_tree(metadata["tree"], tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise BundleError(f"{path} holds no state of simic's ({what}); use another file") from None


def pack_tree(tree: Any) -> tuple[str, dict[str, Tensor]]:
    """The tree as JSON text, and copies on the CPU of the tensors that the text names."""
    tensors: dict[str, Tensor] = {}
    packed = check_values(_pack(tree, "", tensors, {}), "the tree", remedy="save less")
    return json.dumps(packed, allow_nan=False), tensors


def unpack_tree(document: str, tensors: dict[str, Tensor]) -> Any:
    """The tree that `pack_tree` took apart; it holds these very tensors."""
    return _unpack(parse_json(document, "the tree"), tensors)


def _digest(document: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(document.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _pack(value: Any, where: str, tensors: dict[str, Tensor], seen: dict[tuple, str]) -> Any:
    """JSON with markers `{"$kind": ...}` for what JSON has not; tensors go to `tensors`, shared ones once."""
    if isinstance(value, Tensor):
        identity = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, str(value.device))
        if value.numel() == 0 or identity not in seen:
            seen[identity] = _store(value, tensors)
        return {"$tensor": seen[identity]}
    if isinstance(value, np.ndarray):
        return {"$numpy": _store(torch.from_numpy(np.array(value, order="C")), tensors)}
    if isinstance(value, np.generic):
        return _pack(value.item(), where, tensors, seen)
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{where}/{index}", tensors, seen) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        packed = [(key, _pack(item, f"{where}/{key}", tensors, seen)) for key, item in value.items()]
        return dict(packed) if plain else {"$items": [[_pack(k, where, tensors, seen), v] for k, v in packed]}
    raise TypeError(f"cannot save {where or 'the tree'}: {type(value).__name__} is neither tensor, array nor JSON")


def _store(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    # A copy on the CPU: safetensors refuses tensors that share memory or are not contiguous.
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return name


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$numpy": name}:
            return tensors[name].numpy()
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case {"$items": pairs}:
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in pairs}
    return {key: _unpack(item, tensors) for key, item in value.items()}

"""Checkpoints: a directory each, whole or absent. Tensors in safetensors, the rest in JSON, no pickle.

    checkpoints/update_000123/state.safetensors   the tensors
                              state.json          the tree that holds them
                              manifest.json       format, update, metric, SHA-256 of every file; written last

A checkpoint is written under a hidden name, flushed, then renamed: a kill at any moment leaves the earlier ones whole.
Who calls `save_checkpoint`, `sweep` or `discard_newer` holds the lock of the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from simic.storage.files import (
    FileKindError,
    FileSizeError,
    check_size,
    list_directory,
    output_error,
    read_file,
    sync_path,
)
from simic.storage.json_files import parse_json

FORMAT = "simic-checkpoint"
VERSION = 1
TENSORS, TREE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
MAX_BYTES = {TENSORS: 2**30, TREE: 2**24, MANIFEST: 2**22}
"""Far more than any checkpoint has, and what a damaged or hostile one can cost at most."""

UPGRADES: dict[int, Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]] = {}
"""From a version's (tree, about) to those of the next version."""

CRASH_POINTS = (
    *("made_directory", "wrote_tensors", "wrote_tree", "wrote_manifest"),
    *("moved_old_aside", "renamed", "hid_discarded"),
)
"""Where the fault tests let a process die: set SIMIC_CRASH_AT to one of them."""

_NAME = re.compile(r"update_(\d{6,18})")
_HIDDEN = re.compile(r"\.(new|old|discarded)-(update_\d{6,18})-\d+")


class CheckpointError(ValueError):
    """A checkpoint that is damaged, foreign, or does not fit."""


class CheckpointVersionError(CheckpointError):
    """A whole checkpoint of a version that this simic cannot read."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    version: int
    update: int
    metric: float | None
    """Higher is better."""
    about: dict[str, Any]
    """What must agree for the state to make sense, such as gamma or feature sizes."""
    files: dict[str, dict[str, Any]]
    """Size and SHA-256 of every other file."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint."""

    tree: Any
    update: int
    metric: float | None
    about: dict[str, Any]
    path: Path

    @property
    def agent(self) -> Any:
        """The saved agent; None if there is none."""
        return self.tree.get("agent") if isinstance(self.tree, dict) else None


class Found(NamedTuple):
    """The newest usable checkpoint, and those newer than it that are damaged, each with the reason."""

    checkpoint: Checkpoint | None
    skipped: list[tuple[Path, str]]


def save_checkpoint(
    root: str | Path,
    update: int,
    tree: Any,
    *,
    metric: float | None = None,
    about: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write a checkpoint, then remove all but the last `keep` and the best; a metric that is not finite is none."""
    if update < 0 or keep < 1:
        raise ValueError(f"update must not be negative and keep at least 1, got update {update} and keep {keep}")
    from safetensors.torch import save

    from simic.storage.bundle import pack_tree

    document, tensors = pack_tree(tree)
    files = {TENSORS: save(tensors), TREE: document.encode()}
    for name, content in files.items():
        check_size(Path(root) / name, len(content), MAX_BYTES[name])
    manifest = Manifest(
        version=VERSION,
        update=int(update),
        metric=float(metric) if metric is not None and math.isfinite(metric) else None,
        about=_as_read_back(dict(about or {})),
        files={name: {"size": len(content), "sha256": _digest(content)} for name, content in files.items()},
    )
    root = Path(root)
    path = root / f"update_{update:06d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _publish(_write(path, files | {MANIFEST: _render(manifest)}), path)
        _prune(root, keep)
    except BaseException as error:
        with suppress(OSError):
            sweep(root)
        if isinstance(error, OSError):
            raise output_error(path, error) from error
        raise
    return path


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint; CheckpointError names the file that is damaged, missing or does not belong there."""
    path = Path(path)
    manifest = read_manifest(path)
    if manifest.version > VERSION:
        raise CheckpointVersionError(
            f"{path} has checkpoint version {manifest.version}, this simic reads up to {VERSION}: use a newer simic"
        )
    contents = _read_files(path, manifest)
    from safetensors import SafetensorError
    from safetensors.torch import load

    from simic.storage.bundle import unpack_tree

    try:
        tree = unpack_tree(contents[TREE].decode(), load(contents[TENSORS]))
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no state ({type(error).__name__}: {error}); {_REMEDY}") from None
    tree, about = _upgraded(path, manifest, tree)
    return Checkpoint(tree=tree, update=manifest.update, metric=manifest.metric, about=about, path=path)


def find_checkpoint(root: str | Path) -> Found:
    """The newest checkpoint that can be used. A version that cannot be read raises: that is no damage."""
    skipped: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(root)):
        try:
            return Found(load_checkpoint(path), skipped)
        except CheckpointVersionError:
            raise
        except CheckpointError as error:
            skipped.append((path, str(error)))
    return Found(None, skipped)


def best_checkpoint(root: str | Path) -> Path | None:
    """The whole checkpoint with the highest metric, the newest of equals; None if none has a metric."""
    return _best(_whole(root))


def list_checkpoints(root: str | Path) -> list[Path]:
    """All checkpoints, damaged ones too, the oldest first."""
    named = [(_NAME.fullmatch(path.name), path) for path in list_directory(Path(root))]
    own = [(name, path) for name, path in named if name and path.is_dir() and not path.is_symlink()]
    return [path for _, path in sorted((int(name[1]), path) for name, path in own)]


def check_about(checkpoint: Checkpoint, expected: Mapping[str, Any]) -> None:
    """Raise unless the checkpoint was made with these values; each mismatch names both."""
    expected, missing = _as_read_back(dict(expected)), object()
    wrong = [
        f"{name} is {checkpoint.about.get(name, 'not given')!r} there and {value!r} here"
        for name, value in expected.items()
        if checkpoint.about.get(name, missing) != value
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this run: {'; '.join(wrong)}. Use the settings it was made with, "
            "or begin a new run"
        )


def discard_newer(root: str | Path, update: int) -> list[Path]:
    """Remove the checkpoints after an update: a run that goes back to it will write them again."""
    newer = [path for path in list_checkpoints(root) if _update_of(path) > update]
    for path in reversed(newer):
        _discard(path, path.name)
    return newer


def sweep(root: str | Path) -> list[Path]:
    """Clear up after a process that died: half-written checkpoints go, one that was being replaced comes back."""
    root = Path(root)
    hidden = [(_HIDDEN.fullmatch(path.name), path) for path in list_directory(root) if not path.is_symlink()]
    for name, path in ((name, path) for name, path in hidden if name):
        if name[1] == "old" and not (root / name[2]).exists():
            os.rename(path, root / name[2])
        elif name[1] == "old":
            _discard(path, name[2])
        else:
            shutil.rmtree(path, ignore_errors=True)
    return [path for name, path in hidden if name]


def read_manifest(path: str | Path) -> Manifest:
    """What a checkpoint says of itself, without loading it; only the manifest itself is checked."""
    path = Path(path)
    content = _read(path, MANIFEST)
    try:
        record = parse_json(content, path / MANIFEST)
        if record["format"] != FORMAT:
            raise CheckpointError(f"{path / MANIFEST} has format {record['format']!r}, not {FORMAT!r}; {_REMEDY}")
        if content != _seal(record):
            raise CheckpointError(f"{path / MANIFEST} is damaged: it does not match its checksum; {_REMEDY}")
        if record["files"].keys() != {TENSORS, TREE}:
            raise CheckpointError(f"{path / MANIFEST} names other files than {TENSORS} and {TREE}; {_REMEDY}")
        return Manifest(
            version=operator.index(record["version"]),
            update=operator.index(record["update"]),
            metric=None if record["metric"] is None else float(record["metric"]),
            about=dict(record["about"]),
            files={name: {key: file[key] for key in ("size", "sha256")} for name, file in record["files"].items()},
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it is no manifest of a checkpoint; {_REMEDY}") from None


_REMEDY = "use another checkpoint"


def _reached(point: str) -> None:
    assert point in CRASH_POINTS
    if os.environ.get("SIMIC_CRASH_AT") == point:
        os.kill(os.getpid(), signal.SIGKILL)


# Writing.


def _write(path: Path, files: dict[str, bytes]) -> Path:
    """Write the files of a checkpoint under a hidden name."""
    directory = _hidden("new", path, path.name)
    directory.mkdir()
    _reached("made_directory")
    for (name, content), point in zip(files.items(), ("wrote_tensors", "wrote_tree", "wrote_manifest"), strict=True):
        with open(directory / name, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _reached(point)
    sync_path(directory)
    return directory


def _publish(directory: Path, path: Path) -> None:
    """Give a checkpoint its name. One that has the name already steps aside first, and `sweep` can bring it back."""
    old = _hidden("old", path, path.name)
    replaces = path.exists()
    if replaces:
        os.rename(path, old)
        _reached("moved_old_aside")
    os.rename(directory, path)
    _reached("renamed")
    sync_path(path.parent)
    if replaces:
        _discard(old, path.name)


def _prune(root: Path, keep: int) -> None:
    """Remove what is older than the last `keep` whole checkpoints, except the best; damaged ones do not count."""
    whole = _whole(root)
    if len(whole) < keep:
        return
    oldest_kept, best = _update_of(whole[-keep][0]), _best(whole)
    for path in list_checkpoints(root):
        if _update_of(path) < oldest_kept and path != best:
            _discard(path, path.name)


def _discard(path: Path, name: str) -> None:
    """Remove a checkpoint: out of sight in one step, so that a kill on the way leaves no torn one."""
    doomed = _hidden("discarded", path, name)
    os.rename(path, doomed)
    _reached("hid_discarded")
    shutil.rmtree(doomed)


def _hidden(purpose: str, path: Path, name: str) -> Path:
    hidden = path.with_name(f".{purpose}-{name}-{os.getpid()}")
    assert _HIDDEN.fullmatch(hidden.name)
    if hidden.exists():  # of a dead process that had the same id
        shutil.rmtree(hidden)
    return hidden


# Reading.


def _whole(root: str | Path) -> list[tuple[Path, Manifest]]:
    """The checkpoints that are not damaged, the oldest first."""
    whole = []
    for path in list_checkpoints(root):
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            _read_files(path, manifest)
            whole.append((path, manifest))
    return whole


def _best(whole: list[tuple[Path, Manifest]]) -> Path | None:
    rated = [(manifest.metric, _update_of(path), path) for path, manifest in whole if manifest.metric is not None]
    return max(rated)[-1] if rated else None


def _read_files(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """The content of every file that the manifest names, checked; hidden files of the system's are no concern."""
    present = {file.name for file in list_directory(path) if not file.name.startswith(".")}
    for name in sorted(present - manifest.files.keys() - {MANIFEST}):
        raise CheckpointError(f"{path / name} does not belong to the checkpoint; remove it, or {_REMEDY}")
    contents = {}
    for name, promised in manifest.files.items():
        content = contents[name] = _read(path, name, promised["size"])
        if _digest(content) != promised["sha256"]:
            raise CheckpointError(f"{path / name} is damaged: it does not match its checksum; {_REMEDY}")
    return contents


def _read(path: Path, name: str, size: int | None = None) -> bytes:
    """The content of a file, which must have `size` bytes if that is given; a larger one is not read."""
    file = path / name
    try:
        found = file.lstat().st_size
        if size is not None and found != size:
            raise CheckpointError(f"{file} is damaged: it has {found} bytes, not {size}; {_REMEDY}")
        return read_file(file, max_bytes=MAX_BYTES[name])
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; {_REMEDY}") from None
    except (FileKindError, FileSizeError) as error:
        raise CheckpointError(f"{error}; {_REMEDY}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); {_REMEDY}") from None


def _upgraded(path: Path, manifest: Manifest, tree: Any) -> tuple[Any, dict[str, Any]]:
    about = manifest.about
    for version in range(manifest.version, VERSION):
        if version not in UPGRADES:
            raise CheckpointVersionError(
                f"{path} has checkpoint version {manifest.version}, which this simic (version {VERSION}) can no longer "
                "read: open it with an older simic"
            )
        tree, about = UPGRADES[version](tree, about)
    return tree, about


def _render(manifest: Manifest) -> bytes:
    return _seal(asdict(manifest) | {"format": FORMAT})


def _seal(record: dict[str, Any]) -> bytes:
    """A manifest as bytes, with the checksum of all the rest of it."""
    record = {key: value for key, value in record.items() if key != "sha256"}
    return _dump(record | {"sha256": _digest(_dump(record))})


def _dump(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _as_read_back(values: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values, allow_nan=False))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _update_of(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    assert name
    return int(name[1])

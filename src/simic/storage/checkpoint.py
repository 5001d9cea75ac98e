"""Checkpoints of a run: one bundle file per update, `checkpoints/update_000123.safetensors`.

A checkpoint is written atomically (see `files.write_file`): a kill at any moment leaves the earlier ones intact, and a
checkpoint that replaces another one never leaves a gap. Version 1 was a directory of three files; it is still read.
Callers of functions that change the directory hold the lock of the run.
"""

from __future__ import annotations

import json
import math
import operator
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from simic.storage.bundle import BundleVersionError, encode_bundle, load_bundle, peek_bundle
from simic.storage.checkpoint_directory import MANIFEST, read_directory
from simic.storage.files import check_size, list_directory, write_file, writing

FORMAT = "simic-checkpoint"
VERSION = 2
MAX_BYTES = 2**30
"""Far more than any checkpoint has; bounds what a damaged or hostile file can cost."""

UPGRADES: dict[int, Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]] = {}
"""From a version's (tree, about) to those of the next version; `read_directory` upgrades version 1 to 2."""

_NAME = re.compile(r"update_(\d{6,18})(\.safetensors)?")


class CheckpointError(ValueError):
    """A checkpoint that is damaged, foreign, or does not fit the run."""


class CheckpointVersionError(CheckpointError):
    """An intact checkpoint of a version that this simic cannot read."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint as it was read."""

    path: Path
    version: int
    update: int
    metric: float | None
    """Higher is better."""
    about: dict[str, Any]
    """Settings that must agree for the state to make sense, such as gamma or feature sizes."""
    tree: Any
    """The saved state."""

    @property
    def agent(self) -> Any:
        """The saved agent; None if there is none."""
        return self.tree.get("agent") if isinstance(self.tree, dict) else None


class Found(NamedTuple):
    """The newest usable checkpoint, and the damaged ones that are newer, each with the reason."""

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
    """Write a checkpoint, then remove all but the last `keep` and the best. A metric that is not finite is dropped."""
    if update < 0 or keep < 1:
        raise ValueError(f"update must not be negative and keep at least 1, got update {update} and keep {keep}")
    root = Path(root)
    path = root / f"update_{update:06d}.safetensors"
    record = {
        "format": FORMAT,
        "version": VERSION,
        "update": int(update),
        "metric": float(metric) if metric is not None and math.isfinite(metric) else None,
        "about": _through_json(about or {}),
        "state": tree,
    }
    content = encode_bundle(record)
    check_size(path, len(content), MAX_BYTES)
    with writing(path):
        root.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
        if (replaced := path.with_suffix("")) in list_checkpoints(root):  # a directory of version 1
            _remove(replaced)
        _prune(root, keep)
    return path


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint; CheckpointError names the file that is damaged, missing or not a checkpoint."""
    path = Path(path)
    with _checkpoint_errors(path):
        if path.is_dir():
            return _upgrade(_parse(path, read_directory(path)))
        return _upgrade(_parse(path, load_bundle(path, max_bytes=MAX_BYTES, follow_links=False)))


def peek_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint of any version without the tensors of its state. Its checksum is verified; torch is not imported."""
    path = Path(path)
    with _checkpoint_errors(path):
        if path.is_dir():
            return _parse(path, read_directory(path, with_state=False))
        return _parse(path, peek_bundle(path, max_bytes=MAX_BYTES, follow_links=False))


def is_checkpoint(path: str | Path) -> bool:
    """Whether there is a checkpoint, rather than a controller, a run or something else."""
    path = Path(path)
    if path.is_dir():
        return (path / MANIFEST).is_file()
    try:
        return path.is_file() and peek_bundle(path, max_bytes=MAX_BYTES)["format"] == FORMAT
    except (ValueError, KeyError, TypeError, OSError):
        return False  # the caller's reader reports the reason


def find_checkpoint(root: str | Path) -> Found:
    """The newest usable checkpoint. A version that cannot be read raises: it is not damage."""
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
    """The intact checkpoint with the highest metric, the newest of equals; None if none has a metric."""
    return _best(_intact(root))


def list_checkpoints(root: str | Path) -> list[Path]:
    """All checkpoints, damaged ones included, from the oldest to the newest."""
    found = []
    for path in list_directory(Path(root)):
        name = _NAME.fullmatch(path.name)
        if name and not path.is_symlink() and (path.is_file() if name[2] else path.is_dir()):
            found.append((int(name[1]), path))
    return [path for _, path in sorted(found)]


def check_about(checkpoint: Checkpoint, expected: Mapping[str, Any]) -> None:
    """Raise unless the checkpoint was made with these values; the error names both values of each mismatch."""
    missing = object()
    wrong = [
        f"{name} is {checkpoint.about.get(name, 'not given')!r} there and {value!r} here"
        for name, value in _through_json(expected).items()
        if checkpoint.about.get(name, missing) != value
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this run: {'; '.join(wrong)}. Use the settings it was made with, "
            "or start a new run"
        )


def discard_newer(root: str | Path, update: int) -> list[Path]:
    """Remove the checkpoints after an update: a run that continues from it will write them again."""
    newer = [path for path in list_checkpoints(root) if _update_of(path) > update]
    for path in reversed(newer):
        _remove(path)
    return newer


def _prune(root: Path, keep: int) -> None:
    """Remove what is older than the last `keep` intact checkpoints, except the best; damaged ones do not count."""
    intact = _intact(root)
    if len(intact) < keep:
        return
    oldest_kept, best = _update_of(intact[-keep].path), _best(intact)
    for path in list_checkpoints(root):
        if _update_of(path) < oldest_kept and path != best:
            _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _intact(root: str | Path) -> list[Checkpoint]:
    """The checkpoints that are not damaged, from the oldest to the newest, without tensors."""
    intact = []
    for path in list_checkpoints(root):
        with suppress(CheckpointError):
            intact.append(peek_checkpoint(path))
    return intact


def _best(intact: list[Checkpoint]) -> Path | None:
    rated = [(own.metric, _update_of(own.path), own.path) for own in intact if own.metric is not None]
    return max(rated)[-1] if rated else None


@contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a checkpoint into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except BundleVersionError as error:
        raise CheckpointVersionError(f"{error}: use a newer simic") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from None
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _parse(path: Path, record: Any) -> Checkpoint:
    """The checkpoint in the tree of a bundle: a correct checksum does not make a bundle a checkpoint."""
    try:
        if record["format"] != FORMAT:
            raise ValueError
        return Checkpoint(
            path=path,
            version=operator.index(record["version"]),
            update=operator.index(record["update"]),
            metric=None if record["metric"] is None else float(record["metric"]),
            about=dict(record["about"]),
            tree=record["state"],
        )
    except (ValueError, TypeError, KeyError, OverflowError):
        raise CheckpointError(f"{path} is not a checkpoint of simic; use another file") from None


def _upgrade(checkpoint: Checkpoint) -> Checkpoint:
    oldest, found = min(UPGRADES, default=VERSION), checkpoint.version
    if not oldest <= found <= VERSION:
        raise CheckpointVersionError(
            f"{checkpoint.path} has checkpoint version {found}, this simic reads versions {oldest} to {VERSION}: use "
            f"{'a newer' if found > VERSION else 'an older'} simic"
        )
    for version in range(found, VERSION):
        tree, about = UPGRADES[version](checkpoint.tree, checkpoint.about)
        checkpoint = replace(checkpoint, version=version + 1, tree=tree, about=about)
    return checkpoint


def _through_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as they are read back: tuples as lists, keys as strings."""
    return json.loads(json.dumps(dict(values), allow_nan=False))


def _update_of(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    assert name
    return int(name[1])

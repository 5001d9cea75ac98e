"""The runs below a directory, each with a few facts. Of long files only the ends are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from simic.dashboard.run_facts import identity, run_status
from simic.dashboard.view_parts import finite, name
from simic.storage.files import open_file
from simic.storage.run_directory import DIRECTORIES, RunDirectory
from simic.telemetry.events import (
    FILES,
    EventError,
    ProcessEvent,
    RunFinished,
    RunStarted,
    Update,
    WorkerFault,
    from_json,
)

MAX_RUNS = 1000
MAX_DEPTH = 3
"""Levels of directories that are searched."""
MAX_FILES = 10_000
"""Entries of one directory that are looked at."""
START_BYTES = 1 << 17
END_BYTES = (1 << 18, 1 << 24)
"""Bytes of the end of events.jsonl that are searched for the last update: at first, and if it is not there."""


class Facts(NamedTuple):
    """What the files of a run say."""

    first_start: RunStarted | None
    started: RunStarted | None
    finished: RunFinished | None
    last_event: float | None
    last_update: Update | None
    faults: int
    """Workers lost, by the end of process.jsonl."""


def run_list(directory: str | Path) -> list[dict[str, Any]]:
    """The runs in a directory and below it, or the run that it is itself; the newest first.

    `id` is the path below the directory; that of the directory itself is its name.
    """
    root = Path(directory)
    found = [_describe(root, path) for path in islice(_find(root, MAX_DEPTH), MAX_RUNS)]
    return sorted(found, key=lambda entry: (-(entry["last_event"] or 0.0), entry["id"]))


def _find(directory: Path, depth: int) -> Iterator[Path]:
    """Directories that hold a run; links are not followed, and those that a run makes are not searched."""
    try:
        with os.scandir(directory) as entries:
            found = sorted(islice(entries, MAX_FILES), key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in found if entry.is_file(follow_symlinks=False)}
    is_run = bool(names & set(FILES))
    if is_run:
        yield directory
    for entry in found if depth else ():
        own = entry.name.startswith(".") or (is_run and entry.name in DIRECTORIES)
        if entry.is_dir(follow_symlinks=False) and not own:
            yield from _find(directory / entry.name, depth - 1)


def _describe(root: Path, path: Path) -> dict[str, Any]:
    facts = _read_facts(path, tuple(_signature(path / file) for file in FILES))
    config = facts.started.config if facts.started else {}
    updates, metrics = config.get("updates"), facts.last_update.metrics if facts.last_update else {}
    return {
        "id": root.resolve().name if path == root else path.relative_to(root).as_posix(),
        "name": name(path.resolve().name),
        "path": name(str(path)),
        **identity(config, facts.started.command if facts.started else ()),
        "status": run_status(RunDirectory(path), facts.finished),
        "update": facts.last_update.update + 1 if facts.last_update else 0,
        "updates": updates if isinstance(updates, int) else None,
        "score": finite(metrics.get("score")),
        "gain": finite(metrics.get("gain")),
        "started": facts.first_start.time if facts.first_start else None,
        "last_event": facts.last_event,
        "bytes": _size(path),
        "faults": facts.faults,
    }


@lru_cache(maxsize=MAX_RUNS)
def _read_facts(path: Path, signature: tuple[tuple[int, int], ...]) -> Facts:
    """Of files that have not changed (`signature`) the facts are known already."""
    process, events = (path / file for file in FILES)
    first = next((event for event in _events(_start(process)) if isinstance(event, RunStarted)), None)
    started, finished, last, faults = first, None, None, 0
    for event in _events(_end(process, END_BYTES[0])):
        if isinstance(event, ProcessEvent):
            last = finite(event.time)
        if isinstance(event, RunStarted):
            started, finished = event, None
        elif isinstance(event, RunFinished):
            finished = event
        faults += isinstance(event, WorkerFault)
    return Facts(first, started, finished, last, _last_update(events), faults)


def _last_update(events: Path) -> Update | None:
    for size in END_BYTES:
        for line in reversed(_end(events, size)):
            if b'"kind":"update"' in line:
                for event in _events([line]):
                    if isinstance(event, Update):
                        return event
    return None


def _events(lines: list[bytes]) -> Iterator[object]:
    for line in lines:
        try:
            yield from_json(line)
        except EventError:
            continue


def _start(path: Path) -> list[bytes]:
    """Whole lines at the start of a file."""
    return _read(path, 0, START_BYTES).split(b"\n")[:-1]


def _end(path: Path, size: int) -> list[bytes]:
    """The lines that end in the last `size` bytes of a file; the first may be cut, and then is no event."""
    return _read(path, max(_signature(path)[1] - size, 0), size).split(b"\n")[:-1]


def _read(path: Path, start: int, size: int) -> bytes:
    try:
        with open(open_file(path, os.O_RDONLY), "rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError:
        return b""


def _signature(path: Path) -> tuple[int, int]:
    """Time of the last change in nanoseconds, and size; zeros for a missing file."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _size(path: Path, depth: int = 2) -> int:
    """Bytes of the files in a directory and its subdirectories."""
    try:
        with os.scandir(path) as entries:
            total = 0
            for entry in islice(entries, MAX_FILES):
                if entry.is_dir(follow_symlinks=False):
                    total += _size(path / entry.name, depth - 1) if depth else 0
                else:
                    total += entry.stat(follow_symlinks=False).st_size
            return total
    except OSError:
        return 0

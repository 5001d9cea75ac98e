"""Recorder: the only writer of a run's events. Lines are appended, flushed per update, and truncated on resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from simic.storage.files import FileSizeError, open_to_change, output_error, sync_path, writing
from simic.storage.run_directory import EVENTS_FILE, PROCESS_FILE
from simic.telemetry.events import FILES, LEVELS, MAX_LINE_BYTES, Event, Level, to_json

_CHUNK = 1 << 16


class Recorder:
    """Appends events to the files of a run directory, at a level of detail that can be raised temporarily.

    Without a directory nothing is written; only mirrors receive events.
    """

    def __init__(
        self, directory: str | Path | None, level: Level = "normal", *, mirrors: Iterable[Callable[[Event], None]] = ()
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
        self.level: Level = level
        self._mirrors = tuple(mirrors)
        self._escalated_updates = 0
        self._files = {} if directory is None else {name: _LineFile(Path(directory) / name) for name in FILES}

    def wants(self, kind: type[Event]) -> bool:
        """Whether events of this kind are recorded now; check before building many of them."""
        if not self._files and not self._mirrors:
            return False
        level = "debug" if self._escalated_updates and self.level != "off" else self.level
        return LEVELS.index(kind.level) <= LEVELS.index(level)

    def record(self, event: Event) -> None:
        """Record an event if the level includes it, and pass it to the mirrors."""
        if not self.wants(type(event)):
            return
        if self._files:
            self._files[event.file].append(to_json(event))
            if event.file == PROCESS_FILE:  # few, and readers want them at once
                self._files[PROCESS_FILE].flush()
        for mirror in self._mirrors:
            mirror(event)

    def escalate(self, updates: int) -> None:
        """Record everything for the rest of this update and that many more; `off` stays off."""
        self._escalated_updates = max(self._escalated_updates, updates + 1)

    def end_update(self) -> None:
        """Make the update's events visible to readers."""
        self.flush()
        self._escalated_updates = max(self._escalated_updates - 1, 0)

    def flush(self) -> None:
        """Write all pending events to the files."""
        for file in self._files.values():
            file.flush()

    def position(self) -> int:
        """Size of events.jsonl in bytes, after syncing it to disk."""
        if not self._files:
            return 0
        self._files[EVENTS_FILE].sync()
        return self._files[EVENTS_FILE].size

    def rewind(self, position: int) -> None:
        """Truncate events.jsonl to a position: later events will happen again. process.jsonl is not changed."""
        if self._files:
            self._files[EVENTS_FILE].truncate(position)

    def state_dict(self) -> dict[str, Any]:
        """The position in events.jsonl, and how many updates are still recorded in full detail."""
        return {"position": self.position(), "escalated_updates": self._escalated_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the position of a checkpoint."""
        self.rewind(state["position"])
        self._escalated_updates = state["escalated_updates"]

    def close(self) -> None:
        """Write pending events and close the files."""
        try:
            self.flush()
        finally:
            for file in self._files.values():
                file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LineFile:
    """A file of complete lines: an incomplete last line, left by a crash or a full disk, is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[bytes] = []
        with writing(path):
            self._descriptor = open_to_change(path)
            self.size = _whole_lines(path, self._descriptor)
            os.ftruncate(self._descriptor, self.size)
            sync_path(path.parent)

    def append(self, line: str) -> None:
        self._pending.append(line.encode() + b"\n")

    def flush(self) -> None:
        """Write pending lines; on failure the file is unchanged and they stay pending."""
        content = b"".join(self._pending)
        try:
            _write_at(self._descriptor, content, self.size)
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self.size)
            if isinstance(error, OSError):
                raise output_error(self.path, error) from error
            raise
        self.size += len(content)
        self._pending.clear()

    def sync(self) -> None:
        self.flush()
        with writing(self.path):
            os.fsync(self._descriptor)

    def truncate(self, size: int) -> None:
        """Truncate to `size` bytes, which must be the end of a line."""
        if not 0 <= size <= self.size or (size and os.pread(self._descriptor, 1, size - 1) != b"\n"):
            raise ValueError(
                f"{self.path} has no line that ends at byte {size}, the position of the checkpoint (it has {self.size} "
                "bytes): it is damaged or belongs to another run; restore it, or start a new run with another --out"
            )
        self._pending.clear()
        os.ftruncate(self._descriptor, size)
        self.size = size
        self.sync()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._pending.clear()


def _write_at(descriptor: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _whole_lines(path: Path, descriptor: int) -> int:
    """Size up to the end of the last complete line."""
    end = size = os.fstat(descriptor).st_size
    while end:
        if size - end > MAX_LINE_BYTES:
            raise FileSizeError(f"{path} has no line in its last {MAX_LINE_BYTES:,} bytes: it is damaged, restore it")
        start = max(end - _CHUNK, 0)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0

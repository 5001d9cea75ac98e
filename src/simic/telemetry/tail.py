"""FileTail: what is new in a file of events that another process writes. Damage is skipped and counted, never fatal.

A view reads runs that crash, and runs of strangers: a line may be cut, huge, not UTF-8 or no event.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from simic.storage.files import open_file
from simic.telemetry.events import MAX_LINE_BYTES, Event, EventError, LifecycleChange, Unknown, from_json, make_event

BLOCK = 1 << 20
"""Bytes that are read at a time."""
MAX_EVENT_BYTES = 1 << 17
"""Of events other than traces: what a view keeps of a run must stay small, whatever the file holds."""
MAX_SKIPPED_BYTES = 1 << 26
"""Of lines that are too long, in one call; then the rest of the file is left out."""
_NUMBER, _TEXT = r"(0|[1-9][0-9]{0,14})", r'"([^"\\\x00-\x1f]*)"'
# Most events of a run are stage changes: by the form that `to_json` gives them they are read several times faster.
_LIFECYCLE = re.compile(
    rf'\{{"blueprint":{_TEXT},"decision":{_NUMBER},"env":{_NUMBER},"group":{_NUMBER},"kind":"lifecycle",'
    r'"new_stage":"([a-z_]*)","old_stage":"([a-z_]*)","readiness":\{[a-z_",:0-9.e+-]*\},"reason":"([a-z_]*)",'
    rf'"slot":{_TEXT},"update":{_NUMBER}\}}'
)
_TRACE = re.compile(rf'\{{"env":[0-9]+,"group":[0-9]+,"host_parameters":[0-9]+,"kind":"trace",.*"update":{_NUMBER}\}}')
_DECISION = re.compile(
    r'\{"action":"[^"\\]*","decision":[0-9]+,"env":[0-9]+,"group":[0-9]+,"kind":"decision",.*"update":[0-9]+,'
)


class Deferred(NamedTuple):
    """An event that is long and rarely needed; `FileTail.read_range` parses it."""

    kind: str
    update: int


Line = tuple[Event | Unknown | Deferred, int, int]
"""An event, and the bytes where its line starts and ends."""


class FileTail:
    """Reads one file of events from where the last call of `lines` ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.damaged = path, 0, 0
        self._identity: tuple[int, int] | None = None
        self.more = False
        """Whether the last call of `lines` ended at its deadline."""
        self._in_huge_line = False

    def rewound(self) -> bool:
        """Whether the file was truncated or replaced, so that all that was read of it is void."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return self.offset > 0
        return found.st_size < self.offset or self._identity not in (None, (found.st_dev, found.st_ino))

    def lines(self, deadline: float = math.inf) -> Iterator[Line]:
        """The events of the lines that were completed since, until about `deadline` of the monotonic clock.

        Stage changes come without `readiness`, traces are deferred, and decisions, of which traces show the same, are
        left out.
        """
        for start, line in self.raw_lines(deadline):
            try:
                event = parse(line)
            except EventError:
                self.damaged += 1
                continue
            if event is not None:
                yield event, start, start + len(line) + 1

    def read_range(self, start: int, end: int, *, short: bool = False) -> Iterator[Event | Unknown]:
        """All events of whole lines between two bytes, or the short ones, as `lines` gives them; not damaged ones."""
        try:
            descriptor = open_file(self.path, os.O_RDONLY)
        except OSError:
            return
        with open(descriptor, "rb") as file:
            file.seek(start)
            while start < end and (line := file.readline(MAX_LINE_BYTES)):
                start += len(line)
                try:
                    event = parse(line.rstrip(b"\n")) if short else from_json(line)
                except EventError:
                    continue
                if isinstance(event, (Event, Unknown)):
                    yield event

    def raw_lines(self, deadline: float = math.inf) -> Iterator[tuple[int, bytes]]:
        """Start and content of every new whole line without its end; those that are too long are counted as damaged.

        A missing file counts as empty.
        """
        self.more = False
        try:
            descriptor = open_file(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            self._identity = found.st_dev, found.st_ino
            file.seek(self.offset)
            # What is written meanwhile is left to the next call: a fast writer must not keep the reader here.
            began, left, rest, skipped = self.offset, found.st_size - self.offset, b"", 0
            while left > 0 and (block := file.read(min(BLOCK, left))):
                left -= len(block)
                *whole, rest = (rest + block).split(b"\n")
                for line in whole:
                    start, self.offset = self.offset, self.offset + len(line) + 1
                    if self._in_huge_line or len(line) >= MAX_LINE_BYTES:
                        self._in_huge_line, self.damaged = False, self.damaged + 1
                    else:
                        yield start, line
                if self._in_huge_line or len(rest) >= MAX_LINE_BYTES:
                    self._in_huge_line, self.offset, rest = True, self.offset + len(rest), b""
                    skipped += len(block)
                    if skipped > MAX_SKIPPED_BYTES:  # no run writes that: what is there now is not worth reading
                        self._in_huge_line, self.damaged, self.offset = False, self.damaged + 1, found.st_size
                        return
                if left > 0 and self.offset > began and time.monotonic() > deadline:
                    self.more = True
                    return


def parse(line: bytes) -> Event | Unknown | Deferred | None:
    """The event of a line, as `FileTail.lines` says; None for a decision."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise EventError(f"not an event ({error}): {line[:80]!r}") from None
    if match := _LIFECYCLE.fullmatch(text):
        blueprint, decision, env, group, new, old, reason, slot, update = match.groups()
        values = {"update": int(update), "group": int(group), "env": int(env), "decision": int(decision), "slot": slot}
        values |= {"blueprint": blueprint, "old_stage": old, "new_stage": new, "reason": reason, "readiness": {}}
        return make_event(LifecycleChange, values)
    if match := _TRACE.fullmatch(text):
        return Deferred("trace", int(match[1]))
    if _DECISION.match(text):
        return None
    if len(line) > MAX_EVENT_BYTES:
        raise EventError(f"an event has {len(line):,} bytes, at most {MAX_EVENT_BYTES:,} are read: {line[:80]!r}")
    return from_json(text)

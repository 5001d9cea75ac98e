"""Reading the events of a finished or running run. There is no order between the two files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, overload

from simic.storage.files import check_regular, open_file
from simic.telemetry.events import FILES, MAX_LINE_BYTES, Event, EventError, Unknown, from_json

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Rewound:
    """A resumed run truncated this file: discard its events, it is read again from its start."""

    file: str


@overload
def read_events(run: str | Path, kinds: None = None) -> Iterator[Event | Unknown]: ...
@overload
def read_events(run: str | Path, kinds: Sequence[type[E]]) -> Iterator[E]: ...
def read_events(run: str | Path, kinds: Sequence[type[Event]] | None = None) -> Iterator[Event | Unknown]:
    """All events of a run directory, or those of some classes; first process.jsonl, then events.jsonl.

    A missing file counts as empty; an incomplete last line, still being written, is skipped.
    """
    wanted = None if kinds is None else tuple(kinds)
    for name in FILES:
        if wanted is not None and not any(kind.file == name for kind in wanted):
            continue
        for event, _ in _events_from(Path(run) / name, 0):
            if wanted is None or isinstance(event, wanted):
                yield event


def follow(
    run: str | Path, *, poll_seconds: float = 0.5, stop: Callable[[], bool] = lambda: False
) -> Iterator[Event | Unknown | Rewound]:
    """All events so far, then new ones as they are written, until `stop()`; the run need not exist yet."""
    offsets = dict.fromkeys(FILES, 0)
    while True:
        stopping = stop()  # asked first, so that everything written before the stop is still read
        for name in FILES:
            path = Path(run) / name
            if (path.stat().st_size if path.is_file() else 0) < offsets[name]:
                offsets[name] = 0
                yield Rewound(name)
            for event, end in _events_from(path, offsets[name]):
                offsets[name] = end
                yield event
        if stopping:
            return
        time.sleep(poll_seconds)


def _events_from(path: Path, offset: int) -> Iterator[tuple[Event | Unknown, int]]:
    """The events of complete lines from a byte on, each with the byte where its line ends."""
    check_regular(path)
    if not path.is_file():
        return
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        file.seek(offset)
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise EventError(
                    f"{path}, byte {offset}: a line has more than {MAX_LINE_BYTES:,} bytes; the file is damaged"
                )
            if not line.endswith(b"\n"):
                return
            try:
                event = from_json(line)
            except EventError as error:
                raise EventError(f"{path}, byte {offset}: {error}; the file is damaged, remove that line") from None
            offset += len(line)
            yield event, offset

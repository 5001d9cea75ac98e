"""RunWatcher: follows a run by its files and gives what has changed since a cursor, as one JSON object.

Nothing is written, and the process of the run is not asked.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from simic.dashboard.run_facts import describe_run, run_status
from simic.dashboard.state import MAX_STORY, MAX_UPDATE, RunState, apply, is_told
from simic.dashboard.story import story_entry
from simic.dashboard.view_parts import current_growth, growth, learning_row
from simic.storage.run_directory import EVENTS_FILE, PROCESS_FILE, RunDirectory
from simic.telemetry.events import FILES, EpisodeTrace, Event, RunStarted, Unknown
from simic.telemetry.tail import Deferred, FileTail

MAX_TRACED = 50_000
"""Updates whose traces can be found again."""
BOOKMARK = 2000
"""Entries of the story between two positions from which others can be read."""
MAX_BLOCKS = 200
"""Stretches between bookmarks that are searched for entries at a time."""
PLACES = 4096
"""Of the index between two entries of events.jsonl, for those of process.jsonl."""
Placed = tuple[int, float | None, Event | Unknown]
"""Index, time and event of an entry of the story."""


class Cursor(NamedTuple):
    """How much of a run a client knows: which reading of its files, and how many events of each."""

    generation: str
    events: int
    process: int

    def __str__(self) -> str:
        return f"{self.generation}:{self.events}:{self.process}"

    @classmethod
    def parse(cls, text: str | None) -> Cursor | None:
        """None for what is not a cursor."""
        generation, *numbers = (text or "").split(":")
        if len(numbers) != 2 or not all(number.isascii() and number.isdecimal() for number in numbers):
            return None
        return cls(generation, *(int(number[:18]) for number in numbers))


class RunWatcher:
    """Folds what a run has written so far; `refresh` goes on from there. A run that was rewound is read anew."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._name = secrets.token_hex(3)  # of this watcher: another one may have read other bytes
        self._generation = 0
        self._status = ""
        self._start()

    def _start(self) -> None:
        self._generation += 1
        self.state = RunState()
        self._tails = {name: FileTail(self.path / name) for name in FILES}
        self._last_update = -1  # of any event
        self._traced: dict[int, tuple[int, int]] = {}  # bytes of events.jsonl between which an update's traces are
        self._bookmarks: list[int] = []  # bytes of events.jsonl where every 2000th entry is

    @property
    def more(self) -> bool:
        """Whether the last `refresh` ended before the end of the files."""
        return any(tail.more for tail in self._tails.values())

    @property
    def damaged_lines(self) -> int:
        """Lines that are no events, and were skipped."""
        return sum(tail.damaged for tail in self._tails.values())

    @property
    def cursor(self) -> Cursor:
        """How much is folded."""
        revisions = self.state.revisions
        return Cursor(f"{self._name}-{self._generation}", revisions[EVENTS_FILE], revisions[PROCESS_FILE])

    # Reading.

    def refresh(self, seconds: float | None = None) -> bool:
        """Fold what is new, for about `seconds` at most, and then the rest at the next call (`more`).

        Returns whether a view has changed: by events, damage or the status, which also follows from the run's lock.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        before = self.cursor, self.damaged_lines, self._status
        if any(tail.rewound() for tail in self._tails.values()) or not self._read_process(deadline):
            self._start()
            self._read_process(deadline)
        if not self._tails[PROCESS_FILE].more:
            self._read_events(deadline)
        self._status = run_status(RunDirectory(self.path), self.state.finished)
        return self.more or before != (self.cursor, self.damaged_lines, self._status)

    def _read_process(self, deadline: float) -> bool:
        """Fold what is new in process.jsonl; False if a new process went back behind events that are folded.

        It is read first: every event that was written before these is then found in events.jsonl.
        """
        for event, _, _ in self._tails[PROCESS_FILE].lines(deadline):
            if isinstance(event, RunStarted) and event.update <= self._last_update:
                return False
            apply(self.state, event)
        return True

    def _read_events(self, deadline: float) -> None:
        """Fold what is new in events.jsonl; of the traces only those of the newest update, which replace the others."""
        state, told, newest = self.state, self.state.told, list[tuple[int, int]]()
        traced = state.traces[0].update if state.traces else -1
        last, bookmark = self._last_update, BOOKMARK * len(self._bookmarks)
        for event, start, end in self._tails[EVENTS_FILE].lines(deadline):
            if isinstance(event, Deferred):
                if event.update > traced:
                    traced, newest = event.update, []
                if event.update == traced:
                    newest.append((start, end))
                self._note_trace(event.update, start, end)
                continue
            if told[EVENTS_FILE] >= bookmark:
                self._bookmarks.append(start)
                bookmark += BOOKMARK
            apply(state, event)
            if isinstance(event, Event) and event.update > last:
                last = self._last_update = event.update
        for start, end in newest:
            for event in self._tails[EVENTS_FILE].read_range(start, end):
                apply(state, event)

    def _note_trace(self, update: int, start: int, end: int) -> None:
        self._traced[update] = self._traced.get(update, (start, end))[0], end
        if len(self._traced) > MAX_TRACED:
            del self._traced[next(iter(self._traced))]

    # Views.

    def view(self, since: str | None = None) -> dict[str, Any]:
        """All that is known or, after the cursor of an earlier view, what has changed since.

        `now` is always complete. Rows of learning and entries of the story replace those with the same update or index.
        """
        cursor, state, known = self.cursor, self.state, Cursor.parse(since)
        reset = known is None or known.generation != cursor.generation
        if known is None or reset:
            known = Cursor(cursor.generation, 0, 0)
        rows = [row for row in state.rows.values() if row.metrics is not None and row.revision > known.events]
        return {
            "cursor": str(cursor),
            "reset": reset,
            "now": describe_run(RunDirectory(self.path), state, self.damaged_lines),
            "learning": {"rows": [learning_row(row) for row in rows]},
            "growth": current_growth(state) if state.growth_revision > known.events else None,
            "story": {"entries": self._new_entries(known), "total": sum(state.told.values())},
        }

    def hosts(self, update: int) -> dict[str, Any]:
        """The traced hosts of an earlier update, as `growth` of a view."""
        found = self._tails[EVENTS_FILE].read_range(*self._traced.get(update, (0, 0)))
        traces = [event for event in found if isinstance(event, EpisodeTrace) and event.update == update]
        return growth(traces) or {"update": update, "hosts": []}

    def events(
        self,
        after: int | None = None,
        before: int | None = None,
        *,
        kind: str | None = None,
        host: str | None = None,
        severity: str | None = None,
        limit: int = 200,
    ) -> dict[str, Any]:
        """Entries of the story that fit, in order: the first with an index above `after`, or the last below `before`.

        They are read from the file, from bookmark to bookmark; long searches may end before `limit` are found.
        """
        wanted = {"kind": kind, "host": host, "severity": severity}
        told, forward, found = self.state.told[EVENTS_FILE], after is not None, list[dict[str, Any]]()
        low = -1 if after is None else after
        high = (told + 1) * PLACES if before is None else min(before, (told + 1) * PLACES)
        blocks = range(max(low, 0) // PLACES // BOOKMARK, (high - 1) // PLACES // BOOKMARK + 1)
        blocks = [block for block in blocks if block < len(self._bookmarks)]
        searched = (blocks if forward else blocks[::-1])[:MAX_BLOCKS]
        for count, block in enumerate(searched, 1):
            entries = [story_entry(*self._place(number, event)) for number, event in self._told(block)]
            found += [entry for entry in entries if low < entry["index"] < high and _fits(entry, wanted)]
            if len(found) >= limit:
                searched = searched[:count]
                break
        if len(searched) < len(blocks):  # beyond are entries of events.jsonl that come first
            low, high = (low, _first(searched[-1] + 1)) if forward else (_first(searched[-1]) - 1, high)
        process = (story_entry(*placed) for placed in self._process_entries(0))
        found += [entry for entry in process if low < entry["index"] < high and _fits(entry, wanted)]
        found.sort(key=lambda entry: entry["index"])
        chosen = found[:limit] if forward else found[max(len(found) - limit, 0) :]
        return {"entries": chosen, "total": told + self.state.told[PROCESS_FILE]}

    # The story.

    def _told(self, block: int) -> Iterator[tuple[int, Event | Unknown]]:
        """The entries of events.jsonl between a bookmark and the next."""
        ends = [*self._bookmarks[block + 1 : block + 2], self._tails[EVENTS_FILE].offset]
        number = block * BOOKMARK
        for event in self._tails[EVENTS_FILE].read_range(self._bookmarks[block], ends[0], short=True):
            if is_told(event):
                yield number, event
                number += 1

    def _new_entries(self, known: Cursor) -> list[dict[str, Any]]:
        """The entries that are new, or whose time has become known, in order; at most `MAX_STORY`."""
        timed = self.state.times_revision
        entries = [
            story_entry(*self._place(number, event))
            for number, revision, event in self.state.story[EVENTS_FILE]
            if revision > known.events or timed.get(getattr(event, "update", -1), 0) > known.process
        ]
        entries += [story_entry(*placed) for placed in self._process_entries(known.process)]
        return sorted(entries, key=lambda entry: entry["index"])[-MAX_STORY:]

    def _place(self, number: int, event: Event | Unknown) -> Placed:
        """An entry of events.jsonl."""
        return number * PLACES + PLACES - 1, self.state.times.get(getattr(event, "update", -1)), event

    def _process_entries(self, known: int) -> Iterator[Placed]:
        """The entries of process.jsonl after a revision, the newest first.

        An entry belongs before the events of its update. If a later process resumed the run at an earlier update, what
        those before it did comes before that update.
        """
        first, resumed = self.state.first_told, MAX_UPDATE
        for number, revision, event in reversed(self.state.story[PROCESS_FILE]):
            if revision <= known:
                return
            update = min(getattr(event, "update", 0), resumed)
            before = first.get(update)
            if before is None:
                later = (entries for other, entries in first.items() if other > update)
                before = min(later, default=self.state.told[EVENTS_FILE])
            yield before * PLACES + number % (PLACES - 1), None, event
            if isinstance(event, RunStarted):
                resumed = update


def _first(block: int) -> int:
    """The smallest index after a bookmark."""
    return block * BOOKMARK * PLACES


def _fits(entry: dict[str, Any], wanted: dict[str, str | None]) -> bool:
    return all(value is None or entry[name] == value for name, value in wanted.items())

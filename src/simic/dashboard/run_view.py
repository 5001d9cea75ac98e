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

from simic.dashboard.run_facts import describe_run
from simic.dashboard.state import MAX_STORY, RunState, apply, is_told
from simic.dashboard.story import story_entry
from simic.dashboard.view_parts import growth, learning_row
from simic.storage.run_directory import EVENTS_FILE, PROCESS_FILE, RunDirectory
from simic.telemetry.events import FILES, EpisodeTrace, Event, RunStarted, Unknown
from simic.telemetry.tail import Deferred, FileTail

MAX_TRACED = 50_000
"""Updates whose traces can be found again."""
BOOKMARK = 2000
"""Entries of the story between two positions from which older ones can be read."""
PER_EVENT = 4096
"""Places for entries of process.jsonl between two of events.jsonl."""


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
        self._start()

    def _start(self) -> None:
        self._generation += 1
        self.state = RunState()
        self._tails = {name: FileTail(self.path / name) for name in FILES}
        self._last_update = -1  # of any event
        self._traced: dict[int, tuple[int, int]] = {}  # bytes of events.jsonl between which are an update's traces
        self._bookmarks: list[int] = []  # bytes of events.jsonl from which every 2000th entry is found

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

    @property
    def more(self) -> bool:
        """Whether the last `refresh` ran out of time."""
        return self._tails[EVENTS_FILE].behind

    def refresh(self, seconds: float = math.inf) -> bool:
        """Fold what is new; whether there was something. After some seconds it stops; the next call goes on."""
        before, deadline = self.cursor, time.monotonic() + seconds
        if any(tail.rewound() for tail in self._tails.values()) or not self._read_process():
            self._start()
            self._read_process()
        self._read_events(deadline)
        return self.cursor != before

    def _read_process(self) -> bool:
        """Fold what is new in process.jsonl; False if a new process went back behind events that are folded.

        It is read first: every event that was written before these is then found in events.jsonl.
        """
        for line in self._tails[PROCESS_FILE].lines():
            if isinstance(line.event, RunStarted) and line.event.update <= self._last_update:
                return False
            apply(self.state, line.event)
        return True

    def _read_events(self, deadline: float) -> None:
        """Fold what is new in events.jsonl; of the traces only those of the newest update, which replace the others."""
        tail, state, newest = self._tails[EVENTS_FILE], self.state, list[tuple[int, int]]()
        traced = state.traces[0].update if state.traces else -1
        for event, start, end in tail.lines(deadline):
            if isinstance(event, Deferred):
                if event.update > traced:
                    traced, newest = event.update, []
                if event.update == traced:
                    newest.append((start, end))
                self._note_trace(event.update, start, end)
                continue
            if state.told[EVENTS_FILE] >= BOOKMARK * len(self._bookmarks):
                self._bookmarks.append(start)
            apply(state, event)
            if isinstance(event, Event):
                self._last_update = max(self._last_update, event.update)
        for start, end in newest:
            for event in tail.read_range(start, end):
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
        cursor, state = self.cursor, self.state
        known = Cursor.parse(since)
        reset = known is None or known.generation != cursor.generation
        known = Cursor(cursor.generation, 0, 0) if reset else known
        assert known is not None
        rows = [row for row in state.rows.values() if row.metrics is not None and row.revision > known.events]
        grown = state.traces_revision > known.events
        return {
            "cursor": str(cursor),
            "reset": reset,
            "now": describe_run(RunDirectory(self.path), state, self.damaged_lines),
            "learning": {"rows": [learning_row(row) for row in rows]},
            "growth": growth(state.traces) if grown else None,
            "story": {"entries": self._story(known), "total": sum(state.told.values())},
        }

    def hosts(self, update: int) -> dict[str, Any] | None:
        """The traced hosts of an earlier update, as `growth` of a view; None if there are none."""
        if update not in self._traced:
            return None
        found = self._tails[EVENTS_FILE].read_range(*self._traced[update])
        traces = [event for event in found if isinstance(event, EpisodeTrace) and event.update == update]
        return growth(traces)

    def older_entries(
        self,
        before: int,
        *,
        kind: str | None = None,
        host: str | None = None,
        severity: str | None = None,
        limit: int = 200,
    ) -> dict[str, Any]:
        """The last `limit` entries of the story with an index below `before` that fit, in order.

        Those of events.jsonl are read from the file, block by block from the back.
        """
        wanted = {"kind": kind, "host": host, "severity": severity}
        found: list[dict[str, Any]] = []
        end = min(before // PER_EVENT, self.state.told[EVENTS_FILE])
        while end > 0 and len(found) < limit:
            block = (end - 1) // BOOKMARK
            entries = [story_entry(*self._placed(number, event)) for number, event in self._told(block, end)]
            found = [entry for entry in entries if _fits(entry, wanted)] + found
            end = block * BOOKMARK
        process = [story_entry(*placed) for placed in self._process_story(0)]
        found += [entry for entry in process if entry["index"] < before and _fits(entry, wanted)]
        found.sort(key=lambda entry: entry["index"])
        return {"entries": found[max(len(found) - limit, 0) :], "total": sum(self.state.told.values())}

    def _told(self, block: int, end: int) -> Iterator[tuple[int, Event | Unknown]]:
        """The entries of events.jsonl after a bookmark and before number `end`."""
        number, stop = block * BOOKMARK, self._tails[EVENTS_FILE].offset
        for event in self._tails[EVENTS_FILE].read_range(self._bookmarks[block], stop):
            if number >= end:
                return
            if is_told(event):
                yield number, event
                number += 1

    def _placed(self, number: int, event: Event | Unknown) -> tuple[int, float | None, Event | Unknown]:
        """Index, time and event of an entry of events.jsonl."""
        update = getattr(event, "update", -1)
        return number * PER_EVENT + PER_EVENT - 1, self.state.times.get(update), event

    def _story(self, known: Cursor) -> list[dict[str, Any]]:
        """The entries that are new, or whose time has become known, in order; at most `MAX_STORY`."""
        timed = self.state.times_revision
        entries = [
            story_entry(*self._placed(number, event))
            for number, revision, event in self.state.story[EVENTS_FILE]
            if revision > known.events or timed.get(getattr(event, "update", -1), 0) > known.process
        ]
        entries += [story_entry(*placed) for placed in self._process_story(known.process)]
        return sorted(entries, key=lambda entry: entry["index"])[-MAX_STORY:]

    def _process_story(self, known: int) -> Iterator[tuple[int, None, Event | Unknown]]:
        """Index and event of the entries of process.jsonl after a revision.

        An entry belongs before the events of its update. If a later process resumed the run at an earlier update, what
        those before it did comes before that update.
        """
        first, resumed = self.state.first_told, math.inf
        for number, revision, event in reversed(self.state.story[PROCESS_FILE]):
            if revision <= known:
                return
            update = getattr(event, "update", 0)
            order = min(update, resumed)
            before = first.get(int(order))
            if before is None:
                later = (entries for other, entries in first.items() if other > order)
                before = min(later, default=self.state.told[EVENTS_FILE])
            yield before * PER_EVENT + number % (PER_EVENT - 1), None, event
            if isinstance(event, RunStarted):
                resumed = order


def _fits(entry: dict[str, Any], wanted: dict[str, str | None]) -> bool:
    return all(value is None or entry[name] == value for name, value in wanted.items())

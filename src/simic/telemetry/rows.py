"""From the events of runs to the rows of the tables in `tables.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from simic.settings import flatten
from simic.storage.printable import printable
from simic.telemetry.events import (
    FILES,
    DecisionMade,
    EpisodeEvent,
    EpisodeTrace,
    Event,
    EventError,
    GrowthDecision,
    PhaseTimings,
    RunStarted,
    Unknown,
    Update,
    from_json,
)
from simic.telemetry.tables import NAMES, Column, schemas
from simic.telemetry.tail import FileTail

MAX_METRICS = 1_000
"""Metrics of `updates`; a run has some eighty."""
Row = tuple[Any, ...]


class TableRows:
    """The rows of all tables, in the order of their columns."""

    def __init__(self) -> None:
        self._schemas = schemas()
        self._rows: dict[str, list[Row]] = {name: [] for name in self._schemas}
        self._metrics: dict[str, None] = {}
        self._updates: list[tuple[str, int, Mapping[str, float]]] = []

    def read(self, run: str, path: Path) -> int:
        """Add the events of one run; returns the number of lines that are not events, which are left out."""
        damaged, last, traces = 0, None, list[EpisodeTrace]()
        decided: set[tuple[int, int, int]] = set()
        for name in FILES:
            tail, numbers = FileTail(path / name), count()
            for _, line in tail.raw_lines():
                try:
                    text = line.decode()
                    event = from_json(text)
                except (UnicodeDecodeError, EventError):
                    damaged += 1
                    continue
                self._add(run, event, name, next(numbers), text)
                match event:
                    case RunStarted():
                        last = event
                    case EpisodeTrace():
                        traces.append(event)
                    case DecisionMade():
                        decided.add(_episode(event))
            damaged += tail.damaged
        for trace in traces:  # a host of which every decision is recorded needs no others
            if _episode(trace) not in decided:
                self._rows["decisions"] += _decisions(run, trace)
        for name, value in flatten(last.config).items() if last is not None else ():
            self._rows["settings"].append((run, name, value if isinstance(value, str) else _json_text(value)))
        return damaged

    def _add(self, run: str, event: Event | Unknown, file: str, number: int, text: str) -> None:
        fields = event.fields if isinstance(event, Unknown) else vars(event)
        update, moment = fields.get("update"), fields.get("time")
        self._rows["events"].append((run, file, number, event.kind, update, moment, text))
        match event:
            case Unknown():
                pass
            case Update():
                self._metrics.update(dict.fromkeys(event.metrics))
                if len(self._metrics) > MAX_METRICS:
                    raise ValueError(f"{run} has more than {MAX_METRICS:,} metrics: it is not a run of simic")
                self._updates.append((run, event.update, event.metrics))
            case PhaseTimings():
                for phase, seconds in event.seconds.items():
                    self._rows["timings"].append((run, update, moment, phase, seconds))
                whole = sum(event.seconds.values())
                row = (run, update, moment, whole, event.decisions_per_second, event.memory_mb, event.workers)
                self._rows["performance"].append(row)
            case EpisodeTrace():
                self._rows["slots"] += _slot_states(run, event)
            case _:
                if isinstance(event, GrowthDecision):
                    self._rows["slots"] += _own_slots(run, event)
                name = NAMES.get(event.kind, event.kind)
                names = [column.name for column in self._schemas[name].columns]
                self._rows[name].append(tuple(map({**fields, **_host(event), "run": run}.__getitem__, names)))

    def tables(self) -> Iterator[tuple[str, list[tuple[Column, list[Any]]]]]:
        """The columns of every table, with their values."""
        for run, update, own in self._updates:
            self._rows["updates"].append((run, update, *map(own.get, self._metrics)))
        self._updates.clear()
        for name, (_, columns) in self._schemas.items():
            own = [*columns, *_metric_columns(self._metrics)] if name == "updates" else columns
            values: Sequence[Sequence[Any]] = list(zip(*self._rows[name], strict=True)) or [()] * len(own)
            yield name, [(column, _cells(column.type, cells)) for column, cells in zip(own, values, strict=True)]


def _episode(event: EpisodeEvent) -> tuple[int, int, int]:
    return event.update, event.group, event.env


def _host(event: Event) -> dict[str, str]:
    """The column `host`, in tables that have it and where it is not a field."""
    return {"host": f"g{event.group}-e{event.env}"} if isinstance(event, EpisodeEvent) else {}


def _slot_states(run: str, trace: EpisodeTrace) -> Iterator[Row]:
    """A row per slot and state of a traced host."""
    start = (run, *_host(trace).values(), *_episode(trace))
    for slot, series in trace.slots.items():
        columns = [series.get(name, []) for name in ("stage", "blueprint", "alpha", "contribution")]
        for state in range(max(map(len, columns))):
            yield *start, slot, state, *(_at(values, state) for values in columns)


def _own_slots(run: str, event: GrowthDecision) -> Iterator[Row]:
    """A row per slot of a user's own model that is not dormant after a decision."""
    for slot, now in event.slots.items():
        if isinstance(now, Mapping):
            values = (now.get(name) for name in ("stage", "blueprint", "alpha", "contribution"))
            yield run, "g0-e0", event.update, 0, 0, slot, event.update + 1, *values


def _decisions(run: str, trace: EpisodeTrace) -> Iterator[Row]:
    """A row per decision of a traced host."""
    start, steps = (run, *_host(trace).values(), *_episode(trace)), trace.steps
    for number in range(len(steps.get("action", []))):
        seen = {name: _at(steps.get(name, []), number - 1) for name in ("val_accuracy", "val_loss")} if number else {}
        legal = str(_at(steps.get("legal_ops", []), number) or "").split()
        action, value, reward = (_at(steps.get(name, []), number) for name in ("action", "value", "reward"))
        chosen, terms = (
            {name: _at(series, number) for name, series in table.items() if _at(series, number) is not None}
            for table in (trace.probabilities, trace.reward_terms)
        )
        yield *start, number, seen, legal, action, chosen, value, reward, terms


def _at(series: Sequence[Any], index: int) -> Any:
    return series[index] if index < len(series) else None


def _metric_columns(names: Mapping[str, object]) -> Iterator[Column]:
    """One column per metric; SQL does not tell upper from lower case, so a name that is taken gets a number."""
    taken = {"run", "update"}
    for name in names:
        column, number = printable(name, 100) or "unnamed", 2
        while column.lower() in taken:
            column, number = f"{printable(name, 100)}_{number}", number + 1
        taken.add(column.lower())
        yield Column(column, "DOUBLE")


# Values as columns hold them; None for what no column can hold, in files from elsewhere.


def _cells(kind: str, values: Sequence[Any]) -> list[Any]:
    convert = _CONVERT.get(kind)
    return list(values) if convert is None else [None if value is None else convert(value) for value in values]


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _moment(seconds: Any) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _text(value: Any) -> str:
    """Without lone surrogates, which JSON can hold but no other text."""
    text = str(value)
    return text if text.isascii() else text.encode(errors="replace").decode()


def _json_text(value: Any) -> str:
    return _text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "BIGINT": _integer,
    "DOUBLE": _number,
    "TIMESTAMP": _moment,
    "VARCHAR": _text,
    "VARCHAR[]": lambda items: [_text(item) for item in items],
    "JSON": _json_text,
}

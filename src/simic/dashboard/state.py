"""RunState: what is known of a run, folded from its events. Web, terminal and report read this state and nothing else.

The events of the two files change different fields, so it does not matter how they are interleaved. The state does not
grow with the run: of long runs every second update is left out, then every fourth and so on, and of what happened the
last entries are kept.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from simic.storage.run_directory import EVENTS_FILE, PROCESS_FILE
from simic.telemetry.events import (
    Anomaly,
    DecisionMade,
    EpisodeOutcome,
    EpisodeTrace,
    Event,
    GamingSuspicion,
    GovernorRollback,
    GrowthDecision,
    LifecycleChange,
    PhaseTimings,
    Plateau,
    ProcessEvent,
    RunFinished,
    RunStarted,
    Unknown,
    Update,
    WorkerFault,
)

MAX_ROWS = 2048
"""Updates whose metrics are kept."""
MAX_UPDATE = 2**40
"""No run has so many."""
MAX_STORY = 2000
"""Entries of the story that are kept of each file."""
MAX_INCIDENTS = 200
MAX_NAMES = 200
"""Blueprints, reasons or metrics that are told apart."""
MAX_EPISODES = 100_000
"""Hosts of an update whose spread is measured."""
MAX_TRACES = 256
"""Traced hosts of an update."""
MAX_DECISIONS = 500
"""Of a user's own training, with the slots after each."""
MAX_TIMES = 20_000
"""Updates whose time is kept."""
RECENT = 20
"""Updates that the remaining time is estimated from."""
FATES = ("germinated", "fossilized", "pruned")
SPREADS = ("score", "gain", "growth")
QUANTILES = (10, 50, 90)
_NOT_TOLD = {DecisionMade, EpisodeTrace, GrowthDecision, PhaseTimings}


class Incident(NamedTuple):
    """Something that went wrong in a run."""

    update: int
    name: str
    where: str
    details: str


class StoryEntry(NamedTuple):
    """Something that happened, as an event; `number` counts the entries of its file."""

    number: int
    revision: int
    event: Event | Unknown


@dataclass
class Row:
    """What is known of one update, or of several of which the last one's metrics are kept."""

    update: int
    first: int
    """The first update whose seeds and anomalies are counted here."""
    metrics: Mapping[str, float] | None = None
    """None before the update is complete."""
    spread: dict[str, list[float]] = field(default_factory=dict)
    """Quantiles over hosts."""
    seeds: dict[str, list[int]] = field(default_factory=dict)
    """Number of seeds by blueprint, in the order of FATES."""
    anomalies: list[Anomaly] = field(default_factory=list)
    revision: int = 0
    """Of the last change."""

    def absorb(self, earlier: Row) -> None:
        """Take over the seeds and anomalies of a row that is left out."""
        self.first = min(self.first, earlier.first)
        for blueprint, counts in earlier.seeds.items():
            own = self.seeds.setdefault(blueprint, [0] * len(FATES))
            self.seeds[blueprint] = [a + b for a, b in zip(own, counts, strict=True)]
        self.anomalies = (earlier.anomalies + self.anomalies)[-MAX_INCIDENTS:]


class Episodes(NamedTuple):
    """Results of the hosts of one update, whose metrics are not known yet."""

    update: int
    score: array
    gain: array
    growth: array


@dataclass
class RunState:
    """The state of a run after some of its events."""

    revisions: dict[str, int] = field(default_factory=lambda: {EVENTS_FILE: 0, PROCESS_FILE: 0})
    """Number of events so far, by file."""
    story: dict[str, deque[StoryEntry]] = field(
        default_factory=lambda: {name: deque(maxlen=MAX_STORY) for name in (EVENTS_FILE, PROCESS_FILE)}
    )
    told: dict[str, int] = field(default_factory=lambda: {EVENTS_FILE: 0, PROCESS_FILE: 0})
    """Number of story entries so far, by file."""
    first_told: dict[int, int] = field(default_factory=dict)
    """Number of entries of events.jsonl before the first of each update."""

    # From events.jsonl.
    rows: dict[int, Row] = field(default_factory=dict)
    """By update, ascending."""
    stride: int = 1
    """Of the updates before the last, multiples of this are kept."""
    last_update: int = -1
    """The newest update that is complete."""
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    traces: tuple[EpisodeTrace, ...] = ()
    """Of the newest update that has any."""
    decisions: deque[GrowthDecision] = field(default_factory=lambda: deque(maxlen=MAX_DECISIONS))
    """The last ones of a user's own training."""
    growth_revision: int = 0
    """Of the last change of traces or decisions."""
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=MAX_INCIDENTS))
    incident_counts: Counter[str] = field(default_factory=Counter)
    gaming: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of suspicions by (reason, blueprint)."""
    episodes: Episodes | None = None

    # From process.jsonl.
    timings: PhaseTimings | None = None
    """Of the last update."""
    seconds: Counter[str] = field(default_factory=Counter)
    """Of each phase, over all updates."""
    timed: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds of the last updates."""
    times: dict[int, float] = field(default_factory=dict)
    """When an update ended."""
    times_revision: dict[int, int] = field(default_factory=dict)
    starts: int = 0
    """Processes that worked on the run."""
    first_start: float = math.nan
    started: RunStarted | None = None
    """By the last of them."""
    finished: RunFinished | None = None
    faults: deque[Incident] = field(default_factory=lambda: deque(maxlen=MAX_INCIDENTS))
    lost_workers: int = 0
    last_time: float = math.nan


def fold(events: Iterable[object]) -> RunState:
    """The state after all events."""
    state = RunState()
    for event in events:
        apply(state, event)
    return state


def apply(state: RunState, event: object) -> None:
    """Change the state by one event; other objects, and updates out of any range, are ignored."""
    if isinstance(event, Event):
        if 0 <= event.update < MAX_UPDATE:
            _HANDLERS.get(type(event), _nothing)(state, event)
            _tell(state, event, event.file)
    elif isinstance(event, Unknown):
        _tell(state, event, EVENTS_FILE)


def is_told(event: Event | Unknown) -> bool:
    """Whether the event is an entry of the story; long and frequent ones are not."""
    return type(event) not in _NOT_TOLD


def _tell(state: RunState, event: Event | Unknown, file: str) -> None:
    revision = state.revisions[file] = state.revisions[file] + 1
    if file is PROCESS_FILE and isinstance(event, ProcessEvent):
        state.last_time = event.time if math.isnan(state.last_time) else max(state.last_time, event.time)
    if type(event) in _NOT_TOLD:
        return
    number = state.told[file]
    state.told[file] = number + 1
    state.story[file].append(StoryEntry(number, revision, event))
    if file is EVENTS_FILE and isinstance(event, Event) and event.update not in state.first_told:
        _put(state.first_told, event.update, number)


# Learning.


def _row(state: RunState, update: int) -> Row:
    """The row of an update, which is changed by the event at hand."""
    row = state.rows.get(update)
    if row is None:
        row = Row(update, update)
        previous = next(reversed(state.rows.values()), None)
        state.rows[update] = row
        if previous is not None and previous.update > update:  # not in a file of ours
            state.rows = dict(sorted(state.rows.items()))
        if len(state.rows) > MAX_ROWS:
            _thin_out(state)
    row.revision = state.revisions[EVENTS_FILE] + 1
    return row


def _thin_out(state: RunState) -> None:
    state.stride *= 2
    *earlier, last = state.rows.values()
    kept, dropped = dict[int, Row](), list[Row]()
    for row in (*earlier, last):
        if row is not last and row.update % state.stride:
            dropped.append(row)
            continue
        for other in reversed(dropped):
            row.absorb(other)
            row.revision = state.revisions[EVENTS_FILE] + 1
        dropped.clear()
        kept[row.update] = row
    state.rows = kept


def _count_seed(state: RunState, event: LifecycleChange) -> None:
    fate = "germinated" if event.reason == "germinate" else event.new_stage
    if fate not in FATES:
        return
    seeds = _row(state, event.update).seeds
    blueprint = event.blueprint if event.blueprint in seeds or len(seeds) < MAX_NAMES else "other"
    counts = seeds.get(blueprint)
    if counts is None:
        counts = seeds[blueprint] = [0] * len(FATES)
    counts[FATES.index(fate)] += 1


def _add_episode(state: RunState, event: EpisodeOutcome) -> None:
    if state.episodes is None or state.episodes.update != event.update:
        state.episodes = Episodes(event.update, array("d"), array("d"), array("d"))
    if len(state.episodes.score) >= MAX_EPISODES:
        return
    state.episodes.score.append(event.score)
    state.episodes.gain.append(event.gain)
    larger, host = event.parameters, event.host_parameters
    state.episodes.growth.append(math.log2(larger / host) if larger > 0 and host > 0 else math.nan)


def _complete_row(state: RunState, event: Update) -> None:
    row = _row(state, event.update)
    names = list(event.metrics)[:MAX_NAMES]
    row.metrics = {sys.intern(name): event.metrics[name] for name in names}
    if state.episodes is not None and state.episodes.update == event.update:
        values = {name: np.asarray(getattr(state.episodes, name)) for name in SPREADS}
        known = {name: own[np.isfinite(own)] for name, own in values.items()}
        row.spread = {name: np.percentile(own, QUANTILES).tolist() for name, own in known.items() if own.size}
        state.episodes = None
    if event.update >= state.last_update:
        _leave_out(state, state.last_update, row)
        state.last_update, state.last_metrics = event.update, row.metrics


def _leave_out(state: RunState, update: int, successor: Row) -> None:
    """Drop the row that was the newest so far, if others like it are dropped too."""
    if update % state.stride and update != successor.update and update in state.rows:
        successor.absorb(state.rows.pop(update))


def _add_anomaly(state: RunState, event: Anomaly) -> None:
    row = _row(state, event.update)
    row.anomalies = [*row.anomalies, event][-MAX_INCIDENTS:]
    details = f"{event.value:.4g}, limit {event.threshold:.4g}"
    _add_incident(state, Incident(event.update, event.name, event.where, details))


def _add_plateau(state: RunState, event: Plateau) -> None:
    details = f"best {event.best:.4g} at update {event.best_update}"
    _add_incident(state, Incident(event.update, "plateau", event.metric, details))


def _add_rollback(state: RunState, event: GovernorRollback) -> None:
    where = f"group {event.group}, host {event.env}, decision {event.decision}"
    _add_incident(state, Incident(event.update, f"rollback: {event.verdict}", where, f"loss {event.val_loss:.4g}"))


def _add_suspicion(state: RunState, event: GamingSuspicion) -> None:
    _count(state.gaming, (event.reason, event.blueprint), ("other", "other"))


def _add_incident(state: RunState, incident: Incident) -> None:
    state.incidents.append(incident)
    _count(state.incident_counts, incident.name, "other")


def _add_trace(state: RunState, event: EpisodeTrace) -> None:
    current = state.traces[0].update if state.traces else -1
    if event.update < current or (event.update == current and len(state.traces) >= MAX_TRACES):
        return
    state.traces = (*state.traces, event) if event.update == current else (event,)
    state.growth_revision = state.revisions[EVENTS_FILE] + 1


def _add_decision(state: RunState, event: GrowthDecision) -> None:
    state.decisions.append(event)
    state.growth_revision = state.revisions[EVENTS_FILE] + 1


# The process.


def _add_timings(state: RunState, event: PhaseTimings) -> None:
    state.timings = event
    state.timed += 1
    for phase, seconds in event.seconds.items():
        _count(state.seconds, phase, "other", seconds)
    state.recent.append(sum(event.seconds.values()))
    _put(state.times, event.update, event.time)
    _put(state.times_revision, event.update, state.revisions[PROCESS_FILE] + 1)


def _put(table: dict[int, Any], update: int, value: Any) -> None:
    """Set an entry and forget the oldest if there are too many."""
    table.pop(update, None)  # a resumed run does updates again
    table[update] = value
    if len(table) > MAX_TIMES:
        del table[next(iter(table))]


def _add_start(state: RunState, event: RunStarted) -> None:
    state.starts += 1
    state.first_start = event.time if state.starts == 1 else state.first_start
    state.started, state.finished = event, None


def _add_end(state: RunState, event: RunFinished) -> None:
    state.finished = event


def _add_fault(state: RunState, event: WorkerFault) -> None:
    state.lost_workers += 1
    state.faults.append(Incident(event.update, "worker fault", f"group {event.group}", event.error))


def _nothing(state: RunState, event: Event) -> None:
    """Of events that are only told."""


def _count(counter: Counter[Any], key: object, other: object, amount: Any = 1) -> None:
    """Count under a name, or under `other` if there are too many."""
    counter[key if key in counter or len(counter) < MAX_NAMES else other] += amount


_HANDLERS: dict[type[Event], Callable[[RunState, Any], None]] = {
    LifecycleChange: _count_seed,
    EpisodeOutcome: _add_episode,
    EpisodeTrace: _add_trace,
    GrowthDecision: _add_decision,
    Update: _complete_row,
    Anomaly: _add_anomaly,
    Plateau: _add_plateau,
    GovernorRollback: _add_rollback,
    GamingSuspicion: _add_suspicion,
    PhaseTimings: _add_timings,
    RunStarted: _add_start,
    RunFinished: _add_end,
    WorkerFault: _add_fault,
}
"""How an event changes the state."""

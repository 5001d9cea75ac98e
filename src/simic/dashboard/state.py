"""RunState: what is known of a training run, folded from its events. Views read this state and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from simic.telemetry.events import (
    Anomaly,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
    PhaseTimings,
    RunFinished,
    RunStarted,
    Update,
    WorkerFault,
)
from simic.telemetry.reader import read_events

MAX_ENTRIES = 100_000
"""Of one table of the state; the longest runs have some thousands of updates."""


class Incident(NamedTuple):
    """Something that went wrong in a run."""

    update: int
    name: str
    where: str
    details: str


@dataclass
class RunState:
    """The state of a run after some of its events."""

    updates: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics by update."""
    fates: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    """Number of seeds by (update, blueprint, fate); a fate is `germinated` or the stage that the seed entered."""
    incidents: list[Incident] = field(default_factory=list)
    gaming: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of suspicions by (reason, blueprint)."""
    timings: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of each phase by update."""
    starts: list[RunStarted] = field(default_factory=list)
    """One per process that worked on the run."""
    finished: RunFinished | None = None

    @property
    def entries(self) -> int:
        """The size of the largest table."""
        return max(map(len, (self.updates, self.fates, self.incidents, self.gaming, self.timings)))


def fold(events: Iterable[object], source: object = "the run") -> RunState:
    """The state after all events, in order."""
    state = RunState()
    for event in events:
        apply(state, event)
        if state.entries > MAX_ENTRIES:
            raise ValueError(f"{source} has more than {MAX_ENTRIES:,} updates or incidents: it is not a run of simic")
    return state


def read_state(run: Path) -> RunState:
    """The state of the run in a directory; it may still be under way."""
    return fold(read_events(run), run)


def apply(state: RunState, event: object) -> None:
    """Change the state by one event; events of other kinds are ignored."""
    match event:
        case Update():
            state.updates[event.update] = event.metrics
        case LifecycleChange():
            fate = "germinated" if event.reason == "germinate" else event.new_stage
            state.fates[event.update, event.blueprint, fate] += 1
        case Anomaly():
            details = f"{event.value:.4g}, limit {event.threshold:.4g}"
            state.incidents.append(Incident(event.update, event.name, event.where, details))
        case GovernorRollback():
            where = f"group {event.group}, host {event.env}, decision {event.decision}"
            details = f"loss {event.val_loss:.4g}"
            state.incidents.append(Incident(event.update, f"rollback: {event.verdict}", where, details))
        case WorkerFault():
            state.incidents.append(Incident(event.update, "worker fault", f"group {event.group}", event.error))
        case GamingSuspicion():
            state.gaming[event.reason, event.blueprint] += 1
        case PhaseTimings():
            state.timings[event.update] = event.seconds
        case RunStarted():
            state.starts.append(event)
            state.finished = None
        case RunFinished():
            state.finished = event

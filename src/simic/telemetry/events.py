"""Events: the log of a run, one frozen dataclass per kind, one line of JSON each.

`events.jsonl` holds what follows from the config and the rng seed alone, so that a run that was killed and resumed
writes the same bytes. `process.jsonl` holds what depends on the machine and the time.

A new kind of event is a subclass here and the line that records it. A field that is added to an existing kind needs a
default, so that older files stay readable.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from simic.storage.json_files import check_values
from simic.storage.run_directory import EVENTS_FILE, PROCESS_FILE
from simic.telemetry.codecs import CODECS, Codec
from simic.telemetry.series import Series

FILES = (PROCESS_FILE, EVENTS_FILE)
MAX_LINE_BYTES = 2**21
"""Maximum size of one event; the longest, RunStarted with its command line and settings, takes a few thousand."""

E = TypeVar("E", bound="Event")
Level = Literal["off", "minimal", "normal", "debug"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Levels of detail, ascending; an event is recorded at its own level and above."""
KINDS: dict[str, type[Event]] = {}
"""The class of each kind of event."""


class EventError(ValueError):
    """A line that is not an event."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class; `class Mine(Event, kind="mine", level="normal")` registers a kind by its name in files."""

    kind: ClassVar[str]
    level: ClassVar[Level]
    file: ClassVar[str] = EVENTS_FILE

    update: int
    """Number of the update, from 0."""

    def __init_subclass__(cls, *, kind: str | None = None, level: Level = "normal") -> None:
        if kind is not None:
            cls.kind, cls.level, KINDS[kind] = kind, level, cls


@dataclass(frozen=True, kw_only=True)
class EpisodeEvent(Event):
    """Base class of events of one environment."""

    group: int
    env: int


@dataclass(frozen=True, kw_only=True)
class ProcessEvent(Event):
    """Base class of events that depend on the machine and the time."""

    file: ClassVar[str] = PROCESS_FILE

    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class DecisionMade(EpisodeEvent, kind="decision", level="debug"):
    """One decision of the controller in one environment, and its result."""

    decision: int
    state: dict[str, float]
    """Losses, accuracy and gradient norm of the host before the decision."""
    legal_ops: tuple[str, ...]
    action: str
    """As `Action` prints itself."""
    probabilities: dict[str, float]
    """Probability of the chosen value of each used head."""
    value: float
    reward: float
    reward_terms: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LifecycleChange(EpisodeEvent, kind="lifecycle"):
    """A slot changed its stage."""

    decision: int
    slot: str
    blueprint: str
    old_stage: str
    new_stage: str
    reason: str
    readiness: dict[str, float] = field(default_factory=dict)
    """Age, alpha, contribution and decisions since it was measured, gradient norm."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOutcome(EpisodeEvent, kind="episode"):
    """The result of one episode."""

    task: str
    decisions: int
    score: float
    metric: float
    episode_return: float
    host_parameters: int
    parameters: int
    """Parameters of the exported network."""
    operations: dict[str, int] = field(default_factory=dict)
    """Number of decisions by operation."""
    seeds: dict[str, int] = field(default_factory=dict)
    """Number of seeds by outcome: fossilized, pruned, dropped."""
    rolled_back: bool = False
    gain: float = math.nan
    """Score minus that of its twin; NaN without twins."""


@dataclass(frozen=True, kw_only=True)
class EpisodeTrace(EpisodeEvent, kind="trace"):
    """The whole episode of one host: its slots in every state, and every decision. At level normal, of some hosts."""

    task: str
    score: float
    metric: float
    host_parameters: int
    parameters: int
    """Parameters of the exported network."""
    rolled_back: bool = False
    segments: tuple[tuple[str, int], ...] = ()
    """The host's segments and their parameters, in order."""
    seed_parameters: tuple[tuple[str, int], ...] = ()
    """The slots and the parameters of the last seed in each, in order."""
    slots: dict[str, dict[str, Series]] = field(default_factory=dict)
    """By slot: stage, alpha, contribution and blueprint, one per state; decision t leads from state t to t + 1."""
    steps: dict[str, Series] = field(default_factory=dict)
    """One per decision: action, legal_ops (joined by spaces), value, reward; val_loss and val_accuracy after it."""
    probabilities: dict[str, Series] = field(default_factory=dict)
    """Probability of the chosen value by head; None where the head was not used."""
    reward_terms: dict[str, Series] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GrowthDecision(Event, kind="growth"):
    """A decision in a user's own training; `update` is its number."""

    actions: tuple[str, ...]
    """As `Action` prints itself."""
    slots: dict[str, Any]
    """The slots that are not dormant after it: stage, alpha, contribution, blueprint and parameters of each."""
    parameters: int
    """Of the host and its seeds."""
    val_loss: float
    val_accuracy: float
    verdict: str = "ok"
    """Of the governor."""


@dataclass(frozen=True, kw_only=True)
class Update(Event, kind="update", level="minimal"):
    """The metrics of one PPO update."""

    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Anomaly(Event, kind="anomaly", level="minimal"):
    """A metric beyond its threshold."""

    name: str
    value: float
    threshold: float
    where: str = ""
    """The head, layer or group; empty for the whole."""


@dataclass(frozen=True, kw_only=True)
class Plateau(Event, kind="plateau", level="minimal"):
    """A metric has not improved for a while; recorded once, until it improves again."""

    metric: str
    best: float
    """Of its running mean."""
    best_update: int


@dataclass(frozen=True, kw_only=True)
class GovernorRollback(EpisodeEvent, kind="rollback", level="minimal"):
    """The governor restored the last good weights of a broken host."""

    decision: int
    verdict: str
    val_loss: float
    forfeited: float = 0.0
    """Rewards that were taken back."""


@dataclass(frozen=True, kw_only=True)
class GamingSuspicion(EpisodeEvent, kind="gaming"):
    """A seed whose measured contribution exceeds its real benefit."""

    decision: int
    slot: str
    blueprint: str
    reason: str
    contribution: float
    gain: float = math.nan
    """Metric of the host minus that of its twin, which never grew."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(ProcessEvent, kind="run_started", level="minimal"):
    """A process started or resumed the run, at `update`; holds all that is needed to repeat it."""

    command: tuple[str, ...]
    config: dict[str, Any]
    versions: dict[str, str]
    rng_seeds: dict[str, int]
    threads: int
    pid: int
    host: str
    git_commit: str | None = None
    resumed_from: str | None = None
    data_hashes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunFinished(ProcessEvent, kind="run_finished", level="minimal"):
    """A process ended in good order after `update` updates."""

    status: str
    """done, stopped, diverged or failed."""
    exit_code: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(ProcessEvent, kind="checkpoint", level="minimal"):
    """A checkpoint is safely on disk."""

    path: str
    metric: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WorkerFault(ProcessEvent, kind="worker_fault", level="minimal"):
    """A worker process died or failed; its group of environments is run again."""

    worker: int
    group: int
    error: str


@dataclass(frozen=True, kw_only=True)
class PhaseTimings(ProcessEvent, kind="timings"):
    """Duration of the phases of one update."""

    seconds: dict[str, float]
    """By phase: rollout, statistics, update, record, checkpoint."""
    decisions_per_second: float = math.nan
    memory_mb: dict[str, float] = field(default_factory=dict)
    """Peak resident memory so far: of the learner, and of all its worker processes on this machine."""


@dataclass(frozen=True)
class Unknown:
    """An event of a kind that this simic does not know."""

    kind: str
    fields: dict[str, Any]


def to_json(event: Event | Unknown) -> str:
    """One line without its end: compact, keys sorted; numbers that are not finite become null."""
    if isinstance(event, Unknown):
        return _dump({**event.fields, "kind": event.kind})
    record: dict[str, Any] = {name: codec.encode(getattr(event, name)) for name, codec in _codecs(type(event))}
    record["kind"] = event.kind
    return _dump(record)


def from_json(line: str | bytes) -> Event | Unknown:
    """The event of a line. Unknown fields are dropped; an unknown kind becomes `Unknown`.

    A number that is null is NaN; older files have the texts "nan", "inf" and "-inf".
    """
    try:
        record = json.loads(line)
        kind = record.pop("kind")
        if not isinstance(kind, str):
            raise TypeError(f"its kind is {kind!r}")
        if kind not in KINDS:
            return Unknown(kind, check_values(record, "it"))
        cls = KINDS[kind]
        return make_event(cls, {name: codec.decode(record[name]) for name, codec in _codecs(cls) if name in record})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise EventError(f"not an event ({type(error).__name__}: {error}): {line[:80]!r}") from None


def make_event(cls: type[E], values: dict[str, Any]) -> E:
    """The event with these fields. If none is left to its default it is several times faster than calling the class."""
    if len(values) < len(_codecs(cls)):
        return cls(**values)
    event = object.__new__(cls)
    vars(event).update(values)  # __init__ of a frozen dataclass sets the fields one by one
    return event


@cache
def _codecs(cls: type[Event]) -> list[tuple[str, Codec]]:
    hints = get_type_hints(cls)
    return [(item.name, CODECS[hints[item.name]]) for item in fields(cls)]


_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

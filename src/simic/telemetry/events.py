"""Events: the log of a run, one frozen dataclass per kind, one line of JSON each.

`events.jsonl` holds what follows from the config and the rng seed alone, so that a run that was killed and resumed
writes the same bytes. `process.jsonl` holds what depends on the machine and the time.

A new kind of event is a subclass here and the line that records it. A field that is added to an existing kind needs a
default, so that older files stay readable.
"""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

from simic.storage.json_files import check_values
from simic.storage.run_directory import EVENTS_FILE, PROCESS_FILE

FILES = (PROCESS_FILE, EVENTS_FILE)
MAX_LINE_BYTES = 2**21
"""Maximum size of one event; the longest, RunStarted with its command line and settings, takes a few thousand."""

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
    nodes: dict[str, Any] = field(default_factory=dict)
    """Versions and kind of every machine of a cluster by its address, and of the driver; empty on one machine."""


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
    """A worker died, and its group of environments is run again; or a node that joined cannot be used."""

    worker: int
    """Its process id; -1 if a node was refused."""
    group: int
    error: str
    node: str = ""
    """The machine; empty for the one of the run."""


@dataclass(frozen=True, kw_only=True)
class PhaseTimings(ProcessEvent, kind="timings"):
    """Duration of the phases of one update."""

    seconds: dict[str, float]
    """By phase: rollout, statistics, update, record, checkpoint."""


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
        return cls(**{name: codec.decode(record[name]) for name, codec in _codecs(cls) if name in record})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise EventError(f"not an event ({type(error).__name__}: {error}): {line[:80]!r}") from None


class _Codec(NamedTuple):
    """Conversion of a field's value to JSON and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    """Free-form data as JSON: numpy numbers become Python's, types that JSON lacks become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return _number(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _or_none(codec: _Codec) -> _Codec:
    return _Codec(*(lambda value, convert=convert: None if value is None else convert(value) for convert in codec))


def _values(codec: _Codec) -> _Codec:
    return _Codec(*(lambda d, convert=convert: {str(k): convert(v) for k, v in d.items()} for convert in codec))


_INT = _Codec(operator.index, operator.index)
_FLOAT = _Codec(_number, _float)
_STR = _Codec(str, str)
_CODECS: dict[Any, _Codec] = {
    bool: _Codec(bool, bool),
    int: _INT,
    float: _FLOAT,
    str: _STR,
    str | None: _or_none(_STR),
    float | None: _or_none(_FLOAT),
    tuple[str, ...]: _Codec(lambda items: [str(item) for item in items], lambda items: tuple(map(str, items))),
    dict[str, int]: _values(_INT),
    dict[str, float]: _values(_FLOAT),
    dict[str, str]: _values(_STR),
    dict[str, Any]: _Codec(_plain, lambda table: check_values(dict(table), "its settings")),
}


@cache
def _codecs(cls: type[Event]) -> list[tuple[str, _Codec]]:
    hints = get_type_hints(cls)
    return [(item.name, _CODECS[hints[item.name]]) for item in fields(cls)]


_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

"""Events: everything a run says about itself, one frozen dataclass per kind, one line of JSON each.

`events.jsonl` holds what follows from the config and the rng seed alone, so that a run that was killed and resumed
writes the same bytes. `process.jsonl` holds what depends on the machine and the moment.
A field that is added later needs a default: older files must stay readable.
"""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

from simic.storage.json_files import check_values
from simic.storage.run_directory import EVENTS_FILE, PROCESS_FILE

FILES = (PROCESS_FILE, EVENTS_FILE)
MAX_LINE_BYTES = 2**21
"""Of one event; the longest, a run's start with its command line and settings, has some thousands."""

Level = Literal["off", "minimal", "normal", "debug"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""How much is recorded, from nothing to everything; a kind names the first level that records it."""


class EventError(ValueError):
    """A line that is no event."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of the controller in one environment, and what came of it."""

    kind: ClassVar[str] = "decision"
    level: ClassVar[Level] = "debug"
    file: ClassVar[str] = EVENTS_FILE

    update: int
    group: int
    env: int
    decision: int
    state: dict[str, float]
    """What the host looked like when the controller decided."""
    legal_ops: tuple[str, ...]
    action: str
    """In words, as `Action` prints itself."""
    probabilities: dict[str, float]
    """Of what was chosen, by head; heads that do not matter are left out."""
    value: float
    reward: float
    reward_terms: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LifecycleChange:
    """A slot that went from one stage to another."""

    kind: ClassVar[str] = "lifecycle"
    level: ClassVar[Level] = "normal"
    file: ClassVar[str] = EVENTS_FILE

    update: int
    group: int
    env: int
    decision: int
    slot: str
    blueprint: str
    old_stage: str
    new_stage: str
    reason: str
    readiness: dict[str, float] = field(default_factory=dict)
    """The figures behind it: age, alpha, contribution and decisions since it was measured, gradient norm."""


@dataclass(frozen=True, kw_only=True)
class EpisodeOutcome:
    """How the life of one host ended."""

    kind: ClassVar[str] = "episode"
    level: ClassVar[Level] = "normal"
    file: ClassVar[str] = EVENTS_FILE

    update: int
    group: int
    env: int
    task: str
    decisions: int
    score: float
    metric: float
    episode_return: float
    host_parameters: int
    parameters: int
    """Of the exported network."""
    operations: dict[str, int] = field(default_factory=dict)
    """Decisions by operation."""
    seeds: dict[str, int] = field(default_factory=dict)
    """Seeds by fate: fossilized, pruned, dropped."""
    rolled_back: bool = False


@dataclass(frozen=True, kw_only=True)
class Update:
    """One PPO update."""

    kind: ClassVar[str] = "update"
    level: ClassVar[Level] = "minimal"
    file: ClassVar[str] = EVENTS_FILE

    update: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A figure beyond its threshold."""

    kind: ClassVar[str] = "anomaly"
    level: ClassVar[Level] = "minimal"
    file: ClassVar[str] = EVENTS_FILE

    update: int
    name: str
    value: float
    threshold: float
    where: str = ""
    """The head, layer or group it was seen in; empty when it is of the whole."""


@dataclass(frozen=True, kw_only=True)
class GovernorRollback:
    """A host that broke and was given its last good weights back."""

    kind: ClassVar[str] = "rollback"
    level: ClassVar[Level] = "minimal"
    file: ClassVar[str] = EVENTS_FILE

    update: int
    group: int
    env: int
    decision: int
    verdict: str
    val_loss: float
    forfeited: float = 0.0
    """Rewards that were taken back."""


@dataclass(frozen=True, kw_only=True)
class GamingSuspicion:
    """A seed that looks better than it is."""

    kind: ClassVar[str] = "gaming"
    level: ClassVar[Level] = "normal"
    file: ClassVar[str] = EVENTS_FILE

    update: int
    group: int
    env: int
    decision: int
    slot: str
    blueprint: str
    reason: str
    contribution: float
    gain: float = math.nan
    """Metric of the host less that of its twin that never grew."""


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """A process took over the run: all that is needed to repeat it."""

    kind: ClassVar[str] = "run_started"
    level: ClassVar[Level] = "minimal"
    file: ClassVar[str] = PROCESS_FILE

    update: int
    """The first update it will do."""
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
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunFinished:
    """A process left the run in good order."""

    kind: ClassVar[str] = "run_finished"
    level: ClassVar[Level] = "minimal"
    file: ClassVar[str] = PROCESS_FILE

    update: int
    """Updates that are done."""
    status: str
    """done, stopped, diverged or failed."""
    exit_code: int
    seconds: float
    reason: str = ""
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint that is safe on disk."""

    kind: ClassVar[str] = "checkpoint"
    level: ClassVar[Level] = "minimal"
    file: ClassVar[str] = PROCESS_FILE

    update: int
    path: str
    metric: float | None = None
    seconds: float = 0.0
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class WorkerFault:
    """A worker process that died or failed; its group of environments is run again."""

    kind: ClassVar[str] = "worker_fault"
    level: ClassVar[Level] = "minimal"
    file: ClassVar[str] = PROCESS_FILE

    update: int
    worker: int
    group: int
    error: str
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class PhaseTimings:
    """Where the time of one update went."""

    kind: ClassVar[str] = "timings"
    level: ClassVar[Level] = "normal"
    file: ClassVar[str] = PROCESS_FILE

    update: int
    seconds: dict[str, float]
    """By phase: rollout, statistics, update, record, checkpoint."""
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Unknown:
    """An event of a newer simic."""

    kind: str
    fields: dict[str, Any]


Event = (
    Decision
    | LifecycleChange
    | EpisodeOutcome
    | Update
    | Anomaly
    | GovernorRollback
    | GamingSuspicion
    | RunStarted
    | RunFinished
    | CheckpointSaved
    | WorkerFault
    | PhaseTimings
)
KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in get_args(Event)}


def to_json(event: Event | Unknown) -> str:
    """One line without its end: compact, keys sorted; numbers that are not finite become null."""
    if isinstance(event, Unknown):
        return _dump({**event.fields, "kind": event.kind})
    record: dict[str, Any] = {name: codec.encode(getattr(event, name)) for name, codec in _CODECS_OF[event.kind]}
    record["kind"] = event.kind
    return _dump(record)


def from_json(line: str | bytes) -> Event | Unknown:
    """The event behind a line. Fields that this simic does not know are dropped, kinds become `Unknown`.

    A number that is null is NaN; older files have the texts "nan", "inf" and "-inf".
    """
    try:
        record = json.loads(line)
        kind = record.pop("kind")
        if not isinstance(kind, str):
            raise TypeError(f"its kind is {kind!r}")
        if kind not in KINDS:
            return Unknown(kind, check_values(record, "it"))
        known = {name: codec.decode(record[name]) for name, codec in _CODECS_OF[kind] if name in record}
        return KINDS[kind](**known)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise EventError(f"not an event ({type(error).__name__}: {error}): {line[:80]!r}") from None


class _Codec(NamedTuple):
    """From a field's value to JSON and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    """Free-form data as JSON: numpy numbers become Python's, what JSON has not becomes text."""
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


def _codecs(cls: type) -> list[tuple[str, _Codec]]:
    hints = get_type_hints(cls)
    return [(item.name, _CODECS[hints[item.name]]) for item in fields(cls)]


_CODECS_OF = {kind: _codecs(cls) for kind, cls in KINDS.items()}
_dump = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

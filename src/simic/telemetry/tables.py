"""The tables that the events of runs are read into: names, columns, SQL types and what they mean.

A table follows from the dataclass of its kind of event: a new kind, or a new field of one, needs no change here.
`frames.py` makes pandas frames of them, `commands/query.py` puts these into DuckDB.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from simic.settings import settings_of
from simic.telemetry.events import KINDS, EpisodeEvent, EpisodeTrace, Event

NAMES = {
    **{"update": "updates", "decision": "decisions", "episode": "episodes", "anomaly": "anomalies"},
    **{"plateau": "plateaus", "rollback": "rollbacks", "checkpoint": "checkpoints", "worker_fault": "worker_faults"},
}
"""Tables whose name is not that of their kind: plurals, because SQL has its own use for words like update."""
TYPES: dict[Any, str] = {
    bool: "BOOLEAN",
    int: "BIGINT",
    float: "DOUBLE",
    float | None: "DOUBLE",
    str: "VARCHAR",
    str | None: "VARCHAR",
    tuple[str, ...]: "VARCHAR[]",
    dict[str, int]: "MAP(VARCHAR, BIGINT)",
    dict[str, float]: "MAP(VARCHAR, DOUBLE)",
    dict[str, str]: "MAP(VARCHAR, VARCHAR)",
}
"""SQL types of fields; a field of another type is JSON."""


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: str
    """Of SQL."""
    help: str = ""


class Schema(NamedTuple):
    """What a table holds."""

    help: str
    columns: tuple[Column, ...]


RUN = Column("run", "VARCHAR", "Name of the run; its path, if runs of the same name are read.")
UPDATE = Column("update", "BIGINT", "Number of the update, from 0.")
TIME = Column("time", "TIMESTAMP", "When it was recorded, UTC; null for events that do not depend on the time.")
HOST = Column("host", "VARCHAR", "Group and environment in one, such as g0-e3; new hosts in every update.")
GROUP = Column("group", "BIGINT", "Group of hosts, from 0.")
ENV = Column("env", "BIGINT", "Environment in the group, from 0: the host.")
SPECIAL = {
    "events": Schema(
        "All events, also of kinds that this version does not know.",
        (
            RUN,
            Column("file", "VARCHAR", "File that holds it."),
            Column("number", "BIGINT", "Number of the event in that file, from 0."),
            Column("kind", "VARCHAR", "Kind of the event."),
            UPDATE,
            TIME,
            Column("fields", "JSON", "The event as it is in the file."),
        ),
    ),
    "updates": Schema(
        "The metrics of every update, one column each: see docs/metrics.md.",
        (RUN, UPDATE),
    ),
    "timings": Schema(
        "Duration of each phase of every update. An update that was made again after a resumption has two.",
        (
            RUN,
            UPDATE,
            TIME,
            Column("phase", "VARCHAR", "Part of the update: see docs/metrics.md."),
            Column("seconds", "DOUBLE", "Duration."),
        ),
    ),
    "performance": Schema(
        "Speed, memory and workers in every update.",
        (
            RUN,
            UPDATE,
            TIME,
            Column("seconds", "DOUBLE", "Duration of the whole update."),
            Column("decisions_per_second", "DOUBLE", "Decisions of all hosts per second of it."),
            Column("memory_mb", "MAP(VARCHAR, DOUBLE)", "Peak memory so far, of the learner and of its workers."),
            Column("workers", "MAP(VARCHAR, BIGINT)", "How many workers there are, on how many machines."),
        ),
    ),
    "slots": Schema(
        "Every slot of the traced hosts in every state; decision t leads from state t to t + 1. In a user's own "
        "training only slots that are not dormant.",
        (
            *(RUN, HOST, UPDATE, GROUP, ENV),
            Column("slot", "VARCHAR", "Name of the slot."),
            Column("state", "BIGINT", "Number of the state, from 0, which is before the first decision."),
            Column("stage", "VARCHAR", "Stage of the slot."),
            Column("blueprint", "VARCHAR", "Blueprint of the seed; empty without one."),
            Column("alpha", "DOUBLE", "Weight of the seed's output."),
            Column("contribution", "DOUBLE", "Metric with the seed minus that without it."),
        ),
    ),
    "settings": Schema(
        "The settings of every run, by its last start.",
        (
            RUN,
            Column("name", "VARCHAR", "Dotted name, as in config files."),
            Column("value", "VARCHAR", "Value; lists and tables as JSON."),
        ),
    ),
}
"""Tables that are not simply the fields of a kind of event."""


def schemas() -> dict[str, Schema]:
    """All tables and their columns; `updates` has one more for every metric that the runs have.

    Traces are in `slots` and `decisions`.
    """
    own = {NAMES.get(kind, kind): _schema(cls) for kind, cls in KINDS.items() if cls is not EpisodeTrace}
    return {name: SPECIAL.get(name) or own[name] for name in dict.fromkeys([*SPECIAL, *own])}


def _schema(cls: type[Event]) -> Schema:
    own = [
        Column(field.name, TYPES.get(field.type, "JSON"), " ".join(field.help.split())) for field in settings_of(cls)
    ]
    shared = {column.name: column for column in (UPDATE, TIME, GROUP, ENV)}
    columns = [shared.get(column.name, column) for column in own]
    host = (HOST,) if issubclass(cls, EpisodeEvent) else ()
    return Schema(" ".join((cls.__doc__ or "").split()), (RUN, *host, *columns))

"""Events: what goes in comes out, lines are stable, and files of other versions stay readable."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simic.lifecycle.stages import Stage
from simic.telemetry import events
from simic.telemetry.events import (
    EVENTS_FILE,
    KINDS,
    LEVELS,
    PROCESS_FILE,
    Anomaly,
    CheckpointSaved,
    EventError,
    LifecycleChange,
    RunStarted,
    Unknown,
    Update,
    from_json,
    to_json,
)
from simic.telemetry.series import Series

TEXT = st.text(max_size=6) | st.sampled_from(["nan", "inf", "\n", "\u2028", "ü", '"'])
FINITE = st.floats(allow_nan=False, allow_infinity=False)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
SERIES = st.lists(st.none() | TEXT | FINITE | st.just(1.0), max_size=6)
VALUES: dict[Any, st.SearchStrategy] = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(),
    str: TEXT,
    str | None: st.none() | TEXT,
    float | None: st.none() | st.floats(),
    tuple[str, ...]: st.lists(TEXT, max_size=3).map(tuple),
    dict[str, int]: st.dictionaries(TEXT, st.integers(), max_size=3),
    dict[str, float]: st.dictionaries(TEXT, st.floats(), max_size=3),
    dict[str, str]: st.dictionaries(TEXT, TEXT, max_size=3),
    dict[str, Any]: st.dictionaries(TEXT, FREE, max_size=3),
    tuple[tuple[str, int], ...]: st.lists(st.tuples(TEXT, st.integers()), max_size=3).map(tuple),
    dict[str, Series]: st.dictionaries(TEXT, SERIES, max_size=3),
    dict[str, dict[str, Series]]: st.dictionaries(TEXT, st.dictionaries(TEXT, SERIES, max_size=3), max_size=3),
}


def events_of(cls: type) -> st.SearchStrategy:
    hints = get_type_hints(cls)
    return st.builds(cls, **{field.name: VALUES[hints[field.name]] for field in dataclasses.fields(cls)})


ANY_EVENT = st.one_of([events_of(cls) for cls in KINDS.values()])


def same(a: Any, b: Any) -> bool:
    """Equal in value and type; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def as_read(value: Any) -> Any:
    """What is left of a value: numbers that are not finite are one kind of missing."""
    if isinstance(value, dict):
        return {key: as_read(item) for key, item in value.items()}
    return math.nan if isinstance(value, float) and not math.isfinite(value) else value


@given(ANY_EVENT)
def test_any_event_survives(event):
    line = to_json(event)
    back = from_json(line)
    assert type(back) is type(event)
    expected = as_read(vars(event))
    if isinstance(event, CheckpointSaved) and same(expected["metric"], math.nan):
        expected["metric"] = None
    assert same(vars(back), expected)
    assert to_json(back) == line
    assert "\n" not in line
    assert list(json.loads(line)) == sorted(json.loads(line))


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            Update(update=3, metrics={"kl": 0.5, "entropy": math.nan}),
            '{"kind":"update","metrics":{"entropy":null,"kl":0.5},"update":3}',
        ),
        (
            Anomaly(update=0, name="ratio", value=math.inf, threshold=5.0, where="slot"),
            '{"kind":"anomaly","name":"ratio","threshold":5.0,"update":0,"value":null,"where":"slot"}',
        ),
        (
            CheckpointSaved(update=2, path="update_000002", metric=None, seconds=0.25, time=1.5),
            '{"kind":"checkpoint","metric":null,"path":"update_000002","seconds":0.25,"time":1.5,"update":2}',
        ),
    ],
)
def test_lines_are_as_written_here(event, line):
    assert to_json(event) == line
    assert same(vars(from_json(line)), as_read(vars(event)))


def columns_of(value: Any, hint: Any) -> list[Any]:
    """The numbers that a table of events would have in a column of floats."""
    if hint == dict[str, float]:
        return list(value.values())
    return [value] if hint in (float, float | None) else []


@given(ANY_EVENT)
def test_every_line_is_strict_json_with_numbers_where_numbers_belong(event):
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    record, hints = json.loads(to_json(event), parse_constant=refuse), get_type_hints(type(event))
    for field in dataclasses.fields(event):
        for number in columns_of(record[field.name], hints[field.name]):
            assert number is None or type(number) is float


def test_files_of_older_versions_have_texts_in_the_place_of_numbers():
    line = '{"kind":"anomaly","name":"ratio","threshold":"inf","update":0,"value":"nan"}'
    back = from_json(line)
    assert isinstance(back, Anomaly)
    assert back.threshold == math.inf
    assert math.isnan(back.value)


def test_kinds_are_names_of_the_format():
    assert set(KINDS) == {
        *("decision", "lifecycle", "episode", "trace", "growth", "update", "anomaly", "plateau", "rollback", "gaming"),
        *("run_started", "run_finished", "checkpoint", "worker_fault", "timings"),
    }


def test_numpy_numbers_and_stages_are_taken():
    event = LifecycleChange(
        update=np.int64(1),  # pyright: ignore[reportArgumentType]
        group=0,
        env=0,
        decision=0,
        slot="stem",
        blueprint="norm",
        old_stage=Stage.TRAINING,  # pyright: ignore[reportArgumentType]
        new_stage="blending",
        reason="advance",
        readiness={"age": np.float32(3), "norm": np.float64(-np.inf)},  # pyright: ignore[reportArgumentType]
    )
    back = from_json(to_json(event))
    assert isinstance(back, LifecycleChange)
    assert (back.update, back.old_stage) == (1, "training")
    assert same(back.readiness, {"age": 3.0, "norm": math.nan})


def test_a_config_may_hold_what_json_has_not():
    event = RunStarted(
        update=0,
        command=("simic", "train"),
        config={"out": Path("runs/a"), "sizes": (1, 2), "limit": math.inf, "rate": np.float32(0.5)},
        versions={},
        rng_seeds={"run": 1},
        threads=1,
        pid=1,
        host="here",
    )
    back = from_json(to_json(event))
    assert isinstance(back, RunStarted)
    assert back.config == {"out": "runs/a", "sizes": [1, 2], "limit": None, "rate": 0.5}


def test_an_integer_field_takes_no_fraction():
    with pytest.raises(TypeError):
        to_json(Update(update=1.5, metrics={}))  # pyright: ignore[reportArgumentType]


# Other versions.


def test_a_kind_of_a_newer_simic_is_kept():
    line = '{"kind":"dream","of":["sheep"],"update":3}'
    assert from_json(line) == Unknown("dream", {"of": ["sheep"], "update": 3})
    assert to_json(from_json(line)) == line


def test_a_field_of_a_newer_simic_is_dropped():
    line = '{"colour":"red","kind":"update","metrics":{},"update":3}'
    assert from_json(line) == Update(update=3, metrics={})


def test_a_field_that_an_older_simic_did_not_write_has_its_default():
    assert from_json('{"kind":"anomaly","name":"kl","threshold":1,"update":0,"value":2}') == Anomaly(
        update=0, name="kl", value=2.0, threshold=1.0
    )


@pytest.mark.parametrize(
    "line",
    [
        *('{"kind":"update","update":3}', '{"kind":"update","metrics":{},"update":"x"}', '{"metrics":{}}', "[1]", "7"),
        *("", "null", "{", '{"kind":7}', '{"kind":["update"]}', "\x00\x00", "[" * 100_000),
        '{"kind":"update","metrics":[],"update":3}',
        '{"kind":"update","metrics":{"kl":1' + "0" * 400 + '},"update":3}',
        '{"kind":"dream","of":' + "[" * 200 + "]" * 200 + "}",
    ],
    ids=lambda line: line[:30],
)
def test_what_is_no_event_is_refused(line):
    with pytest.raises(EventError, match="not an event"):
        from_json(line)


# What goes where.


def test_the_file_that_must_be_repeatable_holds_nothing_of_machine_or_moment():
    for cls in KINDS.values():
        names = {field.name for field in dataclasses.fields(cls)}
        momentary = names & {"time", "seconds", "pid", "host", "path", "worker"}
        assert bool(momentary) == (cls.file == PROCESS_FILE), cls
        assert cls.file in (EVENTS_FILE, PROCESS_FILE)
        assert cls.level in LEVELS[1:]
        assert ("time" in names) == (cls.file == PROCESS_FILE)


def test_process_events_are_stamped_when_they_are_made():
    before = events.time.time()
    made = CheckpointSaved(update=0, path="x").time
    assert before <= made <= events.time.time()


def test_events_cannot_be_changed():
    event = Update(update=0, metrics={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.update = 1  # pyright: ignore[reportAttributeAccessIssue]

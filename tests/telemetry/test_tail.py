"""Reading on in files that grow, shrink or are damaged."""

import math
import os

import pytest
from helpers.reports import change
from hypothesis import given
from hypothesis import strategies as st

from simic.telemetry import tail
from simic.telemetry.events import (
    MAX_LINE_BYTES,
    DecisionMade,
    EpisodeTrace,
    EventError,
    LifecycleChange,
    Unknown,
    Update,
    from_json,
    to_json,
)
from simic.telemetry.tail import Deferred, FileTail, parse

WORDS = st.text(max_size=8) | st.sampled_from(['"', "\\", "\n", "ü", "\u2028", "</script>", "x" * 50])


def update(number):
    return Update(update=number, metrics={"score": 1.0})


def write(path, *lines, mode="ab"):
    with open(path, mode) as file:
        for line in lines:
            file.write(line if isinstance(line, bytes) else to_json(line).encode() + b"\n")


def events(reader):
    return [event for event, _, _ in reader.lines()]


def test_lines_are_read_once_and_only_when_they_are_whole(tmp_path):
    reader = FileTail(tmp_path / "events.jsonl")
    assert events(reader) == []  # there is no file yet
    text = to_json(update(1)).encode()
    write(reader.path, update(0), text[:10])
    assert events(reader) == [update(0)]
    assert events(reader) == []
    write(reader.path, text[10:] + b"\n")
    found = list(reader.lines())
    assert [event for event, _, _ in found] == [update(1)]
    start, end = found[0][1:]
    assert reader.path.read_bytes()[start:end] == text + b"\n"
    assert not reader.rewound()


def test_a_shorter_or_another_file_is_noticed(tmp_path):
    reader = FileTail(tmp_path / "events.jsonl")
    write(reader.path, update(0), update(1))
    assert len(events(reader)) == 2
    os.truncate(reader.path, len(to_json(update(0))) + 1)
    assert reader.rewound()
    reader = FileTail(tmp_path / "events.jsonl")
    assert events(reader) == [update(0)]
    write(tmp_path / "new", update(0), update(1))
    os.replace(tmp_path / "new", reader.path)
    assert reader.rewound()
    reader.path.unlink()
    assert reader.rewound()


def test_damage_is_counted_and_skipped(tmp_path):
    reader = FileTail(tmp_path / "events.jsonl")
    huge = b'{"kind":"' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\n'
    long = Unknown("long", {"text": "x" * (tail.MAX_EVENT_BYTES + 1)})
    write(reader.path, update(0), b"\xff\xfe\n", b'{"kind":"update"}\n', b"\n", b"[]\n", huge, long, update(1))
    assert events(reader) == [update(0), update(1)]
    assert reader.damaged == 6


@pytest.mark.parametrize("block", [7, 1000])
def test_a_huge_line_that_grows_is_counted_once(tmp_path, monkeypatch, block):
    monkeypatch.setattr(tail, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(tail, "BLOCK", block)
    reader = FileTail(tmp_path / "events.jsonl")
    for part in (b"x" * 90, b"x" * 60, b"x" * 60):
        write(reader.path, part)
        assert events(reader) == []
        assert reader.damaged == 0
    write(reader.path, b"xx\n", update(3))
    assert events(reader) == [update(3)]
    assert reader.damaged == 1


def test_reading_stops_at_the_deadline_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "BLOCK", 64)
    reader = FileTail(tmp_path / "events.jsonl")
    write(reader.path, *map(update, range(20)))
    found = events_until(reader, -math.inf)
    assert reader.more
    assert 0 < len(found) < 20 or len(found) == 0
    while reader.more:
        found += events_until(reader, -math.inf)
    assert found == [update(i) for i in range(20)]


def events_until(reader, deadline):
    return [event for event, _, _ in reader.lines(deadline)]


@given(slot=WORDS, blueprint=WORDS, number=st.integers(0, 10**15))
def test_stage_changes_read_fast_are_those_read_slowly(slot, blueprint, number):
    made = LifecycleChange(
        update=number,
        group=3,
        env=0,
        decision=number,
        slot=slot,
        blueprint=blueprint,
        old_stage="dormant",
        new_stage="training",
        reason="germinate",
        readiness={"age": 1.5, "contribution": math.nan, "gradient_norm": 1e-7},
    )
    line = to_json(made).encode()
    slow, fast = from_json(line), parse(line)
    assert isinstance(slow, LifecycleChange)
    assert isinstance(fast, LifecycleChange)
    assert vars(fast) | {"readiness": 0} == vars(slow) | {"readiness": 0}


def test_most_stage_changes_are_read_fast():
    fast = parse(to_json(change("mlp", "dormant", "blending", "germinate")).encode())
    assert isinstance(fast, LifecycleChange)
    assert tail._LIFECYCLE.fullmatch(to_json(change("mlp", "dormant", "blending", "germinate")))


def test_traces_are_deferred_and_decisions_left_out(tmp_path):
    trace = EpisodeTrace(
        update=7, group=0, env=1, task='a "task"', score=1.0, metric=0.5, host_parameters=3, parameters=4
    )
    decision = DecisionMade(
        update=7,
        group=0,
        env=0,
        decision=0,
        state={},
        legal_ops=(),
        action="wait",
        probabilities={},
        value=0.0,
        reward=0.0,
        reward_terms={},
    )
    reader = FileTail(tmp_path / "events.jsonl")
    write(reader.path, trace, decision, update(7))
    found = list(reader.lines())
    assert [event for event, _, _ in found] == [Deferred("trace", 7), update(7)]
    assert list(reader.read_range(*found[0][1:])) == [trace]
    assert list(reader.read_range(0, reader.offset)) == [trace, decision, update(7)]
    assert list(reader.read_range(0, reader.offset, short=True)) == [update(7)]


def test_what_is_no_event_raises():
    for line in (b'{"kind": 3}', b"\xff", b'{"blueprint":"\xff","kind":"lifecycle"}'):
        with pytest.raises(EventError):
            parse(line)


def test_a_link_is_not_followed(tmp_path):
    write(tmp_path / "secret", update(0))
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic link"):
        events(FileTail(tmp_path / "events.jsonl"))

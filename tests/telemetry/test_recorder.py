"""The recorder: whole lines only, each event exactly once whatever happens, and the right ones for the level."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.storage.files import FileKindError, OutputError
from simic.telemetry import recorder as recorder_module
from simic.telemetry.events import (
    EVENTS_FILE,
    LEVELS,
    PROCESS_FILE,
    Anomaly,
    CheckpointSaved,
    DecisionMade,
    Event,
    GamingSuspicion,
    PhaseTimings,
    Update,
    to_json,
)
from simic.telemetry.recorder import Recorder


def update(number: int) -> Update:
    return Update(update=number, metrics={"score": number / 8})


def decision(number: int) -> DecisionMade:
    return DecisionMade(
        update=number,
        group=0,
        env=0,
        decision=0,
        state={},
        legal_ops=("wait",),
        action="wait",
        probabilities={"op": 1.0},
        value=0.0,
        reward=0.0,
        reward_terms={},
    )


def gaming(number: int) -> GamingSuspicion:
    return GamingSuspicion(
        update=number, group=0, env=0, decision=0, slot="a", blueprint="b", reason="overclaiming", contribution=0.5
    )


def saved(number: int) -> CheckpointSaved:
    return CheckpointSaved(update=number, path=f"update_{number:06d}", time=0.0)


def text(*events: Event) -> str:
    return "".join(to_json(event) + "\n" for event in events)


@contextmanager
def full_disk(allowed_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def events(tmp_path) -> Path:
    return tmp_path / EVENTS_FILE


@pytest.fixture
def process(tmp_path) -> Path:
    return tmp_path / PROCESS_FILE


# Levels.

ONE_OF_EACH_LEVEL = {"minimal": update(1), "normal": gaming(1), "debug": decision(1)}


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_records_its_own_kinds_and_those_below(tmp_path, events, level):
    with Recorder(tmp_path, level) as recorder:
        for event in ONE_OF_EACH_LEVEL.values():
            recorder.record(event)
    wanted = LEVELS[1 : LEVELS.index(level) + 1]
    assert events.read_text() == text(*(ONE_OF_EACH_LEVEL[name] for name in wanted))


def test_an_unknown_level_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be one of off, minimal, normal, debug, got 'loud'"):
        Recorder(tmp_path, "loud")  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", ["minimal", "normal"])
def test_escalation_lasts_for_this_update_and_as_many_more_as_asked(tmp_path, events, level):
    with Recorder(tmp_path, level) as recorder:
        for number in range(5):
            recorder.record(decision(number))
            if number == 1:
                recorder.escalate(updates=2)
                recorder.record(decision(10))
            recorder.end_update()
    assert events.read_text() == text(decision(10), decision(2), decision(3))


def test_a_second_escalation_does_not_shorten_the_first(tmp_path):
    recorder = Recorder(tmp_path, "minimal")
    recorder.escalate(updates=3)
    recorder.escalate(updates=1)
    lasting = []
    for _ in range(5):
        lasting.append(recorder.wants(DecisionMade))
        recorder.end_update()
    recorder.close()
    assert lasting == [True, True, True, True, False]


def test_off_stays_off(tmp_path, events, process):
    seen: list[Event] = []
    with Recorder(tmp_path, "off", mirrors=[seen.append]) as recorder:
        recorder.escalate(updates=5)
        recorder.record(update(0))
        recorder.record(saved(0))
    assert events.read_bytes() == process.read_bytes() == b""
    assert seen == []


def test_mirrors_get_what_is_recorded(tmp_path):
    one: list[Event] = []
    two: list[Event] = []
    with Recorder(tmp_path, "normal", mirrors=[one.append, two.append]) as recorder:
        for event in (update(1), decision(1), saved(1)):
            recorder.record(event)
    assert one == two == [update(1), saved(1)]


# What is written when.


def test_events_are_seen_after_each_update_and_those_of_the_process_at_once(tmp_path, events, process):
    with Recorder(tmp_path) as recorder:
        recorder.record(update(0))
        recorder.record(PhaseTimings(update=0, seconds={"rollout": 1.0}, time=0.0))
        recorder.record(saved(0))
        assert events.read_text() == ""
        assert process.read_text() == text(PhaseTimings(update=0, seconds={"rollout": 1.0}, time=0.0), saved(0))
        recorder.end_update()
        assert events.read_text() == text(update(0))


def test_a_later_process_appends(tmp_path, events, process):
    for number in range(3):
        with Recorder(tmp_path) as recorder:
            recorder.record(update(number))
            recorder.record(saved(number))
    assert events.read_text() == text(update(0), update(1), update(2))
    assert process.read_text() == text(saved(0), saved(1), saved(2))


@pytest.mark.parametrize("torn", [b'{"kind":"upd', b"x" * 200_000, b"\0" * 5000], ids=["half", "long", "zeros"])
def test_what_a_crash_tore_off_is_cut_away(tmp_path, events, process, torn):
    events.write_bytes(text(update(0)).encode() + torn)
    process.write_bytes(torn)
    with Recorder(tmp_path) as recorder:
        recorder.record(update(1))
        recorder.record(saved(1))
    assert events.read_text() == text(update(0), update(1))
    assert process.read_text() == text(saved(1))


def test_closing_twice_does_no_harm(tmp_path, events):
    recorder = Recorder(tmp_path)
    recorder.record(update(0))
    recorder.close()
    recorder.close()
    assert events.read_text() == text(update(0))


# Resume.


def test_rewinding_forgets_later_events_but_not_those_of_the_process(tmp_path, events, process):
    with Recorder(tmp_path) as recorder:
        recorder.record(update(0))
        position = recorder.position()
        assert position == events.stat().st_size == len(text(update(0)))
        recorder.record(update(1))
        recorder.end_update()
        recorder.record(update(2))  # not yet written
        recorder.record(saved(2))
        recorder.rewind(position)
        recorder.record(update(7))
    assert events.read_text() == text(update(0), update(7))
    assert process.read_text() == text(saved(2))


@pytest.mark.parametrize("position", [-1, 3, 1000])
def test_a_position_that_is_no_end_of_a_line_is_refused(tmp_path, events, position):
    with Recorder(tmp_path) as recorder:
        recorder.record(update(0))
        recorder.end_update()
        with pytest.raises(ValueError, match=rf"no line that ends at byte {position}, .*--out"):
            recorder.rewind(position)
        recorder.record(update(1))
    assert events.read_text() == text(update(0), update(1))


def run_updates(recorder: Recorder, first: int, last: int, checkpoints: dict[int, dict]) -> None:
    """A run in which update 2 escalates; the state after each update is kept."""
    for number in range(first, last):
        recorder.record(decision(number))
        if number == 2:
            recorder.record(Anomaly(update=number, name="kl", value=1.0, threshold=0.5))
            recorder.escalate(updates=3)
        recorder.record(update(number))
        recorder.end_update()
        checkpoints[number + 1] = recorder.state_dict()


@settings(max_examples=20, deadline=None)
@given(
    kills=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3), st.binary(max_size=20)), max_size=4),
    level=st.sampled_from(LEVELS),
)
def test_a_run_that_is_killed_and_resumed_writes_the_same_bytes(kills, level):
    with tempfile.TemporaryDirectory() as place:
        whole, broken = Path(place) / "whole", Path(place) / "broken"
        whole.mkdir()
        broken.mkdir()
        checkpoints: dict[int, dict] = {}
        with Recorder(whole, level) as recorder:
            run_updates(recorder, 0, 8, checkpoints)
        done: dict[int, dict] = {0: {"position": 0, "escalated_updates": 0}}
        for reached, lost, torn in kills:  # killed after update `reached`; the last `lost` have no checkpoint
            with Recorder(broken, level) as recorder:
                start = max(done)
                recorder.load_state_dict(done[start])
                later: dict[int, dict] = {}
                run_updates(recorder, start, max(start, reached), later)
            with open(broken / EVENTS_FILE, "ab") as file:
                file.write(torn)
            done |= {number: state for number, state in later.items() if number <= reached - lost}
        with Recorder(broken, level) as recorder:
            recorder.load_state_dict(done[max(done)])
            run_updates(recorder, max(done), 8, done)
        assert (broken / EVENTS_FILE).read_bytes() == (whole / EVENTS_FILE).read_bytes()
        assert done[8] == checkpoints[8]


def test_a_position_is_safe_on_disk_before_it_is_told(tmp_path, monkeypatch):
    with Recorder(tmp_path) as recorder:
        recorder.record(update(0))
        synced: list[int] = []
        monkeypatch.setattr(recorder_module.os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
        position = recorder.position()
    assert synced == [position] == [len(text(update(0)))]


# Trouble.


def test_a_full_disk_is_told_in_words_and_earlier_events_stay(tmp_path, events):
    with Recorder(tmp_path) as recorder:
        for number in range(20):
            recorder.record(update(number))
        recorder.end_update()
        before = events.read_text()
        recorder.record(update(20))
        recorder.record(update(21))
        # Room for one line and a half.
        with full_disk(len(before) + 90), pytest.raises(OutputError, match=r"cannot write .*events\.jsonl") as failed:
            recorder.end_update()
        assert failed.value.errno == errno.EFBIG
        assert "then resume" in str(failed.value)
        assert events.read_text() == before
        recorder.end_update()  # there is room again
    assert events.read_text() == before + text(update(20), update(21))


def test_a_full_disk_at_the_end_still_lets_go_of_the_files(tmp_path, events):
    recorder = Recorder(tmp_path)
    recorder.record(update(0))
    with full_disk(3), pytest.raises(OutputError):
        recorder.close()
    recorder.close()
    assert events.read_bytes() == b""


def test_an_interrupted_write_leaves_whole_lines_and_loses_nothing(tmp_path, events, monkeypatch):
    real = os.pwrite

    def interrupted(descriptor: int, content, offset: int) -> int:
        real(descriptor, bytes(content)[:5], offset)
        raise KeyboardInterrupt

    recorder = Recorder(tmp_path)
    recorder.record(update(0))
    monkeypatch.setattr(recorder_module.os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recorder.end_update()
    assert events.read_bytes() == b""
    monkeypatch.setattr(recorder_module.os, "pwrite", real)
    recorder.close()
    assert events.read_text() == text(update(0))


def test_short_writes_are_continued(tmp_path, events, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(recorder_module.os, "pwrite", lambda fd, content, offset: real(fd, content[:7], offset))
    with Recorder(tmp_path) as recorder:
        recorder.record(update(0))
        recorder.record(update(1))
    assert events.read_text() == text(update(0), update(1))


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"cannot write .*nowhere.*create its directory first"):
        Recorder(tmp_path / "nowhere")


FULL_TMPFS = """
import sys
from simic.telemetry.events import Update
from simic.storage.files import OutputError
from simic.telemetry.recorder import Recorder
recorder = Recorder(sys.argv[1])
try:
    for number in range(10_000):
        recorder.record(Update(update=number, metrics={"score": 0.5}))
        recorder.end_update()
except OutputError as error:
    lines = open(sys.argv[1] + "/events.jsonl", "rb").read()
    assert lines.endswith(b"\\n") and lines.count(b"\\n") == number > 100, number
    print(error)
"""


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root to mount a tmpfs")
def test_a_disk_that_is_really_full(tmp_path):
    mounted = f"mount -t tmpfs -o size=64k tmpfs {tmp_path} 2>/dev/null || exit 77; exec "
    command = ["unshare", "-m", "sh", "-c", mounted + '"$@"', "-", sys.executable, "-c", FULL_TMPFS, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode == 77 or "unshare failed" in ran.stderr:
        pytest.skip("this sandbox does not mount")
    assert ran.returncode == 0, ran.stderr
    assert "No space left on device; free some space, then resume" in ran.stdout


@pytest.mark.parametrize("name", ["events.jsonl", "process.jsonl"])
def test_events_are_not_written_through_links(tmp_path, name):
    (tmp_path / "own.txt").write_text("the user's own, without a line's end")
    for make in (Path.symlink_to, Path.hardlink_to):
        make(tmp_path / name, tmp_path / "own.txt")
        with pytest.raises(FileKindError, match="link"):
            Recorder(tmp_path)
        (tmp_path / name).unlink()
    assert (tmp_path / "own.txt").read_text() == "the user's own, without a line's end"


def test_a_file_that_is_one_long_line_is_left_as_it_is(tmp_path):
    with open(tmp_path / "events.jsonl", "wb") as file:
        file.write(b"{}\n")
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"events.jsonl has no line in its last 2,097,152 bytes"):
        Recorder(tmp_path)
    assert (tmp_path / "events.jsonl").stat().st_size == 2**40

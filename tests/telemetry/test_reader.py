"""Reading events: whole lines of both files, afterwards and live."""

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from simic.storage.files import FileKindError
from simic.telemetry.events import (
    EVENTS_FILE,
    PROCESS_FILE,
    Anomaly,
    CheckpointSaved,
    EventError,
    Unknown,
    Update,
    to_json,
)
from simic.telemetry.reader import Rewound, follow, read_events
from simic.telemetry.recorder import Recorder

UPDATES = [Update(update=number, metrics={"score": 0.5}) for number in range(6)]
ANOMALY = Anomaly(update=1, name="kl", value=1.0, threshold=0.5)
SAVED = CheckpointSaved(update=1, path="update_000001", time=0.0)


@pytest.fixture
def run(tmp_path) -> Path:
    with Recorder(tmp_path) as recorder:
        for event in (UPDATES[0], ANOMALY, SAVED, UPDATES[1]):
            recorder.record(event)
    return tmp_path


def test_all_events_come_in_the_order_of_their_file(run):
    assert list(read_events(run)) == [SAVED, UPDATES[0], ANOMALY, UPDATES[1]]
    assert list(read_events(str(run))) == list(read_events(run))


def test_some_kinds_only(run):
    assert list(read_events(run, [Update])) == UPDATES[:2]
    assert list(read_events(run, [Anomaly, CheckpointSaved])) == [SAVED, ANOMALY]
    assert list(read_events(run, [])) == []


def test_missing_files_count_as_empty(tmp_path):
    assert list(read_events(tmp_path)) == []
    assert list(read_events(tmp_path / "nowhere")) == []


@pytest.mark.parametrize("torn", ['{"kind":"upd', to_json(UPDATES[2]), "\x00"], ids=["half", "no end", "zero"])
def test_a_torn_last_line_is_left_out(run, torn):
    with open(run / EVENTS_FILE, "a") as file:
        file.write(torn)
    assert list(read_events(run, [Update])) == UPDATES[:2]


def test_a_damaged_line_in_the_middle_is_named(run):
    whole = (run / EVENTS_FILE).read_text()
    (run / EVENTS_FILE).write_text(whole + "garbage\n" + whole)
    with pytest.raises(EventError, match=rf"events\.jsonl, byte {len(whole)}: .*garbage.*remove that line"):
        list(read_events(run))


def test_events_of_a_newer_simic_are_passed_on(run):
    with open(run / EVENTS_FILE, "a") as file:
        file.write('{"kind":"dream"}\n')
    assert list(read_events(run))[-1] == Unknown("dream", {})
    assert list(read_events(run, [Update])) == UPDATES[:2]


# Live.


class Script:
    """Does one thing at each poll, then says stop."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def __call__(self) -> bool:
        self.steps.pop(0)()
        return not self.steps


def write(path: Path, content: str, mode: str = "a") -> Callable[[], object]:
    def step() -> None:
        with open(path, mode) as file:
            file.write(content)

    return step


def lines(*events) -> str:
    return "".join(to_json(event) + "\n" for event in events)


def test_following_gives_each_event_once_as_it_comes(tmp_path):
    run = tmp_path / "later"
    half = lines(UPDATES[2])
    script = Script(
        lambda: None,  # there is no run yet
        run.mkdir,
        write(run / EVENTS_FILE, lines(UPDATES[0], UPDATES[1]) + half[:10]),
        lambda: None,
        write(run / EVENTS_FILE, half[10:]),
        write(run / PROCESS_FILE, lines(SAVED)),
        write(run / EVENTS_FILE, lines(UPDATES[3])),  # written just before the stop
    )
    assert list(follow(run, poll_seconds=0, stop=script)) == [*UPDATES[:3], SAVED, UPDATES[3]]


def test_following_says_when_a_run_goes_back(tmp_path):
    events = tmp_path / EVENTS_FILE
    script = Script(
        write(events, lines(*UPDATES[:3])),
        write(tmp_path / PROCESS_FILE, lines(SAVED)),
        lambda: events.write_text(lines(UPDATES[0])),
        write(events, lines(UPDATES[1])),
    )
    assert list(follow(tmp_path, poll_seconds=0, stop=script)) == [
        *(*UPDATES[:3], SAVED),
        *(Rewound(EVENTS_FILE), UPDATES[0], UPDATES[1]),
    ]


def test_following_waits_between_looks(tmp_path, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("simic.telemetry.reader.time.sleep", waits.append)
    list(follow(tmp_path, poll_seconds=0.25, stop=Script(lambda: None, lambda: None, lambda: None)))
    assert waits == [0.25, 0.25]


def test_telemetry_loads_neither_torch_nor_numpy():
    code = (
        "import sys, simic.telemetry.reader, simic.telemetry.recorder, simic.telemetry.events\n"
        "assert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Files from somebody else.


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path):
    with open(tmp_path / "events.jsonl", "wb") as file:
        file.write(to_json(Update(update=0, metrics={})).encode() + b"\n")
        file.truncate(2**40)
    tracemalloc.start()
    with pytest.raises(EventError, match=r"events.jsonl, byte 42: a line has more than 2,097,152 bytes"):
        list(read_events(tmp_path))
    assert tracemalloc.get_traced_memory()[1] < 16e6
    tracemalloc.stop()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["events.jsonl", "process.jsonl"])
def test_only_regular_files_are_read(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(FileKindError, match=f"{name} is "):
        list(read_events(tmp_path))

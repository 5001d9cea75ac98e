"""The list of runs: a row for each, also for those that were killed, are damaged or have no events."""

import json
import os
import re
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers import tiny_run

from simic.api import train
from simic.commands.runs import RunsCommand, summarize
from simic.storage.run_directory import RunDirectory
from simic.telemetry.events import Update
from simic.telemetry.recorder import Recorder
from simic.training.loop import train as run_loop
from simic.training.result import TrainingResult
from simic.training.run import Run


def test_the_score_of_a_run_is_the_mean_of_its_last_five_updates(tmp_path):
    with Recorder(tmp_path) as recorder:
        for number in range(7):
            recorder.record(Update(update=number, metrics={"score": 10.0 * number}))
    summary = summarize(RunDirectory(tmp_path))
    assert (summary["score"], summary["updates"], summary["status"]) == ("40.00", "7/?", "not begun")


def test_runs_are_listed_by_name_also_those_that_were_killed(tmp_path, tiny_task, capsys):
    tiny_run.play_run(tmp_path / "b-done", updates=1)
    tiny_run.play_run(tmp_path / "a-killed", updates=1)
    process = tmp_path / "a-killed/process.jsonl"
    process.write_text("".join(process.read_text().splitlines(keepends=True)[:-1]))
    (tmp_path / "[red]empty/checkpoints").mkdir(parents=True)
    (tmp_path / "no run").mkdir()
    capsys.readouterr()
    assert RunsCommand(root=tmp_path).run() == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["run", "task", "updates", "score", "status", "started"]
    assert [row[0] for row in rows] == ["[red]empty", "a-killed", "b-done"]
    assert rows[0][-3:] == ["not", "begun", "-"]
    assert rows[1][4] == "killed"
    assert (rows[2][1], rows[2][2], rows[2][4]) == ("mlp", "1/1", "done")


def status(path: Path) -> str:
    return summarize(RunDirectory(path))["status"]


def test_a_damaged_run_is_a_row_that_says_so_and_hides_no_other(tmp_path, tiny_task, capsys):
    for name in ("a", "b"):
        train(tiny_run.make_config(updates=1), out=tmp_path / name)
    with open(tmp_path / "a/process.jsonl", "ab") as file:
        file.write(b"no event\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.json").write_text("[" * 5000)
    capsys.readouterr()
    assert RunsCommand(root=tmp_path).run() == 0
    said = capsys.readouterr().out
    _, a, b, c, *faults = said.splitlines()
    assert re.search(r"a +mlp +1/1 .* done, damaged ", a)
    assert re.search(r"b +mlp +1/1 .* done  ", b)
    assert "not begun, damaged" in c
    assert re.match(r"a: .*process.jsonl, byte \d+: not an event", faults[0])
    assert re.match(r"c: .*config.json nests values more than 64 deep", faults[1])


def test_a_run_that_goes_on_and_one_that_was_killed_are_told_apart(tmp_path, tiny_task):
    tiny_run.play_run(tmp_path, updates=1)
    run = RunDirectory(tmp_path)
    events = run.process.read_text().splitlines(keepends=True)
    run.process.write_text("".join(events[:-1]))  # without its end
    with run.lock():
        assert status(tmp_path) == f"running (process {os.getpid()})"
    for pid in (os.getpid(), 2**22 + 1, -1, 0, 10**30):  # alive but without the lock, dead, and nonsense
        run.lock_file.write_text(json.dumps({"pid": pid, "host": socket.gethostname()}))
        assert status(tmp_path) == "killed"
    for odd in ("", "{", '{"pid": []}', "[1]"):
        run.lock_file.write_text(odd)
        assert status(tmp_path) == "killed"
    run.process.write_text("".join(events))
    assert status(tmp_path) == "done"


@pytest.mark.parametrize(("code", "expected"), [(0, "done"), (3, "diverged"), (143, "stopped"), (None, "failed")])
def test_a_run_without_events_still_shows_its_state(tmp_path, tiny_task, monkeypatch, code, expected):
    def end(run: Run) -> TrainingResult:
        if code is None:
            raise MemoryError
        if code:
            return TrainingResult(status="stopped", exit_code=code, updates=0, history=[], agent=run.agent)
        return run_loop(run)

    monkeypatch.setattr("simic.api.run_loop", end)
    with nullcontext() if code is not None else pytest.raises(MemoryError):
        train(tiny_run.make_config(updates=1, level="off"), out=tmp_path)
    summary = summarize(RunDirectory(tmp_path))
    assert (summary["task"], summary["updates"], summary["score"]) == ("mlp", f"{int(code == 0)}/1", "-")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", summary["started"])
    assert summary["status"] == expected
    # Somebody who is refused changes nothing of that.
    with pytest.raises(ValueError, match="already contains a run"):
        train(tiny_run.make_config(updates=1, level="off"), out=tmp_path)
    assert status(tmp_path) == expected
    # A kill leaves the lock as it was taken.
    RunDirectory(tmp_path).lock_file.write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))
    assert status(tmp_path) == "killed"


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere; name another with --root"):
        RunsCommand(root=tmp_path / "nowhere").run()

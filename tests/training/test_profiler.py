"""Traces of one update and of a rollout for it, where the user wants them."""

import json
import os
from pathlib import Path

import pytest
from helpers import tiny_run

from simic.storage.files import OutputError
from simic.storage.run_directory import RunDirectory
from simic.training.build import build_run
from simic.training.loop import train
from simic.training.profiler import UpdateProfiler, profiled_rollout


def profile(path, directory, *, resume: bool = False, updates: int = 3, **changes) -> None:
    run_directory = RunDirectory(path)
    config = tiny_run.make_config(updates=updates, **changes)
    with run_directory.lock():
        run = build_run(config, run_directory, resume=resume, profile=directory, quiet=True, say=lambda text: None)
        assert train(run).status == "done"


def test_the_second_update_is_traced_and_nothing_else_changes(tmp_path, tiny_task):
    profile(tmp_path / "plain", None)
    profile(tmp_path / "profiled", tmp_path / "new" / "traces")
    rollout, update = sorted((tmp_path / "new/traces").iterdir())
    assert (rollout.name, update.name) == ("rollout_1.json", "update_1.json")
    names = {event.get("name", "") for event in traced(update)}
    assert any("lstm" in name for name in names)
    assert any("backward" in name.lower() for name in names)
    assert {event["pid"] for event in traced(rollout) if event.get("cat") == "cpu_op"} == {os.getpid()}
    assert tiny_run.same(tiny_run.kept(tmp_path / "plain"), tiny_run.kept(tmp_path / "profiled"))


def traced(path) -> list[dict]:
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.slow
def test_a_worker_traces_its_own_rollout_of_one_group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A task of its own: the tiny one exists only in this process.
    groups = {"num_groups": 2, "task": "digits-mlp", "episode": {"horizon": 2}}
    profile(tmp_path / "alone", None, updates=2, **groups)
    profile(tmp_path / "workers", Path("traces"), updates=2, workers=2, **groups)
    assert sorted(os.listdir("traces")) == ["rollout_1.json", "update_1.json"]
    (player,) = {event["pid"] for event in traced(Path("traces/rollout_1.json")) if event.get("cat") == "cpu_op"}
    assert player != os.getpid()
    assert tiny_run.same(tiny_run.kept(tmp_path / "alone"), tiny_run.kept(tmp_path / "workers"))


def test_a_worker_with_another_working_directory_finds_the_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profiler = UpdateProfiler(Path("traces"), 0, 2)
    assert profiler.rollout_path(0) is None
    assert profiler.rollout_path(1) == str(tmp_path / "traces" / "rollout_1.json")


def test_a_trace_that_cannot_be_written_costs_no_episodes(tmp_path, capsys):
    (tmp_path / "rollout_1.json").mkdir()
    with profiled_rollout(str(tmp_path / "rollout_1.json")):
        played = True
    assert played
    assert "the trace of a rollout is not written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_is_traced_at_its_own_second_update(tmp_path, tiny_task):
    profile(tmp_path / "run", None, updates=2)
    profile(tmp_path / "run", tmp_path / "traces", updates=4, resume=True)
    assert sorted(os.listdir(tmp_path / "traces")) == ["rollout_3.json", "update_3.json"]


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path, tiny_task):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="there is a file where a directory is needed"):
        profile(tmp_path / "run", tmp_path / "file" / "traces")

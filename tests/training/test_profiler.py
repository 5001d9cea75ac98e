"""A trace of one update, where the user wants it."""

import json

import pytest
from helpers import tiny_run

from simic.storage.files import OutputError
from simic.storage.run_directory import RunDirectory
from simic.training.build import build_run
from simic.training.loop import train


def profile(path, directory, *, resume: bool = False, updates: int = 3) -> None:
    run_directory = RunDirectory(path)
    config = tiny_run.make_config(updates=updates)
    with run_directory.lock():
        run = build_run(config, run_directory, resume=resume, profile=directory, quiet=True, say=lambda text: None)
        assert train(run).status == "done"


def test_the_second_update_is_traced_and_nothing_else_changes(tmp_path, tiny_task):
    profile(tmp_path / "plain", None)
    profile(tmp_path / "profiled", tmp_path / "new" / "traces")
    (trace,) = (tmp_path / "new/traces").iterdir()
    assert trace.name == "update_1.json"
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any("lstm" in name for name in names)
    assert any("backward" in name.lower() for name in names)
    assert tiny_run.same(tiny_run.kept(tmp_path / "plain"), tiny_run.kept(tmp_path / "profiled"))


@pytest.mark.slow
def test_a_resumed_run_is_traced_at_its_own_second_update(tmp_path, tiny_task):
    profile(tmp_path / "run", None, updates=2)
    profile(tmp_path / "run", tmp_path / "traces", updates=4, resume=True)
    assert [trace.name for trace in (tmp_path / "traces").iterdir()] == ["update_3.json"]


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path, tiny_task):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="there is a file where a directory is needed"):
        profile(tmp_path / "run", tmp_path / "file" / "traces")

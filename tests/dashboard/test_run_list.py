"""The list of runs below a directory."""

import os

import pytest
from helpers.recorded import write_recorded

from simic.dashboard import run_list as listing
from simic.dashboard.run_list import run_list
from simic.storage.run_directory import RunDirectory


def test_runs_are_listed_with_their_facts(tmp_path):
    write_recorded(tmp_path / "first")
    write_recorded(tmp_path / "deep" / "second", updates=1, end=False)
    (tmp_path / "empty").mkdir()
    found = {entry["id"]: entry for entry in run_list(tmp_path)}
    assert found.keys() == {"first", "deep/second"}
    first = found["first"]
    assert (first["name"], first["kind"], first["status"], first["preset"]) == ("first", "training", "done", "quick")
    assert (first["update"], first["updates"], first["score"], first["gain"]) == (3, 9, 72.0, 1.5)
    assert (first["started"], first["last_event"], first["faults"]) == (100.0, 200.0, 3)
    assert first["bytes"] == sum(path.stat().st_size for path in (tmp_path / "first").iterdir())
    assert found["deep/second"]["status"] == "stale"
    with RunDirectory(tmp_path / "deep" / "second").lock_log():
        assert {entry["id"]: entry["status"] for entry in run_list(tmp_path)}["deep/second"] == "running"


def test_a_run_lists_itself(tmp_path):
    write_recorded(tmp_path / "run")
    assert [entry["id"] for entry in run_list(tmp_path / "run")] == ["run"]
    assert run_list(tmp_path / "none") == []


def test_the_newest_comes_first_and_facts_follow_the_files(tmp_path):
    old, new = write_recorded(tmp_path / "old", end=False), write_recorded(tmp_path / "new")
    assert [entry["id"] for entry in run_list(tmp_path)] == ["new", "old"]
    for name in ("events.jsonl", "process.jsonl"):
        (new / name).write_bytes((old / name).read_bytes())
    assert {entry["status"] for entry in run_list(tmp_path)} == {"stale"}


def test_links_are_not_followed(tmp_path):
    outside = write_recorded(tmp_path / "outside")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(outside)
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    fake = tmp_path / "runs" / "fake"
    fake.mkdir()
    (fake / "events.jsonl").symlink_to(outside / "events.jsonl")
    assert run_list(tmp_path / "runs") == []


def test_of_long_files_the_ends_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "END_BYTES", (900, 4000))
    monkeypatch.setattr(listing, "START_BYTES", 900)
    run = write_recorded(tmp_path / "run", updates=20)
    assert run.joinpath("events.jsonl").stat().st_size > 10_000
    (entry,) = run_list(tmp_path)
    assert (entry["update"], entry["score"], entry["status"], entry["task"]) == (20, 89.0, "done", "mlp")


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"{}\n[]\n", b'{"kind":"update"}\n'])
def test_damaged_files_are_listed(tmp_path, content):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("events.jsonl", "process.jsonl"):
        (run / name).write_bytes(content)
    (entry,) = run_list(tmp_path)
    assert (entry["update"], entry["score"], entry["status"]) == (0, None, "stale")


def test_a_directory_that_cannot_be_read_is_left_out(tmp_path):
    write_recorded(tmp_path / "run")
    (tmp_path / "closed").mkdir(mode=0)
    assert [entry["id"] for entry in run_list(tmp_path)] == ["run"]
    os.chmod(tmp_path / "closed", 0o700)

"""The run directory: where files live, and one writer at a time."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.tiny_run import play_run

from simic.storage.files import FileKindError, OutputError
from simic.storage.run_directory import DIRECTORIES, RunDirectory, RunLockedError, list_runs, new_directory

HOLDER = """
import subprocess, sys
from pathlib import Path
from simic.storage.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "one")


def test_the_tree_is_made_on_request_only(run):
    assert not run.path.exists()
    assert run.create() is run
    run.create()
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "episodes"]
    assert run.events == run.path / "events.jsonl"
    assert run.process == run.path / "process.jsonl"


def test_a_place_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file.*choose another place"):
        RunDirectory(tmp_path / "file" / "run").create()
    with pytest.raises(OutputError, match=r"cannot write .*file.*choose another place"):
        RunDirectory(tmp_path / "file").create()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match=r"Permission denied; choose another place"):
        RunDirectory(tmp_path / "run").create()


def test_the_lock_is_for_one_at_a_time(run):
    with run.lock():
        with pytest.raises(RunLockedError, match=rf"in use by process {os.getpid()} on .*another --out"), run.lock():
            pass
        assert str(os.getpid()) in run.lock_file.read_text()  # the refused one changed nothing
    with run.lock():
        pass


def test_the_lock_is_released_by_an_error(run):
    with pytest.raises(KeyError), run.lock():
        raise KeyError
    with run.lock():
        pass


def test_a_second_process_is_refused_and_the_lock_dies_with_its_holder(run):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(RunLockedError, match=f"process {holder.pid} on"), run.lock():
                pass
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            with run.lock():  # although a child of the dead process lives on
                assert f'"pid": {os.getpid()}' in run.lock_file.read_text()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_holder_that_has_not_said_who_it_is(run):
    with run.lock():
        run.lock_file.write_text("")
        with pytest.raises(RunLockedError, match="in use by another process"), run.lock():
            pass


def fail_in(run: RunDirectory, file: str, content: str = "") -> None:
    """Lock the run, write a file in it, and fail."""
    with run.lock():
        (run.path / file).write_text(content)
        raise KeyError


def test_a_run_that_never_began_leaves_nothing(tmp_path):
    (tmp_path / "mine").mkdir()
    for path in (tmp_path / "new/run", tmp_path / "mine"):
        with pytest.raises(KeyError):
            fail_in(RunDirectory(path), "events.jsonl")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
    with pytest.raises(KeyError):
        fail_in(RunDirectory(tmp_path / "run"), "config.json", "{}")  # it began
    assert (tmp_path / "run/lock").exists()


def test_files_that_were_there_before_stay(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    for name in ("events.jsonl", "notes"):
        (run.path / name).touch()
    with pytest.raises(KeyError):
        fail_in(run, "episodes/one")
    assert sorted(path.name for path in run.path.iterdir()) == ["episodes", "events.jsonl", "notes"]


def test_a_lock_that_was_removed_meanwhile_is_not_taken(run, monkeypatch):
    """Another process removed the lock between our opening the file and locking it."""

    def remove_first(descriptor: int, operation: int) -> None:
        run.lock_file.unlink()

    monkeypatch.setattr("fcntl.flock", remove_first)
    with pytest.raises(RunLockedError, match="was just released by another process: try again"), run.lock():
        pass


def test_directories_named_after_the_time_are_unique(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda pattern: "now")
    root, barrier = tmp_path / "runs", threading.Barrier(4)

    def begin(number: int) -> Path:
        with new_directory(root) as path:
            barrier.wait()
            (path / str(number)).touch()
        return path

    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(begin, range(4)))
    assert sorted(path.name for path in paths) == ["now", "now-2", "now-3", "now-4"]
    assert all(len(list(path.iterdir())) == 1 for path in paths)
    with new_directory(root) as path:
        pass
    assert not path.exists()
    assert len(list(root.iterdir())) == 4


def test_runs_are_listed_by_name(tmp_path):
    for name in ("b", "a"):
        RunDirectory(tmp_path / name).create()
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "c").mkdir()
    RunDirectory(tmp_path / "c").process.write_text("")
    assert [run.path.name for run in list_runs(tmp_path)] == ["a", "b", "c"]
    assert list_runs(tmp_path / "nowhere") == []
    assert len(list_runs(str(tmp_path))) == 3


# Untrusted directories.

FILES = ("lock", "events.jsonl", "process.jsonl", "config.json", "controller.safetensors", "mirrors.json")
INNER = (
    "checkpoints/update_000001/state.json",
    "checkpoints/update_000001",
    "checkpoints/update_000002.safetensors",
    "episodes/update_000000.safetensors",
    "comparison/results.json",
    "comparison/parts",
)


@pytest.fixture
def users(tmp_path) -> Path:
    """The user's files, which a link may lead to."""
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "thesis.txt").write_text("the only copy\nof it")
    return tmp_path / "users"


@pytest.mark.parametrize("target", ["thesis.txt", "nowhere", ".", "/dev/null"])
@pytest.mark.parametrize("name", [*FILES, *DIRECTORIES, *INNER])
def test_a_link_in_a_run_is_refused_before_anything_is_written(run, users, name, target):
    path = run.path / name
    path.parent.mkdir(parents=True)
    path.symlink_to(users / target)
    before = sorted(str(path) for path in run.path.rglob("*"))
    with pytest.raises(FileKindError, match=rf"^{re.escape(str(path))} is a symbolic link, where simic"), run.lock():
        pass
    assert sorted(str(path) for path in run.path.rglob("*")) == before
    assert (users / "thesis.txt").read_text() == "the only copy\nof it"
    assert sorted(os.listdir(users)) == ["thesis.txt"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_pipes_and_directories_in_the_place_of_files_are_refused(run, name, make):
    run.path.mkdir(parents=True)
    make(run.path / name)
    with pytest.raises(FileKindError, match="where simic needs a regular file"), run.lock():
        pass


def test_a_link_to_a_directory_may_be_the_place_of_a_run(tmp_path, users):
    (tmp_path / "link").symlink_to(users)
    with RunDirectory(tmp_path / "link").lock():
        assert (users / "lock").is_file()
    with RunDirectory(tmp_path / "link").lock():
        pass


def test_links_that_wandb_makes_are_its_own_concern(run):
    (run.path / "wandb").mkdir(parents=True)
    (run.path / "wandb" / "latest-run").symlink_to("run-1")
    with run.lock():
        pass


@pytest.mark.parametrize("name", ["events.jsonl", "process.jsonl", "controller.safetensors", "lock"])
def test_files_that_no_run_wrote_are_not_overwritten(run, name):
    run.path.mkdir(parents=True)
    (run.path / name).write_text("the only copy\nof it")
    with pytest.raises(FileExistsError, match=rf"{name}.*choose another --out"), run.lock():
        pass
    assert (run.path / name).read_text() == "the only copy\nof it"


def test_a_damaged_lock_of_a_run_is_written_anew(run):
    run.create().config.write_text("{}")
    run.lock_file.write_bytes(b"\0" * 50)
    with run.lock():
        assert str(os.getpid()) in run.lock_file.read_text()


def test_a_hard_link_to_a_file_of_the_users_is_refused(run, users):
    run.path.mkdir(parents=True)
    os.link(users / "thesis.txt", run.lock_file)
    with pytest.raises(FileKindError, match="is a hard link"), run.lock():
        pass
    assert (users / "thesis.txt").read_text() == "the only copy\nof it"


def test_a_users_own_temporary_files_stay_and_ours_are_swept(tmp_path, tiny_task):
    own, ours = tmp_path / "run" / ".notes.tmp", tmp_path / "run" / ".simic-0123456789abcdef.tmp"
    own.parent.mkdir()
    for path in (own, ours, own.with_name("config.new")):
        path.write_text("draft")
    code, _ = play_run(tmp_path / "run", updates=1)
    assert code == 0
    assert own.read_text() == "draft"
    assert own.with_name("config.new").read_text() == "draft"
    assert not ours.exists()


def test_a_view_that_looks_at_the_lock_keeps_nobody_out(run):
    run.create().config.write_text("{}")
    with run.lock():
        pass
    with run.lock_file.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.03, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with run.lock():
            assert run.holder() is not None

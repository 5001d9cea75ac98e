"""Worker processes: results do not depend on their number or on deaths, and no process is left behind.

A worker imports torch, which takes seconds: most of these tests are slow.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from helpers import jobs

from simic import plugins
from simic.workers import local_processes
from simic.workers.local_processes import LocalProcessPool
from simic.workers.protocol import WorkerError, WorkersDiedError


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Neither a worker nor a zombie; Python's own helper processes live as long as this process."""
    yield
    assert multiprocessing.active_children() == []
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    assert all(line and "spawn_main" not in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_come_in_the_order_of_the_jobs_and_workers_are_used_again(num_workers):
    pool = LocalProcessPool(jobs.slow_power, num_workers)
    try:
        first = pool.run(3, range(5))
        second = pool.run(2, range(5))  # sends the other `common`
    finally:
        pool.close()
    assert [result for result, _ in first] == [1, 3, 9, 27, 81]
    assert [result for result, _ in second] == [1, 2, 4, 8, 16]
    pids = {pid for _, pid in first}
    assert pids == {pid for _, pid in second}
    assert len(pids) == num_workers
    assert os.getpid() not in pids
    assert pool.faults == []


def test_the_job_of_a_killed_worker_is_run_again(tmp_path):
    pool = LocalProcessPool(jobs.die_once, 2)
    try:
        assert pool.run(tmp_path / "died", range(5)) == [0, 10, 20, 30, 40]
        (fault,) = pool.faults
        assert (fault.job, fault.error) == (2, "exit code -9")
        assert fault.pid not in {child.pid for child in multiprocessing.active_children()}
        assert pool.run(tmp_path / "died", range(2)) == [0, 10]
    finally:
        pool.close()


@pytest.mark.slow
def test_results_of_an_abandoned_stream_are_dropped():
    """Otherwise they would be taken for results of the next call."""
    pool = LocalProcessPool(jobs.slow_power, 2)
    try:
        stream = pool.stream(2, range(6))
        next(stream)
        assert isinstance(stream, Generator)
        stream.close()
        assert [result for result, _ in pool.run(3, range(4))] == [1, 3, 9, 27]
    finally:
        pool.close()


@pytest.mark.slow
def test_workers_go_on_while_the_caller_does_something_else(tmp_path):
    """Each with the job that it was given when the one before was done."""
    pool = LocalProcessPool(jobs.touch, 1)
    try:
        stream = pool.stream(tmp_path, ["first", "second"])
        assert next(stream) == (0, "first")
        deadline = time.monotonic() + 30
        while not (tmp_path / "second").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert list(stream) == [(1, "second")]
    finally:
        pool.close()


@pytest.mark.slow
def test_an_idle_worker_that_dies_is_replaced():
    pool = LocalProcessPool(jobs.power, 1)
    try:
        ((_, pid),) = pool.run(2, [1])
        os.kill(pid, signal.SIGKILL)
        ((result, other),) = pool.run(3, [2])
    finally:
        pool.close()
    assert result == 9
    assert other != pid
    assert [fault.pid for fault in pool.faults] == [pid]


@pytest.mark.slow
def test_a_job_that_raises_is_not_retried_and_shows_its_traceback():
    pool = LocalProcessPool(jobs.fail, 1)
    with pytest.raises(WorkerError, match=r"(?s)job 1 failed in a worker:.*jobs\.py.*raise KeyError.*the bug") as error:
        pool.run(None, [0, 1, 2])
    assert not isinstance(error.value, OSError)  # exit code 1: a bug


@pytest.mark.slow
def test_a_job_that_kills_every_worker_ends_the_run(monkeypatch):
    monkeypatch.setattr(local_processes, "MAX_DEATHS", 3)
    pool = LocalProcessPool(jobs.die_always, 2)
    with pytest.raises(WorkersDiedError, match="3 workers died, the last one with exit code -9: there may be too"):
        pool.run(None, range(4))
    assert len(pool.faults) == 3
    assert {fault.job for fault in pool.faults} == {1}
    assert issubclass(WorkersDiedError, WorkerError)
    assert issubclass(WorkersDiedError, OSError)  # exit code 4: the machine's fault


@pytest.mark.slow
def test_workers_use_one_thread_and_transfer_large_objects():
    pool = LocalProcessPool(jobs.threads, 1)
    try:
        assert pool.run(None, [0]) == [1]
    finally:
        pool.close()
    pool = LocalProcessPool(jobs.large, 2)
    try:
        load = os.urandom(3_000_000)
        assert pool.run(load, range(3)) == [load, load * 2, load * 3]
    finally:
        pool.close()


@pytest.mark.slow
def test_workers_exit_when_their_parent_is_killed(tmp_path):
    pid_file = tmp_path / "pids"
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from helpers import jobs
from simic.workers.local_processes import LocalProcessPool
if __name__ == "__main__":
    pool = LocalProcessPool(jobs.slow_power, 2)
    pids = {{pid for _, pid in pool.run(1, range(4))}}
    stream = pool.stream(1, [0, 1, 100, 101])
    next(stream), next(stream)  # both workers are busy for an hour
    open({str(pid_file)!r}, "w").write(" ".join(map(str, pids)))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = tmp_path / "parent.py"
    script.write_text(code)
    assert subprocess.run([sys.executable, script], check=False, timeout=120).returncode == -signal.SIGKILL
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


SCRIPT = """
import os
from helpers import jobs
from simic.workers.local_processes import LocalProcessPool

print("runs", flush=True)
pool = LocalProcessPool(jobs.power, 1)
print([result for result, pid in pool.run(3, [0, 2]) if pid != os.getpid()])
pool.close()
"""


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    sources = [str(Path(jobs.__file__).parent.parent), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sources)}
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, check=False)


def test_a_script_needs_no_main_guard(tmp_path):
    done = run_script(tmp_path / "script.py", SCRIPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:2] == ["runs", "[1, 9]"]  # the script ran once


def test_a_job_defined_in_the_script_is_refused_in_one_line(tmp_path):
    text = SCRIPT.replace('print("runs"', 'class Mine: pass\n\nprint("runs"').replace("[0, 2]", "[Mine()]")
    done = run_script(tmp_path / "script.py", text)
    assert "define what jobs use in a module that can be imported" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1


# Plugins.

PLUGIN = """
from helpers import jobs
jobs.OFFSETS["plugin"] = 100
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The name of a plugin module that this process has loaded; it registers an offset of 100."""
    (tmp_path / "offset_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.setattr(jobs, "OFFSETS", {})
    plugins.load_plugins(["offset_plugin"])
    yield tmp_path / "offset_plugin.py"
    sys.modules.pop("offset_plugin")


def test_workers_load_the_plugins_of_their_parent_first(plugin):
    pool = LocalProcessPool(jobs.add_offset, 1)
    try:
        assert pool.run("plugin", [1, 2]) == [101, 102]
    finally:
        pool.close()


@pytest.mark.slow
def test_a_plugin_that_fails_in_a_worker_is_reported(plugin):
    plugin.write_text("raise ZeroDivisionError")
    with pytest.raises(WorkerError, match=r"(?s)plugin offset_plugin failed.*ZeroDivisionError"):
        LocalProcessPool(jobs.add_offset, 1).run("plugin", [1])

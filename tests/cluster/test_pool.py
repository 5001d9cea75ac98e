"""The pool on a cluster of simulated nodes: who runs what, what is lost, what is refused."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from helpers import jobs
from helpers.clusters import SimulatedCluster

from simic.plugins import load_plugins
from simic.workers.placement import Placement
from simic.workers.protocol import JobRefusedError, WorkerError, WorkersDiedError
from simic.workers.ray_cluster import ClusterError
from simic.workers.ray_dispatch import JOBS_PER_WORKER, MAX_RETRIES
from simic.workers.ray_pool import RayPool


def make_pool(cluster: SimulatedCluster, function, check=None, **settings) -> RayPool:
    return RayPool(function, Placement(backend="ray", address=cluster.address, **settings), check)


@pytest.fixture
def pool_of(cluster):
    """Makes pools on the module's cluster and closes them."""
    made = []

    def make(function, check=None, **settings) -> RayPool:
        made.append(make_pool(cluster, function, check, **settings))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def test_every_cpu_of_the_cluster_has_a_worker_and_no_more_than_two_jobs(pool_of):
    pool, in_flight, pids = pool_of(jobs.sleep_and_tell), [], set()
    for _, pid in pool.stream(0.1, range(12)):
        pids.add(pid)
        in_flight.append(pool.status().in_flight)
    status = pool.status()
    assert (status.workers, status.nodes, len(pids)) == (2, 2, 2)
    assert str(status) == "2 workers on 2 nodes"
    assert max(in_flight) <= JOBS_PER_WORKER * 2
    assert max(in_flight) > 2  # the next job waits at the worker, not at the driver


def test_fewer_workers_than_cpus_are_spread(pool_of):
    pool = pool_of(jobs.threads, workers=1)
    assert pool.run(None, [0, 1]) == [1, 1]  # one thread each
    assert pool.status().workers == 1


def test_a_killed_worker_is_replaced_and_its_job_run_again(pool_of, tmp_path):
    pool = pool_of(jobs.die_once)
    assert pool.run(tmp_path / "died", range(6)) == [0, 10, 20, 30, 40, 50]
    (fault,) = pool.faults
    assert fault.job == 2
    assert fault.node.startswith("127.0.0.1/")
    assert f"worker {fault.pid} on node {fault.node} died" in str(fault)
    assert "1 jobs lost and run again" in str(pool.status())
    assert pool.run(tmp_path / "died", range(2)) == [0, 10]


def test_a_job_that_kills_every_worker_is_named(pool_of):
    pool = pool_of(jobs.die_always)
    with pytest.raises(WorkersDiedError, match=rf"job 1 \(1\) lost its worker {MAX_RETRIES + 1} times"):
        pool.run(None, range(3))
    assert [fault.job for fault in pool.faults] == [1] * (MAX_RETRIES + 1)


def test_a_job_that_raises_is_not_run_again(pool_of, tmp_path):
    with pytest.raises(JobRefusedError, match="job 1 cannot be done: choose another") as raised:
        pool_of(jobs.count_and_fail).run(tmp_path, range(3))
    assert "in count_and_fail" in str(raised.value.__cause__)  # the worker's own traceback
    assert len(list(tmp_path.iterdir())) == 1
    pool = pool_of(jobs.fail)
    with pytest.raises(WorkerError, match="KeyError: 'the bug'"):
        pool.run(None, [1])
    assert pool.status().workers == 0  # also when it was the last job, the workers are gone


def test_what_a_node_lacks_is_told_before_any_job(pool_of):
    with pytest.raises(ClusterError, match=r"^node 127.0.0.1/\w+: there are no data in /data: put them there"):
        pool_of(jobs.power, jobs.refuse_here).start()


def test_plugins_reach_nodes_that_do_not_have_them(pool_of, tmp_path, monkeypatch):
    (tmp_path / "sent_plugin").mkdir()
    (tmp_path / "sent_plugin/__init__.py").write_text("from sent_plugin.part import VALUE\n")
    (tmp_path / "sent_plugin/part.py").write_text("from helpers import jobs\nVALUE = 5\njobs.OFFSETS['sent'] = VALUE\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("simic.plugins._loaded", [])
    load_plugins(["sent_plugin"])
    pool = pool_of(jobs.add_offset)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    assert pool.run("sent", [1, 2]) == [6, 7]


def test_workers_follow_the_nodes_of_the_cluster(new_cluster):
    cluster = new_cluster()
    first, pool, seen, added = cluster.add_node(), None, [], None
    try:
        pool = make_pool(cluster, jobs.sleep_and_tell)
        for done, _ in enumerate(pool.stream(0.25, range(80)), 1):
            seen.append(pool.status().nodes)
            if done == 4:
                added = cluster.add_node()
            if added is not None and seen[-1] == 2 and first in cluster.nodes:
                cluster.kill_node(first)
        assert set(seen) == {1, 2}  # one node, both, and one again
        assert seen[-1] == 1
        assert pool.faults
    finally:
        if pool is not None:
            pool.close()


def test_a_node_with_another_simic_is_refused_at_the_start_and_left_out_later(new_cluster, tmp_path):
    (tmp_path / "simic").mkdir()
    (tmp_path / "simic/__init__.py").write_text('__version__ = "9.9"\n')
    cluster = new_cluster()
    cluster.add_node()
    pool = make_pool(cluster, jobs.sleep_and_tell)
    try:
        for done, _ in enumerate(pool.stream(0.25, range(40)), 1):
            if done == 1:
                cluster.add_node(PYTHONPATH=str(tmp_path))
        assert pool.status().nodes == 1
        assert "has simic 9.9, the driver has" in pool.faults[0].error
    finally:
        pool.close()
    pool = make_pool(cluster, jobs.power)
    with pytest.raises(ClusterError, match=r"^node 127.0.0.1/\w+ has simic 9.9, the driver has .*: install simic"):
        pool.start()


def test_a_cluster_that_is_not_there_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ClusterError, match=f"cannot connect to Ray at {address}"):
        RayPool(jobs.power, Placement(backend="ray", address=address)).start()


def test_ray_keeps_the_signal_handlers_of_the_program(pool_of):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    pool_of(jobs.power).run(2, [1])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_caller_that_stops_iterating_leaves_no_worker(pool_of):
    pool = pool_of(jobs.slow_power)
    _, (_, pid) = next(pool.stream(2, [1, 100, 100, 100]))
    pool.close()
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and _state(pid) not in "ZX":
        assert time.monotonic() < until
        time.sleep(0.1)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_nothing_of_a_worker_is_trusted_beyond_plain_data(pool_of):
    with pytest.raises(WorkerError, match="arrays and plain data, not a TextIOWrapper"):
        pool_of(jobs.open_file).run(os.devnull, [0])

"""Nodes simulated on this machine, with jobs that sleep: what Ray adds to a rollout, and whether the model is right."""

from __future__ import annotations

import importlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cluster_jobs import PretendJob, Sleeper, pretend
from cluster_model import Overheads, Phases, rollout_seconds

from simic.workers.build import make_pool
from simic.workers.placement import Placement
from simic.workers.protocol import Pool

LOOPBACK = "127.0.0.1"
STORE_BYTES = 128 * 2**20
SETTINGS = {
    **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
    **{"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"},
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # no log lines about actors that were killed on purpose
}
"""Environment of the cluster: a token is needed, and it listens on the loopback interface only."""
START_SECONDS = 300.0
SHORT_SLEEP = 0.05
"""Longer than the driver needs for a job, so that it is the worker's overhead that shows."""
MANY_REFERENCES = 2000
"""Jobs in flight with 1,000 workers."""


@contextmanager
def simulated_cluster(nodes: int, cores: int) -> Iterator[str]:
    """The address of a cluster to which this process is connected."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        # Of its own: Ray notes there which cluster `auto` means, and others may run on this machine.
        for name, value in (SETTINGS | {"RAY_TMPDIR": directory}).items():
            os.environ.setdefault(name, value)
        ray = importlib.import_module("ray")
        utilities = importlib.import_module("ray.cluster_utils")
        settings = {"num_cpus": cores, "object_store_memory": STORE_BYTES, "node_ip_address": LOOPBACK}
        cluster = utilities.Cluster(initialize_head=True, head_node_args=settings | {"include_dashboard": False})
        try:
            for _ in range(nodes - 1):
                cluster.add_node(**settings)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def ready_pool(address: str, workers: int) -> Iterator[Pool]:
    """A pool of pretended jobs all of whose workers have started."""
    pool = make_pool(pretend, Placement(backend="ray", address=address, workers=workers))
    until, error = time.monotonic() + START_SECONDS, None
    try:
        while pool.status().workers < workers:
            if time.monotonic() > until:
                ready = pool.status().workers
                raise RuntimeError(f"{ready} of {workers} workers started in {START_SECONDS:.0f} seconds") from error
            try:
                pool.run(None, [PretendJob(0.1, ())] * workers)
            except OSError as failed:  # on a busy machine none may have started in the time that a pool waits
                error = failed
        yield pool
    finally:
        pool.close()


def timed(pool: Pool, common: Any, jobs: Sequence[PretendJob]) -> float:
    """Seconds of a rollout."""
    began = time.perf_counter()
    pool.run(common, jobs)
    return time.perf_counter() - began


def measure_overheads(address: str, phases: Phases, common: Any, rounds: int) -> Overheads:
    """What one worker, the driver and Ray need besides the jobs' own time; the best of several rounds."""
    jobs = phases.jobs(len(phases.groups))
    at_once = [job._replace(seconds=0.0) for job in jobs] * 4
    short = [job._replace(seconds=SHORT_SLEEP) for job in jobs]
    driver, worker, stream = list[float](), list[float](), list[float]()
    with ready_pool(address, 1) as pool:
        for _ in range(rounds + 1):  # the first warms up
            began = time.process_time()
            timed(pool, None, at_once)
            driver.append((time.process_time() - began) / len(at_once))
            worker.append(timed(pool, None, short) / len(short) - SHORT_SLEEP)
            stream.append(timed(pool, common, [PretendJob(0.0, ())]))
        per_reference = wait_seconds() / MANY_REFERENCES
    per_job = min(worker)
    return Overheads(
        per_stream=max(min(stream) - per_job, 0.0),
        per_job_worker=per_job,
        per_job_driver=min(driver),
        per_reference=per_reference,
    )


def wait_seconds() -> float:
    """CPU seconds of one look at many jobs in flight."""
    ray = importlib.import_module("ray")
    sleeper = ray.remote(num_cpus=0)(Sleeper).remote()
    pending = [sleeper.sleep.remote(600.0) for _ in range(MANY_REFERENCES)]
    best = float("inf")
    for _ in range(20):
        began = time.process_time()
        ray.wait(pending, num_returns=1, timeout=0, fetch_local=False)
        best = min(best, time.process_time() - began)
    ray.kill(sleeper)
    return best


def check_model(
    address: str,
    phases: Phases,
    common: Any,
    overheads: Overheads,
    *,
    workers: Sequence[int],
    groups: Sequence[int],
    rounds: int,
) -> float:
    """Print predicted and measured rollouts; returns the largest relative error of a prediction."""
    worst = 0.0
    print("workers  groups  jobs  rollout predicted  measured (best to worst)   error of the prediction")
    for count in workers:
        with ready_pool(address, count) as pool:
            for size in groups:
                jobs = phases.jobs(size)
                costs = {"common_bytes": phases.common_bytes, "overheads": overheads}
                predicted = rollout_seconds(jobs, workers=count, **costs)
                found = sorted(timed(pool, common, jobs) for _ in range(rounds))
                error = predicted / found[0] - 1
                worst = max(worst, abs(error))
                print(
                    f"{count:7d}  {size:6d}  {len(jobs):4d}  {predicted:15.3f} s  "
                    f"{found[0]:7.3f} to {found[-1]:7.3f} s  {error:+22.1%}",
                    flush=True,
                )
    return worst

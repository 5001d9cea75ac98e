"""A model of an update on a cluster: measured costs in, seconds out, for any number of workers and groups.

The driver does one thing at a time: it hands out jobs, receives results and learns. A worker has one job that runs and
one that waits, as in `simic.workers.ray_pool`. Groups are handed out first, then their twins, which are shorter. Real
runs play twins while the driver learns, so the model is on the slow side by up to their time:

    driver   common data | hand out 2 jobs per worker | receive, hand out | receive, hand out | ... | learn
    worker               fetch common data | group .............. | group ............ | twin ...
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster_jobs import PretendJob

JOBS_PER_WORKER = 2


@dataclass(frozen=True, kw_only=True)
class Phases:
    """What a task costs wherever its jobs run, in seconds of a free core."""

    groups: tuple[PretendJob, ...]
    """The groups that were played; in larger rollouts they repeat."""
    twins: tuple[PretendJob, ...]
    common_bytes: int
    """Weights and settings, sent to every node once per update."""
    decisions_per_group: int
    learn_seconds: float
    """What follows a rollout however small: statistics, update, record, checkpoint."""
    learn_seconds_per_group: float

    def jobs(self, groups: int) -> list[PretendJob]:
        """The jobs of an update in the order in which they are handed out."""
        return [kind[index % len(kind)] for kind in (self.groups, self.twins) for index in range(groups)]

    def learning(self, groups: int) -> float:
        """Seconds of an update in which workers wait for the learner."""
        return self.learn_seconds + groups * self.learn_seconds_per_group

    @property
    def learner_limit(self) -> float:
        """Decisions per second that no number of workers exceeds: large rollouts that take no time to play."""
        return self.decisions_per_group / self.learn_seconds_per_group


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """What Ray adds, in seconds."""

    per_stream: float
    """From the call to the first job that runs: common data are stored, fetched and unpickled."""
    per_job_worker: float
    """Of a worker between two jobs."""
    per_job_driver: float
    """CPU time of the driver for a job; assumed: half to hand it out, half to receive its result."""
    per_reference: float
    """Of one wait, for each job in flight."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Between the driver and other machines."""

    bytes_per_second: float = math.inf
    latency: float = 0.0
    """Seconds until a result that is asked for begins to arrive."""
    workers_per_node: int = 16


ONE_MACHINE = Network()


def rollout_seconds(
    jobs: Sequence[PretendJob],
    *,
    workers: int,
    common_bytes: int,
    overheads: Overheads,
    network: Network = ONE_MACHINE,
) -> float:
    """From the call to the last result received: every job is simulated."""
    used = min(workers, len(jobs))
    clock = math.ceil(used / network.workers_per_node) * common_bytes / network.bytes_per_second
    free = [clock + overheads.per_stream] * used
    waiting, running = deque(range(len(jobs))), list[tuple[float, int, int]]()

    def hand_to(worker: int) -> None:
        nonlocal clock
        job = waiting.popleft()
        clock += overheads.per_job_driver / 2
        free[worker] = max(free[worker], clock) + overheads.per_job_worker + jobs[job].seconds
        heapq.heappush(running, (free[worker], worker, job))

    for worker in list(range(used)) * JOBS_PER_WORKER:
        if waiting:
            hand_to(worker)
    while running:
        # Twice per turn the driver looks at all jobs in flight: is one ready, and which others are.
        clock = max(clock, running[0][0]) + 2 * overheads.per_reference * len(running)
        ready = []
        while running and running[0][0] <= clock:
            ready.append(heapq.heappop(running))
        for _, worker, job in ready:
            transfer = network.latency + sum(jobs[job].arrays) / network.bytes_per_second
            clock += overheads.per_job_driver / 2 + transfer
            if waiting:
                hand_to(worker)
    return clock


def decisions_per_second(
    phases: Phases, overheads: Overheads, *, groups: int, workers: int, network: Network = ONE_MACHINE
) -> float:
    """Of whole updates: rollout, then learning."""
    costs = {"common_bytes": phases.common_bytes, "overheads": overheads, "network": network}
    rollout = rollout_seconds(phases.jobs(groups), workers=workers, **costs)
    return groups * phases.decisions_per_group / (rollout + phases.learning(groups))

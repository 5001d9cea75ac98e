"""Pool backend on Ray: workers are actors on the nodes of a cluster, which may come and go while jobs run.

The driver decides where workers are and which job each has; Ray starts processes, moves data and tells who died.

    stream   common data -> object store, once per call
             job -> worker (at most 2 each: one runs, one waits there so that the worker never idles) -> plain data
             worker or node dies -> its jobs go back to the front of the queue, the one that ran at most 3 times
"""

from __future__ import annotations

import pickle
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simic.workers import node_probe
from simic.workers.node_checks import differing_bits, missing_on
from simic.workers.placement import DEFAULT_WORKERS, Placement
from simic.workers.plain_data import array_bytes, from_plain
from simic.workers.protocol import (
    Check,
    Fault,
    JobFunction,
    JobRefusedError,
    Pool,
    PoolStatus,
    WorkerError,
    WorkersDiedError,
)
from simic.workers.ray_cluster import ClusterError, Node, RayConnection, only_on, ray_module
from simic.workers.ray_worker import RayWorker, own_surroundings

JOBS_PER_WORKER = 2
MAX_RETRIES = 3
"""How often a job is run again after its worker died."""
MAX_START_DEATHS = 10
"""Workers that may die in a row before they had a job."""
POLL_SECONDS = 1.0
"""Longest time until the pool looks for lost and new nodes."""
PATIENCE_SECONDS = 60.0
"""How long a pool waits for a first worker, or for a node when all are gone."""
HEAD_SECONDS = 10.0
"""How long the head node may be out of reach."""


@dataclass(eq=False)
class _Worker:
    actor: Any
    node: Node
    starting: Any
    """Reference of the answer to `start`; None once the worker is ready."""
    pid: int = -1
    jobs: deque[int] = field(default_factory=deque)
    """In the order in which the worker runs them."""
    death: str = ""
    """How it died."""


class RayPool(Pool):
    """Connects to Ray, or starts it, with the first `start` or `stream`."""

    def __init__(self, function: JobFunction, placement: Placement, check: Check | None = None) -> None:
        self.function, self.placement, self.check, self.faults = function, placement, check, list[Fault]()
        self.num_workers = placement.workers or (DEFAULT_WORKERS if placement.address is None else None)
        self.bytes_sent = self.bytes_received = 0
        """Array bytes and pickled bytes since the pool was made; common data count once per node."""
        self._connection: RayConnection | None = None
        self._workers: list[_Worker] = []
        self._facts: dict[str, Mapping[str, Any]] = {}
        """Of the nodes that were checked, by name."""
        self._refused: set[str] = set()
        """Ids of nodes that joined later and cannot work."""
        self._probes: dict[Any, Node] = {}
        self._flying: dict[Any, tuple[_Worker, int]] = {}
        """The worker and job of each reference that is awaited."""
        self._version = self._lost = self._start_deaths = 0
        self._looked = -float("inf")

    def start(self) -> dict[str, Mapping[str, Any]]:
        """Connect, check every node and start the workers; returns the facts of the nodes by name."""
        if self._connection is None:
            self._connection = RayConnection(self.placement, self.num_workers)
            try:
                own = node_probe.probe()
                self._facts = self._connection.probe_all()
                for name, facts in self._facts.items():
                    if reason := missing_on(name, facts, own):
                        raise ClusterError(reason)
                self._place_workers()
                self._await_first_worker()
            except BaseException:
                self.close()
                raise
        return self._facts

    def warning(self) -> str | None:
        """What the user should know about the nodes that have been checked."""
        return differing_bits(self._facts, node_probe.probe())

    def stream(self, common: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the job, result) in the order of completion."""
        self.start()  # before Ray is imported: its settings are read then
        ray = ray_module()
        self._version += 1
        version, waiting, deaths, unfinished = self._version, deque(range(len(jobs))), Counter[int](), len(jobs)
        content = pickle.dumps(common, protocol=5)
        self.bytes_sent += len(content) * len({worker.node.id for worker in self._workers})
        shared = ray.put(content)
        last_progress = time.monotonic()
        try:
            while unfinished:
                self._place_workers()
                self._hand_out(waiting, jobs, shared)
                for reference in self._wait():
                    last_progress = time.monotonic()
                    if reference not in self._flying:  # nor is one of a worker that died a moment ago
                        self._answered(reference)
                        continue
                    worker, _ = self._flying[reference]
                    for index, answer in self._collect(reference, worker):
                        worker.jobs.remove(index)
                        unfinished -= 1
                        yield index, self._result(index, answer)
                    if worker not in self._workers:
                        self._requeue(worker, waiting, deaths, jobs)
                if not self._flying and time.monotonic() - last_progress > PATIENCE_SECONDS:
                    raise WorkersDiedError(
                        f"no worker could be started for {PATIENCE_SECONDS:.0f} seconds: every node is gone or busy; "
                        "`simic doctor --address` lists what the cluster has"
                    )
        finally:
            # An error, or a caller that stopped iterating: workers would go on with jobs that nobody wants.
            if unfinished and version == self._version:
                self.close()

    def status(self) -> PoolStatus:
        """Workers that are ready, the nodes they are on, and their jobs."""
        ready = [worker for worker in self._workers if worker.starting is None]
        nodes = len({worker.node.id for worker in ready})
        return PoolStatus(len(ready), nodes, len(self._flying), self._lost)

    def close(self) -> None:
        """Kill all workers and disconnect; Ray itself ends too if simic started it."""
        for worker in self._workers:
            self._kill(worker)
        self._workers.clear()
        self._flying.clear()
        self._probes.clear()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    # Workers.

    def _place_workers(self) -> None:
        """Start workers where there is room, on the nodes with the fewest first. Nodes that joined are checked."""
        assert self._connection is not None
        if time.monotonic() - self._looked < POLL_SECONDS:
            return
        self._looked = time.monotonic()
        if not self._connection.head_answers(HEAD_SECONDS):
            raise WorkersDiedError(
                f"the head node of the cluster at {self._connection.address} is gone: continue with --resume auto "
                "--address and another cluster, or --backend local"
            )
        here = Counter(worker.node.id for worker in self._workers)
        room: dict[Node, int] = {}
        for node in self._connection.nodes():
            if node.name in self._facts:
                room[node] = self._capacity(node) - here[node.id]
            elif node.id not in self._refused and node not in self._probes.values():
                self._probes[self._connection.start_probe(node)] = node
        while (self.num_workers is None or len(self._workers) < self.num_workers) and any(
            free > 0 for free in room.values()
        ):
            node = min((node for node, free in room.items() if free > 0), key=lambda node: here[node.id])
            self._start_worker(node)
            here[node.id] += 1
            room[node] -= 1

    def _capacity(self, node: Node) -> int:
        gpus = self.placement.gpus_per_worker
        return min(node.cpus, int(node.gpus / gpus + 1e-9)) if gpus else node.cpus

    def _start_worker(self, node: Node) -> None:
        options = {"num_cpus": 1, "num_gpus": self.placement.gpus_per_worker, "max_restarts": 0, "max_task_retries": 0}
        actor = ray_module().remote(RayWorker).options(**options, scheduling_strategy=only_on(node))
        handle = actor.remote(pickle.dumps((self.function, self.check)), tuple(own_surroundings()))
        self._workers.append(_Worker(handle, node, handle.start.remote()))

    def _await_first_worker(self) -> None:
        """Wait until every node has tried to start a worker or one is ready; what a node lacks is raised here."""
        until = time.monotonic() + PATIENCE_SECONDS
        while any(worker.starting is not None for worker in self._workers) and time.monotonic() < until:
            for reference in self._wait():
                self._answered(reference)
        if not any(worker.starting is None for worker in self._workers):
            if self.faults:
                raise ClusterError(f"no worker could be started: {self.faults[-1].error}")
            gpus = f" and {self.placement.gpus_per_worker:g} GPUs" if self.placement.gpus_per_worker else ""
            raise ClusterError(
                f"no node has a free CPU{gpus} for a worker: `simic doctor --address` lists what the cluster has"
            )

    def _answered(self, reference: Any) -> None:
        """A worker is ready or dead, or a node that joined has told its facts."""
        ray = ray_module()

        if (node := self._probes.pop(reference, None)) is not None:
            try:
                facts = ray.get(reference)
            except ray.exceptions.RayError:
                return  # the node is gone again
            if reason := missing_on(node.name, facts, node_probe.probe()):
                self._refused.add(node.id)
                self.faults.append(Fault(-1, f"not used: {reason}", -1, node.name))
            else:
                self._facts[node.name] = facts | node.resources
                self._looked = -float("inf")
            return
        worker = next((own for own in self._workers if own.starting is reference), None)
        if worker is None:
            return
        answer = self._fetch(reference, worker)
        if answer is None:  # it is recorded
            self._start_deaths += 1
            if self._start_deaths >= MAX_START_DEATHS:
                raise WorkersDiedError(f"{self._start_deaths} workers in a row died while they started")
            return
        self._start_deaths, worker.starting, worker.pid = 0, None, answer["pid"]
        if answer["error"] is not None:
            raise ClusterError(f"node {worker.node.name}: {answer['error']}")

    def _kill(self, worker: _Worker) -> None:
        ray = ray_module()

        try:
            ray.kill(worker.actor, no_restart=True)
        except Exception:  # it is dead, or Ray is: both are what was asked for
            return

    # Jobs.

    def _hand_out(self, waiting: deque[int], jobs: Sequence[Any], shared: Any) -> None:
        """Give every worker a job, then every worker a second one."""
        for load in range(JOBS_PER_WORKER):
            for worker in self._workers:
                if waiting and worker.starting is None and len(worker.jobs) == load:
                    index = waiting.popleft()
                    content = pickle.dumps(jobs[index], protocol=5)
                    self.bytes_sent += len(content)
                    self._flying[worker.actor.run.remote(self._version, [shared], content)] = worker, index
                    worker.jobs.append(index)

    def _wait(self) -> list[Any]:
        """References whose answer is there; none after a second in which nothing happened."""
        ray = ray_module()

        starting = [worker.starting for worker in self._workers if worker.starting is not None]
        pending = [*self._flying, *starting, *self._probes]
        if not pending:
            time.sleep(POLL_SECONDS / 4)
            return []
        ready, rest = ray.wait(pending, num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
        if ready and rest:  # all others that are ready too, without waiting
            ready += ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)[0]
        return ready

    def _collect(self, reference: Any, worker: _Worker) -> list[tuple[int, dict[str, Any]]]:
        """The job of a reference with its answer; of a worker that died, all jobs that it had still finished."""
        _, index = self._flying.pop(reference)
        answer = self._fetch(reference, worker)
        if answer is not None:
            return [(index, answer)]
        others = [own for own, (owner, _) in self._flying.items() if owner is worker]
        finished = []
        for own in others:
            _, index = self._flying.pop(own)
            answer = self._fetch(own, worker)
            finished += [(index, answer)] if answer is not None else []
        return finished

    def _fetch(self, reference: Any, worker: _Worker) -> dict[str, Any] | None:
        """The answer of a worker; None if it died, which is then recorded."""
        ray = ray_module()

        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ray.exceptions.RayError):
                raise WorkerError(f"a worker on node {worker.node.name} failed:\n{error}") from None
            reason = error.cause
        except ray.exceptions.RayError as error:
            reason = error
        if worker in self._workers:
            worker.death = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
            self._workers.remove(worker)
            self._kill(worker)
            if worker.starting is not None:
                self._record_death(worker, -1)
        self._looked = -float("inf")
        return None

    def _record_death(self, worker: _Worker, job: int) -> None:
        self.faults.append(Fault(worker.pid, worker.death, job, worker.node.name))

    def _requeue(self, worker: _Worker, waiting: deque[int], deaths: Counter[int], jobs: Sequence[Any]) -> None:
        """Put the jobs of a dead worker back; only the first of them ran, so only that may be the cause."""
        index = worker.jobs[0]
        self._record_death(worker, index)
        deaths[index] += 1
        self._lost += 1
        if deaths[index] > MAX_RETRIES:
            raise WorkersDiedError(
                f"job {index} ({jobs[index]}) lost its worker {deaths[index]} times, the last one on node "
                f"{worker.node.name} ({worker.death}): there may be too little memory; use smaller groups or "
                "fewer workers per node"
            )
        waiting.extendleft(reversed(worker.jobs))
        worker.jobs.clear()

    def _result(self, index: int, answer: dict[str, Any]) -> Any:
        if answer["failure"] is not None:
            error = WorkerError(f"job {index} failed in a worker:\n{answer['failure']}")
            raise error if answer["refusal"] is None else JobRefusedError(answer["refusal"]) from error
        self.bytes_received += array_bytes(answer["result"])
        return from_plain(answer["result"])

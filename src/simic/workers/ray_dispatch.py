"""Who has which job on a Ray cluster. Everything here runs in the thread that makes the calls of Ray.

The driver decides where workers are and which job each has; Ray starts processes, moves data and tells who died.

    begin   common data -> object store, once per call
    turn    job -> worker (at most 2 each: one runs, one waits there so that the worker never idles) -> plain data
            worker or node dies -> its jobs go back to the front of the queue, the one that ran at most 3 times
"""

from __future__ import annotations

import pickle
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simic.workers import node_probe
from simic.workers.node_checks import missing_on
from simic.workers.placement import Placement
from simic.workers.protocol import Check, Fault, JobFunction, PoolStatus, WorkerError, WorkersDiedError
from simic.workers.ray_cluster import ClusterError, Node, RayConnection, first_line, only_on, ray_module
from simic.workers.ray_worker import RayWorker, own_surroundings

JOBS_PER_WORKER = 2
MAX_RETRIES = 3
"""How often a job is run again after its worker died."""
POLL_SECONDS = 1.0
"""Longest time until the pool looks for lost and new nodes."""
PATIENCE_SECONDS = 60.0
"""How long a pool waits for a first node or worker, also when all are gone."""
AVOID_SECONDS = 10.0
"""How long no worker is started on a node where one could not be: Ray takes a while to notice that a node is dead."""


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


@dataclass
class _Call:
    """The jobs of one `stream`."""

    jobs: Sequence[Any]
    shared: Any
    """Reference of the common data."""
    waiting: deque[int]
    deaths: Counter[int] = field(default_factory=Counter)
    last_progress: float = field(default_factory=time.monotonic)


class Dispatcher:
    """The workers of a pool and their jobs."""

    def __init__(
        self,
        connection: RayConnection,
        placement: Placement,
        num_workers: int | None,
        work: tuple[JobFunction, Check | None],
    ) -> None:
        self.connection, self.placement, self.num_workers, self.work = connection, placement, num_workers, work
        self.faults, self.facts = list[Fault](), dict[str, Mapping[str, Any]]()
        """Workers that died; facts of the nodes that were checked, by name."""
        self.bytes_sent = self.lost = 0
        self._workers: list[_Worker] = []
        self._refused: set[str] = set()
        """Ids of nodes that joined later and cannot work."""
        self._avoided: dict[str, float] = {}
        """Until when no worker is started on a node, by its id."""
        self._probes: dict[Any, Node] = {}
        self._flying: dict[Any, tuple[_Worker, int]] = {}
        """The worker and job of each reference that is awaited."""
        self._call = _Call((), None, deque())
        self._version, self._looked = 0, -float("inf")
        self._last_death = ""

    def check_and_start(self) -> None:
        """Check every node, then start the workers; what a node lacks is raised here."""
        until, own = time.monotonic() + PATIENCE_SECONDS, node_probe.probe()
        while not self.connection.nodes() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)  # a cluster that is just being started
        self.facts = self.connection.probe_all()
        for name, facts in self.facts.items():
            if reason := missing_on(name, facts, own):
                raise ClusterError(reason)
        self._place_workers()
        while any(worker.starting is not None for worker in self._workers) and time.monotonic() < until:
            for reference in self._wait():
                self._answered(reference)
        if not any(worker.starting is None for worker in self._workers):
            gpus = f" and {self.placement.gpus_per_worker:g} GPUs" if self.placement.gpus_per_worker else ""
            reason = self._last_death or f"no node has a free CPU{gpus}"
            raise ClusterError(f"no worker could be started: {reason}; `simic doctor --address` lists what there is")

    def begin(self, common: bytes, jobs: Sequence[Any]) -> None:
        """Start a new call, with these pickled common data."""
        self.bytes_sent += len(common) * len({worker.node.id for worker in self._workers})
        self._version += 1
        self._call = _Call(jobs, ray_module().put(common), deque(range(len(jobs))))

    def turn(self) -> list[tuple[int, dict[str, Any]]]:
        """Hand out jobs, wait up to a second, and return the jobs that were finished with the answers of workers."""
        self._place_workers()
        self._hand_out()
        finished = []
        for reference in self._wait():
            self._call.last_progress = time.monotonic()
            if reference not in self._flying:  # nor is one of a worker that died a moment ago
                self._answered(reference)
                continue
            worker, _ = self._flying[reference]
            for index, answer in self._collect(reference, worker):
                worker.jobs.remove(index)
                finished.append((index, answer))
            if worker not in self._workers:
                self._requeue(worker)
        if not self._flying and time.monotonic() - self._call.last_progress > PATIENCE_SECONDS:
            raise WorkersDiedError(
                f"no worker could be started for {PATIENCE_SECONDS:.0f} seconds: every node is gone or busy; "
                "`simic doctor --address` lists what the cluster has"
            )
        return finished

    def status(self) -> PoolStatus:
        """Workers that are ready, the nodes they are on, and their jobs."""
        ready = [worker for worker in self._workers if worker.starting is None]
        return PoolStatus(len(ready), len({worker.node.id for worker in ready}), len(self._flying), self.lost)

    def kill_all(self) -> None:
        """Kill the workers and forget their jobs."""
        for worker in self._workers:
            self._kill(worker)
        self._workers.clear()

    # Workers.

    def _place_workers(self) -> None:
        """Start workers where there is room, on the nodes with the fewest first. Nodes that joined are checked."""
        if time.monotonic() - self._looked < POLL_SECONDS:
            return
        self._looked = time.monotonic()
        here = Counter(worker.node.id for worker in self._workers)
        room: dict[Node, int] = {}
        for node in self.connection.nodes():
            if self._avoided.get(node.id, 0.0) > time.monotonic():
                continue
            if node.name in self.facts:
                room[node] = self._capacity(node) - here[node.id]
            elif node.id not in self._refused and node not in self._probes.values():
                self._probes[self.connection.start_probe(node)] = node
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
        handle = actor.remote(pickle.dumps(self.work), tuple(own_surroundings()))
        self._workers.append(_Worker(handle, node, handle.start.remote()))

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
                self.facts[node.name] = facts | node.resources
                self._looked = -float("inf")
            return
        worker = next((own for own in self._workers if own.starting is reference), None)
        if worker is None:
            return
        answer = self._fetch(reference, worker)
        if answer is None:
            return  # another one is started elsewhere, or here after a while
        worker.starting, worker.pid = None, answer["pid"]
        if answer["error"] is not None:
            raise ClusterError(f"node {worker.node.name}: {answer['error']}")

    def _kill(self, worker: _Worker) -> None:
        ray = ray_module()

        try:
            ray.kill(worker.actor, no_restart=True)
        except Exception:  # it is dead, or Ray is: both are what was asked for
            return

    # Jobs.

    def _hand_out(self) -> None:
        """Give every worker a job, then every worker a second one."""
        waiting, jobs, shared = self._call.waiting, self._call.jobs, self._call.shared
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
            worker.death = self._last_death = first_line(reason)
            self._workers.remove(worker)
            self._kill(worker)
            if worker.starting is not None:
                self._avoided[worker.node.id] = time.monotonic() + AVOID_SECONDS
        self._looked = -float("inf")
        return None

    def _requeue(self, worker: _Worker) -> None:
        """Put the jobs of a dead worker back; only the first of them ran, so only that may be the cause."""
        index, deaths = worker.jobs[0], self._call.deaths
        self.faults.append(Fault(worker.pid, worker.death, index, worker.node.name))
        deaths[index] += 1
        self.lost += 1
        if deaths[index] > MAX_RETRIES:
            raise WorkersDiedError(
                f"job {index} ({self._call.jobs[index]}) lost its worker {deaths[index]} times, the last one on node "
                f"{worker.node.name} ({worker.death}): there may be too little memory; use smaller groups or "
                "fewer workers per node"
            )
        self._call.waiting.extendleft(reversed(worker.jobs))
        worker.jobs.clear()

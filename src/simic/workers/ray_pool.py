"""Pool backend on Ray: workers are actors on the nodes of a cluster, which may come and go while jobs run."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simic.workers import node_probe
from simic.workers.node_checks import differing_bits
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
from simic.workers.ray_cluster import RayConnection
from simic.workers.ray_dispatch import Dispatcher
from simic.workers.ray_thread import RayThread

HEAD_SECONDS = 10.0
"""How long the head node may be out of reach."""


class RayPool(Pool):
    """Connects to Ray, or starts it, with the first `start` or `stream`."""

    def __init__(self, function: JobFunction, placement: Placement, check: Check | None = None) -> None:
        self.placement, self.faults = placement, list[Fault]()
        self.num_workers = placement.workers or (DEFAULT_WORKERS if placement.address is None else None)
        self.bytes_sent = self.bytes_received = 0
        """Pickled bytes and array bytes since the pool was made; common data count once per node."""
        self._work = (function, check)
        self._thread: RayThread | None = None
        self._connection: RayConnection | None = None
        self._dispatcher: Dispatcher | None = None
        self._version = self._lost = 0

    def start(self) -> dict[str, Mapping[str, Any]]:
        """Connect, check every node and start the workers; returns the facts of the nodes by name."""
        if self._dispatcher is None:
            self._thread = RayThread()
            try:
                connection = self._connection = self._thread.call(RayConnection, self.placement, self.num_workers)
                self._dispatcher = Dispatcher(connection, self.placement, self.num_workers, self._work)
                self._call(self._dispatcher.check_and_start)
            except BaseException:
                self.close()
                raise
        return dict(self._dispatcher.facts)

    def warning(self) -> str | None:
        """What the user should know about the nodes that have been checked."""
        return differing_bits(self._dispatcher.facts, node_probe.probe()) if self._dispatcher else None

    def stream(self, common: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the job, result) in the order of completion."""
        self.start()
        assert self._dispatcher is not None
        self._version += 1
        version, unfinished, dispatcher = self._version, len(jobs), self._dispatcher
        try:
            self._call(dispatcher.begin, pickle.dumps(common, protocol=5), list(jobs))
            while unfinished:
                for index, answer in self._call(dispatcher.turn):
                    result = self._result(index, answer)
                    unfinished -= 1
                    yield index, result
        finally:
            # An error, or a caller that stopped iterating: workers would go on with jobs that nobody wants.
            if unfinished and version == self._version:
                self.close()

    def status(self) -> PoolStatus:
        """Workers that are ready, the nodes they are on, and their jobs."""
        return PoolStatus(lost=self._lost) if self._dispatcher is None else self._dispatcher.status()

    def close(self) -> None:
        """Kill all workers and disconnect; Ray itself ends too if simic started it."""
        thread, self._thread = self._thread, None
        connection, dispatcher = self._connection, self._dispatcher
        self._connection = self._dispatcher = None
        if dispatcher is not None:
            self._lost = dispatcher.lost
        if thread is not None and connection is not None:
            connection.close(thread, dispatcher.kill_all if dispatcher is not None else None)
        if thread is not None:
            thread.end()

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Call in the thread of Ray, as long as the head node is there; then take over what was counted."""
        assert self._thread is not None
        try:
            return self._thread.call(function, *arguments, look=self._check_head)
        finally:
            if (dispatcher := self._dispatcher) is not None:
                self.faults += dispatcher.faults
                self.bytes_sent += dispatcher.bytes_sent
                dispatcher.faults, dispatcher.bytes_sent = [], 0

    def _check_head(self) -> None:
        if self._connection is not None and not self._connection.head_answers(HEAD_SECONDS):
            raise WorkersDiedError(
                f"the head node of the cluster at {self._connection.address} is gone: continue with --resume auto "
                "--address and another cluster, or --backend local"
            )

    def _result(self, index: int, answer: dict[str, Any]) -> Any:
        if answer["failure"] is not None:
            error = WorkerError(f"job {index} failed in a worker:\n{answer['failure']}")
            raise error if answer["refusal"] is None else JobRefusedError(answer["refusal"]) from error
        self.bytes_received += array_bytes(answer["result"])
        return from_plain(answer["result"])

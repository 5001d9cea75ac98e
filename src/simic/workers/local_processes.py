"""Pool backend with worker processes on this machine. A worker that dies is replaced and its job run again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from simic.plugins import load_plugins, loaded_plugins
from simic.workers.devices import set_worker_number
from simic.workers.protocol import Fault, JobFunction, JobRefusedError, Pool, PoolStatus, WorkerError, WorkersDiedError
from simic.workers.signals import SIGNALS, signals_deferred

MAX_DEATHS = 10
"""Deaths during one `stream` after which a job, not a worker, is assumed to be at fault."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    number: int
    """Unlike that of any other living worker."""
    job: int | None = None
    common_version: int = -1
    """Which call's `common` the worker holds."""


class LocalProcessPool(Pool):
    """Worker processes are started by `start` or the first `stream`; `common` is sent to each of them once per call."""

    def __init__(self, function: JobFunction, workers: int) -> None:
        self.function, self.num_workers, self.faults = function, workers, list[Fault]()
        self._workers: list[_Worker] = []
        self._version = self._lost = 0

    def start(self) -> dict[str, Mapping[str, Any]]:
        """Start the worker processes without waiting for them: each takes seconds to import what it needs."""
        while len(self._workers) < self.num_workers:
            self._start()
        return {}

    def stream(self, common: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the job, result) in the order of completion."""
        self._version += 1
        version, waiting, deaths, unfinished = self._version, list(range(len(jobs)))[::-1], 0, len(jobs)
        try:
            self.start()
            while unfinished:
                for worker in self._workers:
                    if worker.job is None and waiting:
                        self._send(worker, waiting.pop(), jobs, common)
                busy = {w.connection: w for w in self._workers if w.job is not None}
                alive = {w.process.sentinel: w for w in self._workers}
                for ready in wait([*busy, *alive]):
                    worker = busy.get(ready) or alive[ready]  # pyright: ignore[reportArgumentType, reportCallIssue]
                    if worker not in self._workers:
                        continue  # already replaced: both its pipe and its sentinel were ready
                    answer = self._receive(worker)
                    if answer is None:
                        deaths += 1
                        if worker.job is not None:
                            waiting.append(worker.job)
                            self._lost += 1
                        self._replace(worker, deaths)
                    else:
                        unfinished -= 1
                        if waiting:  # before the caller goes on, so that the worker has work meanwhile
                            self._send(worker, waiting.pop(), jobs, common)
                        yield answer
        finally:
            # An error, or a caller that stopped iterating: workers would answer the next call with results of this one.
            if unfinished and version == self._version:
                self.close()

    def status(self) -> PoolStatus:
        """Living workers and the jobs that they have."""
        busy = sum(worker.job is not None for worker in self._workers)
        return PoolStatus(len(self._workers), in_flight=busy, lost=self._lost)

    def close(self) -> None:
        """Kill all workers and drop unfinished jobs."""
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join()
        self._workers.clear()

    def _start(self) -> None:
        """Add a worker. Signals are deferred: one that arrives half-way would leave an orphaned process."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        arguments = (there, self.function, loaded_plugins(), os.getpid(), self._next_number())
        process = context.Process(target=_serve, args=arguments, daemon=True)
        resource_tracker.ensure_running()  # started by `process.start`, it would unblock the signals
        with signals_deferred():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited by the worker
            try:
                with _without_main_module():
                    process.start()
                there.close()
                self._workers.append(_Worker(process, here, arguments[-1]))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _next_number(self) -> int:
        return min(set(range(self.num_workers)) - {worker.number for worker in self._workers}, default=0)

    def _send(self, worker: _Worker, index: int, jobs: Sequence[Any], common: Any) -> None:
        is_new = worker.common_version != self._version
        worker.job, worker.common_version = index, self._version
        with suppress(OSError):  # the worker is dead; `wait` reports that next
            worker.connection.send((index, jobs[index], is_new, common if is_new else None))

    def _receive(self, worker: _Worker) -> tuple[int, Any] | None:
        """The index and result of a worker's job; None if the worker is dead."""
        try:
            if not worker.connection.poll():
                return None
            index, result, failure, refusal = worker.connection.recv()
        except (EOFError, OSError):
            return None
        if failure is not None:
            error = WorkerError(f"job {worker.job} failed in a worker:\n{failure}")
            raise error if refusal is None else JobRefusedError(refusal) from error
        worker.job = None
        return index, result

    def _replace(self, worker: _Worker, deaths: int) -> None:
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        exit_code = worker.process.exitcode
        job = -1 if worker.job is None else worker.job
        self.faults.append(Fault(worker.process.pid or -1, f"exit code {exit_code}", job))
        if deaths >= MAX_DEATHS:
            raise WorkersDiedError(
                f"{deaths} workers died, the last one with exit code {exit_code}: there may be too little memory; "
                "use fewer workers or smaller groups"
            )
        self._start()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Start processes that do not import the user's script, so that it needs no `if __name__ == "__main__"`.

    multiprocessing imports the main module in every spawned process; our jobs are imported by module name.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# In the worker process.


def _serve(connection: Connection, function: JobFunction, plugins: tuple[str, ...], parent: int, number: int) -> None:
    """Run jobs until the parent closes the connection."""
    import torch

    set_worker_number(number)

    # Both signals are blocked on entry. SIGINT stays so: Ctrl-C reaches the whole process group, the parent decides.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    common = None
    with suppress(EOFError, OSError):  # the parent closed the connection
        try:
            if plugins:
                load_plugins(plugins)
        except Exception as error:
            connection.send((-1, None, *_describe(error)))
            return
        while True:
            try:
                index, job, is_new, sent = connection.recv()
            except (EOFError, OSError):
                return
            except Exception as error:
                remedy = "define what jobs use in a module that can be imported, not in the script; or use workers = 0"
                connection.send((-1, None, f"the worker cannot unpickle its job ({error}): {remedy}", None))
                return
            common = sent if is_new else common
            try:
                answer = (index, function(common, job), None, None)
            except Exception as error:
                answer = (index, None, *_describe(error))
            connection.send(answer)


def _describe(error: Exception) -> tuple[str, str | None]:
    """The traceback of an error, and its message if that says what to change."""
    return traceback.format_exc(), str(error) if isinstance(error, ValueError) else None


def _exit_with_parent(parent: int) -> None:
    """End this process soon after its parent, even in the middle of a job."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)

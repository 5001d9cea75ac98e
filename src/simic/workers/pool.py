"""Workers: jobs that are pure functions of what they are given, over several processes that may die.

A job's result does not depend on who runs it, so a worker that dies is replaced and its job given to the next one. With
`num_workers` 0 jobs run here, one after the other, with the same results.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from simic.workers.signals import SIGNALS, signals_deferred

MAX_DEATHS = 10
"""So many deaths while one batch of jobs runs mean that the job, not the worker, is at fault."""


class WorkerError(RuntimeError):
    """A job failed in a worker."""


class WorkersDiedError(WorkerError, OSError):
    """Workers were killed again and again: the machine's fault, as far as one can tell from here."""


@dataclass(frozen=True)
class Fault:
    """A worker that died, and what it was doing."""

    pid: int
    exit_code: int | None
    job: int


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    job: int | None = None
    known: int = -1
    """Number of the common part that the worker has."""


@dataclass
class WorkerPool:
    """Runs `function(common, job)` for many jobs; `common`, which all share, is sent to each worker once."""

    function: Callable[[Any, Any], Any]
    num_workers: int = 0
    faults: list[Fault] = field(default_factory=list)
    """Workers that died, since the list was last emptied."""
    _workers: list[_Worker] = field(default_factory=list)
    _version: int = 0

    def run(self, common: Any, jobs: Sequence[Any]) -> list[Any]:
        """The results in the order of the jobs."""
        results: list[Any] = [None] * len(jobs)
        for index, result in self.stream(common, jobs):
            results[index] = result
        return results

    def stream(self, common: Any, jobs: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Indices and results as they come."""
        if self.num_workers < 0:
            raise ValueError(f"workers must not be negative, got {self.num_workers}")
        if not self.num_workers:
            for index, job in enumerate(jobs):
                yield index, self.function(common, job)
            return
        self._version += 1
        for _ in range(self.num_workers - len(self._workers)):
            self._start()
        waiting, deaths, open_jobs = list(range(len(jobs)))[::-1], 0, len(jobs)
        while open_jobs:
            for worker in self._workers:
                if worker.job is None and waiting:
                    self._give(worker, common, jobs, waiting)
            busy = {w.connection: w for w in self._workers if w.job is not None}
            dead = {w.process.sentinel: w for w in self._workers}
            for ready in wait([*busy, *dead]):
                worker = busy.get(ready) or dead[ready]  # pyright: ignore[reportArgumentType, reportCallIssue]
                if worker not in self._workers:
                    continue  # both its pipe and its end were seen
                answer = self._receive(worker)
                if answer is None:
                    deaths += 1
                    if worker.job is not None:
                        waiting.append(worker.job)
                    self._replace(worker, deaths)
                else:
                    index, result = answer
                    open_jobs -= 1
                    yield index, result

    def close(self) -> None:
        """End all workers at once; what they were doing is lost."""
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join()
        self._workers.clear()

    def _start(self) -> None:
        """Add a worker. Signals wait meanwhile: one that came half-way would leave a worker that nobody ends."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, self.function, os.getpid()), daemon=True)
        resource_tracker.ensure_running()  # its own start would let the signals through
        with signals_deferred():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the worker is born with both blocked
            try:
                with _main_left_alone():
                    process.start()
                there.close()
                self._workers.append(_Worker(process, here))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _give(self, worker: _Worker, common: Any, jobs: Sequence[Any], waiting: list[int]) -> None:
        worker.job = waiting.pop()
        message = (worker.job, jobs[worker.job], self._version != worker.known, None)
        if worker.known != self._version:
            message = (*message[:3], common)
            worker.known = self._version
        try:
            worker.connection.send(message)
        except OSError:
            return  # it died before: its end is seen when we wait

    def _receive(self, worker: _Worker) -> tuple[int, Any] | None:
        """What a worker says; None if it is dead."""
        try:
            if not worker.connection.poll():
                return None
            index, result, failure = worker.connection.recv()
        except (EOFError, OSError):
            return None
        job, worker.job = worker.job, None
        if failure is not None:
            self.close()
            raise WorkerError(f"job {job} failed in a worker:\n{failure}")
        return index, result

    def _replace(self, worker: _Worker, deaths: int) -> None:
        worker.process.join()
        job = -1 if worker.job is None else worker.job
        self.faults.append(Fault(worker.process.pid or -1, worker.process.exitcode, job))
        worker.connection.close()
        self._workers.remove(worker)
        if deaths >= MAX_DEATHS:
            self.close()
            raise WorkersDiedError(
                f"{deaths} workers died, the last one with exit code {worker.process.exitcode}: there may be too "
                "little memory; try fewer workers or smaller groups"
            )
        self._start()


@contextmanager
def _main_left_alone() -> Iterator[None]:
    """Start processes that do not run the user's script again, so that it needs no `if __name__ == "__main__"`.

    multiprocessing imports the main module in every new process; jobs come from modules that are imported by name.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _serve(connection: Connection, function: Callable[[Any, Any], Any], parent: int) -> None:
    """A worker's life: take a job, answer, until the other end closes."""
    import traceback

    import torch

    # Born with both blocked. Ctrl-C reaches the whole group, also workers that still import: the parent decides.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    torch.set_num_threads(1)
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    common = None
    while True:
        try:
            index, job, fresh, sent = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as error:
            connection.send(
                (
                    -1,
                    None,
                    f"a worker could not take its job ({error}): what workers use must be defined "
                    "in a module that can be imported, not in the script itself; or train with workers = 0",
                )
            )
            return
        common = sent if fresh else common
        try:
            answer = (index, function(common, job), None)
        except Exception:
            answer = (index, None, traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:
            return


def _die_with(parent: int) -> None:
    """End this process soon after its parent, whose death left nobody to answer to, even in the middle of a job."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)

"""GrowthLog: the decisions of a user's own training as a run directory, for `simic watch`, `simic report` and `runs`.

Each decision is written when it is taken, as an update of its own: metrics, stage changes, and the slots after it. A
training that is resumed goes on from the decision that was loaded: what the log holds beyond it is removed.
"""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from simic import __version__
from simic.control.baselines import Controller
from simic.control.governor import Verdict
from simic.growth.model import GrowableModel
from simic.growth.notices import warn_user
from simic.lifecycle.stages import Stage
from simic.scheduler.decision import Decision, StageChange
from simic.storage.run_directory import RunDirectory, RunExistsError
from simic.telemetry.events import (
    Event,
    GovernorRollback,
    GrowthDecision,
    LifecycleChange,
    PhaseTimings,
    RunFinished,
    RunStarted,
    Update,
)
from simic.telemetry.memory import peak_memory
from simic.telemetry.recorder import Recorder
from simic.telemetry.tail import FileTail

ALGORITHM = "growth"
"""In the place of a training algorithm: what kind of run it is."""
PHASE = "host epoch"
MAX_SLOTS = 500
"""Slots that are written; views show fewer, and events must stay short."""
_open: dict[Path, GrowthLog] = {}
"""Logs that this process is writing."""
_tasks: dict[Path, str] = {}
"""Names of what is trained, by log; of a user's own training it is the class of the host."""


def open_log(
    directory: str | os.PathLike[str] | None, model: GrowableModel, controller: Controller, **settings: Any
) -> GrowthLog | None:
    """The log in a directory; None without one, and on every rank but the first. `settings` are written to it."""
    if directory is None or (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
        return None
    path = Path(directory).resolve()
    if path in _open:  # a notebook that builds its scheduler anew
        _open[path].close("stopped", "another scheduler of this process goes on")
    names = {"controller": type(controller).__name__, "task": _tasks.get(path, type(model.host).__name__)}
    return GrowthLog(path, model, names | settings)


@contextmanager
def closing_log(directory: str | os.PathLike[str] | None, task: str) -> Iterator[None]:
    """Write to a log what is trained in this block, and how it ended, instead of waiting for the end of its model."""
    status, reason = "done", ""
    path = None if directory is None else Path(directory).resolve()
    if path is not None:
        _tasks[path] = task
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        status, reason = ("stopped", "interrupted") if stopped else ("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        if path is not None:
            del _tasks[path]
            if path in _open:
                _open[path].close(status, reason)


class GrowthLog:
    """Writes the decisions of one scheduler, until its model or the process ends. If that fails, training goes on."""

    def __init__(self, path: Path, model: GrowableModel, settings: dict[str, Any]) -> None:
        self.path, self._model, self._settings = path, weakref.ref(model), settings
        self._process, self._began = os.getpid(), time.monotonic()
        self._stack, self._last, self._next = ExitStack(), self._began, 0
        self._early: list[Event] = []
        self._stack.enter_context(RunDirectory(path).lock_log())
        self._recorder: Recorder | None = self._stack.enter_context(Recorder(path))
        self._foreign = _next_decision(path)
        """Decisions that are in the log and not in this training, unless its state is loaded."""
        if not self._foreign:
            self._start(0)
        _open[path] = self
        weakref.finalize(model, self._close_at_end)  # also called when the process ends

    def record(self, decision: Decision) -> None:
        """Write a decision. One that a constructor takes is written with the next: a state may be loaded in between."""
        if decision.early and decision.index == 0:
            self._early = list(_events(decision, self._slots()))
            return
        if self._foreign:
            raise RunExistsError(
                f"{self.path} holds the log of a training with {self._foreign} decisions: load its state before the "
                "first step to continue it, or give log another directory"
            )
        self._write([*self._early, *_events(decision, self._slots())])
        self._early, self._next = [], decision.index + 1
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._write([_timings(decision.index, seconds)])

    def go_back(self, index: int) -> None:
        """Continue with this decision: it and all later ones are removed from the log."""
        self._early, self._foreign, self._next = [], 0, index
        if self._recorder is not None:
            with self._guarded():
                self._recorder.rewind(_position(self.path, index))
                self._start(index)

    def close(self, status: str, reason: str = "") -> None:
        """Write how the training ended, if it wrote anything."""
        if self._recorder is None or os.getpid() != self._process:  # a forked worker has a copy
            return
        seconds, code = time.monotonic() - self._began, int(status == "failed")
        if not self._foreign:
            self._write([RunFinished(update=self._next, status=status, exit_code=code, seconds=seconds, reason=reason)])
        self._end()

    def _close_at_end(self) -> None:
        """When the process ends by an exception that nobody caught, the interpreter has noted it."""
        kind, error = getattr(sys, "last_type", None), getattr(sys, "last_value", None)
        if kind is None or hasattr(sys, "ps1"):  # interactive: it may be an old one
            self.close("done")
        elif issubclass(kind, KeyboardInterrupt):
            self.close("stopped", "interrupted")
        else:
            self.close("failed", f"{kind.__name__}: {error}")

    def _end(self) -> None:
        self._recorder = None
        _open.pop(self.path, None)
        self._stack.close()

    def _start(self, index: int) -> None:
        model = self._model()
        assert model is not None
        self._write([_manifest(model, self._settings, index)])

    def _write(self, events: list[Event]) -> None:
        if self._recorder is None:
            return
        with self._guarded():
            for event in events:
                self._recorder.record(event)
            self._recorder.end_update()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A full disk ends the log, not the training."""
        try:
            yield
        except OSError as error:
            warn_user(f"the log of growth fails and is ended ({error}); training goes on")
            with suppress(OSError):
                self._end()

    def _slots(self) -> dict[str, Any]:
        """The slots that are not dormant."""
        model = self._model()
        assert model is not None
        grown = [report for report in model.growth() if report.stage != Stage.DORMANT]
        return {
            report.slot: {
                "stage": str(report.stage),
                "alpha": _short(report.alpha),
                "contribution": _short(report.contribution),
                "blueprint": report.blueprint or "",
                "parameters": report.parameters,
            }
            for report in grown[:MAX_SLOTS]
        }


def _events(decision: Decision, slots: dict[str, Any]) -> Iterator[Event]:
    """A decision as the events of an update."""
    host = {"update": decision.index, "group": 0, "env": 0, "decision": decision.index}
    for change in decision.changes:
        yield LifecycleChange(
            **host,
            slot=change.slot,
            blueprint=change.blueprint,
            old_stage=str(change.old),
            new_stage=str(change.new),
            reason=_reason(decision, change),
            readiness={"alpha": change.alpha, "contribution": change.contribution},
        )
    if decision.verdict != Verdict.OK:
        yield GovernorRollback(**host, verdict=str(decision.verdict), val_loss=decision.val_loss)
    yield GrowthDecision(
        update=decision.index,
        actions=tuple(map(str, decision.actions)),
        slots=slots,
        parameters=decision.parameters,
        val_loss=decision.val_loss,
        val_accuracy=decision.val_accuracy,
        verdict=str(decision.verdict),
    )
    yield Update(update=decision.index, metrics={**decision.metrics, "parameters": float(decision.parameters)})


def _reason(decision: Decision, change: StageChange) -> str:
    if decision.verdict != Verdict.OK:
        return "governor"
    return next(
        (action.op for action in decision.actions if action.op != "wait" and action.slot == change.slot), "time"
    )


def _timings(index: int, seconds: float) -> Event:
    speed = 1 / seconds if seconds else math.nan
    return PhaseTimings(update=index, seconds={PHASE: seconds}, decisions_per_second=speed, memory_mb=peak_memory())


def _manifest(model: GrowableModel, settings: dict[str, Any], index: int) -> Event:
    host = list(model.host_parameters())
    about = {"algorithm": ALGORITHM, "updates": settings["horizon"] or None}
    about |= {"slots": list(model.slot_names[:MAX_SLOTS]), "segments": _segments(model, {id(p) for p in host})}
    return RunStarted(
        update=index,
        command=tuple(sys.argv),
        config=settings | about | {"host_parameters": sum(parameter.numel() for parameter in host)},
        versions={"python": platform.python_version(), "simic-rl": __version__, "torch": torch.__version__},
        rng_seeds={"growth": model.rng_seed},
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        host=socket.gethostname(),
        resumed_from=f"decision {index}" if index else None,
    )


def _segments(model: GrowableModel, host: set[int]) -> list[list[Any]]:
    """The submodules that have slots, and how many of the host's parameters each has."""
    modules = dict(model.host.named_modules())
    names = [name for name in model.slot_names if name in modules][:MAX_SLOTS]
    return [[name, sum(p.numel() for p in modules[name].parameters() if id(p) in host)] for name in names]


def _next_decision(path: Path) -> int:
    """Number of the decision after the last in a log; 0 for an empty one."""
    updates = [getattr(event, "update", -1) for event, _, _ in FileTail(RunDirectory(path).events).lines()]
    return max(updates, default=-1) + 1


def _position(path: Path, index: int) -> int:
    """The byte of events.jsonl where the events of a decision start."""
    log = FileTail(RunDirectory(path).events)
    for event, start, _ in log.lines():
        if getattr(event, "update", -1) >= index:
            return start
    return log.offset


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None

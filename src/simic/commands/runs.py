"""simic runs: one line per run of a directory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from simic.commands.train import RUNS
from simic.config import read_config
from simic.storage.checkpoint import list_checkpoints
from simic.storage.printable import printable
from simic.storage.run_directory import RunDirectory, list_runs
from simic.telemetry.events import RunFinished, RunStarted, Update
from simic.telemetry.reader import read_events
from simic.training.progress import PatientConsole

ENDED = {0: "done", 3: "diverged", 130: "stopped", 143: "stopped"}
"""Status by exit code; any other code means failed."""


@dataclass(frozen=True, kw_only=True)
class RunsCommand:
    """List the runs in a directory."""

    root: Path = RUNS
    """Directory to look in."""

    def run(self) -> int:
        """Print one line per run."""
        if not self.root.is_dir():
            raise FileNotFoundError(f"there is no directory {self.root}; name another with --root")
        columns = ("run", "task", "updates", "score", "status", "started")
        table, faults = Table(*columns, box=None), []
        for run in list_runs(self.root):
            summary = summarize(run)
            table.add_row(*(printable(summary[column], 80) for column in columns))
            faults += [f"{summary['run']}: {fault}" for fault in summary.get("damaged", ())]
        console = PatientConsole(soft_wrap=True, markup=False, highlight=False)
        console.print(table)
        for fault in faults:  # below the table, whose rows are too short for them
            console.print(printable(fault))
        return 0


def summarize(run: RunDirectory) -> dict[str, Any]:
    """The main facts of a run, from all of its files: events may be off, damaged or not written yet."""
    summary: dict[str, Any] = {
        "run": run.path.name,
        "task": "-",
        "updates": "0",
        "score": "-",
        "status": "",
        "started": "-",
    }
    faults: list[str] = []
    config = _settings(run, faults)
    started, finished = _process(run, faults)
    scores = _scores(run, faults)
    settings = config or (started.config if started else {})
    summary["task"], total = str(settings.get("task", "-")), settings.get("updates", "?")
    if started is not None or config:
        summary["started"] = _moment(started.time if started else run.config.stat().st_mtime)
    latest = [score for score in scores[-5:] if math.isfinite(score)]  # imitation and IQL have none
    if latest:
        summary["score"] = f"{sum(latest) / len(latest):.2f}"
    done = len(scores) or max((_update(path) for path in list_checkpoints(run.checkpoints)), default=0)
    summary["updates"] = f"{done}/{total}" if settings.get("algorithm", "ppo") == "ppo" else str(done)
    summary["status"] = _status(run, finished, begun=bool(config or started))
    if faults:
        summary |= {"status": f"{summary['status']}, damaged", "damaged": faults}
    return summary


def _status(run: RunDirectory, finished: RunFinished | None, *, begun: bool) -> str:
    """The status by the lock of the run, then by its last event, then by the exit code in the lock file."""
    holder = run.holder()
    if holder is not None and holder.holds:
        return f"running (process {holder.pid})"
    if finished is not None:
        return finished.status
    if holder is not None and holder.exit_code is not None:
        return ENDED.get(holder.exit_code, "failed")
    return "killed" if begun else "not begun"


def _settings(run: RunDirectory, faults: list[str]) -> dict[str, Any]:
    """The settings in the run's file; {} if there is none or it cannot be read."""
    try:
        return read_config(run.config) if run.config.is_file() else {}
    except (ValueError, OSError) as error:
        faults.append(_brief(error))
        return {}


def _process(run: RunDirectory, faults: list[str]) -> tuple[RunStarted | None, RunFinished | None]:
    """The last start of a run, and the end after it if there is one."""
    started, finished = None, None
    try:
        for event in read_events(run.path, [RunStarted, RunFinished]):
            if isinstance(event, RunStarted):
                started, finished = event, None
            else:
                finished = event
    except (ValueError, OSError) as error:
        faults.append(_brief(error))
        finished = None  # beyond the damage there may be another start
    return started, finished


def _scores(run: RunDirectory, faults: list[str]) -> list[float]:
    """The scores of all updates."""
    scores: list[float] = []
    try:
        scores += (event.metrics.get("score", float("nan")) for event in read_events(run.path, [Update]))
    except (ValueError, OSError) as error:
        faults.append(_brief(error))
    return scores


def _brief(error: Exception) -> str:
    """An error in one line of at most 160 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "-"  # out of the range of dates


def _update(checkpoint: Path) -> int:
    return int("".join(filter(str.isdigit, checkpoint.name)) or 0)

"""What is in a run, a checkpoint or a saved controller, as text."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from simic.config import read_config
from simic.storage.checkpoint import best_checkpoint, is_checkpoint, list_checkpoints
from simic.storage.printable import printable
from simic.storage.run_directory import RunDirectory, list_runs
from simic.telemetry.events import RunFinished, RunStarted, Update
from simic.telemetry.reader import read_events
from simic.training.progress import PatientConsole

if TYPE_CHECKING:
    from torch import nn


def list_runs_as_table(root: Path) -> int:
    """One line per run below `root`."""
    if not root.is_dir():
        raise FileNotFoundError(f"there is no directory {root}; name another with --root")
    table = Table("run", "task", "updates", "score", "status", "started", box=None)
    faults = []
    for run in list_runs(root):
        summary = summarize(run)
        table.add_row(
            *(printable(summary[key], 80) for key in ("run", "task", "updates", "score", "status", "started"))
        )
        faults += [f"{summary['run']}: {fault}" for fault in summary.get("damaged", ())]
    console = PatientConsole(soft_wrap=True, markup=False, highlight=False)
    console.print(table)
    for fault in faults:  # below the table, whose rows have no room for them
        console.print(printable(fault))
    return 0


def summarize(run: RunDirectory) -> dict[str, Any]:
    """The main facts of a run, from all of its files: events may be off, damaged or not yet written."""
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


ENDED = {0: "done", 3: "diverged", 130: "stopped", 143: "stopped"}
"""How a run ended, by its exit code; with any other it failed."""


def _status(run: RunDirectory, finished: RunFinished | None, *, begun: bool) -> str:
    """What the run is doing: by its lock, then by its last event, then by what the lock's holder left."""
    holder = run.holder()
    if holder is not None and holder.holds:
        return f"running (process {holder.pid})"
    if finished is not None:
        return finished.status
    if holder is not None and holder.exit_code is not None:
        return ENDED.get(holder.exit_code, "failed")
    return "killed" if begun else "not begun"


def _settings(run: RunDirectory, faults: list[str]) -> dict[str, Any]:
    """The settings of a run as its file has them; {} if there is none, or it cannot be read."""
    try:
        return read_config(run.config) if run.config.is_file() else {}
    except (ValueError, OSError) as error:
        faults.append(_brief(error))
        return {}


def _process(run: RunDirectory, faults: list[str]) -> tuple[RunStarted | None, RunFinished | None]:
    """The last start of a run, and its end if it came after that."""
    started, finished = None, None
    try:
        for event in read_events(run.path, [RunStarted, RunFinished]):
            if isinstance(event, RunStarted):
                started, finished = event, None
            else:
                finished = event
    except (ValueError, OSError) as error:
        faults.append(_brief(error))
        finished = None  # what is behind the damage may be another start
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
    """An error in one line, not more of it than fits."""
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else f"{text[:157]}..."


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "-"  # a time that no clock has


def _update(checkpoint: Path) -> int:
    return int("".join(filter(str.isdigit, checkpoint.name)) or 0)


def inspect_path(path: Path) -> int:
    """Print what is at a path."""
    if is_checkpoint(path):
        _print(_checkpoint(path))
    elif path.is_dir():
        _print(_run(RunDirectory(path)))
    else:
        _print(_controller(path))
    return 0


def _run(run: RunDirectory) -> dict[str, Any]:
    checkpoints, best = list_checkpoints(run.checkpoints), best_checkpoint(run.checkpoints)
    if not checkpoints and not run.process.is_file() and not run.config.is_file():
        raise ValueError(f"{run.path} is neither a run nor a checkpoint")
    return summarize(run) | {
        "checkpoints": [checkpoint.name for checkpoint in checkpoints],
        "best": best.name if best else None,
        "recorded episodes": len(list(run.episodes.glob("*.safetensors"))),
        "controller": run.controller.name if run.controller.is_file() else None,
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    from simic.control.learned import network_of
    from simic.storage.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(path)
    return {
        "checkpoint": path.name,
        "update": checkpoint.update,
        "score": checkpoint.metric,
        "about": checkpoint.about,
        "parameters": _count(network_of(checkpoint.agent, path)),
        "bytes": sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path])),
        "whole": True,
    }


def _controller(path: Path) -> dict[str, Any]:
    from simic.control.learned import load_controller

    saved = load_controller(path)
    return {"controller": path.name, "about": saved.state["about"], "parameters": _count(saved.network)}


def _count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _print(facts: dict[str, Any]) -> None:
    for key, value in facts.items():
        print(f"{key}: {json.dumps(value) if isinstance(value, (dict, list)) else printable(value)}")

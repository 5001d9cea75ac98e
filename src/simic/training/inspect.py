"""What is in a run, a checkpoint or a saved controller, as text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from simic.telemetry.events import RunFinished, RunStarted, Update
from simic.telemetry.reader import read_events
from simic.terminal import printable
from simic.training.checkpoint import MANIFEST, best_checkpoint, list_checkpoints, read_manifest
from simic.training.progress import PatientConsole
from simic.training.run_directory import RunDirectory, list_runs


def list_runs_as_table(root: Path) -> int:
    """One line per run below `root`."""
    if not root.is_dir():
        raise FileNotFoundError(f"there is no directory {root}; name another with --root")
    table = Table("run", "task", "updates", "score", "status", "started", box=None)
    for run in list_runs(root):
        summary = summarize(run)
        table.add_row(
            *(printable(summary[key], 80) for key in ("run", "task", "updates", "score", "status", "started"))
        )
    PatientConsole(soft_wrap=True, markup=False).print(table)
    return 0


def summarize(run: RunDirectory) -> dict[str, Any]:
    """The main facts of a run, from its events."""
    summary: dict[str, Any] = {"run": run.path.name, "task": "-", "updates": "0", "score": "-", "status": "no events"}
    summary["started"] = "-"
    scores: list[float] = []
    for event in read_events(run.path):
        if isinstance(event, RunStarted):
            summary |= {"task": event.config.get("task", "-"), "status": "running or killed"}
            summary["total"] = event.config.get("updates", "?")
            summary["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(event.time))
        elif isinstance(event, RunFinished):
            summary["status"] = event.status
        elif isinstance(event, Update):
            scores.append(event.metrics.get("score", float("nan")))
    if scores:
        summary["score"] = f"{sum(scores[-5:]) / len(scores[-5:]):.2f}"
    summary["updates"] = f"{len(scores)}/{summary.get('total', '?')}"
    return summary


def inspect_path(path: Path) -> int:
    """Print what is at a path."""
    if path.is_dir() and (path / MANIFEST).is_file():
        _print(_checkpoint(path))
    elif path.is_dir():
        _print(_run(RunDirectory(path)))
    else:
        _print(_controller(path))
    return 0


def _run(run: RunDirectory) -> dict[str, Any]:
    checkpoints, best = list_checkpoints(run.checkpoints), best_checkpoint(run.checkpoints)
    if not checkpoints and not run.process.is_file():
        raise ValueError(f"{run.path} is neither a run nor a checkpoint")
    return summarize(run) | {
        "checkpoints": [checkpoint.name for checkpoint in checkpoints],
        "best": best.name if best else None,
        "recorded episodes": len(list(run.episodes.glob("*.safetensors"))),
        "controller": run.controller.name if run.controller.is_file() else None,
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    from simic.training.checkpoint import load_checkpoint

    checkpoint, manifest = load_checkpoint(path), read_manifest(path)
    agent = checkpoint.tree["agent"]
    return {
        "checkpoint": path.name,
        "update": checkpoint.update,
        "score": checkpoint.metric,
        "about": checkpoint.about,
        "parameters": _count(agent["network"]),
        "bytes": {name: file["size"] for name, file in manifest.files.items()},
        "whole": True,
    }


def _controller(path: Path) -> dict[str, Any]:
    from simic.bundle import load_bundle

    saved = load_bundle(path)
    if not isinstance(saved, dict) or "about" not in saved:
        raise ValueError(f"{path} is a simic file, but no controller")
    return {"controller": path.name, "about": saved["about"], "parameters": _count(saved["network"])}


def _count(state: dict[str, Any]) -> int:
    return sum(int(value.numel()) for name, value in state.items() if not name.startswith("normalize."))


def _print(facts: dict[str, Any]) -> None:
    for key, value in facts.items():
        print(f"{key}: {json.dumps(value) if isinstance(value, (dict, list)) else printable(value)}")

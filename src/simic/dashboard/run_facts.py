"""What a run is doing now, as one small table: progress, speed, score, health, settings."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from simic.dashboard.health import health_lights
from simic.dashboard.state import RunState
from simic.storage.json_files import read_json
from simic.storage.printable import printable
from simic.storage.run_directory import RunDirectory
from simic.telemetry.events import RunFinished

KINDS = {"ppo": "training"}
"""Kind of a run by its algorithm; those not named are their own."""
ENDED = {0: "done", 3: "diverged", 130: "stopped", 143: "stopped"}
"""Status by exit code; any other code means failed."""
COMPARISON, RESULTS_FILE = "comparison", "results.json"
"""Directory of the comparison at the end of a run, and the file of any evaluation."""
MAX_RESULTS_BYTES = 2**28
MAX_NAME = 200


def describe_run(run: RunDirectory, state: RunState, damaged_lines: int) -> dict[str, Any]:
    """The `now` of a view."""
    started, metrics, timings = state.started, state.last_metrics, state.timings
    status = run_status(run, state.finished)
    config = dict(started.config) if started else {}
    done, planned = state.last_update + 1, _whole(config.get("updates"))
    return {
        "name": printable(run.path.resolve().name, MAX_NAME),
        "path": printable(run.path),
        **identity(config, started.command if started else ()),
        "status": status,
        "reason": printable(state.finished.reason) if state.finished else "",
        "update": done,
        "updates": planned,
        "started": _finite(state.first_start),
        "last_event": _finite(state.last_time),
        "processes": state.starts,
        "eta_seconds": _remaining(state, done, planned) if status == "running" else None,
        "decisions_per_second": _finite(timings.decisions_per_second) if timings else None,
        "score": _finite(metrics.get("score", math.nan)),
        "gain": _finite(metrics.get("gain", math.nan)),
        "rules": compared_scores(run.path / COMPARISON / RESULTS_FILE),
        "phases": {printable(name, MAX_NAME): _finite(s) for name, s in timings.seconds.items()} if timings else {},
        "memory_mb": dict(timings.memory_mb) if timings and timings.memory_mb else None,
        "workers": _workers(config, state),
        "faults": state.lost_workers,
        "lights": health_lights(config, state.last_update, metrics),
        "config": flat(config),
        "command": [printable(word) for word in started.command] if started else [],
        "versions": dict(started.versions) if started else {},
        "damaged_lines": damaged_lines,
    }


def identity(config: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """What kind of run it is."""
    algorithm = printable(config.get("algorithm", ""), MAX_NAME)
    return {
        "kind": KINDS.get(algorithm, algorithm) or "training",
        "task": printable(config.get("task", ""), MAX_NAME),
        "algorithm": algorithm,
        "preset": _preset(command),
    }


def run_status(run: RunDirectory, finished: RunFinished | None) -> str:
    """By the lock of the run, then by its last event, then by the exit code in the lock file.

    A run that should be running by its events, but whose process is gone, is `stale`.
    """
    holder = run.holder()
    if holder is not None and holder.holds:
        return "running"
    if finished is not None:
        return printable(finished.status, MAX_NAME)
    if holder is not None and holder.exit_code is not None:
        return ENDED.get(holder.exit_code, "failed")
    return "stale"


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names; numbers that are not finite are None."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{printable(name, MAX_NAME)}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{key}.")
        else:
            found[key] = _finite(value) if isinstance(value, float) else value
    return found


def compared_scores(results: Path) -> dict[str, float]:
    """Mean scores of the controllers of an evaluation; {} without one."""
    try:
        found = os.lstat(results)
    except OSError:
        return {}
    return dict(_scores(results, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=256)
def _scores(path: Path, changed: int, size: int) -> tuple[tuple[str, float], ...]:
    try:
        summary = read_json(path, max_bytes=MAX_RESULTS_BYTES)["summary"]["controllers"]
        return tuple((printable(name, MAX_NAME), float(own["score"]["mean"])) for name, own in summary.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()


def _remaining(state: RunState, done: int, planned: int | None) -> float | None:
    if planned is None or not state.recent:
        return None
    return max(planned - done, 0) * sum(state.recent) / len(state.recent)


def _workers(config: Mapping[str, Any], state: RunState) -> dict[str, Any] | None:
    told = state.timings.workers if state.timings else {}
    count = told.get("count", _whole(config.get("workers")))
    if count is None or state.started is None:
        return None
    return {"count": count, "nodes": told.get("nodes", 1), "lost": state.lost_workers}


def _preset(command: Sequence[str]) -> str | None:
    """The preset that was named on the command line."""
    for word, following in zip(command, (*command[1:], ""), strict=False):
        if word == "--preset" and following:
            return printable(following, MAX_NAME)
        if word.startswith("--preset="):
            return printable(word.partition("=")[2], MAX_NAME)
    return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

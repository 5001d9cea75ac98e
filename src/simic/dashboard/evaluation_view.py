"""Evaluations as JSON for `simic watch`: a list of those in a directory, and one with its comparisons.

Everything comes from results.json, which is read again only when it changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from simic.dashboard.charts import FATES
from simic.dashboard.evaluation_report import Results, read_results, verdict
from simic.dashboard.run_facts import RESULTS_FILE
from simic.evaluation.groups import Groups
from simic.storage.files import check_regular
from simic.storage.printable import printable
from simic.storage.run_directory import DIRECTORIES

MAX_LISTED_BYTES = 2**25
"""Larger results are listed without their controllers: reading them would hold up the list."""
MEASURES = ("score", "metric", "area", "parameters", "flops")
PAIRED = ("score", "metric", "log2_flops", "log2_parameters")
MAX_EVALUATIONS = 1000
MAX_DEPTH = 3
"""Levels of directories that are searched."""
_NOT_SEARCHED = frozenset(DIRECTORIES) - {"comparison"}
FIGURES = ("mean", "low", "high", "iqm", "probability")


def evaluation_list(directory: Path) -> list[dict[str, Any]]:
    """The evaluations in a directory and below it, those of runs included; the latest first.

    `id` is the path below the directory; that of the directory itself is its name.
    """
    found = [_describe(directory, path) for path in islice(_find(directory), MAX_EVALUATIONS)]
    return sorted(found, key=lambda entry: (-entry["modified"], entry["id"]))


def evaluation_view(path: Path) -> dict[str, Any]:
    """Everything of an evaluation but its single episodes."""
    file = path / RESULTS_FILE
    check_regular(file)
    found = file.stat()
    summary = _summary(file, found.st_mtime_ns, found.st_size)
    return {"name": printable(path.resolve().name), "path": printable(path), "modified": found.st_mtime, **summary}


def _find(directory: Path) -> Iterator[Path]:
    """Directories with results; links are not followed."""
    for place, below, files in os.walk(directory):
        path = Path(place)
        searched = [name for name in below if not name.startswith(".") and name not in _NOT_SEARCHED]
        below[:] = sorted(searched) if len(path.relative_to(directory).parts) < MAX_DEPTH else []
        if RESULTS_FILE in files and not (path / RESULTS_FILE).is_symlink():
            yield path


def _describe(directory: Path, path: Path) -> dict[str, Any]:
    """The facts of a list: None for what cannot be read; the page of the evaluation says why."""
    entry: dict[str, Any] = {
        "id": path.resolve().name if path == directory else path.relative_to(directory).as_posix(),
        "name": printable(path.resolve().name),
        "path": printable(path),
        **{"modified": 0.0, "bytes": 0, "controllers": None, "tasks": None, "hosts": None},
    }
    with suppress(ValueError, OSError):
        found = (path / RESULTS_FILE).stat()
        entry |= {"modified": found.st_mtime, "bytes": found.st_size}
        if found.st_size <= MAX_LISTED_BYTES:
            view = evaluation_view(path)
            names = [own["name"] for own in view["controllers"] if own["member_of"] is None]
            tasks = len(view["tasks"])
            entry |= {"controllers": names, "tasks": tasks, "hosts": tasks * view["rng_seeds"]}
    return entry


@lru_cache(maxsize=64)
def _summary(file: Path, modified: int, size: int) -> dict[str, Any]:
    """The facts of results that were changed at a time and have a size, which decide whether they are read again."""
    results = read_results(file)
    try:
        return _summarize(results)
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
        what = f"{type(error).__name__}: {error!s:.80}"
        raise ValueError(f"{file} holds no whole results of simic evaluate ({what}); run it again") from None


def _summarize(results: Results) -> dict[str, Any]:
    groups, summary = Groups.of_results(results), results.get("summary") or {"controllers": {}, "paired": {}}
    ranked = sorted(summary["controllers"], key=lambda label: -summary["controllers"][label]["score"]["mean"])
    return {
        "command": results["command"],
        "controllers": [_controller(groups, label, summary["controllers"][label]) for label in ranked],
        "paired": list(_paired(groups, groups.learned(ranked), summary["paired"])),
        "tasks": list(results["tasks"]),
        "rng_seeds": len(results["rng_seeds"]),
        "by_task": _by_task(groups, ranked, results["episodes"]),
        "fates": _fates(groups, ranked, results["episodes"]),
        **{key: results.get(key) for key in ("notes", "settings", "versions")},
    }


def _controller(groups: Groups, label: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    about = groups.about(label)
    pooled = f"{', '.join(groups.members(label))}, judged as one"
    return {
        "name": label,
        "kind": about["kind"],
        "description": pooled if label in groups.groups else about.get("description", ""),
        "learned": about["kind"] == "learned",
        "member_of": groups.owner.get(label),
        **{measure: _figures(figures[measure]) for measure in MEASURES},
    }


def _figures(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: figures[name] for name in FIGURES if name in figures}


def _paired(groups: Groups, learned: Sequence[str], paired: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The differences of each learned controller to the others; those of a group leave out members of groups."""
    for label in learned:
        for other, figures in paired[label].items():
            if label in groups.owner or other not in groups.owner:
                sentence = verdict(label, other, figures["score"])
                found = {measure: _figures(figures[measure]) for measure in PAIRED}
                yield {"controller": label, "other": other, "sentence": sentence, **found}


def _by_task(groups: Groups, labels: Sequence[str], episodes: Sequence[Results]) -> dict[str, dict[str, float]]:
    """Mean scores by task and controller."""
    scores: dict[tuple[str, str], list[float]] = {}
    for episode in episodes:
        scores.setdefault((episode["task"], episode["controller"]), []).append(episode["score"])
    table: dict[str, dict[str, float]] = {}
    for task in sorted({task for task, _ in scores}):
        pooled = {label: [s for m in groups.members(label) for s in scores.get((task, m), [])] for label in labels}
        table[task] = {label: float(np.mean(values)) for label, values in pooled.items() if values}
    return table


def _fates(groups: Groups, labels: Sequence[str], episodes: Sequence[Results]) -> dict[str, Any]:
    """Number of seeds by controller, blueprint and fate."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for episode in episodes:
        counts.update((episode["controller"], seed["blueprint"], seed["fate"]) for seed in episode["seeds"])
    blueprints = sorted({blueprint for _, blueprint, _ in counts})
    table: dict[str, Any] = {}
    for label in labels:
        for blueprint in blueprints:
            fates = {fate: sum(counts[m, blueprint, fate] for m in groups.members(label)) for fate in FATES}
            if any(fates.values()):
                table.setdefault(label, {})[blueprint] = fates
    return table

"""Evaluations as JSON for `simic watch`: a list of those in a directory, and one with its comparisons.

Everything comes from results.json, which is read again only when it changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from simic.dashboard.charts import FATES
from simic.dashboard.evaluation_report import Results, read_results, verdict
from simic.evaluation.groups import Groups
from simic.storage.files import FileSizeError, check_regular, list_directory
from simic.storage.run_directory import DIRECTORIES

RESULTS = "results.json"
MAX_LISTED_BYTES = 2**25
"""Larger results are listed without their controllers: reading them would hold up the list."""
MEASURES = ("score", "metric", "area", "parameters", "flops")
PAIRED = ("score", "metric", "log2_flops", "log2_parameters")
FIGURES = ("mean", "low", "high", "iqm", "probability")
_NOT_SEARCHED = frozenset(DIRECTORIES) - {"comparison"}


def evaluation_list(directory: Path) -> list[dict[str, Any]]:
    """The evaluations in a directory, in its subdirectories and in theirs; the latest first."""
    found = [_entry(directory, path) for path in _find(directory)]
    return sorted((entry for entry in found if entry), key=lambda entry: -entry["modified"])


def evaluation_view(path: Path) -> dict[str, Any]:
    """Everything of an evaluation but its single episodes."""
    file = path / RESULTS
    check_regular(file)
    found = file.stat()
    return {"name": path.name, "path": str(path), "modified": found.st_mtime} | _summary(
        file, found.st_mtime_ns, found.st_size
    )


def _find(directory: Path) -> Iterator[Path]:
    """Directories with results, two levels deep. Links are not followed."""
    pending = [(directory, 2)]
    while pending:
        path, depth = pending.pop()
        if os.path.lexists(path / RESULTS):
            yield path
        if depth:
            try:
                below = list_directory(path)
            except (OSError, FileSizeError):
                continue  # not ours, or removed meanwhile
            below = [item for item in below if item.name not in _NOT_SEARCHED and not item.is_symlink()]
            pending += [(item, depth - 1) for item in below if item.is_dir()]


def _entry(directory: Path, path: Path) -> dict[str, Any] | None:
    try:
        check_regular(path / RESULTS)
        found = (path / RESULTS).stat()
    except OSError:
        return None
    entry: dict[str, Any] = {
        "id": path.name if path == directory else path.relative_to(directory).as_posix(),
        "name": path.name if path == directory else path.relative_to(directory).as_posix(),
        "path": str(path),
        "modified": found.st_mtime,
        "bytes": found.st_size,
        **dict.fromkeys(("controllers", "tasks", "hosts")),
    }
    if found.st_size <= MAX_LISTED_BYTES:
        try:
            summary = _summary(path / RESULTS, found.st_mtime_ns, found.st_size)
        except (ValueError, OSError):
            return entry  # damaged, or being written: its own page says more
        names = [own["name"] for own in summary["controllers"] if own["member_of"] is None]
        tasks = len(summary["tasks"])
        entry |= {"controllers": names, "tasks": tasks, "hosts": tasks * summary["rng_seeds"]}
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

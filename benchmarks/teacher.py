"""Who should teach convolutions? Plans that plant in every slot from some decision on, against the heuristic.

Run: python benchmarks/teacher.py [--rng-seeds 6] [--num-tasks 8] [--tasks subsets:validation digits-cnn mnist1d-cnn]

All lead the same hosts; the score is that of `simic evaluate`, on test data of validation tasks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import tyro

from simic.api import evaluate
from simic.control.plan import Plan

PLANS = {
    **{f"conv_double from {first}": (first, 1, "conv_double") for first in (0, 1, 2, 4)},
    "conv_double every other decision from 2": (2, 2, "conv_double"),
    "conv from 2": (2, 1, "conv"),
}
"""First decision, decisions between seeds, blueprint."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    tasks: tuple[str, ...] = ("subsets:validation", "digits-cnn", "mnist1d-cnn")
    """Families with their split, or tasks."""
    num_tasks: int = 8
    """Tasks of each family."""
    rng_seeds: int = 6
    """Hosts of each task."""
    workers: int = 2
    """Processes."""


def main(options: Options) -> None:
    """Measure and print one row per teacher."""
    with TemporaryDirectory() as directory:
        results = evaluate(
            ["wait", "heuristic", *_write_plans(Path(directory))],
            options.tasks,
            rng_seeds=options.rng_seeds,
            num_tasks=options.num_tasks,
            workers=options.workers,
        ).results
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for episode in results["episodes"]:
        place = next(name for name in options.tasks if episode["task"].startswith(name.partition(":")[0]))
        scores[episode["controller"]][place].append(episode["score"])
    table = {who: {place: round(mean(found), 2) for place, found in row.items()} for who, row in scores.items()}
    for who, row in table.items():
        print(f"{who:42s}" + "".join(f"  {place} {score:6.2f}" for place, score in row.items()))
    print("RESULT " + json.dumps(table))


def _write_plans(directory: Path) -> list[str]:
    """One file per plan, as controllers for `evaluate`."""
    names: list[str] = []
    for number, (label, (first, interval, blueprint)) in enumerate(PLANS.items()):
        path = directory / f"{number}.json"
        Plan(first=first, interval=interval, max_seeds=9, blueprints=(blueprint,), size=1.0).save(path)
        names.append(f"{label}={path}")
    return names


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

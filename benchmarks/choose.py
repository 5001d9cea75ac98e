"""Which of several policies ships? The rule of docs/experiments.md, applied to an evaluation on validation tasks.

Run: simic evaluate --controllers pretrained p1=RUN p2=RUN ensemble=FILE --tasks combined:validation --out DIR
     python benchmarks/choose.py DIR --policies p1=RUN p2=RUN --ensemble ensemble=FILE [--out FILE]

The candidate is the policy with the highest mean score, or the ensemble if its mean score is higher by more than the
standard error of the difference over tasks. It ships if its mean score is higher than that of the controller that
ships today, label `pretrained`, by more than that standard error: then it is copied to --out.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

import tyro
from lab import mean_and_error

Scores = dict[str, dict[str, float]]
"""Label -> task -> mean score of its hosts."""


SHIPPED = "pretrained"
"""Label of the controller that ships today."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to choose from."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Directory of the evaluation."""
    policies: tuple[str, ...]
    """LABEL=RUN of each policy."""
    ensemble: str
    """LABEL=FILE of the ensemble."""
    out: Path | None = None
    """Where the candidate is copied to, if it ships."""


def main(options: Options) -> None:
    """Print all mean scores, the candidate and whether it ships."""
    scores = read_scores(options.directory / "episodes.csv")
    for label in scores:
        mean, error = lead(scores, label, SHIPPED)
        print(f"{label:12s} {mean_score(scores, label):6.2f}   minus {SHIPPED} {mean:+.2f} +- {error:.2f}")
    paths = {label: Path(path) for label, path in (named.split("=") for named in (*options.policies, options.ensemble))}
    *policies, ensemble = paths
    candidate = choose_candidate(scores, policies, ensemble)
    ships = exceeds(scores, candidate, SHIPPED)
    if ships and options.out is not None:
        path = paths[candidate]
        shutil.copyfile(path / "controller.safetensors" if path.is_dir() else path, options.out)
    print("RESULT " + json.dumps({"candidate": candidate, "ships": ships}))


def read_scores(path: Path) -> Scores:
    """The mean score of every controller on every task."""
    hosts: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            hosts[row["controller"]][row["task"]].append(float(row["score"]))
    return {label: {task: fmean(own) for task, own in tasks.items()} for label, tasks in hosts.items()}


def choose_candidate(scores: Scores, policies: Sequence[str], ensemble: str) -> str:
    """The best policy, or the ensemble if it is clearly better."""
    best = max(policies, key=lambda label: mean_score(scores, label))
    return ensemble if exceeds(scores, ensemble, best) else best


def exceeds(scores: Scores, label: str, other: str) -> bool:
    """Whether the mean score is higher by more than the standard error of the difference over tasks."""
    mean, error = lead(scores, label, other)
    return mean > error


def lead(scores: Scores, label: str, other: str) -> tuple[float, float]:
    """Mean difference of scores and its standard error over tasks."""
    return mean_and_error([scores[label][task] - scores[other][task] for task in scores[other]])


def mean_score(scores: Scores, label: str) -> float:
    """The mean over tasks."""
    return fmean(scores[label].values())


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""Can the value of growing and the best kind of seed be told from what a controller sees before the first seed?

Run: python benchmarks/probe.py [--families mlp cnn subsets sequences] [--num-tasks 16] [--rng-seeds 4]

Every host of some validation tasks is trained without growth and with six fixed ways to grow from decision 3 on: seeds
in every slot that are behind, beside or both, small or large. From the observations of decisions 0 to 2, where all
wait, two probes predict

    value    points of score on test data that the best way brings over never growing
    kind     none, behind, beside or both, whichever is best
    choice   points that growing in the way with the highest predicted gain brings over never growing

What is best is chosen by the score on validation data. A probe is linear or a small neural network, and is tested on
tasks that it was not fitted to (grouped cross-validation). "old" leaves out the features that tell hosts apart by data,
layers and optimizer.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import tyro
from headroom import KINDS, LIFECYCLE, Item, MenuController
from lab import run_parallel
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import r2_score
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from simic.control.features import BASE_FEATURES, SLOT_FEATURES
from simic.control.observation import Observation, observe
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.rewards.score import score
from simic.tasks.registry import find_task

FIRST = 3
"""Decision from which on hosts grow."""
MENU = (
    Item("none"),
    *(Item(kind, FIRST, size) for kind, size in product(("behind", "beside", "both"), ("small", "large"))),
)
LIMIT = 15.0
"""Points to which gains are clipped before they are fitted, so that single broken hosts do not decide."""
NEW_BASE, NEW_SLOT = BASE_FEATURES.names.index("batches"), SLOT_FEATURES.names.index("width")
"""The first features that tell hosts apart."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    families: tuple[str, ...] = ("mlp", "cnn", "subsets", "sequences")
    """Task families."""
    num_tasks: int = 16
    """Validation tasks of each."""
    rng_seeds: int = 4
    """Hosts of each task."""
    horizon: int = 24
    """Host epochs."""
    folds: int = 8
    """Parts of the tasks, of which one at a time is predicted."""


class Job(NamedTuple):
    """One task."""

    options: Options
    family: str
    number: int


class Hosts(NamedTuple):
    """The hosts of a task (N, ...)."""

    old: np.ndarray
    """Features without those that are new."""
    all: np.ndarray
    value: np.ndarray
    kind: np.ndarray
    """Index into KINDS."""
    gain: np.ndarray
    """Points that every way brings on validation data (N, ways)."""
    test_gain: np.ndarray


def measure(job: Job) -> Hosts:
    """Train the hosts of one task in all ways."""
    options, task = job.options, find_task(job.family, split="validation", rng_seed=job.number)
    rng_seeds = list(range(options.rng_seeds * job.number, options.rng_seeds * (job.number + 1)))
    episode = EpisodeConfig(horizon=options.horizon)
    trainings = HostTrainings(task, rng_seeds * len(MENU), episode=episode, lifecycle=LIFECYCLE)
    controller = MenuController([item for item in MENU for _ in rng_seeds], trainings)
    facts, seen = trainings.facts(), []
    for decision in range(trainings.length.host_epochs):
        if decision < FIRST:
            seen.append(observe(facts))
        facts = trainings.step(controller.act(facts)).facts
    grown, base = trainings.parameters(exported=True), trainings.hosts.host_parameters
    validation, test = (
        score(quality, grown, base).reshape(len(MENU), -1)
        for quality in (trainings.quality(), trainings.test_quality())
    )
    hosts = np.arange(len(rng_seeds))
    value = test[1 + validation[1:].argmax(0), hosts] - test[0]
    kind = np.array([list(KINDS).index(item.kind) for item in MENU])[validation.argmax(0)]
    old, everything = (describe(seen, len(rng_seeds), *ends) for ends in ((NEW_BASE, NEW_SLOT), (None, None)))
    return Hosts(old, everything, value, kind, (validation - validation[0]).T, (test - test[0]).T)


def describe(seen: list[Observation], num_hosts: int, base_end: int | None, slot_end: int | None) -> np.ndarray:
    """One row per host: what all decisions say of it, and the last of its slots on average."""
    base = [observation.base[:num_hosts, :base_end] for observation in seen]
    return np.concatenate([*base, seen[-1].slots[:num_hosts, :, :slot_end].mean(1)], 1)


def predict(model: Any, x: np.ndarray, y: np.ndarray, tasks: np.ndarray, folds: int) -> np.ndarray:
    """Predictions for each task by a model that did not see it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = cross_val_predict(make_pipeline(StandardScaler(), model), x, y, groups=tasks, cv=GroupKFold(folds))
        return np.asarray(found)


def main(options: Options) -> None:
    """Measure and print."""
    jobs = [Job(options, family, number) for family in options.families for number in range(options.num_tasks)]
    if not 2 <= options.folds <= len(jobs):
        raise SystemExit(f"folds must lie in 2..{len(jobs)}, the number of tasks, got {options.folds}")
    found = run_parallel(measure, jobs)
    tasks = np.repeat(np.arange(len(jobs)), options.rng_seeds)
    old, everything, value, kind, gain, test_gain = (np.concatenate(parts) for parts in zip(*found, strict=True))
    linear = RidgeCV(np.logspace(0, 5, 16))
    small: dict[str, Any] = {"hidden_layer_sizes": (16,), "alpha": 10.0, "max_iter": 300, "random_state": 0}
    result = {
        f"r2_{name}{suffix}": float(r2_score(value, predict(model, x, value, tasks, options.folds)))
        for name, model in (("linear", linear), ("mlp", MLPRegressor(**small)))
        for suffix, x in (("_old", old), ("", everything))
    }
    for name, model in (("linear", linear), ("mlp", MLPRegressor(**small))):
        chosen = predict(model, everything, gain.clip(-LIMIT, LIMIT), tasks, options.folds).argmax(1)
        result[f"choice_{name}"] = float(test_gain[np.arange(len(chosen)), chosen].mean())
    result["choice_fixed"] = float(test_gain[:, gain.mean(0).argmax()].mean())
    classifiers = {
        "linear": LogisticRegression(C=0.01, max_iter=300),
        "mlp": MLPClassifier(**small),
    }
    for name, model in classifiers.items():
        for suffix, x in (("_old", old), ("", everything)):
            same = predict(model, x, kind, tasks, options.folds) == kind
            result[f"kind_accuracy_{name}{suffix}"] = float(same.mean())
    counts = np.bincount(kind, minlength=len(KINDS))
    result["kind_majority"] = float(counts.max() / counts.sum())
    print(f"{len(jobs)} tasks, {len(kind)} hosts: growing brings {value.mean():+.2f} points (std {value.std():.2f})")
    print("best kinds: " + ", ".join(f"{name} {count}" for name, count in zip(KINDS, counts, strict=True)))
    print("RESULT " + json.dumps({name: round(number, 3) for name, number in result.items()}))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

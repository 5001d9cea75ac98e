"""Suites: fixed sets, baselines and numbers of rng seeds, so that one command gives comparable results. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simic.evaluation.parsing import SCALED
from simic.registry import nearest


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What is compared, and on what."""

    tasks: tuple[str, ...]
    """Quick ones first. Each has a number of host epochs of its own."""
    baselines: tuple[str, ...]
    """Controllers that take part beside those that are given."""
    controllers: tuple[str, ...]
    """Those that are given by default."""
    derived: tuple[str, ...]
    """Ablations of every learned controller."""
    rival: str
    """The baseline that the others are compared with, set by set."""
    rng_seeds: int
    """Hosts per task."""


SUITES: dict[str, Suite] = {
    "real": Suite(
        tasks=(
            *("dna-mlp", "satellite-mlp", "letter-mlp", "moby-transformer"),
            *("mnist-cnn", "fashion-cnn-10k", "fashion-mlp-60k", "fashion-resnet"),
        ),
        baselines=("wait", "heuristic", "plan", SCALED),
        controllers=("pretrained",),
        derived=("static_wide",),
        rival="heuristic",
        rng_seeds=5,
    )
}
FIXED = {
    "horizon": "its sets have numbers of host epochs of their own",
    "num_tasks": "it has fixed sets, not families",
    "ablations": "it has baselines of its own",
}
"""Settings that a suite leaves no choice of, and why."""


def find_suite(name: str) -> Suite:
    """The suite of that name."""
    if name not in SUITES:
        raise ValueError(f"--suite: there is no suite {name!r}; {nearest(name, SUITES)}")
    return SUITES[name]


def suite_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an evaluation of a suite: those that were given, and the suite's."""
    suite = find_suite(name)
    for setting, why in FIXED.items():
        if setting in given:
            raise ValueError(f"--{setting.replace('_', '-')} and --suite exclude each other: {why}; leave one out")
    return {
        **{"tasks": suite.tasks, "rng_seeds": tuple(range(suite.rng_seeds))},
        **given,
        "suite": name,
        "controllers": _with_baselines(suite, given.get("controllers", suite.controllers)),
    }


def check_suite(name: str, tasks: Sequence[str], num_rng_seeds: int) -> None:
    """Raise unless the tasks are sets of the suite and there are rng seeds enough for intervals on each."""
    suite = find_suite(name)
    for task in tasks:
        if task not in suite.tasks:
            raise ValueError(f"--tasks: the suite {name} has no set {task!r}; {nearest(task, suite.tasks)}")
    if num_rng_seeds < 2:
        raise ValueError(f"a suite has an interval for every set: give at least 2 rng seeds, got {num_rng_seeds}")


def _with_baselines(suite: Suite, words: Sequence[str]) -> tuple[str, ...]:
    """The words of --controllers, and before them the baselines that they do not name."""
    named = {part for word in words for part in word.split(",")}
    missing = [name for name in suite.baselines if name not in named]
    return (*([",".join(missing)] if missing else []), *words)

"""Is there anything to adapt to? Fixed plans on many hosts of a family, the best of them in hindsight, and width.

Run: python benchmarks/headroom.py [--family mlp] [--blueprints mlp_small mlp mlp_large] [--num-tasks 12]
     python benchmarks/headroom.py --family cnn --blueprints depthwise conv conv_double

Every plan leads the same hosts: never grow, or one blueprint in every slot from the start. The oracle takes the plan
that was best for a host on validation data, and is scored on test data, as all are: points of accuracy minus
log2(parameters / host's). "Wide" is the host widened to the parameters of the plan's network. All figures are means.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tyro
from lab import run_parallel

from simic.control.plan import Plan, PlanController
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.evaluation.candidates import width_for
from simic.rewards.score import POINTS
from simic.tasks.registry import find_task
from simic.tasks.task import Task

NEVER = Plan(max_seeds=0)
DIFFICULTY = ("problem", "turns", "hidden", "extent", "classes")
"""Traits that tell problems apart."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    family: str = "mlp"
    """The task family; its training tasks are drawn."""
    blueprints: tuple[str, ...] = ("mlp_small", "mlp", "mlp_large")
    """Plans to compare."""
    num_tasks: int = 12
    """Tasks."""
    rng_seeds: int = 16
    """Hosts of each."""
    horizon: int = 24
    """Host epochs."""

    @property
    def plans(self) -> dict[str, Plan]:
        """By name."""
        growing = {name: Plan(first=0, interval=1, max_seeds=9, blueprints=(name,)) for name in self.blueprints}
        return {"never": NEVER} | growing


class Job(NamedTuple):
    """One task."""

    options: Options
    number: int


class Found(NamedTuple):
    """What the hosts of a task came to (N,)."""

    kind: list[str]
    score: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]
    over_wide: dict[str, np.ndarray]


def main(options: Options) -> None:
    """Measure and print."""
    found = run_parallel(measure, [Job(options, number) for number in range(options.num_tasks)])
    score, validation = (
        np.concatenate([np.stack([getattr(own, part)[name] for name in options.plans]) for own in found], 1)
        for part in ("score", "validation")
    )
    for name, own in zip(options.plans, score, strict=True):
        print(f"{name:12s} {own.mean():6.2f}")
    hosts = np.arange(score.shape[1])
    figures = {
        "best_plan": float(score.mean(1).max()),
        "oracle": float(score[validation.argmax(0), hosts].mean()),
        "oracle_never_grows": float((validation.argmax(0) == 0).mean()),
    }
    kinds = [kind for own in found for kind in own.kind]
    print("by problem: growth pays (points of accuracy and rent), grown minus equally wide (points of accuracy)")
    for kind in sorted(set(kinds)):
        here = np.array([own == kind for own in kinds])
        cells = [f"{kind:16s} {here.sum():4d} hosts"]
        for row, name in enumerate(options.blueprints, start=1):
            wide = np.concatenate([own.over_wide[name] for own in found])
            cells.append(f"{name} {(score[row] - score[0])[here].mean():+6.2f} {wide[here].mean():+6.2f}")
        print("   ".join(cells))
    for name in options.blueprints:
        figures[f"over_wide_{name}"] = float(np.concatenate([own.over_wide[name] for own in found]).mean())
    print("RESULT " + json.dumps({name: round(value, 3) for name, value in figures.items()}))


def measure(job: Job) -> Found:
    """All plans on the hosts of one task, and wide hosts."""
    task, horizon = find_task(job.options.family, rng_seed=job.number), job.options.horizon
    rng_seeds = list(range(job.options.rng_seeds))
    score: dict[str, np.ndarray] = {}
    validation: dict[str, np.ndarray] = {}
    over_wide: dict[str, np.ndarray] = {}
    for name, plan in job.options.plans.items():
        played = _play(task, plan, rng_seeds, horizon)
        score[name], validation[name] = played.test - played.rent, played.validation - played.rent
        if plan is not NEVER:
            assert task.host_of_width is not None
            wide = task.widened(width_for(task.host_of_width, int(np.median(played.parameters))))
            over_wide[name] = played.test - _play(wide, NEVER, rng_seeds, horizon).test
    traits = [task.draw(rng_seed).traits for rng_seed in rng_seeds]
    kinds = [" ".join(str(own[name]) for name in DIFFICULTY if name in own) for own in traits]
    return Found(kinds, score, validation, over_wide)


class Played(NamedTuple):
    """Exported networks (N,): points of accuracy, parameters and what they cost."""

    test: np.ndarray
    validation: np.ndarray
    parameters: np.ndarray
    rent: np.ndarray


def _play(task: Task, plan: Plan, rng_seeds: list[int], horizon: int) -> Played:
    trainings = HostTrainings(task, rng_seeds, episode=EpisodeConfig(horizon=horizon))
    controller, facts = PlanController(plan), trainings.facts()
    for _ in range(horizon):
        facts = trainings.step(controller.act(facts)).facts
    parameters = trainings.parameters(exported=True)
    return Played(
        test=POINTS * trainings.test_quality(),
        validation=POINTS * facts.val_accuracy[:, -1],
        parameters=parameters,
        rent=np.log2(parameters / trainings.hosts.host_parameters),
    )


if __name__ == "__main__":
    main(tyro.cli(Options))

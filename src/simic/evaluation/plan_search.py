"""Search for the best fixed plan by successive halving: each rung plays all remaining plans and keeps the best third.

All plans of a rung play on the same hosts, from tasks that no earlier rung used. A plan is ranked by its mean score on
validation data over all rungs so far. The budget, in host trainings, is divided evenly between the rungs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from simic.control.facts import Facts
from simic.control.legality import Masks
from simic.control.plan import Plan, PlanController
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.episodes import Decide, play
from simic.evaluation.candidates import Settings
from simic.evaluation.parsing import NamedTask, parse_tasks
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.training.progress import PatientConsole
from simic.workers.build import make_pool

KEEP = 1 / 3
"""Share of the plans that a rung keeps."""
MIN_HOSTS = 2
"""Least hosts per plan and task; few, because tasks differ more than hosts of a task."""
STACK = 96
"""Hosts trained as one stack: the fewer plans, the more hosts each gets."""


def grid() -> list[Plan]:
    """All plans of the search, one of which never grows."""
    growing = [
        Plan(first=first, max_seeds=max_seeds, interval=interval, size=size, style=style)
        for first, (max_seeds, interval), size, style in product(
            (0, 2, 6, 12), ((1, 1), (2, 1), (2, 4), (4, 1), (4, 4)), (0.2, 0.4, 0.6, 0.8, 1.0), ("linear-add", "gated")
        )
    ]
    return [Plan(max_seeds=0), *growing]


class Trial(NamedTuple):
    """Several plans on the same hosts of one task."""

    task: NamedTask
    rng_seeds: tuple[int, ...]
    plans: tuple[Plan, ...]


def search_plan(
    *,
    budget: int,
    tasks: Sequence[str],
    horizon: int = EpisodeConfig.horizon,
    incubation: Incubation = LifecycleConfig.incubation,
    rng_seed: int = 0,
    data_dir: str | None = None,
    plans: Sequence[Plan] | None = None,
    workers: int = 0,
    quiet: bool = True,
) -> Plan:
    """The best of `plans`, by default those of `grid`."""
    alive, names, turn = list(plans or grid()), parse_tasks(tasks, 1, data_dir), 0
    rungs = math.ceil(math.log(len(alive), 1 / KEEP) - 1e-9)
    least = rungs * MIN_HOSTS * len(alive)
    if budget < least:
        raise ValueError(f"--budget must be at least {least} for {len(alive)} plans in {rungs} rungs, got {budget}")
    scores: dict[Plan, list[float]] = {plan: [] for plan in alive}
    common = (EpisodeConfig(horizon=horizon), LifecycleConfig(incubation=incubation))
    console, pool = PatientConsole(soft_wrap=True, highlight=False, quiet=quiet), make_pool(play_trial, workers=workers)
    try:
        for rung in range(rungs):
            hosts = max(MIN_HOSTS, STACK // len(alive))
            num_tasks = max(1, budget // rungs // (hosts * len(alive)))
            turns = range(turn, turn + num_tasks)
            trials = [trial for at in turns for trial in _trials(names, rng_seed, at, alive, hosts)]
            turn += num_tasks
            for trial, found in zip(trials, pool.run(common, trials), strict=True):
                for plan, own in zip(trial.plans, found, strict=True):
                    scores[plan] += own
            alive.sort(key=lambda plan: -float(np.mean(scores[plan])))
            best = f"mean score {np.mean(scores[alive[0]]):.2f} with {alive[0]}"
            console.print(
                f"rung {rung + 1}/{rungs}: {len(alive)} plans on {num_tasks} tasks, best {best}", markup=False
            )
            alive = alive[: max(1, math.ceil(KEEP * len(alive) - 1e-9))]
    finally:
        pool.close()
    return alive[0]


def play_trial(common: tuple[EpisodeConfig, LifecycleConfig], trial: Trial) -> list[list[float]]:
    """The scores of every plan, one per host."""
    settings = Settings(
        rng_seeds=trial.rng_seeds * len(trial.plans), episode=common[0], lifecycle=common[1], governor=GovernorConfig()
    )
    record = play(settings.trainings(trial.task.find()), _decide_by(trial.plans, len(trial.rng_seeds)))
    return record.score.reshape(len(trial.plans), -1).tolist()


def _decide_by(plans: Sequence[Plan], hosts_each: int) -> Decide:
    """Hosts in the order of the plans, `hosts_each` for each: plan 0, plan 0, plan 1, plan 1, ..."""
    controllers = [PlanController(plan) for plan in plans]
    owner = np.repeat(np.arange(len(plans)), hosts_each)

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        return np.stack([controller.act(facts) for controller in controllers])[owner, np.arange(len(owner))]

    return decide


def _trials(names: Sequence[NamedTask], rng_seed: int, turn: int, plans: Sequence[Plan], hosts: int) -> list[Trial]:
    """All plans on the next task, or, for a task that is not drawn from a family, on new hosts of it."""
    stream = rng_seed * 1_000_000 + turn
    name = names[turn % len(names)]
    task = name if name.split is None else NamedTask(name.name, name.split, stream)
    rng_seeds = tuple(range(STACK * stream, STACK * stream + hosts))
    at_once = max(1, STACK // hosts)
    chunks = [plans[start : start + at_once] for start in range(0, len(plans), at_once)]
    return [Trial(task, rng_seeds, tuple(chunk)) for chunk in chunks]

"""Search the best fixed plan by successive halving: all plans play a little, the better third plays on, and so on.

All plans of a rung lead the same hosts, of tasks that no earlier rung has seen. They are judged by the score on
validation data, as a learned controller is in training; each plan by all that it ever played. The budget, in host
trainings, is shared evenly by the rungs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from simic.control.facts import Facts
from simic.control.plan import Plan, PlanController
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.evaluation.candidates import Settings
from simic.evaluation.measures import Act, play, score
from simic.evaluation.parsing import NamedTask, parse_tasks
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.rewards.terms import POINTS
from simic.training.progress import PatientConsole
from simic.workers.pool import WorkerPool

KEEP = 1 / 3
"""Share of the plans that survive a rung."""
MIN_HOSTS = 2
"""Hosts of a task that each plan leads at least; few, because more tasks say more than more hosts."""
STACK = 96
"""Hosts that are trained as one: few plans lead more hosts each."""


def grid() -> list[Plan]:
    """All plans that are tried; to never grow is one of them."""
    growing = [
        Plan(first=first, max_seeds=max_seeds, interval=interval, size=size, style=style)
        for first, (max_seeds, interval), size, style in product(
            (0, 2, 6, 12), ((1, 1), (2, 1), (2, 4), (4, 1), (4, 4)), (0.2, 0.4, 0.6, 0.8, 1.0), ("linear-add", "gated")
        )
    ]
    return [Plan(max_seeds=0), *growing]


class Trial(NamedTuple):
    """Some plans on one task."""

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
    """The best of the plans, by default those of `grid`."""
    alive, names, turn = list(plans or grid()), parse_tasks(tasks, 1, data_dir), 0
    rungs = math.ceil(math.log(len(alive), 1 / KEEP) - 1e-9)
    least = rungs * MIN_HOSTS * len(alive)
    if budget < least:
        raise ValueError(f"--budget must be at least {least} for {len(alive)} plans in {rungs} rungs, got {budget}")
    scores: dict[Plan, list[float]] = {plan: [] for plan in alive}
    common = (EpisodeConfig(horizon=horizon, attribute_at_end=False), LifecycleConfig(incubation=incubation))
    console, pool = PatientConsole(soft_wrap=True, highlight=False, quiet=quiet), WorkerPool(play_trial, workers)
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
    trainings = settings.trainings(trial.task.find())
    lives = play(trainings, _each_its_own(trial.plans, len(trial.rng_seeds)))
    scores = score(POINTS * lives.val_metric[-1], lives.exported, trainings.hosts.host_parameters)
    return scores.reshape(len(trial.plans), -1).tolist()


def _each_its_own(plans: Sequence[Plan], hosts_each: int) -> Act:
    controllers = [PlanController(plan) for plan in plans]
    owner = np.repeat(np.arange(len(plans)), hosts_each)

    def act(facts: Facts) -> np.ndarray:
        return np.stack([controller.act(facts) for controller in controllers])[owner, np.arange(len(owner))]

    return act


def _trials(names: Sequence[NamedTask], rng_seed: int, turn: int, plans: Sequence[Plan], hosts: int) -> list[Trial]:
    """One more task for all plans; tasks that have only a name come with new hosts."""
    stream = rng_seed * 1_000_000 + turn
    name = names[turn % len(names)]
    task = name if name.split is None else NamedTask(name.name, name.split, stream)
    rng_seeds = tuple(range(STACK * stream, STACK * stream + hosts))
    at_once = max(1, STACK // hosts)
    chunks = [plans[start : start + at_once] for start in range(0, len(plans), at_once)]
    return [Trial(task, rng_seeds, tuple(chunk)) for chunk in chunks]

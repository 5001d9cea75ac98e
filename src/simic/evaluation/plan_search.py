"""Search for the best fixed plan or scale by successive halving: each rung plays all that remain, keeps the best third.

All options (plans or scales) of a rung play on the same hosts, from tasks that no earlier rung used. An option is
ranked by its mean score on validation data over all rungs so far. The budget, in host trainings, is divided evenly
between the rungs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from simic.control.baselines import WaitController
from simic.control.facts import Facts
from simic.control.legality import Masks
from simic.control.plan import Kinds, Plan, PlanController
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.episodes import Decide, decide_by, play
from simic.evaluation.candidates import Settings, count_parameters, scaled_width
from simic.evaluation.parsing import NamedTask, parse_tasks
from simic.evaluation.scale import Scale
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.rewards.score import RENT_WEIGHT, doublings
from simic.tasks.registry import check_data
from simic.tasks.task import Task
from simic.training.progress import PatientConsole
from simic.workers.build import make_pool
from simic.workers.placement import Placement

KEEP = 1 / 3
"""Share of the options that a rung keeps."""
MIN_HOSTS = 2
"""Least hosts per option and task; few, because tasks differ more than hosts of a task."""
STACK = 96
"""Hosts of a task that play together: the fewer options, the more hosts each gets."""


SIZES: dict[Kinds, tuple[float, ...]] = {
    "output": (0.2, 0.4, 0.6, 0.8, 1.0),
    "input": (0.0, 0.5, 1.0),
    "both": (0.4, 0.6, 0.8, 1.0),
}
"""Ranks that are tried: a slot of features fits six blueprints behind it and three beside it."""
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""Scales that are tried."""


def plan_grid() -> list[Plan]:
    """All plans of the search, one of which never grows."""
    growing = [
        Plan(first=first, max_seeds=max_seeds, interval=interval, reads=reads, size=size, style=style)
        for first, (max_seeds, interval), style, reads in product(
            (0, 2, 8), ((1, 1), (2, 1), (2, 4), (4, 1), (4, 4)), ("linear-add", "gated"), SIZES
        )
        for size in SIZES[reads]
        if (reads, max_seeds) != ("both", 1)  # one seed cannot be of both kinds
    ]
    return [Plan(max_seeds=0), *growing]


def scale_grid() -> list[Scale]:
    """All scales of the search, one of which leaves hosts as they are."""
    return [Scale(parameter_factor=factor) for factor in FACTORS]


Option = Plan | Scale
GRIDS: dict[str, Callable[[], Sequence[Option]]] = {"plan": plan_grid, "scale": scale_grid}
"""What can be searched."""


class Trial(NamedTuple):
    """Several options on the same hosts of one task."""

    task: NamedTask
    rng_seeds: tuple[int, ...]
    options: tuple[Option, ...]


def search(
    options: Sequence[Option],
    *,
    budget: int,
    tasks: Sequence[str],
    horizon: int = EpisodeConfig.horizon,
    incubation: Incubation = LifecycleConfig.incubation,
    seeds_per_slot: int = LifecycleConfig.seeds_per_slot,
    rng_seed: int = 0,
    data_dir: str | None = None,
    placement: Placement | None = None,
    quiet: bool = True,
) -> Option:
    """The best of plans or scales, such as those of GRIDS."""
    alive, names, turn = list[Option](options), parse_tasks(tasks, 1, data_dir), 0
    rungs = math.ceil(math.log(len(alive), 1 / KEEP) - 1e-9)
    least = rungs * MIN_HOSTS * len(alive)
    kind = f"{type(alive[0]).__name__.lower()}s"
    if budget < least:
        raise ValueError(f"--budget must be at least {least} for {len(alive)} {kind} in {rungs} rungs, got {budget}")
    scores: dict[Option, list[float]] = {option: [] for option in alive}
    common = (EpisodeConfig(horizon=horizon), LifecycleConfig(incubation=incubation, seeds_per_slot=seeds_per_slot))
    console = PatientConsole(soft_wrap=True, highlight=False, quiet=quiet)
    check = partial(check_data, sorted({name.name for name in names}), data_dir)
    pool = make_pool(play_trial, placement, check=check)
    try:
        for rung in range(rungs):
            hosts = max(MIN_HOSTS, STACK // len(alive))
            num_tasks = max(1, budget // rungs // (hosts * len(alive)))
            turns = range(turn, turn + num_tasks)
            trials = [trial for at in turns for trial in _trials(names, rng_seed, at, alive, hosts)]
            turn += num_tasks
            for trial, found in zip(trials, pool.run(common, trials), strict=True):
                for option, own in zip(trial.options, found, strict=True):
                    scores[option] += own
            alive.sort(key=lambda option: -float(np.mean(scores[option])))
            best = f"mean score {np.mean(scores[alive[0]]):.2f} with {alive[0]}"
            console.print(
                f"rung {rung + 1}/{rungs}: {len(alive)} {kind} on {num_tasks} tasks, best {best}", markup=False
            )
            alive = alive[: max(1, math.ceil(KEEP * len(alive) - 1e-9))]
    finally:
        pool.close()
    return alive[0]


def play_trial(common: tuple[EpisodeConfig, LifecycleConfig], trial: Trial) -> list[list[float]]:
    """The scores of every option, one per host."""
    task, (episode, lifecycle) = trial.task.find(), common
    settings = Settings(rng_seeds=trial.rng_seeds, episode=episode, lifecycle=lifecycle, governor=GovernorConfig())
    if plans := [option for option in trial.options if isinstance(option, Plan)]:
        return _play_plans(settings, task, plans)
    return [_play_scale(settings, task, option) for option in trial.options if isinstance(option, Scale)]


def _play_plans(settings: Settings, task: Task, plans: Sequence[Plan]) -> list[list[float]]:
    """The scores of every plan; all of them are one stack of hosts."""
    trainings = settings.trainings(task, settings.rng_seeds * len(plans))
    record = play(trainings, _decide_by(plans, len(settings.rng_seeds)))
    return record.score.reshape(len(plans), -1).tolist()


def _play_scale(settings: Settings, task: Task, scale: Scale) -> list[float]:
    """The scores of hosts that are wider from the start; parameters count in relation to hosts that are not."""
    trainings = settings.trainings(task.widened(scaled_width(task, scale)))
    record = play(trainings, decide_by(WaitController().act))
    rent = RENT_WEIGHT * doublings(record.exported_parameters, count_parameters(task.make_host))
    return (record.score - rent).tolist()


def _decide_by(plans: Sequence[Plan], hosts_each: int) -> Decide:
    """Hosts in the order of the plans, `hosts_each` for each: plan 0, plan 0, plan 1, plan 1, ..."""
    controllers = [PlanController(plan) for plan in plans]
    owner = np.repeat(np.arange(len(plans)), hosts_each)

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        return np.stack([controller.act(facts) for controller in controllers])[owner, np.arange(len(owner))]

    return decide


def _trials(names: Sequence[NamedTask], rng_seed: int, turn: int, options: Sequence[Option], hosts: int) -> list[Trial]:
    """All options on the next task, or, for a task that is not drawn from a family, on new hosts of it."""
    stream = rng_seed * 1_000_000 + turn
    name = names[turn % len(names)]
    task = name if name.split is None else NamedTask(name.name, name.split, stream)
    rng_seeds = tuple(range(STACK * stream, STACK * stream + hosts))
    at_once = max(1, STACK // hosts)
    chunks = [options[start : start + at_once] for start in range(0, len(options), at_once)]
    return [Trial(task, rng_seeds, tuple(chunk)) for chunk in chunks]

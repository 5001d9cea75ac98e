"""How much is there to win by deciding for every host whether, when, where and how much to grow?

Run: python benchmarks/headroom.py [--families mlp cnn subsets sequences broad] [--num-tasks 8] [--rng-seeds 4]

On validation tasks of a family, all on the same hosts, in points of score on test data:

    never          no growth
    best plan      the item of the menu that is best on average over all hosts
    per host       the item of the menu that is best for the host
    trained again  the same item, when the host is trained once more from weights that differ by a thousandth
    other hosts    the item that is best on average over the other hosts of the task: what knowing the task is worth
    best of 64     the best of 64 random episodes of the host

What is best is chosen by the score on validation data, so `per host` and `best of 64` are what a search of so many
trainings brings, not hindsight. What `per host` gains over `trained again` is the luck of one training, which no
controller can foresee; what that gains over `other hosts` belongs to the host's own data and weights. The menu has 13
items: never, or seeds in every slot that are behind, beside or both (two seeds per slot), small or large, from
decision 0 or 8 on. Random episodes germinate any blueprint anywhere at a rate of their own and finish what they began.
The answers that were chosen are counted; "same on test data" is how often test data would have chosen the same kind of
seeds, and what it would be if both choices were independent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from lab import mean_and_error, run_parallel

from simic.control.baselines import RandomController
from simic.control.facts import Facts
from simic.control.legality import legal_masks
from simic.control.plan import decisions_to_fossil, germinate_rows, move_on
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.growth.blueprints import BLUEPRINTS
from simic.lifecycle.actions import TEMPOS, Column, Op
from simic.lifecycle.stages import LifecycleConfig
from simic.rewards.score import score
from simic.tasks.registry import find_task
from simic.tasks.task import Task

LIFECYCLE = LifecycleConfig(seeds_per_slot=2)
EARLY, LATE = 0, 8
"""Decisions at which items of the menu begin; a random episode is early if its seeds are older than the middle."""
KINDS = {"none": (), "behind": ("output",), "beside": ("input",), "both": ("output", "input")}
"""What the seeds of a slot read, in the order of its seats."""
BLUEPRINTS_OF: dict[str, dict[tuple[str, str], str]] = {
    "features": {
        ("output", "small"): "mlp_small",
        ("output", "large"): "mlp_large",
        ("input", "small"): "widen_small",
        ("input", "large"): "widen_large",
    },
    "conv": {
        ("output", "small"): "depthwise",
        ("output", "large"): "conv_double",
        ("input", "small"): "widen_pointwise",
        ("input", "large"): "widen",
    },
    "sequence": {
        ("output", "small"): "mlp",
        ("output", "large"): "attention",
        ("input", "small"): "widen",
        ("input", "large"): "widen_attention",
    },
}
"""Topology -> what a seed reads and its size -> blueprint."""
NUDGE = 1e-3
"""Relative change of the initial weights of hosts that are trained again."""
RATES = (0.05, 1.0)
"""Range of the probability, log-uniform, with which a random episode takes a chance to germinate."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    families: tuple[str, ...] = ("mlp", "cnn", "subsets", "sequences", "broad")
    """Task families."""
    num_tasks: int = 8
    """Validation tasks of each."""
    rng_seeds: int = 4
    """Hosts of each task."""
    episodes: int = 64
    """Random episodes of each host."""
    horizon: int = 24
    """Host epochs."""


class Item(NamedTuple):
    """One fixed way to grow."""

    kind: str
    first: int = EARLY
    size: str = ""

    def __str__(self) -> str:
        return "never" if self.kind == "none" else f"{self.kind} {'late' if self.first else 'early'} {self.size}"


MENU = (
    Item("none"),
    *(Item(*each) for each in product(("behind", "beside", "both"), (EARLY, LATE), ("small", "large"))),
)


class Job(NamedTuple):
    """One task."""

    options: Options
    family: str
    number: int


class Played(NamedTuple):
    """Episodes of hosts, E of each of N (E, N): scores of exported networks, and how they were grown."""

    validation: np.ndarray
    test: np.ndarray
    kind: np.ndarray
    """Index into KINDS."""
    late: np.ndarray
    large: np.ndarray
    """Of the menu what the item says; of random episodes whether parameters at least double."""


class Found(NamedTuple):
    """What the hosts of a task came to."""

    menu: Played
    again: Played
    random: Played


def main(options: Options) -> None:
    """Measure and print, family by family."""
    result = {}
    for family in options.families:
        jobs = [Job(options, family, number) for number in range(options.num_tasks)]
        result[family] = report(family, run_parallel(measure, jobs))
    print("RESULT " + json.dumps(result))


def measure(job: Job) -> Found:
    """The menu and random episodes on the hosts of one task."""
    options, task = job.options, find_task(job.family, split="validation", rng_seed=job.number)
    rng_seeds = list(range(options.rng_seeds))
    menu, again = (_fresh(task, rng_seeds * len(MENU), options.horizon) for _ in range(2))
    weights = again.hosts.hosts.rows
    weights.mul_(1 + NUDGE * torch.randn(weights.shape, generator=torch.Generator().manual_seed(job.number)))
    items = [item for item in MENU for _ in rng_seeds]
    late, large = (
        np.reshape([getattr(item, part) == value for item in items], (len(MENU), -1))
        for part, value in (("first", LATE), ("size", "large"))
    )
    random = _fresh(task, rng_seeds * options.episodes, options.horizon)
    return Found(
        play(menu, MenuController(items, menu), len(MENU))._replace(late=late, large=large),
        play(again, MenuController(items, again), len(MENU))._replace(late=late, large=large),
        play(random, RandomGrowth(random, rng_seed=job.number), options.episodes),
    )


def _fresh(task: Task, rng_seeds: Sequence[int], horizon: int) -> HostTrainings:
    return HostTrainings(task, rng_seeds, episode=EpisodeConfig(horizon=horizon), lifecycle=LIFECYCLE)


class MenuController:
    """Follows an item of the menu on every host."""

    def __init__(self, items: Sequence[Item], trainings: HostTrainings) -> None:
        self.first = np.array([item.first for item in items])
        self.host_epochs = trainings.length.host_epochs
        self.wanted = np.array([self._blueprints(item, trainings) for item in items])
        """The blueprint for every slot (N, S), -1 to leave it empty."""

    @staticmethod
    def _blueprints(item: Item, trainings: HostTrainings) -> list[int]:
        wanted, reads = [], KINDS[item.kind]
        names, table = trainings.hosts.blueprint_names, trainings.hosts.blueprint_table()
        for site, parameters in zip(trainings.hosts.sites, table, strict=True):
            index = -1
            if site.seat < len(reads):
                name = BLUEPRINTS_OF[site.shape.topology][reads[site.seat], item.size]
                index = names.index(name) if name in names and parameters[names.index(name)] >= 0 else -1
            wanted.append(index)
        return wanted

    def act(self, facts: Facts) -> np.ndarray:
        """Finish seeds, or germinate what the item says in the first slot that lacks it (N, H)."""
        masks = legal_masks(facts)
        lacking = masks.slot[:, Op.GERMINATE] & (self.wanted >= 0)
        slot = lacking.argmax(1)
        due = lacking.any(1) & (facts.decision >= self.first)
        rows = germinate_rows(slot, self.wanted[np.arange(len(slot)), slot], "linear-add", TEMPOS[0])
        return finish_or_plant(facts, move_on(masks), rows, due, self.host_epochs)


class RandomGrowth:
    """Germinates at random, at a rate that every host draws for itself, and finishes what it began."""

    def __init__(self, trainings: HostTrainings, rng_seed: int) -> None:
        self._random, self._rng = RandomController(rng_seed), np.random.default_rng([1, rng_seed])
        low, high = np.log(RATES)
        self._rate = np.exp(self._rng.uniform(low, high, trainings.num_hosts))
        self._host_epochs = trainings.length.host_epochs

    def act(self, facts: Facts) -> np.ndarray:
        """Finish seeds, or perhaps germinate (N, H)."""
        rows = self._random.act(facts)
        due = (rows[:, Column.OP] == Op.GERMINATE) & (self._rng.random(len(rows)) < self._rate)
        return finish_or_plant(facts, move_on(legal_masks(facts)), rows, due, self._host_epochs)


def finish_or_plant(
    facts: Facts, finishing: np.ndarray, planting: np.ndarray, due: np.ndarray, host_epochs: int
) -> np.ndarray:
    """Germinate where that is due, no seed can be moved on, and there is time for the new one and those that live.

    Training ends after `host_epochs`, also where controllers are not told so or are told otherwise (family broad).
    """
    tempo = np.array(TEMPOS)[planting[:, Column.TEMPO]]
    # A host takes one action per decision, so every other live seed may delay the new one.
    needed = decisions_to_fossil(facts.lifecycle, 0) + tempo + facts.slots.live.sum(1)
    chosen = due & (finishing[:, Column.OP] == Op.WAIT) & (host_epochs - facts.decision >= needed)
    return np.where(chosen[:, None], planting, finishing)


def play(trainings: HostTrainings, controller: MenuController | RandomGrowth, episodes: int) -> Played:
    """Lead the hosts to the end of their episodes; the N hosts of an episode stand side by side."""
    facts = trainings.facts()
    for _ in range(trainings.length.host_epochs):
        facts = trainings.step(controller.act(facts)).facts
    fossil = facts.slots.occupied & ~facts.slots.live
    grown, base = trainings.parameters(exported=True), trainings.hosts.host_parameters
    reads_input = np.array([BLUEPRINTS[name].reads == "input" for name in facts.blueprint_names])[facts.slots.blueprint]
    kind = (fossil & ~reads_input).any(1) + 2 * (fossil & reads_input).any(1)
    born = np.where(fossil, trainings.length.host_epochs - facts.slots.age, 0).sum(1) / np.maximum(1, fossil.sum(1))
    figures = (
        *(score(trainings.quality(), grown, base), score(trainings.test_quality(), grown, base)),
        *(kind, born >= (EARLY + LATE) / 2, grown >= 2 * base),
    )
    return Played(*(figure.reshape(episodes, -1) for figure in figures))


# What is printed.


def report(family: str, found: Sequence[Found]) -> dict[str, Any]:
    """Print what the tasks of a family came to; the figures of the RESULT line."""
    menu, again, random = (_joined(parts) for parts in zip(*found, strict=True))
    num_tasks, hosts = len(found), np.arange(menu.test.shape[1])
    plan, item, episode = menu.validation.mean(1).argmax(), menu.validation.argmax(0), random.validation.argmax(0)
    scores = {
        "never": menu.test[0],
        f"best plan ({MENU[plan]})": menu.test[plan],
        "per host": menu.test[item, hosts],
        "trained again": again.test[item, hosts],
        "other hosts": menu.test[best_of_others(menu.validation, num_tasks), hosts],
        f"best of {len(random.test)}": random.test[episode, hosts],
    }
    print(f"{family}: {num_tasks} tasks, {len(hosts)} hosts")
    for name, own in scores.items():
        lead = mean_and_error((own - menu.test[plan]).reshape(num_tasks, -1).mean(1).tolist())
        print(f"  {name:32s} {own.mean():6.2f}   minus best plan {lead[0]:+5.2f} +- {lead[1]:.2f}")
    means = {name.split(" (")[0]: round(float(own.mean()), 2) for name, own in scores.items()}
    result: dict[str, Any] = {**means, "plan": str(MENU[plan])}
    for name, played, chosen in (("menu", menu, item), ("random", random, episode)):
        counts = count_answers(played, chosen)
        print(f"  chosen from {name}: " + "; ".join(f"{answer} {count}" for answer, count in counts.items()))
        result[f"answers_{name}"] = counts
    in_test = menu.kind[menu.test.argmax(0), hosts]
    in_validation = menu.kind[item, hosts]
    same = float((in_test == in_validation).mean())
    chance = float(sum((in_test == kind).mean() * (in_validation == kind).mean() for kind in range(len(KINDS))))
    print(f"  same on test data: {same:.0%}, by chance {chance:.0%}")
    return result | {"same_on_test": round(same, 2), "same_by_chance": round(chance, 2)}


def best_of_others(value: np.ndarray, num_tasks: int) -> np.ndarray:
    """For every host the item with the highest sum over the other hosts of its task; (E, N) values to (N,) items."""
    by_task = value.reshape(len(value), num_tasks, -1)
    return (by_task.sum(2, keepdims=True) - by_task).argmax(0).reshape(-1)


def _joined(parts: Sequence[Played]) -> Played:
    """The hosts of all tasks side by side."""
    return Played(*(np.concatenate(figures, axis=1) for figures in zip(*parts, strict=True)))


def count_answers(played: Played, chosen: np.ndarray) -> dict[str, int]:
    """How many hosts have which answer; early, late, small and large are of hosts that grow."""
    hosts = np.arange(len(chosen))
    kind, late, large = (figure[chosen, hosts] for figure in (played.kind, played.late, played.large))
    counts = Counter(list(KINDS)[each] for each in kind)
    grown = kind > 0
    return {name: counts[name] for name in KINDS} | {
        "early": int((grown & ~late).sum()),
        "late": int((grown & late).sum()),
        "small": int((grown & ~large).sum()),
        "large": int((grown & large).sum()),
    }


if __name__ == "__main__":
    main(tyro.cli(Options))

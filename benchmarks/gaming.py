"""How often are the detectors of gaming wrong? Alarms in healthy episodes, and misses of planted gaming.

Run: python benchmarks/gaming.py [--tasks 8] [--num-hosts 8] [--families mlp cnn]

Healthy are the episodes of the rules and of the pretrained controller on validation tasks. For planted ones a seed in
the last slot is let in fully; then its offset is shifted and the head's bias shifted back, so that the network computes
what it did, and nothing without its seed ("overclaiming"). If half of the head's weights are also erased before every
host epoch, the host gets worse while it needs its seed ("indispensable").
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import tyro

from simic.control.facts import Facts
from simic.control.legality import Masks
from simic.control.registry import make_controller
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import Decide, EpisodeRecord, decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import Action
from simic.rewards.gaming import MIN_CONTRIBUTION
from simic.rewards.schemes import RewardConfig
from simic.tasks.registry import find_task
from simic.tasks.task import Task
from simic.training.episodes import against_twins

EPISODE = EpisodeConfig()
GERMINATION, PLANTING = 4, 10
"""Decisions at which the seed germinates, and at which it begins to game."""
OFFSET = 4.0
HEALTHY = ("wait", "random", "heuristic", "pretrained")
PLANTED = {"overclaiming": 0.0, "indispensable": 0.5}
"""Share of the head's weights that is erased before every host epoch."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    tasks: int = 8
    """Validation tasks of each family."""
    num_hosts: int = 8
    """Hosts of each task."""
    families: tuple[str, ...] = ("mlp", "cnn")
    """Task families."""


def led_by(name: str) -> Decide:
    """Decisions of a controller."""
    return decide_by(make_controller(name, 0).act)


def one_seed(task: Task) -> Decide:
    """One low-rank seed in the last slot, which is then left alone."""

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        grows = facts.decision[0] == GERMINATION
        action = Action("germinate", task.slots[-1], "low_rank", tempo=3) if grows else Action()
        return np.stack([action.encode(facts.slot_names, facts.blueprint_names)] * facts.num_hosts)

    return decide


@torch.no_grad()
def plant(trainings: HostTrainings, decision: int, erased: float) -> None:
    """Make every host need the seed in its last slot, without changing what it computes; then erase weights."""
    hosts = trainings.hosts
    weight, bias = list(hosts.hosts.leaves.values())[-2:]  # (N, classes, C), (N, classes) of the head
    if decision == PLANTING:
        (group,) = hosts.groups.values()
        offset = list(group.parameters.leaves.values())[-1]  # (N, C)
        shift = OFFSET * torch.randn(offset.shape, generator=torch.Generator().manual_seed(0))
        rows = torch.from_numpy(group.hosts)
        offset += shift
        bias[rows] -= torch.einsum("nkc,nc->nk", weight[rows], shift)
    if decision >= PLANTING:
        weight[:, :, : int(erased * weight.shape[2])] = 0


def with_plant(trainings: HostTrainings, erased: float) -> HostTrainings:
    """Hosts whose seed begins to game in the middle of the episode."""
    step: Callable[..., Any] = trainings.step

    def planted(actions: np.ndarray, masks: Masks | None = None) -> Any:
        plant(trainings, int(trainings.facts().decision[0]), erased)
        return step(actions, masks)

    trainings.step = planted
    return trainings


def seeds_flagged(record: EpisodeRecord) -> dict[str, int]:
    """Slots whose live seed was judged, and those that were flagged at some time, by reason."""
    assert record.twins is not None
    live = (record.slots.alpha[1:-1] > 0) & record.slots.live[1:-1] & record.valid[:-1, :, None]
    any_flag = np.any(list(record.twins.gaming.values()), axis=0)
    return {"judged": int(live.any(0).sum()), "flagged": int(any_flag.any(0).sum())} | {
        reason: int(flags.any(0).sum()) for reason, flags in record.twins.gaming.items()
    }


def planted_found(record: EpisodeRecord, reason: str) -> dict[str, int]:
    """Hosts that lived through the plant, those in which it took effect, and how many of these were found.

    A plant has no effect where guessing is as good as the host, or where the shift happens to favour the right classes.
    """
    assert record.twins is not None
    lived = ~record.verdict.any(0)
    took = lived & (record.slots.contribution[PLANTING + 1 : -1, :, -1].mean(0) > MIN_CONTRIBUTION)
    found = {name: flags[PLANTING:, :, -1].any(0) for name, flags in record.twins.gaming.items()}
    either = np.any(list(found.values()), axis=0)
    return {
        "planted": int(lived.sum()),
        "took_effect": int(took.sum()),
        "found": int((either & took).sum()),
        "by_its_reason": int((found[reason] & took).sum()),
        "found_without_effect": int((either & lived & ~took).sum()),
    }


def add(total: dict[str, int], more: dict[str, int]) -> None:
    """Add up counts."""
    for name, count in more.items():
        total[name] = total.get(name, 0) + count


def main(options: Options) -> None:
    """Print counts and rates of every kind of episode."""
    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {name: {} for name in (*HEALTHY, *PLANTED)}
    for family in options.families:
        for number in range(options.tasks):
            task = find_task(family, split="validation", rng_seed=number)

            def fresh(task: Task = task) -> HostTrainings:
                return HostTrainings(task, list(range(options.num_hosts)), episode=EPISODE, reward=RewardConfig())

            twins = play(fresh(), led_by("wait"))

            def judged(played: EpisodeRecord, twins: EpisodeRecord = twins) -> EpisodeRecord:
                return against_twins(played, twins, 1.0)

            for name in HEALTHY:
                add(counts[name], seeds_flagged(judged(play(fresh(), led_by(name)))))
            for reason, erased in PLANTED.items():
                record = judged(play(with_plant(fresh(), erased), one_seed(task)))
                add(counts[reason], planted_found(record, reason))
    rates: dict[str, float] = {}
    for name, own in counts.items():
        share = (
            own["flagged"] / max(own["judged"], 1) if name in HEALTHY else 1 - own["found"] / max(own["took_effect"], 1)
        )
        rates[f"{'alarms' if name in HEALTHY else 'missed'}/{name}"] = round(share, 4)
        print(name, own)
    print("RESULT", json.dumps(rates))


if __name__ == "__main__":
    main(tyro.cli(Options))

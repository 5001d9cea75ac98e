"""What does measuring one fossil per host at every decision cost?

Run: python benchmarks/fossils.py [--tasks 6] [--num-hosts 32] [--rounds 7]

Tasks of the family `mlp`, which preset quick draws from, and of `cnn`; every slot holds a fossil. Decisions with and
without the measurement take turns on the same hosts, in one thread; the medians of both are compared.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
import tyro

from simic.environment import host_trainings as environment
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import HEADS
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage
from simic.stacked import hosts as stacked
from simic.tasks.registry import find_task

LONG = EpisodeConfig(horizon=10_000, anneal=False)
NAMES = ("mlp", "cnn")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    tasks: int = 6
    """Tasks drawn from each family."""
    num_hosts: int = 32
    """Hosts side by side."""
    rounds: int = 7
    """Decisions of either kind."""


def with_fossils(trainings: HostTrainings) -> HostTrainings:
    """Every slot of every host gets a seed, which is then made a fossil."""
    for slot in range(len(trainings.task.slots)):
        rows = np.zeros((trainings.num_hosts, len(HEADS)), dtype=np.int64)
        fits = np.flatnonzero(trainings.hosts.blueprint_table()[slot] >= 0)
        rows[:, 0], rows[:, 1], rows[:, 2] = 1, slot, fits[np.arange(trainings.num_hosts) % len(fits)]
        trainings.step(rows)
    slot_state = trainings.hosts.slot_state
    slot_state.stage[:], slot_state.alpha[:], slot_state.alpha_target[:] = Stage.FOSSILIZED, 1.0, 1.0
    trainings.hosts.sync_with_slots()
    return trainings


def none(slots: SlotState) -> np.ndarray:
    """No fossil is measured; here no other seed is left."""
    return np.zeros_like(slots.live)


def milliseconds(trainings: HostTrainings, rounds: int) -> tuple[float, float]:
    """Of a decision without and with the measurement."""
    wait = np.zeros((trainings.num_hosts, len(HEADS)), dtype=np.int64)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds + 2):
        measures = bool(number % 2)
        rule = stacked.to_measure if measures else none
        with mock.patch.object(stacked, "to_measure", rule), mock.patch.object(environment, "to_measure", rule):
            begin = time.perf_counter()
            trainings.step(wait)
        if number > 1:  # the first of each kind warms up
            spent[measures].append(1e3 * (time.perf_counter() - begin))
    return float(np.median(spent[False])), float(np.median(spent[True]))


def main(options: Options) -> None:
    """Print a line per task, and the mean per family."""
    torch.set_num_threads(1)
    result: dict[str, dict[str, float]] = {}
    for name in NAMES:
        shares = []
        for number in range(options.tasks):
            task = find_task(name, rng_seed=number)
            hosts = with_fossils(HostTrainings(task, list(range(options.num_hosts)), episode=LONG))
            without, measured = milliseconds(hosts, options.rounds)
            shares.append(measured / without - 1)
            print(f"{task.name}: {without:.1f} ms, with a fossil measured {measured:.1f} ms, {shares[-1]:+.1%}")
        result[name] = {"mean_share": float(np.mean(shares)), "largest_share": float(np.max(shares))}
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options))

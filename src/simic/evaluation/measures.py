"""Whole episodes of a stack of hosts, and what they came to: one record per host, as JSON values.

Shapes: T decisions, N hosts, S slots, H heads of an action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from simic.control.facts import Facts
from simic.control.governor import Verdict
from simic.environment.host_trainings import HostTrainings
from simic.evaluation.flops import TrainingFlops
from simic.lifecycle.actions import HEAD_USED, STYLES, Op
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage
from simic.rewards.terms import POINTS

RENT = 1.0
"""Points that a doubling of the parameters costs; part of the definition of the score, never tuned."""
Act = Callable[[Facts], np.ndarray]


class Fossil(NamedTuple):
    """A seed that is part of the exported network."""

    slot: int
    blueprint: str
    style: str


@dataclass(frozen=True, kw_only=True)
class Lives:
    """What a stack of hosts went through. A host whose episode ended early stays as it was then."""

    slot_names: tuple[str, ...]
    blueprint_names: tuple[str, ...]
    actions: np.ndarray  # (T, N, H), 0 in heads that do not matter
    slots: list[SlotState]  # T + 1 of (N, S)
    val_metric: np.ndarray  # (T + 1, N)
    parameters: np.ndarray  # (T + 1, N), live seeds included
    decisions: np.ndarray  # (N,) until the episode ended
    test_metric: np.ndarray  # (N,) of the exported network
    exported: np.ndarray  # (N,) parameters of the exported network
    shapley: np.ndarray  # (N, S)
    flops: np.ndarray  # (N,)

    def fossils(self, host: int) -> list[Fossil]:
        """What one host ended with."""
        end = self.slots[int(self.decisions[host])]
        return [
            Fossil(slot, self.blueprint_names[end.blueprint[host, slot]], STYLES[end.style[host, slot]].name)
            for slot in np.flatnonzero(end.stage[host] == Stage.FOSSILIZED).tolist()
        ]


def play(trainings: HostTrainings, act: Act) -> Lives:
    """Let somebody lead the hosts through their episodes; the test split is looked at when an episode ends."""
    facts, counter, n = trainings.facts(), TrainingFlops(trainings), trainings.num_hosts
    alive, decisions, flops = np.ones(n, dtype=bool), np.zeros(n, dtype=np.int64), np.zeros(n)
    test_metric, exported = np.full(n, np.nan), np.zeros(n, dtype=np.int64)
    shapley = np.full(facts.slots.stage.shape, np.nan)
    slots, actions = [facts.slots], []
    val_metric, parameters = [facts.val_accuracy[:, -1]], [trainings.parameters()]
    for _ in range(trainings.episode.horizon):
        rows = act(facts) * alive[:, None]
        rows = rows * HEAD_USED[rows[:, 0]]
        outcome = trainings.step(rows)
        before, facts = facts, outcome.facts
        broken = alive & (outcome.verdict != Verdict.OK)  # a rollback took its seeds: it trained those from before
        flops += alive * np.where(broken, counter.of_host_epoch(before.slots), counter.of_host_epoch(facts.slots))
        actions.append(rows)
        slots.append(facts.slots)
        val_metric.append(np.where(alive, facts.val_accuracy[:, -1], val_metric[-1]))
        parameters.append(np.where(alive, trainings.parameters(), parameters[-1]))
        decisions += alive
        ended = alive & outcome.ended
        if ended.any():
            test_metric[ended] = trainings.test_metric()[ended]
            exported[ended] = trainings.parameters(exported=True)[ended]
            if outcome.attribution is not None:
                shapley[ended] = outcome.attribution.shapley[ended]
        alive = alive & ~outcome.ended
    return Lives(
        slot_names=tuple(facts.slot_names),
        blueprint_names=tuple(facts.blueprint_names),
        actions=np.stack(actions),
        slots=slots,
        val_metric=np.stack(val_metric),
        parameters=np.stack(parameters),
        decisions=decisions,
        test_metric=test_metric,
        exported=exported,
        shapley=shapley,
        flops=flops,
    )


def score(points: np.ndarray, parameters: np.ndarray, host_parameters: int) -> np.ndarray:
    """The objective (N,): accuracy in points, less rent for what a network has more parameters than its host."""
    return points - RENT * np.log2(parameters / host_parameters)


def episodes(lives: Lives, rng_seeds: Sequence[int], host_parameters: int) -> list[dict[str, Any]]:
    """One record per host. Figures are points (percent); `host_parameters` is what growth is charged against."""
    records, scores = [], score(POINTS * lives.test_metric, lives.exported, host_parameters)
    for host, rng_seed in enumerate(rng_seeds):
        curve = [POINTS * float(value) for value in lives.val_metric[:, host]]
        metric, parameters = POINTS * float(lives.test_metric[host]), int(lives.exported[host])
        records.append(
            {
                "rng_seed": int(rng_seed),
                "metric": metric,
                "score": float(scores[host]),
                "area": math.fsum(curve[1:]) / len(curve[1:]),
                "parameters": parameters,
                "host_parameters": host_parameters,
                "flops": float(lives.flops[host]),
                "accuracy_per_parameter": metric / parameters,
                "val_curve": curve,
                "parameter_curve": lives.parameters[:, host].astype(int).tolist(),
                "seeds": seed_lives(lives, host),
            }
        )
    return records


def seed_lives(lives: Lives, host: int) -> list[dict[str, Any]]:
    """Every seed of a host, in order of birth: times are decisions, contributions points.

    The contribution of a seed that was there at the end is its Shapley value, of others the last that was measured.
    """
    seeds: list[dict[str, Any]] = []
    for slot, name in enumerate(lives.slot_names):
        seed: dict[str, Any] | None = None
        for time in range(-1, int(lives.decisions[host])):
            after = lives.slots[time + 1]
            germinates = time >= 0 and tuple(lives.actions[time, host, :2]) == (Op.GERMINATE, slot)
            if germinates or (time < 0 and after.occupied[host, slot]):
                blueprint = lives.actions[time, host, 2] if germinates else after.blueprint[host, slot]
                seed = _seed(name, lives.blueprint_names[blueprint], max(time, 0))
                seeds.append(seed)
            if seed is None or seed["fate"] == "pruned":
                continue
            if not after.occupied[host, slot]:
                seed |= {"fate": "pruned", "ended": time}
                continue
            measured = float(after.contribution[host, slot])
            if math.isfinite(measured):
                seed["contribution"] = POINTS * measured
            if after.stage[host, slot] == Stage.FOSSILIZED and seed["fate"] == "live":
                seed |= {"fate": "fossilized", "ended": max(time, 0)}
        worth = float(lives.shapley[host, slot])
        if seed is not None and math.isfinite(worth):
            seed["contribution"] = POINTS * worth
    return sorted(seeds, key=lambda seed: seed["germinated"])


def _seed(slot: str, blueprint: str, germinated: int) -> dict[str, Any]:
    return {
        "slot": slot,
        "blueprint": blueprint,
        "germinated": germinated,
        "ended": None,
        "fate": "live",
        "contribution": None,
    }

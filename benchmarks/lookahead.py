"""How good could a controller be? A look-ahead search as the upper bound of each family, and the share that is reached.

Run: python benchmarks/lookahead.py [--families mlp cnn subsets sequences] [--num-tasks 3] [--rng-seeds 4]

All lead the same hosts of validation tasks; the score is that of test data. The search (`environment.lookahead`)
chooses by validation data, so its result is what so many host trainings can find, not hindsight. The share of the bound
is (controller - never) / (search - never), over all hosts of a family.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import tyro
from lab import mean_and_error

from simic.control.registry import make_controller
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import EpisodeRecord, decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.environment.lookahead import make_lookahead
from simic.environment.lookahead_config import LookaheadConfig
from simic.environment.seeding import task_rng_seed
from simic.rewards.score import score
from simic.tasks.registry import find_task

CONTROLLERS = {"never": "wait", "heuristic": "heuristic", "plan": "plan", "pretrained": "pretrained"}
SEARCH = "bound"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    families: tuple[str, ...] = ("mlp", "cnn", "subsets", "sequences")
    """Task families."""
    num_tasks: int = 3
    """Validation tasks of each family."""
    rng_seeds: int = 4
    """Hosts of each task."""
    horizon: int = 24
    """Decisions per episode."""
    controller: str = "pretrained"
    """The controller whose share of the bound is told: a name or a file."""
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)


def main(options: Options) -> None:
    """Measure family by family."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    spent: list[float] = []
    for family in options.families:
        began, scores = time.perf_counter(), {name: [] for name in (*CONTROLLERS, SEARCH)}
        for number in range(options.num_tasks):
            for name, (own, trainings) in play_task(options, family, number).items():
                scores[name].append(own)
                if name == SEARCH:
                    spent.append(trainings)
        result |= report(family, {name: np.stack(own) for name, own in scores.items()})
        print(f"  {np.mean(spent):.1f} host trainings per host, {time.perf_counter() - began:.0f} s", flush=True)
    print("RESULT " + json.dumps(result | {"host_trainings": round(float(np.mean(spent)), 1)}))


def play_task(options: Options, family: str, number: int) -> dict[str, tuple[np.ndarray, float]]:
    """Scores on test data (N,) of the hosts of one task, and the host trainings that each of them cost."""
    task = find_task(family, split="validation", rng_seed=task_rng_seed(0, number))

    def trainings(rng_seeds: int) -> HostTrainings:
        return HostTrainings(task, range(rng_seeds), episode=EpisodeConfig(horizon=options.horizon))

    found: dict[str, tuple[np.ndarray, float]] = {}
    for name, controller in (CONTROLLERS | {"pretrained": options.controller}).items():
        decide = decide_by(make_controller(controller).act)
        found[name] = test_score(play(trainings(options.rng_seeds), decide, evaluate=True)), 1.0
    search = make_lookahead(trainings(options.rng_seeds), trainings, options.lookahead, rng_seed=number)
    found[SEARCH] = test_score(play(search.trunk, search.decide, evaluate=True)), search.host_trainings
    return found


def test_score(record: EpisodeRecord) -> np.ndarray:
    """Score of the exported networks on test data (N,)."""
    assert record.test_quality is not None
    return score(record.test_quality, record.exported_parameters, record.host_parameters)


def report(family: str, scores: dict[str, np.ndarray]) -> dict[str, float]:
    """Print the scores (tasks, N) of a family; the figures of the RESULT line."""
    never, bound = scores["never"].mean(1), scores[SEARCH].mean(1)
    print(f"{family}: {len(never)} tasks, {scores['never'].size} hosts")
    for name, own in scores.items():
        lead = mean_and_error((own.mean(1) - never).tolist()) if len(never) > 1 else ((own.mean(1) - never)[0], np.nan)
        print(f"  {name:12s} {own.mean():6.2f}   minus never {lead[0]:+6.2f} +- {lead[1]:.2f}")
    room, reached = float((bound - never).mean()), float((scores["pretrained"].mean(1) - never).mean())
    share = reached / room if room > 0 else float("nan")
    print(f"  share of the bound that pretrained reaches: {share:.2f}")
    figures = {"bound": bound.mean(), "pretrained": scores["pretrained"].mean(), "share": share}
    return {f"{name}_{family}": round(float(value), 2) for name, value in figures.items()}


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

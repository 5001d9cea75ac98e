"""How strong can the heuristic be? Its main settings on training tasks of a family, judged on validation data.

Run: python benchmarks/heuristic.py [--family mlp] [--num-tasks 8] [--rng-seeds 16]

The score is validation accuracy in points minus log2(parameters / host's) of the exported network, mean over hosts;
the error is that of the paired difference from the default settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import tyro
from lab import run_parallel

from simic.control.heuristic import HeuristicConfig, HeuristicController
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.tasks.registry import find_task

GRID = [
    HeuristicConfig(max_seed_ratio=ratio, min_improvement=improvement, max_live_seeds=live)
    for ratio, improvement, live in product((1.0, 2.0, 4.0, 8.0), (0.1, 0.3), (1, 3))
]
FIRST_TASK, FIRST_RNG_SEED = 5_000, 9_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    family: str = "mlp"
    """The task family; its training tasks are drawn."""
    num_tasks: int = 8
    """Tasks."""
    rng_seeds: int = 16
    """Hosts of each."""
    horizon: int = 24
    """Host epochs."""


class Job(NamedTuple):
    """Some settings on one task."""

    options: Options
    number: int
    config: HeuristicConfig


def main(options: Options) -> None:
    """Measure and print, best first."""
    configs = [HeuristicConfig(), *(config for config in GRID if config != HeuristicConfig())]
    jobs = [Job(options, number, config) for config in configs for number in range(options.num_tasks)]
    scores = np.stack(run_parallel(measure, jobs)).reshape(len(configs), -1)
    difference = scores - scores[0]
    for row in np.argsort(-scores.mean(1)):
        error = difference[row].std(ddof=1) / np.sqrt(scores.shape[1])
        config = configs[row]
        print(
            f"{scores[row].mean():6.2f} ({difference[row].mean():+.2f} +- {error:.2f})  "
            f"ratio {config.max_seed_ratio:g}, improvement {config.min_improvement:g}, live {config.max_live_seeds}"
        )
    best = float(scores.mean(1).max())
    print("RESULT " + json.dumps({"default": round(float(scores[0].mean()), 3), "best": round(best, 3)}))


def measure(job: Job) -> np.ndarray:
    """The scores of the hosts of one task."""
    task, horizon = find_task(job.options.family, rng_seed=FIRST_TASK + job.number), job.options.horizon
    rng_seeds = range(FIRST_RNG_SEED, FIRST_RNG_SEED + job.options.rng_seeds)
    trainings = HostTrainings(task, rng_seeds, episode=EpisodeConfig(horizon=horizon))
    return play(trainings, decide_by(HeuristicController(job.config).act)).score


if __name__ == "__main__":
    main(tyro.cli(Options))

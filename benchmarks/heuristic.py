"""How strong can the heuristic be? Its main settings on training tasks of a family, judged on validation data.

Run: python benchmarks/heuristic.py [--family mlp] [--num-tasks 8] [--rng-seeds 16] [--reads output both] [--ratios 2]

The score is validation accuracy in points minus log2(parameters / host's) of the exported network, mean over hosts;
the error is that of the paired difference from the default settings, over tasks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import tyro
from lab import run_parallel

from simic.control.heuristic import HeuristicConfig, HeuristicController
from simic.control.plan import Kinds
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.stages import LifecycleConfig
from simic.tasks.registry import find_task

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
    seeds_per_slot: int = LifecycleConfig.seeds_per_slot
    """Seeds that a slot may hold."""
    split: Literal["train", "validation"] = "train"
    """Settings are chosen on training tasks; validation tasks are for one look at the chosen ones."""
    reads: tuple[Kinds, ...] = ("output", "input", "both")
    """Values of `reads`."""
    ratios: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Values of `max_seed_ratio`."""
    improvements: tuple[float, ...] = (0.1, 0.3)
    """Values of `min_improvement`."""
    live: tuple[int, ...] = (1, 3)
    """Values of `max_live_seeds`."""

    @property
    def configs(self) -> list[HeuristicConfig]:
        """The default settings, then all others."""
        grid = [
            HeuristicConfig(reads=reads, max_seed_ratio=ratio, min_improvement=improvement, max_live_seeds=live)
            for reads, ratio, improvement, live in product(self.reads, self.ratios, self.improvements, self.live)
        ]
        return [HeuristicConfig(), *(config for config in grid if config != HeuristicConfig())]


class Job(NamedTuple):
    """Some settings on one task."""

    options: Options
    number: int
    config: HeuristicConfig


def main(options: Options) -> None:
    """Measure and print, best first."""
    configs = options.configs
    jobs = [Job(options, number, config) for config in configs for number in range(options.num_tasks)]
    scores = np.stack(run_parallel(measure, jobs)).reshape(len(configs), options.num_tasks, -1).mean(2)
    difference = scores - scores[0]  # (configs, tasks)
    for row in np.argsort(-scores.mean(1)):
        error = difference[row].std(ddof=1) / np.sqrt(options.num_tasks)
        config = configs[row]
        print(
            f"{scores[row].mean():6.2f} ({difference[row].mean():+.2f} +- {error:.2f})  "
            f"reads {config.reads}, "
            f"ratio {config.max_seed_ratio:g}, improvement {config.min_improvement:g}, live {config.max_live_seeds}"
        )
    best = float(scores.mean(1).max())
    print("RESULT " + json.dumps({"default": round(float(scores[0].mean()), 3), "best": round(best, 3)}))


def measure(job: Job) -> np.ndarray:
    """The scores of the hosts of one task."""
    options = job.options
    task = find_task(options.family, split=options.split, rng_seed=FIRST_TASK + job.number)
    rng_seeds = range(FIRST_RNG_SEED, FIRST_RNG_SEED + options.rng_seeds)
    lifecycle = LifecycleConfig(seeds_per_slot=options.seeds_per_slot)
    trainings = HostTrainings(task, rng_seeds, episode=EpisodeConfig(horizon=options.horizon), lifecycle=lifecycle)
    return play(trainings, decide_by(HeuristicController(job.config).act)).score


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Do controllers find planted answers? Their gain over the host alone, on hosts of which it is known what pays.

Run: PYTHONPATH=tests python benchmarks/planted.py [--controllers heuristic pretrained FILE ...] [--rng-seeds 8]

The hosts are those of tests/helpers/planted.py. A figure is the score (points of test accuracy minus log2(parameters /
host's)) minus that of the host alone, mean over rng seeds; `right` is the plan that is known to be right, `worst` the
worst host of a row as a share of what the right plan gains (where nothing is to be gained: left out).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from helpers.planted import HORIZON, NEVER, PLANTED
from lab import run_parallel

from simic.control.plan import PlanController
from simic.control.registry import make_controller
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.evaluation.candidates import Settings, evaluate_episodes
from simic.lifecycle.stages import LifecycleConfig

RIGHT, ALONE = "right", "host alone"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    controllers: tuple[str, ...] = ("heuristic", "plan", "pretrained")
    """Names of controllers, or files of plans and trained controllers."""
    rng_seeds: int = 8
    """Hosts of each kind."""


class Job(NamedTuple):
    """One controller on the hosts of one kind."""

    controller: str
    host: str
    rng_seeds: int


def main(options: Options) -> None:
    """Print the table."""
    rows = (RIGHT, *options.controllers)
    jobs = [Job(row, host, options.rng_seeds) for row in (ALONE, *rows) for host in PLANTED]
    found = dict(zip([job[:2] for job in jobs], run_parallel(measure, jobs), strict=True))
    gains = {row: {host: found[row, host] - found[ALONE, host] for host in PLANTED} for row in rows}
    print(f"| gain over the host alone | {' | '.join(PLANTED)} | worst |")
    print("|---" * (len(PLANTED) + 2) + "|")
    for row, own in gains.items():
        worst = min(own[host] / gains[RIGHT][host] for host in PLANTED if PLANTED[host].right != NEVER)
        cells = " | ".join(f"{gain:+.1f}" for gain in own.values())
        print(f"| {Path(row).stem if Path(row).is_file() else row} | {cells} | {worst:.0%} |")
    print(
        "RESULT "
        + json.dumps({row: {host: round(gain, 2) for host, gain in own.items()} for row, own in gains.items()})
    )


def measure(job: Job) -> float:
    """The mean score."""
    planted = PLANTED[job.host]
    settings = Settings(
        rng_seeds=tuple(range(job.rng_seeds)),
        episode=EpisodeConfig(horizon=HORIZON),
        lifecycle=LifecycleConfig(seeds_per_slot=planted.seeds_per_slot),
        governor=GovernorConfig(),
    )
    plans = {RIGHT: planted.right, ALONE: NEVER}
    plan = plans.get(job.controller)
    controller: Any = make_controller(job.controller) if plan is None else PlanController(plan)
    trainings = settings.trainings(planted.make_task())
    _, episodes = evaluate_episodes(trainings, controller.act, settings.rng_seeds, trainings.hosts.host_parameters)
    return float(np.mean([episode["score"] for episode in episodes]))


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Does growth by the heuristic reach its final architecture trained from scratch, and at what compute?

Run: python benchmarks/growth.py [--task mnist1d-cnn] [--rng-seeds 8] [--host-epochs 40]

Per rng seed: the host alone; the host grown by the heuristic; the architecture it ended with, from scratch, for as
many host epochs, from the same initial host weights and batches. Accuracy is that of the exported network on the test
split.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import tyro
from lab import Outcome, mean_and_error, run_parallel, train

from simic.control.heuristic import HeuristicConfig, HeuristicController
from simic.tasks.registry import make_task

RULE = HeuristicConfig(max_live_seeds=1, max_seed_ratio=1.0)
"""Cautious: one seed at a time, none larger than the host."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    task: str = "mnist1d-cnn"
    """A task preset."""
    rng_seeds: int = 8
    """Hosts, each with its own initial weights, batches and seeds."""
    host_epochs: int = 40
    """Passes over the training data."""


def measure(job: tuple[Options, int]) -> dict[str, Outcome]:
    """Three trainings that share an rng seed."""
    options, rng_seed = job
    task = make_task(options.task)
    alone, _ = train(task, "wait", host_epochs=options.host_epochs, rng_seed=rng_seed)
    grown, _ = train(task, HeuristicController(RULE), host_epochs=options.host_epochs, rng_seed=rng_seed)
    scratch, _ = train(task, "wait", host_epochs=options.host_epochs, rng_seed=rng_seed, planted=grown.architecture)
    return {"alone": alone, "grown": grown, "scratch": scratch}


def main(options: Options) -> None:
    """Measure and print."""
    outcomes = run_parallel(measure, [(options, rng_seed) for rng_seed in range(options.rng_seeds)])
    result: dict[str, float | str] = {"task": options.task, "rng_seeds": options.rng_seeds}
    for kind in ("alone", "grown", "scratch"):
        mean, error = mean_and_error([100 * outcome[kind].test_accuracy for outcome in outcomes])
        parameters, _ = mean_and_error([outcome[kind].parameters for outcome in outcomes])
        gflops, _ = mean_and_error([outcome[kind].training_flops / 1e9 for outcome in outcomes])
        print(f"{kind:8s} {mean:6.2f} +- {error:.2f} %  {parameters:8,.0f} parameters  {gflops:8.2f} GFLOP of training")
        result |= {f"{kind}_accuracy": round(mean, 3), f"{kind}_gflop": round(gflops, 3)}
    differences = [100 * (outcome["grown"].test_accuracy - outcome["scratch"].test_accuracy) for outcome in outcomes]
    difference, error = mean_and_error(differences)
    compute, _ = mean_and_error([o["grown"].training_flops / o["scratch"].training_flops for o in outcomes])
    print(f"grown - scratch, paired: {difference:+.2f} +- {error:.2f} points at {compute:.2f} of its training compute")
    for rng_seed, outcome in enumerate(outcomes):
        print(f"  rng seed {rng_seed}: " + ", ".join(f"{s} {b}" for s, b, _ in outcome["grown"].architecture))
    result |= {
        "grown_minus_scratch": round(difference, 3),
        "standard_error": round(error, 3),
        "compute_ratio": round(compute, 4),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""Does a frozen model need adapters everywhere? Grown adapters against LoRA of fixed rank and place, and others.

Run: make data && python benchmarks/adapters.py [--only "gpt-*/lora-*"] [--rng-seeds 8] [--quick]

Every arm adapts the same pretrained model with the same batches, optimizer (AdamW) and schedule (warm-up, then linear
decay). An rng seed is a sample of data, their order, and the initial weights. Learning rates are chosen by validation
loss on rng seeds of their own, for every arm from a grid of the same size. Every training is one line in the
file of results; what is there already is not run again, so the script may be stopped at any time and started again.

Trained parameters do not count the head, which all arms train. Compute is the number of floating-point operations of
training and, for grown adapters, of all evaluations on which growth is decided.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import tyro
from adapter_arms import FIXED_ARMS, Adaptation, Arm, head_parameters
from adapter_growth import GROWING_ARMS
from adapter_problems import PROBLEMS, Problem, Sample, evaluate
from adapter_report import report
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.flop_counter import FlopCounterMode

ARMS = (*FIXED_ARMS, *GROWING_ARMS)
ADAPTER_RATES = (1e-3, 3e-3, 1e-2)
RATES = {"full": (1e-4, 3e-4, 1e-3), "adalora": (1e-2, 3e-2, 1e-1)}
"""Arm -> its grid of learning rates, if other than that of LoRA and grown adapters."""
HEAD_RATE = 1e-2
"""Learning rate of the head in all arms."""
TUNING_SEEDS = (1000, 1001)
WARM_UP_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    only: tuple[str, ...] = ("*",)
    """Patterns of problem/arm, such as gpt-bible/lora-all-*."""
    rng_seeds: int = 8
    """Rng seeds that are reported."""
    quick: bool = False
    """A sixth of the steps, 2 rng seeds and one tuning seed, in a file of its own: shows that everything runs."""
    report_only: bool = False
    """Run nothing; print the tables of what is on file."""
    results: Path = Path("runs/adapters.jsonl")
    """File of results, one training per line."""

    def __post_init__(self) -> None:
        if self.rng_seeds < 2:
            raise ValueError(f"rng_seeds must be at least 2 for a standard error, got {self.rng_seeds}")


class Job(NamedTuple):
    """One training."""

    problem: str
    arm: str
    rng_seed: int
    rate: float


def main(options: Options) -> None:
    """Run what is missing, then print the tables."""
    torch.set_num_threads(1)
    if options.quick:
        options = dataclasses.replace(options, rng_seeds=2, results=options.results.with_suffix(".quick"))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    chosen = [
        (problem, arm)
        for problem in PROBLEMS.values()
        for arm in ARMS
        if any(fnmatch.fnmatch(f"{problem.name}/{arm.name}", pattern) for pattern in options.only)
    ]
    if not chosen:
        raise ValueError(
            f"no problem/arm matches {' '.join(options.only)}; problems are {', '.join(PROBLEMS)}, arms "
            f"{', '.join(arm.name for arm in ARMS)}"
        )
    if not options.report_only:
        run_missing(chosen, options)
    names = [(problem.name, arm.name) for problem, arm in chosen]
    report(read(options.results), names, options.rng_seeds)


def run_missing(chosen: Sequence[tuple[Problem, Arm]], options: Options) -> None:
    """Tune, then run all arms at one rng seed after the other, so that what is on file is always paired."""
    for job in tuning_jobs(chosen, quick=options.quick):
        run(job, options)
    for rng_seed in range(options.rng_seeds):
        for problem, arm in chosen:
            rate = best_rate(read(options.results), problem, arm)
            run(Job(problem.name, arm.name, rng_seed, rate), options)


def tuning_jobs(chosen: Sequence[tuple[Problem, Arm]], *, quick: bool) -> Iterator[Job]:
    """All rates of all arms that are needed, on rng seeds that are not reported."""
    for rng_seed in TUNING_SEEDS[: 1 if quick else None]:
        for problem, arm in dict.fromkeys((problem.tuned_on, arm.name) for problem, arm in chosen):
            for rate in RATES.get(arm, ADAPTER_RATES) if needs_rate(arm) else ():
                yield Job(problem, arm, rng_seed, rate)


def needs_rate(arm: str) -> bool:
    """Whether an arm trains anything but the head, whose rate is fixed."""
    return arm != "head"


def best_rate(records: Sequence[dict[str, Any]], problem: Problem, arm: Arm) -> float:
    """The rate of the lowest mean validation loss."""
    if not needs_rate(arm.name):
        return HEAD_RATE
    losses: dict[float, list[float]] = defaultdict(list)
    for record in records:
        if (record["problem"], record["arm"]) == (problem.tuned_on, arm.name) and record["rng_seed"] in TUNING_SEEDS:
            losses[record["rate"]].append(record["validation_loss"])
    return min(losses, key=lambda rate: statistics.fmean(losses[rate]))


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file; a last line that was cut off by a kill does not count."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def run(job: Job, options: Options) -> None:
    """Run a training unless it is on file, and append its record."""
    if any(all(record[name] == value for name, value in job._asdict().items()) for record in read(options.results)):
        return
    record = job._asdict() | adapt(job, quick=options.quick)
    with options.results.open("a", encoding="utf-8") as file:
        file.write("\n" * _is_cut_off(options.results) + json.dumps(record) + "\n")
    print(" ".join(f"{name}={value:.4g}" if isinstance(value, float) else str(value) for name, value in record.items()))


def _is_cut_off(path: Path) -> bool:
    content = path.read_bytes()
    return bool(content) and not content.endswith(b"\n")


def adapt(job: Job, *, quick: bool) -> dict[str, Any]:
    """Train one arm on one sample; measures of the result and costs."""
    problem = PROBLEMS[job.problem]
    arm = next(arm for arm in ARMS if arm.name == job.arm)
    sample = problem.draw(problem.steps, job.rng_seed)
    if quick:
        sample = sample._replace(batches=sample.batches[: problem.steps // 6])
    torch.manual_seed(job.rng_seed)
    start = time.process_time()
    adaptation = arm.start(problem, sample, job.rng_seed)
    costs = train(problem, adaptation, sample, job.rate)
    cpu_seconds = time.process_time() - start
    model = adaptation.model
    return {
        "quality": problem.quality(model, sample.test),
        "validation_loss": _finite(evaluate(model, sample.validation)[0]),
        "forgetting": problem.forgetting(model, sample),
        "parameters": adaptation.count(),
        "cpu_seconds": cpu_seconds,
        **costs,
        **adaptation.notes(),
    }


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else 1e9


def train(problem: Problem, adaptation: Adaptation, sample: Sample, rate: float) -> dict[str, float]:
    """One pass over the sample's batches; mean number of trained parameters, and floating-point operations."""
    model, steps = adaptation.model, len(sample.batches)
    optimizer = make_optimizer(problem, model, rate)
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / (WARM_UP_SHARE * steps), 1 - step / steps))
    after_step = adaptation.begin(optimizer, schedule)
    parameters, step_flops, flops, counted = [], 0.0, 0.0, -1
    for step, (x, y) in enumerate(sample.batches):
        model.train()
        parameters.append(adaptation.count())
        # A step costs the same until the structure changes.
        counter = FlopCounterMode(display=False) if parameters[-1] != counted else None
        with counter or nullcontext():
            loss = F.cross_entropy(model(x), y) + adaptation.penalty()
            optimizer.zero_grad()
            if loss.requires_grad:
                loss.backward()
        if counter is not None:
            step_flops, counted = float(counter.get_total_flops()), parameters[-1]
        flops += step_flops
        optimizer.step()
        schedule.step()
        flops += after_step(step)
    return {"mean_parameters": statistics.fmean(parameters), "flops": flops}


def make_optimizer(problem: Problem, model: nn.Module, rate: float) -> Optimizer:
    """AdamW on all that is trained; the head has its own learning rate."""
    head = head_parameters(problem, model)
    ids = {id(parameter) for parameter in head}
    # Frozen parameters, which get no gradient and do not change, tell the growth scheduler how to train seeds.
    others = [each for each in model.parameters() if id(each) not in ids]
    groups = [{"params": others, "lr": rate}, {"params": head, "lr": HEAD_RATE}]
    return torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)


if __name__ == "__main__":
    main(tyro.cli(Options))

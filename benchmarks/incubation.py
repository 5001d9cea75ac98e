"""How should a seed learn before it is blended in? The three modes, against plain networks.

Run: python benchmarks/incubation.py [--tasks digits-cnn mnist1d-cnn] [--rng-seeds 6] [--host-epochs 40]

Every mode gets the same simple controller: plant `conv_double` in every slot from host epoch 5 on, move each seed on
as soon as it is legal, keep it. Plain networks: the host alone, the final architecture from scratch, the host widened
to the same number of parameters. Accuracy is on the test split, of the exported network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import tyro
from lab import mean_and_error, run_parallel, train

from simic import GrowableModel
from simic.control.facts import Facts
from simic.control.legality import legal_masks
from simic.lifecycle.actions import HEADS, Action, Op
from simic.lifecycle.stages import INCUBATIONS, LifecycleConfig
from simic.tasks.registry import make_task
from simic.tasks.task import Task

BLUEPRINT, START = "conv_double", 5
PLAIN = ("alone", "scratch", "wide")
SLOT_SETS = {1: ("block1",), 3: ("stem", "block1", "block2")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    tasks: tuple[str, ...] = ("digits-cnn", "mnist1d-cnn")
    """Task presets with convolutional hosts."""
    rng_seeds: int = 6
    """Hosts per cell, each with its own initial weights, batches and seeds."""
    host_epochs: int = 40
    """Passes over the training data."""


@dataclass(frozen=True)
class Job:
    """One training."""

    task: str
    num_slots: int
    kind: str
    rng_seed: int
    host_epochs: int


class EagerController:
    """Moves seeds on as soon as it may, keeps all of them, and fills empty slots from decision START on."""

    def act(self, facts: Facts) -> np.ndarray:
        """One action per host."""
        masks = legal_masks(facts)
        plant = Action("germinate", 0, BLUEPRINT, tempo=5).encode(facts.slot_names, facts.blueprint_names)
        actions = np.zeros((facts.num_hosts, len(HEADS)), dtype=np.int64)
        for host in range(facts.num_hosts):
            for op in (Op.FOSSILIZE, Op.ADVANCE, Op.GERMINATE):
                if masks.op[host, op] and (op != Op.GERMINATE or facts.decision[host] >= START):
                    actions[host] = plant if op == Op.GERMINATE else 0
                    actions[host, :2] = op, masks.slot[host, op].argmax()
                    break
        return actions

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to remember."""


def measure(job: Job) -> dict[str, float]:
    """Accuracy, parameters, compute, and how loud the seeds became against the host."""
    task = replace(make_task(job.task), slots=SLOT_SETS[job.num_slots])
    planted = [(slot, BLUEPRINT, 1.0) for slot in task.slots]
    settings: dict[str, Any] = {"host_epochs": job.host_epochs, "rng_seed": job.rng_seed}
    if job.kind == "alone":
        outcome, grown = train(task, "wait", **settings)
    elif job.kind == "scratch":
        outcome, grown = train(task, "wait", planted=planted, **settings)
    elif job.kind == "wide":
        outcome, grown = train(widened(task, job), "wait", **settings)
    else:
        lifecycle = LifecycleConfig(incubation=job.kind)  # pyright: ignore[reportArgumentType]
        outcome, grown = train(task, EagerController(), lifecycle=lifecycle, **settings)
        assert len(outcome.architecture) == len(task.slots), f"not all seeds were fossilised: {outcome.architecture}"
    return {
        "accuracy": 100 * outcome.test_accuracy,
        "parameters": outcome.parameters,
        "gflop": outcome.training_flops / 1e9,
        "loudness": loudness(grown.model, task),
    }


def widened(task: Task, job: Job) -> Task:
    """The same host, as wide as it must be to have the parameters of the grown one."""
    planted = len(SLOT_SETS[job.num_slots])
    goal = sum(p.numel() for p in task.make_host().parameters()) + planted * _branch_parameters(task)
    widths = [make_task(job.task, width=width) for width in range(4, 40)]
    return min(widths, key=lambda t: abs(sum(p.numel() for p in t.make_host().parameters()) - goal))


def _branch_parameters(task: Task) -> int:
    model = GrowableModel(task.make_host(), task.slots, example_input=task.data.train_x[:2])
    return int(model.blueprint_table()[0, model.blueprint_names.index(BLUEPRINT)])


def loudness(model: GrowableModel, task: Task) -> float:
    """Norm of what seeds add over the norm of what they are added to, mean over slots; 0 without seeds."""
    ratios: list[float] = []

    def listen(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        ratios.append(float(output.norm() / args[0].norm()))

    handles = [part.get_submodule("branch").register_forward_hook(listen) for part in model.seeds.values()]
    with torch.no_grad():
        model.eval()(task.data.validation_x)
    for handle in handles:
        handle.remove()
    return sum(ratios) / len(ratios) if ratios else 0.0


def jobs(options: Options) -> Iterator[Job]:
    """Every training; the host alone does not depend on the number of slots, so it runs once per task."""
    for task in options.tasks:
        for num_slots in SLOT_SETS:
            for kind in (*PLAIN, *INCUBATIONS):
                if kind != "alone" or num_slots == 1:
                    for rng_seed in range(options.rng_seeds):
                        yield Job(task, num_slots, kind, rng_seed, options.host_epochs)


def main(options: Options) -> None:
    """Measure and print."""
    todo = list(jobs(options))
    results = dict(zip(todo, run_parallel(measure, todo), strict=True))
    summary: dict[str, float] = {}
    print(f"{'task':18s} slots {'kind':17s} test accuracy   parameters  training GFLOP  seed/host norm")
    for task, num_slots, kind in dict.fromkeys((job.task, job.num_slots, job.kind) for job in todo):
        cell = [r for job, r in results.items() if (job.task, job.num_slots, job.kind) == (task, num_slots, kind)]
        mean, error = mean_and_error([r["accuracy"] for r in cell])
        parameters, gflop, loud = (mean_and_error([r[k] for r in cell])[0] for k in ("parameters", "gflop", "loudness"))
        slots = "-" if kind == "alone" else str(num_slots)
        reached = f"{task:18s} {slots:>5s} {kind:17s} {mean:6.2f} +- {error:4.2f} %"
        print(f"{reached}  {parameters:9,.0f}  {gflop:14.2f}  {loud:14.2f}")
        summary[f"{task}/{slots}/{kind}"] = round(mean, 3)
    print("RESULT " + json.dumps(summary))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

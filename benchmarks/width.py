"""Is depth, width or both the better use of as many parameters? Grown networks from birth against wider hosts.

Run: python benchmarks/width.py [--rows mlp:2 mlp:4 cnn:3 subsets:3 sequences:3] [--num-tasks 12] [--rng-seeds 8]

Every slot of a host holds newborn fossils at alpha 1, so nothing grows: networks are compared, not controllers. A
branch has one hidden layer; its size, equal in all slots, makes the network as large as the host widened to at least
`factor` times its parameters:

    behind   one branch per slot that reads what the submodule puts out
    beside   one branch per slot that reads what goes into it; slots where none fits (embeddings) stay empty
    both     two seeds per slot: one behind, then one beside, with half of the parameters each

Branches are linear - GELU - linear (after a layer norm in sequences), or 3x3 convolution - norm - ReLU - 3x3
convolution. Validation tasks; a figure is the score (points of accuracy minus log2(parameters / host's)) minus that of
the wide host on the same data, mean and standard error over tasks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import NamedTuple

import numpy as np
import tyro
from lab import mean_and_error, run_parallel
from torch import nn

from simic.control.baselines import WaitController
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.evaluation.candidates import count_parameters, plant_fossils, width_for
from simic.evaluation.measures import Fossil
from simic.growth.blueprints import BLUEPRINTS, blueprint
from simic.growth.branch_layers import zeroed
from simic.growth.slot_discovery import find_sites
from simic.growth.slot_shape import TOPOLOGIES, Reads, SlotShape
from simic.lifecycle.stages import LifecycleConfig
from simic.rewards.score import score
from simic.tasks.registry import find_task
from simic.tasks.task import Task

KINDS: dict[str, tuple[Reads, ...]] = {"behind": ("output",), "beside": ("input",), "both": ("output", "input")}
"""What the seeds of a slot read, in the order of its seats."""
CONV = {1: nn.Conv1d, 2: nn.Conv2d}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    rows: tuple[str, ...] = ("mlp:2", "mlp:4", "cnn:3", "subsets:3", "sequences:3")
    """Families, each with a factor on the host's parameters."""
    num_tasks: int = 12
    """Validation tasks of each."""
    rng_seeds: int = 8
    """Hosts of each task."""
    horizon: int = 24
    """Host epochs."""


class Job(NamedTuple):
    """One task of one row."""

    options: Options
    family: str
    factor: float
    number: int


class Branch(NamedTuple):
    """What a seed is made of."""

    reads: Reads
    hidden: int
    """Size of its hidden layer."""


class Found(NamedTuple):
    """What a task came to."""

    gain: dict[str, float]
    """Kind -> score minus that of the wide host."""
    parameters: dict[str, float]
    """Kind -> parameters relative to those of the wide host."""
    wide: float
    """Score of the wide host minus that of the host itself."""


def main(options: Options) -> None:
    """Print the table."""
    jobs = [
        Job(options, family, float(factor), number)
        for family, factor in (row.split(":") for row in options.rows)
        for number in range(options.num_tasks)
    ]
    found = run_parallel(measure, jobs)
    result = {}
    print("| | behind | beside | both, half each | wide minus host | parameters / wide's: behind, beside, both |")
    print("|---|---|---|---|---|---|")
    for row in options.rows:
        own = [each for job, each in zip(jobs, found, strict=True) if f"{job.family}:{job.factor:g}" == row]
        figures = {kind: mean_and_error([each.gain[kind] for each in own]) for kind in KINDS}
        figures["wide"] = mean_and_error([each.wide for each in own])
        sizes = ", ".join(f"{np.mean([each.parameters[kind] for each in own]):.3f}" for kind in KINDS)
        cells = " | ".join(f"{mean:+.1f} +- {error:.1f}" for mean, error in figures.values())
        print(f"| {row}x ({len(own)} tasks) | {cells} | {sizes} |")
        result[row] = {kind: [round(value, 2) for value in pair] for kind, pair in figures.items()}
    print("RESULT " + json.dumps(result))


def measure(job: Job) -> Found:
    """All kinds of networks on the hosts of one task."""
    task = find_task(job.family, split="validation", rng_seed=job.number)
    wide = wide_task(task, job.factor)
    host, wanted = count_parameters(task.make_host), count_parameters(wide.make_host)
    played = {"host": _train(job.options, task, host), "wide": _train(job.options, wide, host)}
    sizes = {}
    shapes = [site.shape for site in find_sites(task.make_host(), list(task.slots), task.data.train_x[:2])]
    for kind, reads in KINDS.items():
        branches = choose_branches(shapes, reads, wanted - host)
        played[kind] = _train(job.options, task, host, branches)
        sizes[kind] = (host + added(shapes, branches)) / wanted
    gain = {kind: float(np.mean(played[kind] - played["wide"])) for kind in KINDS}
    return Found(gain, sizes, float(np.mean(played["wide"] - played["host"])))


def wide_task(task: Task, factor: float) -> Task:
    """The task with hosts of the least width that has `factor` times the parameters, and as many heads as before."""
    assert task.host_of_width is not None
    width = width_for(task.host_of_width, round(factor * count_parameters(task.make_host)))
    if not task.data.train_x.is_floating_point():  # of transformers: their number of heads depends on the width
        heads = gcd(int(task.traits["width"]), 4)
        width = -(-width // heads) * heads
    return task.widened(width)


def choose_branches(shapes: Sequence[SlotShape], reads: Sequence[Reads], wanted: int) -> list[Branch]:
    """Branches for every slot that share so many parameters equally, as nearly as hidden sizes allow."""
    chosen: list[Branch] = []
    for left, each in zip(range(len(reads), 0, -1), reads, strict=True):
        share = (wanted - added(shapes, chosen)) / left
        one, two = (added(shapes, [Branch(each, hidden)]) for hidden in (1, 2))
        chosen.append(Branch(each, max(1, 1 + round((share - one) / (two - one)))))  # linear in the hidden size
    return chosen


def added(shapes: Sequence[SlotShape], branches: Sequence[Branch]) -> int:
    """Parameters of the seeds of a host."""
    return sum(
        count_parameters(partial(build_branch, branch, shape))
        for shape in shapes
        for branch in branches
        if fits(branch.reads, shape)
    )


def fits(reads: Reads, shape: SlotShape) -> bool:
    """Whether such a seed can grow in the slot."""
    return reads == "output" or shape.in_features is not None


def build_branch(branch: Branch, shape: SlotShape) -> nn.Module:
    """A hidden layer between what the branch reads and what the slot's submodule puts out."""
    beside, hidden, out = branch.reads == "input", branch.hidden, shape.features
    features = shape.in_features if beside else out
    assert features is not None
    if shape.topology != "conv":
        first = [nn.LayerNorm(features)] if shape.topology == "sequence" else []
        return nn.Sequential(*first, nn.Linear(features, hidden), nn.GELU(), zeroed(nn.Linear(hidden, out)))
    conv, stride = CONV[shape.dims], shape.stride if beside else 1
    return nn.Sequential(
        conv(features, hidden, 3, stride=stride, padding=1, bias=False),
        *(nn.GroupNorm(1, hidden), nn.ReLU(), zeroed(conv(hidden, out, 3, padding=1))),
    )


def blueprint_of(branch: Branch) -> str:
    """The name of that branch, registered when it is first asked for."""
    name = f"hidden_{branch.reads}_{branch.hidden}"
    if name not in BLUEPRINTS:

        @blueprint(name, topology=TOPOLOGIES, reads=branch.reads)
        def build(shape: SlotShape) -> nn.Module:
            return build_branch(branch, shape)

    return name


def _train(options: Options, task: Task, host_parameters: int, branches: Sequence[Branch] = ()) -> np.ndarray:
    """Scores (N,) of hosts whose slots hold these branches as fossils from the start."""
    names = [blueprint_of(branch) for branch in branches]
    trainings = HostTrainings(
        task,
        list(range(options.rng_seeds)),
        episode=EpisodeConfig(horizon=options.horizon),
        lifecycle=LifecycleConfig(seeds_per_slot=max(1, len(branches))),
    )
    own = [
        Fossil(slot, names[site.seat], "linear-add")
        for slot, site in enumerate(trainings.hosts.sites)
        if branches and fits(branches[site.seat].reads, site.shape)
    ]
    plant_fossils(trainings, [own] * trainings.num_hosts)
    controller, facts = WaitController(), trainings.facts()
    for _ in range(options.horizon):
        facts = trainings.step(controller.act(facts)).facts
    return score(trainings.test_quality(), trainings.parameters(exported=True), host_parameters)


if __name__ == "__main__":
    main(tyro.cli(Options))

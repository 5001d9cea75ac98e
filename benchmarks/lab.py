"""Shared by the learning benchmarks: run many trainings over both cores, and say mean and spread."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from simic.control.baselines import Controller
from simic.growth.model import GrowableModel
from simic.lifecycle.stages import LifecycleConfig
from simic.tasks.task import Task
from simic.training.grow_task import Grown, grow

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training reached and cost."""

    test_accuracy: float
    parameters: int
    training_flops: float
    architecture: tuple[tuple[str, str, float], ...]
    """Fossils: slot, blueprint, alpha."""


def run_parallel(function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
    """Results in the order of jobs, from one process per core with one thread each."""
    with multiprocessing.get_context("spawn").Pool(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.map(function, jobs, chunksize=1)


def train(
    task: Task,
    controller: str | Controller,
    *,
    host_epochs: int,
    rng_seed: int,
    lifecycle: LifecycleConfig | None = None,
    planted: Sequence[tuple[str, str, float]] = (),
) -> tuple[Outcome, Grown]:
    """Grow one host and count the floating-point operations of its training, shadow passes included."""
    flops = [0.0]

    def prepare(model: GrowableModel) -> None:
        for slot, blueprint, alpha in planted:
            model.plant(slot, blueprint, alpha=alpha)

    def count(model: GrowableModel) -> None:
        x, y = task.data.train_x[: task.batch_size], task.data.train_y[: task.batch_size]
        gradients = [parameter.grad for parameter in model.parameters()]
        with FlopCounterMode(display=False) as counter:
            model.loss(lambda: task.loss(model(x), y)).backward()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        flops[0] += counter.get_total_flops() * len(task.data.train_x) / task.batch_size

    grown = grow(
        task,
        controller,
        host_epochs=host_epochs,
        rng_seed=rng_seed,
        lifecycle=lifecycle,
        prepare=prepare,
        before_host_epoch=count,
    )
    fossils = [report for report in grown.model.growth() if str(report.stage) == "fossilized"]
    outcome = Outcome(
        test_accuracy=grown.test_accuracy,
        parameters=count_parameters(grown.plain),
        training_flops=flops[0],
        architecture=tuple((f.slot, str(f.blueprint), f.alpha) for f in fossils),
    )
    return outcome, grown


def count_parameters(model: nn.Module) -> int:
    """All parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error."""
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5

"""Grow one host of a task: `simic.grow` and `simic grow`."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from simic.control.baselines import Controller
from simic.control.registry import DEFAULT_CONTROLLER, make_controller
from simic.growth.export import export_plain
from simic.growth.isolation import preserved_rng
from simic.growth.model import GrowableModel
from simic.growth.report import SlotReport, blended_live_seeds, describe_seeds
from simic.lifecycle.stages import LifecycleConfig
from simic.registry import nearest
from simic.scheduler.decision import Decision
from simic.scheduler.log import closing_log
from simic.scheduler.scheduler import GrowthScheduler
from simic.storage.files import write_file
from simic.tasks.registry import make_task
from simic.tasks.task import SGD_MOMENTUM, Length, Task, evaluate
from simic.training.progress import Progress, say
from simic.workers.threads import single_thread

HOST_EPOCHS = 40
"""Length of training, where neither the caller nor the task says it."""


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A host that was trained and grown."""

    model: GrowableModel
    plain: nn.Module
    """The exported network: with fossils, without live seeds."""
    left_out: tuple[SlotReport, ...]
    """Live seeds that the model's output depends on and the exported network lacks."""
    decisions: list[Decision] = field(repr=False)
    test_accuracy: float
    """Of the exported network."""
    example: torch.Tensor = field(repr=False)
    """A batch of two inputs."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the exported network."""
        return sum(parameter.numel() for parameter in self.plain.parameters())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the exported network as a torch.export program (.pt2) for batches of any size."""
        program = torch.export.export(self.plain, (self.example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        content = io.BytesIO()  # torch aborts the process if it writes to a full disk itself
        torch.export.save(program, content)
        write_file(Path(path), content.getvalue())


def grow(
    task: str | Task,
    controller: str | Controller = DEFAULT_CONTROLLER,
    *,
    host_epochs: int | None = None,
    rng_seed: int = 0,
    lifecycle: LifecycleConfig | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | None = None,
    prepare: Callable[[GrowableModel], None] = lambda model: None,
    before_host_epoch: Callable[[GrowableModel], None] = lambda model: None,
    on_decision: Callable[[Decision], None] = lambda decision: None,
) -> Grown:
    """Train a new host of a task and let a controller grow it; a decision follows each host epoch.

    The global random state is left as it was.

    Args:
        task: A `simic.Task`, a name, or `module:function`, a function that returns a `simic.Task`.
        controller: A name, the path of a saved controller or plan, or an object such as `TrainingResult.controller`.
        host_epochs: By default as long as the task says, or 40.
        rng_seed: Of initial weights, batches and seeds.
        lifecycle: Times and limits of seeds.
        data_dir: Directory of the files of a task that reads some.
        log: Directory of a log for `simic watch`; by default nothing is written.
        prepare: Called with the model before the training.
        before_host_epoch: Called with the model before every host epoch.
        on_decision: Called with every `Decision`.

    Returns:
        The model, its exported network (`plain`), the decisions and the test accuracy.

    Raises:
        ValueError: There is no such task or controller.

    Example:
        >>> grown = simic.grow("digits-mlp", host_epochs=2)
        >>> 0 <= grown.test_accuracy <= 1
        True
    """
    task = load_task(task, data_dir) if isinstance(task, str) else task
    length = length_of(task, host_epochs)
    with preserved_rng(), closing_log(log, task.name):
        torch.manual_seed(rng_seed)
        batches = torch.Generator().manual_seed(rng_seed)
        example = task.data.train_x[:2]
        model = GrowableModel(
            task.make_host(), task.slots, example_input=example, lifecycle=lifecycle, rng_seed=rng_seed
        )
        prepare(model)
        optimizer = _make_optimizer(task, model)
        annealing = [CosineAnnealingLR(optimizer, length.planned_host_epochs)] if length.anneal else []

        def validate() -> dict[str, float]:
            figures = evaluate(model, task, "validation")
            return {"val_loss": figures["loss"], "val_accuracy": figures["accuracy"]}

        scheduler = GrowthScheduler(
            *(model, optimizer, controller, annealing),
            evaluate=validate,
            horizon=length.told_host_epochs,
            train_samples=len(task.data.train_x),
            rng_seed=rng_seed,
            log=None if log is None else Path(log),
        )
        for _ in range(length.host_epochs):
            before_host_epoch(model)
            _train_host_epoch(task, model, optimizer, scheduler, batches)
            for schedule in annealing:
                schedule.step()
            on_decision(scheduler.step())
        plain = export_plain(model)
        return Grown(
            model=model,
            plain=plain,
            left_out=tuple(blended_live_seeds(model)),
            decisions=scheduler.decisions,
            test_accuracy=evaluate(plain, task, "test")["accuracy"],
            example=example,
        )


def _train_host_epoch(
    task: Task,
    model: GrowableModel,
    optimizer: torch.optim.Optimizer,
    scheduler: GrowthScheduler,
    batches: torch.Generator,
) -> None:
    model.train()
    for x, y in task.train_batches(batches):
        loss = scheduler.loss(lambda x=x, y=y: task.loss(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def print_growing(
    *,
    task_name: str,
    controller: str,
    lifecycle: LifecycleConfig,
    host_epochs: int | None,
    rng_seed: int,
    data_dir: Path | None,
    log: Path | None,
    out: Path | None,
    quiet: bool,
) -> None:
    """Train a host without growth, then the same host with growth; print every seed's stages and both results."""
    task = load_task(task_name, data_dir)
    planned = length_of(task, host_epochs).host_epochs
    make_controller(controller)  # a file that does not fit is refused before the first training
    progress = Progress(quiet=quiet)
    common: dict[str, Any] = {"host_epochs": host_epochs, "rng_seed": rng_seed, "lifecycle": lifecycle}
    with single_thread(), progress:
        alone = grow_with_bar(task, "wait", progress, "host alone", planned, **common)
        grown = grow_with_bar(task, controller, progress, "growing host", planned, log=log, **common)
    print_result(task.name, planned, alone, grown)
    if out is not None:
        grown.save(out)
        say(f"the grown network is in {out}")


def grow_with_bar(task: Task, controller: str, progress: Progress, label: str, planned: int, **settings: Any) -> Grown:
    """Call `grow` with these settings, show its progress, and print every change of a stage."""

    def on_decision(decision: Decision) -> None:
        progress.bar(decision.index + 1, planned)
        print_changes(progress, [decision])

    progress.describe(label)
    return grow(task, controller, on_decision=on_decision, **settings)


def print_result(task_name: str, planned: int, alone: Grown, grown: Grown) -> None:
    """Print the slots of the grown host, both test accuracies, and the seeds that its export leaves out."""
    result = Progress()  # also if quiet
    grown.model.print_growth(result.console)
    result.print(f"test accuracy of {task_name} after {planned} host epochs:")
    result.print(f"  before growth (host alone) {alone.test_accuracy:7.2%}  {alone.parameters:,} parameters")
    result.print(f"  after growth  (exported)   {grown.test_accuracy:7.2%}  {grown.parameters:,} parameters")
    if grown.left_out:
        result.print(
            f"the exported network leaves out seeds that are not fossils: {describe_seeds(grown.left_out)}; "
            "more --host-epochs give them time"
        )


def length_of(task: Task, host_epochs: int | None = None) -> Length:
    """The length that is asked for, else the task's own, else HOST_EPOCHS."""
    if host_epochs is not None:
        return Length(host_epochs=host_epochs)
    return task.length or Length(host_epochs=HOST_EPOCHS)


def _make_optimizer(task: Task, model: GrowableModel) -> torch.optim.Optimizer:
    if task.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=SGD_MOMENTUM)
    return torch.optim.AdamW(model.parameters(), lr=task.learning_rate)


def load_task(name: str, data_dir: str | os.PathLike[str] | None = None) -> Task:
    """A task by its name, or the task that a user's function returns, given as `module:function`."""
    module_name, colon, function = name.partition(":")
    if colon and not (module_name and function):
        raise ValueError(f"a task of your own is given as module:function, got {name!r}")
    if not colon:
        return make_task(name, data_dir=None if data_dir is None else Path(data_dir))
    if data_dir is not None:
        raise ValueError(f"{name} knows where its data is: leave out --data-dir (data_dir), got {data_dir}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ValueError(f"there is no {name}: {error}; call it from the directory the module lies in") from None
        make = getattr(module, function, None)
        if make is None:
            there = [own for own, value in vars(module).items() if callable(value) and not own.startswith("_")]
            raise ValueError(f"there is no {name}: the module has no {function}; {nearest(function, there)}")
        if not callable(make):
            raise ValueError(f"{name} must be a function that returns a simic.Task, got {type(make).__name__}")
        task = make()
    finally:
        sys.path.pop(0)
    if not isinstance(task, Task):
        raise ValueError(f"{name} must return a simic.Task, got {type(task).__name__}")
    return replace(task, name=name) if task.name == Task.name else task


def print_changes(progress: Progress, decisions: Iterable[Decision]) -> None:
    """Print a line for each change of a stage."""
    for decision in decisions:
        for change in decision.changes:
            known = change.contribution == change.contribution
            measured = f"  contribution {change.contribution:+.4f}" if known else ""
            progress.print(
                f"host epoch {decision.index + 1:3d}  val loss {decision.val_loss:.4f}  {change.slot}: "
                f"{change.blueprint} {change.old} -> {change.new}{measured}"
            )

"""Grow one host of a task under a controller: the loop behind `simic grow`, usable as a function."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from simic.control.baselines import Controller
from simic.control.registry import make_controller
from simic.growth.export import export_plain, heard_live_seeds, in_words
from simic.growth.model import GrowableModel, SlotReport
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.scheduler.scheduler import Decision, GrowthScheduler
from simic.storage.files import write_file
from simic.storage.printable import printable
from simic.tasks.registry import make_task
from simic.tasks.task import Task, evaluate


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A host after its life, and what it reached."""

    model: GrowableModel
    plain: nn.Module
    """The exported network: fossils are part of it, seeds whose fate was open are left out."""
    left_out: tuple[SlotReport, ...]
    """Those of them that the growing network's output depends on."""
    decisions: list[Decision]
    test_accuracy: float
    """Of the exported network."""


def grow_host(
    task: Task,
    controller: str | Controller = "heuristic",
    *,
    host_epochs: int = 40,
    rng_seed: int = 0,
    lifecycle: LifecycleConfig | None = None,
    prepare: Callable[[GrowableModel], None] = lambda model: None,
    before_host_epoch: Callable[[GrowableModel], None] = lambda model: None,
    on_decision: Callable[[Decision], None] = lambda decision: None,
) -> Grown:
    """Train a fresh host for `host_epochs`, deciding after each one. The rng seed fixes weights, batches and seeds."""
    if host_epochs < 1:
        raise ValueError(f"host_epochs must be at least 1, got {host_epochs}")
    torch.manual_seed(rng_seed)
    batches = torch.Generator().manual_seed(rng_seed)
    model = GrowableModel(
        task.make_host(), task.slots, example_input=task.data.train_x[:2], lifecycle=lifecycle, rng_seed=rng_seed
    )
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    learning_rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, host_epochs)

    def validate() -> dict[str, float]:
        figures = evaluate(model, task, "validation")
        return {"val_loss": figures["loss"], "val_accuracy": figures["accuracy"]}

    scheduler = GrowthScheduler(
        model, optimizer, controller, [learning_rate], evaluate=validate, horizon=host_epochs, rng_seed=rng_seed
    )
    for _ in range(host_epochs):
        before_host_epoch(model)
        model.train()
        for x, y in task.train_batches(batches):
            loss = scheduler.loss(lambda x=x, y=y: task.loss(model(x), y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        learning_rate.step()
        on_decision(scheduler.step())
    plain = export_plain(model)
    return Grown(
        model=model,
        plain=plain,
        left_out=tuple(heard_live_seeds(model)),
        decisions=scheduler.decisions,
        test_accuracy=evaluate(plain, task, "test")["accuracy"],
    )


def print_growing(
    *,
    task_name: str,
    controller: str,
    incubation: Incubation,
    host_epochs: int,
    rng_seed: int,
    data_dir: Path | None,
    out: Path | None,
    quiet: bool,
) -> None:
    """Train a host alone, then one that grows from the same start; print every seed's life and what growth brought."""
    torch.set_num_threads(1)  # many tiny operations: threads cost more than they give
    task = load_task(task_name, data_dir)
    make_controller(controller)  # a file that does not fit is refused before the host alone is trained
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    lifecycle = LifecycleConfig(incubation=incubation)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:

        def run(who: str, label: str, tell: Callable[[Decision], None]) -> Grown:
            bar = progress.add_task(label, total=host_epochs)

            def on_decision(decision: Decision) -> None:
                progress.advance(bar)
                tell(decision)

            return grow_host(
                task, who, host_epochs=host_epochs, rng_seed=rng_seed, lifecycle=lifecycle, on_decision=on_decision
            )

        alone = run("wait", "host alone", lambda decision: None)
        grown = run(controller, "growing host", (lambda decision: None) if quiet else _printer(console))
    grown.model.print_growth(console)
    before, after = _parameters(alone.plain), _parameters(grown.plain)
    console.print(f"test accuracy of {escape(printable(task.name))} after {host_epochs} host epochs:")
    console.print(f"  before growth (host alone) {alone.test_accuracy:7.2%}  {before:,} parameters")
    console.print(f"  after growth  (exported)   {grown.test_accuracy:7.2%}  {after:,} parameters")
    if grown.left_out:
        console.print(
            f"the exported network leaves out seeds that are not fossils: {in_words(grown.left_out)}; "
            "more --host-epochs give them time",
            highlight=False,
            markup=False,
        )
    if out is not None:
        example = (task.data.train_x[:2],)
        batch = {0: torch.export.Dim.DYNAMIC}
        written = io.BytesIO()  # torch aborts the process when a disk is full
        torch.export.save(torch.export.export(grown.plain, example, dynamic_shapes=(batch,)), written)
        write_file(out, written.getvalue())
        console.print(f"the grown network is in {out}", markup=False)


def load_task(name: str, data_dir: Path | None = None) -> Task:
    """A task by its name, or what a function of the user's own returns, given as `module:function`."""
    module_name, colon, function = name.partition(":")
    if colon and not (module_name and function):
        raise ValueError(f"a task of your own is given as module:function, got {name!r}")
    if not colon:
        return make_task(name, data_dir=data_dir)
    if data_dir is not None:
        raise ValueError(f"{name} knows where its data is: leave out --data-dir (data_dir), got {data_dir}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        try:
            make = getattr(importlib.import_module(module_name), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"there is no {name}: {error}; call it from the directory the module lies in") from None
        if not callable(make):
            raise ValueError(f"{name} must be a function that returns a simic.Task, got {type(make).__name__}")
        task = make()
    finally:
        sys.path.pop(0)
    if not isinstance(task, Task):
        raise ValueError(f"{name} must return a simic.Task, got {type(task).__name__}")
    return task


def _printer(console: Console) -> Callable[[Decision], None]:
    def tell(decision: Decision) -> None:
        for change in decision.changes:
            measured = (
                "" if change.contribution != change.contribution else f"  contribution {change.contribution:+.4f}"
            )
            console.print(
                f"host epoch {decision.index + 1:3d}  val loss {decision.val_loss:.4f}  {printable(change.slot)}: "
                f"{printable(change.blueprint)} {change.old} -> {change.new}{measured}",
                highlight=False,
                markup=False,
            )

    return tell


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())

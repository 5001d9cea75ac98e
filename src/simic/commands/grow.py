"""simic grow: train one host alone and one that grows, from the same start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from simic import pretrained
from simic.commands.flags import PLUGIN
from simic.control.registry import CONTROLLERS, DEFAULT_CONTROLLER
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.registry import nearest, nearest_entry
from simic.settings import check_choice
from simic.tasks.registry import DEFAULT_TASK, TASKS, check_data
from simic.training.preflight import check_log, check_output_file


@dataclass(frozen=True, kw_only=True)
class GrowCommand:
    """Grow one host of a task, or a model of your own, and print what happened to every seed."""

    task: str = DEFAULT_TASK
    """A task, or `module:function`, where the function returns a `simic.Task` with your model and data."""
    controller: str = DEFAULT_CONTROLLER
    """A controller by name, or the path of a run, a controller or a plan."""
    incubation: Incubation = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    seeds_per_slot: int = LifecycleConfig.seeds_per_slot
    """Seeds that a slot may hold, one after the other."""
    host_epochs: int | None = None
    """Passes over the host's training data, with one decision after each; by default those of the task's length, or
    40."""
    rng_seed: int = 0
    """Seed of initial weights, batches and seeds."""
    data_dir: Path | None = None
    """Directory of the files of a task that reads some."""
    plugins: tuple[str, ...] = field(default=(), metadata=PLUGIN)
    """Module to import that registers tasks, rewards, controllers and so on; may be repeated."""
    out: Path | None = None
    """Write the grown network to this file, as a plain torch.export program (.pt2)."""
    log: Path | None = None
    """Write every decision to this directory, for `simic watch` and `simic report`; it must hold no log yet."""
    quiet: bool = False
    """Print only the result."""

    def run(self) -> int:
        """Check what needs no torch, then grow."""
        if self.host_epochs is not None and self.host_epochs < 1:
            raise ValueError(f"--host-epochs must be at least 1, got {self.host_epochs}")
        if self.rng_seed < 0:
            raise ValueError(f"--rng-seed must not be negative, got {self.rng_seed}")
        lifecycle = LifecycleConfig(incubation=self.incubation, seeds_per_slot=self.seeds_per_slot)
        if self.out is not None:
            check_output_file(self.out)
        if self.log is not None:
            check_log(self.log)
        _check_task(self.task, self.data_dir)
        _check_controller(self.controller)
        from simic.training.grow_task import print_growing

        print_growing(
            task_name=self.task,
            controller=self.controller,
            lifecycle=lifecycle,
            host_epochs=self.host_epochs,
            rng_seed=self.rng_seed,
            data_dir=self.data_dir,
            log=self.log,
            out=self.out,
            quiet=self.quiet,
        )
        return 0


def _check_task(name: str, data_dir: Path | None) -> None:
    if ":" not in name:
        check_choice("--task", name, TASKS, hint=nearest_entry)
        check_data([name], data_dir)
    elif data_dir is not None:
        raise ValueError(f"{name} knows where its data is: leave out --data-dir, got {data_dir}")


def _check_controller(name: str) -> None:
    known = CONTROLLERS
    if name == "pretrained":
        pretrained.check_controller()
    elif name not in known and not Path(name).exists():
        hint = nearest(name, known)
        raise ValueError(
            f"--controller must be {', '.join(known)} or the path of a run or a trained one, got {name!r}; {hint}"
        )

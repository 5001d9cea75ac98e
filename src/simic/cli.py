"""The command line. Nothing here loads torch before the arguments are known to be right."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from simic import __version__
from simic.lifecycle import Incubation, LifecycleConfig
from simic.tasks import DEFAULT_TASK, TaskName

USAGE_ERROR, ENVIRONMENT_ERROR = 2, 4


@dataclass(frozen=True, kw_only=True)
class GrowCommand:
    """Grow one host of a task and print the life of every seed."""

    task: TaskName = DEFAULT_TASK
    """What the host learns."""
    controller: Literal["heuristic", "random", "wait"] = "heuristic"
    """Who decides."""
    incubation: Incubation = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    host_epochs: int = 40
    """Passes over the host's training data; one decision after each."""
    rng_seed: int = 0
    """Fixes initial weights, batches and seeds."""
    data_dir: Path | None = None
    """Where a task that reads files finds them."""
    out: Path | None = None
    """Write the grown network here, as a plain torch.export program (.pt2)."""
    quiet: bool = False
    """Print only the result."""

    def run(self) -> None:
        """Check what needs no torch, then grow."""
        if self.host_epochs < 1:
            raise ValueError(f"--host-epochs must be at least 1, got {self.host_epochs}")
        if self.out is not None and not self.out.parent.is_dir():
            raise FileNotFoundError(f"--out: the directory {self.out.parent} does not exist; create it first")
        from simic.grow import print_growing

        print_growing(
            task_name=self.task,
            controller=self.controller,
            incubation=self.incubation,
            host_epochs=self.host_epochs,
            rng_seed=self.rng_seed,
            data_dir=self.data_dir,
            out=self.out,
            quiet=self.quiet,
        )


@dataclass(frozen=True, kw_only=True)
class VersionCommand:
    """Print the version."""

    def run(self) -> None:
        """Print it."""
        print(__version__)


Command = (
    Annotated[GrowCommand, tyro.conf.subcommand("grow")] | Annotated[VersionCommand, tyro.conf.subcommand("version")]
)


def main(args: list[str] | None = None) -> None:
    """Entry point of `simic`. Exit codes: 0 done, 2 usage, 4 environment (files, disk), 130 interrupted, 1 a bug."""
    command = tyro.cli(Command, prog="simic", description="Neural networks that grow.", args=args)
    try:
        command.run()
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        _fail(error, USAGE_ERROR)
    except OSError as error:
        _fail(error, ENVIRONMENT_ERROR)


def _fail(error: Exception, code: int) -> None:
    print(f"simic: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""The command line. Nothing here loads torch before the arguments are known to be right."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import tyro

from simic import __version__, pretrained
from simic.commands.evaluate import EvaluateCommand, PlanCommand, ReportCommand, compare
from simic.commands.flags import (
    CHOICES,
    IncubationChoice,
    OptionalAlgorithm,
    OptionalDevice,
    OptionalFloat,
    OptionalIncubation,
    OptionalInt,
    OptionalLevel,
    OptionalPath,
    OptionalPreset,
    OptionalReward,
    OptionalTask,
    OptionalText,
    OptionalTexts,
    Switch,
)
from simic.config import (
    DEFAULT_PRESET,
    PRESETS,
    PresetName,
    RunConfig,
    differences,
    override,
    read_config,
    read_run_config,
    to_dict,
)
from simic.control.registry import CONTROLLERS
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.registry import nearest
from simic.storage.printable import printable
from simic.storage.run_directory import RunDirectory, new_directory
from simic.tasks.registry import DEFAULT_TASK, TASKS
from simic.training.preflight import (
    check_choice,
    check_data,
    check_output_directory,
    check_output_file,
    check_run,
    refuse_ignored,
)
from simic.training.used_settings import reads, used_settings

USAGE_ERROR, DIVERGED, ENVIRONMENT_ERROR, INTERRUPTED = 2, 3, 4, 130
RUNS = Path("runs")

# Which settings of RunConfig each flag of `simic train` stands for; {} is the algorithm.
FLAGS: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            *(
                "task",
                "data_dir",
                "algorithm",
                "episodes",
                "rng_seed",
                "updates",
                "num_groups",
                "group_size",
                "workers",
            ),
            *("device", "level", "record", "tensorboard", "wandb", "checkpoint_every", "compare"),
        )
    },
    "horizon": ("episode.horizon",),
    "incubation": ("lifecycle.incubation",),
    "reward": ("reward.scheme",),
    "gamma": ("ppo.gamma", "reward.gamma"),
    "learning_rate": ("{}.learning_rate",),
    "entropy_coefficient": ("{}.entropy_coefficient",),
}
FAST = {
    **{"updates": 2, "num_groups": 2, "group_size": 4, "workers": 0, "checkpoint_every": 1, "compare": 0},
    **{"episode": {"horizon": 6}, "imitation": {"passes": 2}, "iql": {"steps": 4}},
}
"""What --fast-dev-run sets."""


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a controller over many host trainings. Settings: preset, then --config, then flags; later ones win."""

    preset: OptionalPreset = None
    """Where settings start from, by default quick; `simic presets` shows them. A run that goes on has its own."""
    config: OptionalPath = None
    """A JSON or TOML file of settings, for all that has no flag."""
    out: OptionalPath = None
    """Directory of the run; by default one named after the time, in runs/."""
    resume: OptionalText = None
    """`auto` goes on from the last checkpoint in --out, if there is one; a path goes on with that run as it is."""
    init: OptionalPath = None
    """Start from a saved controller, such as one that was trained by imitation."""
    fast_dev_run: bool = False
    """Two tiny updates, to see that everything works."""
    print_config: bool = False
    """Print the settings, as a file for --config, and where they come from (on stderr), and stop."""
    quiet: bool = False
    """Print only the result."""
    profile: OptionalPath = None
    """Write a trace of the second update's learning (of PPO) or of some gradient steps to this directory, for
    chrome://tracing."""

    task: OptionalTask = None
    """The task family that hosts are drawn from, or one task."""
    data_dir: OptionalText = None
    """Where a task that reads files finds them."""
    algorithm: OptionalAlgorithm = None
    """How to learn: by trying (ppo), by imitating recorded episodes, or offline from them (iql)."""
    episodes: OptionalTexts = None
    """What to imitate or learn from: runs or directories with recorded episodes; or who plays some: a name
    such as `heuristic`, the file of a controller or of a plan (.json)."""
    rng_seed: OptionalInt = None
    """Fixes everything that is drawn at random."""
    updates: OptionalInt = None
    """Rollouts to learn from; rates anneal over all of them."""
    num_groups: OptionalInt = None
    """Groups of hosts in a rollout; each has a task of its own."""
    group_size: OptionalInt = None
    """Hosts of a group, trained as one tensor program."""
    workers: OptionalInt = None
    """Processes that train hosts; 0 trains them in the main process. The result is the same."""
    device: OptionalDevice = None
    """Where the policy learns."""
    horizon: OptionalInt = None
    """Decisions of an episode."""
    incubation: OptionalIncubation = None
    """How a seed learns before it is blended in."""
    reward: OptionalReward = None
    """What the controller is paid for."""
    gamma: OptionalFloat = None
    """Discount per decision."""
    learning_rate: OptionalFloat = None
    """Of the policy."""
    entropy_coefficient: OptionalFloat = None
    """Weight of the policy's entropy."""
    level: OptionalLevel = None
    """How much is recorded."""
    record: Switch = None
    """Keep the episodes for imitation and offline learning."""
    tensorboard: Switch = None
    """Mirror the figures to TensorBoard."""
    wandb: Switch = None
    """Mirror the figures to Weights & Biases; WANDB_MODE=offline needs no network."""
    checkpoint_every: OptionalInt = None
    """Updates between checkpoints."""
    compare: OptionalInt = None
    """Fresh hosts of each of four tasks on which the controller meets wait, random and heuristic in the end."""

    def run(self) -> int:
        """Check everything that needs no torch, then train, then compare."""
        directory, resume = self.place()
        config, sources = self.resolve()
        if self.print_config:
            print(f"settings: {' < '.join(sources)}", file=sys.stderr)
            print(json.dumps(used_settings(config), indent=1))
            return 0
        self.check(config)
        from simic import api
        from simic.training.progress import say

        if not self.quiet:
            say(f"settings: {' < '.join(sources)}")
        with nullcontext(directory) if directory is not None else new_directory(RUNS) as path:
            result = api.train(config, out=path, resume=resume, init=self.init, quiet=self.quiet, profile=self.profile)
            say(str(result))
            if result.status == "done" and config.compare:
                compare(config, path, quiet=self.quiet)
        return result.exit_code

    def check(self, config: RunConfig) -> None:
        """Raise if the run could not begin, as far as that can be known without torch."""
        directory, resume = self.place()
        if self.init is not None and not self.init.is_file():
            raise FileNotFoundError(f"--init: there is no file {self.init}")
        if self.resume is not None and config.algorithm != "ppo":
            raise ValueError(
                f"--resume: a run of {config.algorithm} is not resumed: leave it out, choose another --out"
            )
        for place in (directory or RUNS, self.profile):
            if place is not None:
                check_output_directory(place)
        if directory is not None and not resume:
            RunDirectory(directory).check_free()
        check_run(config)

    def resolve(self) -> tuple[RunConfig, list[str]]:
        """The settings, and where they come from, the weakest first."""
        for name, choices in CHOICES.items():
            if getattr(self, name) is not None:
                check_choice(f"--{name}", getattr(self, name), choices)
        config, sources = self._base()
        chosen: list[str] = []
        if self.config is not None:
            before, config = config, _with_file(config, self.config)
            chosen = [name for name, _, _ in differences(to_dict(before), to_dict(config))]
            sources.append(f"file {self.config}")
        if self.fast_dev_run:
            config = override(config, FAST)
            sources.append("--fast-dev-run")
        given = {name: value for name in FLAGS if (value := getattr(self, name)) is not None}
        if given:
            config = override(config, _nested(given, given.get("algorithm", config.algorithm)))
            flags = (f"--{'no-' * (value is False)}{name.replace('_', '-')}" for name, value in given.items())
            sources.append("flags " + " ".join(flags))
        refuse_ignored(config, [name for name in chosen if not reads(config, name)], f"--config {self.config}")
        ignored = [name for name in given if not any(reads(config, own) for own in _settings(name, config.algorithm))]
        refuse_ignored(config, [f"--{name.replace('_', '-')}" for name in ignored], "flags")
        return config, sources

    def _base(self) -> tuple[RunConfig, list[str]]:
        """What files and flags change: the settings of the run that goes on, or of a preset."""
        directory, resumes = self.place()
        if resumes and directory is not None and (directory / "config.json").is_file() and self.preset is None:
            return read_run_config(directory / "config.json")[0], [f"run {directory}"]
        preset = cast(PresetName, self.preset or DEFAULT_PRESET)
        return PRESETS[preset][1], [f"preset {preset}"]

    def place(self) -> tuple[Path | None, bool]:
        """The directory of the run, None for a new one; and whether to go on with what it holds."""
        if self.resume not in (None, "auto"):
            path = Path(self.resume)
            if not (path / "config.json").is_file():
                raise FileNotFoundError(f"--resume: {path} holds no run; `simic runs` lists what there is")
            if self.out is not None and self.out != path:
                raise ValueError(f"--resume {path} and --out {self.out} name two places; give one of them")
            return path, True
        if self.resume == "auto" and self.out is None:
            raise ValueError("--resume auto needs --out, the run to go on with")
        return self.out, self.resume == "auto"


@dataclass(frozen=True, kw_only=True)
class GrowCommand:
    """Grow one host of a task, or a model of your own, and print the life of every seed."""

    task: str = DEFAULT_TASK
    """What the host learns: a task, or `module:function`, which returns a `simic.Task` of your model and data."""
    controller: str = "heuristic"
    """Who decides: heuristic, random, wait, autogrow, plan, pretrained, or the path of a controller or plan."""
    incubation: IncubationChoice = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    host_epochs: int = 40
    """Passes over the host's training data; one decision after each."""
    rng_seed: int = 0
    """Fixes initial weights, batches and seeds."""
    data_dir: OptionalPath = None
    """Where a task that reads files finds them."""
    out: OptionalPath = None
    """Write the grown network here, as a plain torch.export program (.pt2)."""
    quiet: bool = False
    """Print only the result."""

    def run(self) -> int:
        """Check what needs no torch, then grow."""
        if self.host_epochs < 1:
            raise ValueError(f"--host-epochs must be at least 1, got {self.host_epochs}")
        if self.rng_seed < 0:
            raise ValueError(f"--rng-seed must not be negative, got {self.rng_seed}")
        if self.out is not None:
            check_output_file(self.out)
        check_choice("--incubation", self.incubation, CHOICES["incubation"])
        _check_task(self.task, self.data_dir)
        _check_controller(self.controller)
        from simic.training.grow_task import print_growing

        print_growing(
            task_name=self.task,
            controller=self.controller,
            incubation=cast(Incubation, self.incubation),
            host_epochs=self.host_epochs,
            rng_seed=self.rng_seed,
            data_dir=self.data_dir,
            out=self.out,
            quiet=self.quiet,
        )
        return 0


@dataclass(frozen=True, kw_only=True)
class RunsCommand:
    """List the runs in a directory."""

    root: Path = RUNS
    """Where to look."""

    def run(self) -> int:
        """Print one line per run."""
        from simic.commands.inspection import list_runs_as_table

        return list_runs_as_table(self.root)


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Say what is in a run, a checkpoint or a saved controller."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run's directory, a checkpoint's directory or a .safetensors file."""

    def run(self) -> int:
        """Print it."""
        if not self.path.exists():
            raise FileNotFoundError(f"there is nothing at {self.path}")
        from simic.commands.inspection import inspect_path

        return inspect_path(self.path)


@dataclass(frozen=True, kw_only=True)
class PresetsCommand:
    """Show the presets of `simic train`."""

    def run(self) -> int:
        """Print what each is for, and its main settings."""
        for name, (purpose, config) in PRESETS.items():
            hosts = f"{config.num_groups} groups of {config.group_size} hosts"
            print(f"{name:10s} {purpose} {config.updates} updates, {hosts}, family {config.task}, {config.device}.")
        print("All settings of one: simic train --preset NAME --print-config")
        return 0


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check the machine: versions, threads, memory, disk, data sets."""

    def run(self) -> int:
        """Print what was found; exit code 4 if something needed is missing."""
        from simic.commands.doctor import print_diagnosis

        return print_diagnosis()


@dataclass(frozen=True, kw_only=True)
class VersionCommand:
    """Print the version."""

    def run(self) -> int:
        """Print it."""
        print(__version__)
        return 0


Command = (
    Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[GrowCommand, tyro.conf.subcommand("grow")]
    | Annotated[EvaluateCommand, tyro.conf.subcommand("evaluate")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[RunsCommand, tyro.conf.subcommand("runs")]
    | Annotated[InspectCommand, tyro.conf.subcommand("inspect")]
    | Annotated[ReportCommand, tyro.conf.subcommand("report")]
    | Annotated[PresetsCommand, tyro.conf.subcommand("presets")]
    | Annotated[DoctorCommand, tyro.conf.subcommand("doctor")]
    | Annotated[VersionCommand, tyro.conf.subcommand("version")]
)

COMMANDS = tuple(part.name for kind in get_args(Command) for part in get_args(kind)[1:] if isinstance(part.name, str))


def main(args: list[str] | None = None) -> None:
    """Entry point of `simic`. What only prints ends when nobody reads on; a training goes on in silence.

    Exit codes: 0 done, 2 usage, 3 diverged, 4 environment (files, disk, memory), 130 or 143 stopped, 1 a bug.
    """
    try:
        code = _parse(sys.argv[1:] if args is None else args).run()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left: nothing more to say, and no complaint at exit either. A training never
        # comes here: it may not be called done because of that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except ValueError as error:
        code = _fail(error, USAGE_ERROR)
    except MemoryError as error:
        code = _fail(error, ENVIRONMENT_ERROR)
    except OSError as error:
        code = _fail(error, ENVIRONMENT_ERROR)
    if code:
        sys.exit(code)


def _parse(args: list[str]) -> Any:
    """The command that the arguments ask for."""
    if args == ["--version"]:
        return VersionCommand()
    if args and not args[0].startswith("-") and args[0] not in COMMANDS:
        raise ValueError(f"there is no command {args[0]!r}; {nearest(args[0], COMMANDS)}")
    description = "Neural networks that grow. `simic --version` prints the version."
    return tyro.cli(Command, prog="simic", description=description, args=args)


def _fail(error: Exception, code: int) -> int:
    said = str(error) or ("not enough memory" if isinstance(error, MemoryError) else type(error).__name__)
    print(f"simic: {printable(said)}", file=sys.stderr)
    return code


def _with_file(config: RunConfig, path: Path) -> RunConfig:
    settings = read_config(path)
    try:
        return override(config, settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _settings(flag: str, algorithm: str) -> list[str]:
    """The settings that a flag stands for, by dotted name; those that there are."""
    names = [name.format(algorithm) for name in FLAGS[flag]]
    known = {name for name, _, _ in differences(to_dict(RunConfig()), {})}
    return [name for name in names if name in known]


def _nested(given: dict[str, Any], algorithm: str) -> dict[str, Any]:
    """Flags as settings, nested as RunConfig is."""
    settings: dict[str, Any] = {}
    for flag, value in given.items():
        for dotted in _settings(flag, algorithm):
            *parents, name = dotted.split(".")
            table = settings
            for parent in parents:
                table = table.setdefault(parent, {})
            table[name] = value
    return settings


def _check_task(name: str, data_dir: Path | None) -> None:
    if ":" not in name:
        check_choice("--task", name, TASKS)
        check_data([name], data_dir)
    elif data_dir is not None:
        raise ValueError(f"{name} knows where its data is: leave out --data-dir, got {data_dir}")


def _check_controller(name: str) -> None:
    known = CONTROLLERS
    if name == "pretrained":
        pretrained.check_controller()
    elif name not in known and not Path(name).is_file():
        hint = nearest(name, known)
        raise ValueError(f"--controller must be {', '.join(known)} or the path of a trained one, got {name!r}; {hint}")


assert set(FLAGS) <= {field.name for field in fields(TrainCommand)}

if __name__ == "__main__":
    main()

"""The commands that look at results: evaluate, plan, report. Nothing here loads torch before it is needed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from simic.commands.flags import CHOICES, IncubationChoice, OptionalPath, OptionalText
from simic.config import RunConfig
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.parsing import parse_tasks
from simic.lifecycle.stages import LifecycleConfig
from simic.storage.run_directory import new_directory
from simic.tasks.registry import FAMILIES
from simic.telemetry.events import FILES
from simic.training.preflight import check_choice, check_data, check_output_directory, check_output_file

EVALUATIONS = Path("evaluations")
"""Where evaluations go by default."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Compare controllers on the same fresh hosts, on test data: table, results.json, CSV and a report."""

    controllers: tuple[str, ...] = ("wait", "random", "plan", "heuristic", "autogrow")
    """Who, separated by commas or spaces: wait, random, plan, heuristic, autogrow, pretrained, a run, checkpoint,
    controller file or plan (.json). NAME=PATH names one; NAME=PATH,PATH judges several policies as one, to the end of
    the word: `wait,heuristic ours=runs/a,runs/b baseline=runs/c`."""
    tasks: tuple[str, ...] = ("mlp:held_out",)
    """On what, separated by commas: FAMILY[:SPLIT] (held_out unless said) or the name of a task."""
    num_tasks: int = EvaluationConfig.num_tasks
    """Tasks drawn from each family."""
    rng_seeds: int = 10
    """Hosts of every task."""
    first_rng_seed: int = 0
    """The rng seed of the first host."""
    horizon: int = EvaluationConfig.horizon
    """Decisions of an episode."""
    incubation: IncubationChoice = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    ablations: bool = False
    """Compare every learned controller with static_final, static_wide, replay and shuffled of its own."""
    sample: bool = False
    """Learned controllers draw their actions, rather than take the likeliest."""
    data_dir: OptionalText = None
    """Where tasks that read files find them."""
    out: OptionalPath = None
    """Directory of the results, and to resume from; by default one named after the time, in evaluations/."""
    workers: int = 2
    """Processes that train hosts; 0 trains them in the main process. The result is the same."""
    quiet: bool = False
    """Print nothing."""

    def run(self) -> int:
        """Check what needs no torch, then compare."""
        if self.workers < 0:
            raise ValueError(f"--workers must not be negative, got {self.workers}")
        rng_seeds = tuple(range(self.first_rng_seed, self.first_rng_seed + self.rng_seeds))
        check_choice("--incubation", self.incubation, CHOICES["incubation"])
        names = ("controllers", "tasks", "num_tasks", "horizon", "incubation", "ablations", "sample", "data_dir")
        config = EvaluationConfig(rng_seeds=rng_seeds, **{name: getattr(self, name) for name in names})
        check_data((task.name for task in config.named_tasks), self.data_dir)
        check_output_directory(self.out or EVALUATIONS)
        from simic import api

        with nullcontext(self.out) if self.out is not None else new_directory(EVALUATIONS) as out:
            api.run_comparison(config, out=out, workers=self.workers, quiet=self.quiet)
        return 0


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Search the best fixed plan, for `evaluate --controllers plan=FILE`, by successive halving."""

    budget: int = 4096
    """Host trainings to spend."""
    tasks: tuple[str, ...] = ("mixed:train",)
    """Where to search: FAMILY[:SPLIT] or names of tasks, separated by commas."""
    horizon: int = EvaluationConfig.horizon
    """Decisions of an episode."""
    incubation: IncubationChoice = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    rng_seed: int = 0
    """Fixes tasks and hosts."""
    data_dir: OptionalText = None
    """Where tasks that read files find them."""
    out: Path = Path("plan.json")
    """Where the plan goes."""
    workers: int = 2
    """Processes that train hosts; 0 trains them in the main process. The result is the same."""
    quiet: bool = False
    """Print nothing."""

    def run(self) -> int:
        """Check what needs no torch, then search."""
        named = parse_tasks(self.tasks, 1)
        check_choice("--incubation", self.incubation, CHOICES["incubation"])
        for name in ("workers", "rng_seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        check_data((task.name for task in named), self.data_dir)
        check_output_file(self.out)
        from simic.evaluation.plan_search import search_plan

        names = ("budget", "tasks", "horizon", "incubation", "rng_seed", "data_dir")
        settings = {name: getattr(self, name) for name in names}
        search_plan(**settings, workers=self.workers, quiet=self.quiet).save(self.out)
        return 0


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write the HTML report of an evaluation or of a training run, which may still be going on."""

    path: Annotated[Path, tyro.conf.Positional]
    """The directory of an evaluation (with its results.json) or of a run (with its events)."""
    out: OptionalPath = None
    """Where to write it; by default report.html in that directory."""

    def run(self) -> int:
        """Write it and say where."""
        out, results = self.out or self.path / "report.html", self.path / "results.json"
        if self.out is not None:
            check_output_file(self.out)
        if results.is_file():
            from simic.dashboard.evaluation_report import read_results, write_evaluation_report

            write_evaluation_report(read_results(results), out)
        elif any((self.path / name).is_file() for name in FILES):
            from simic.dashboard.run_report import write_run_report

            write_run_report(self.path, out)
        else:
            raise ValueError(f"{self.path} holds neither {results.name} nor events; `simic runs` lists runs")
        print(f"report: {out}")
        return 0


def compare(config: RunConfig, directory: Path, *, quiet: bool) -> None:
    """Let what was just trained and some rules lead the same fresh hosts, of tasks that training never saw."""
    from simic import api

    api.evaluate(
        ("wait", "random", "heuristic", f"trained={directory}"),
        (f"{config.task}:validation" if config.task in FAMILIES else config.task,),
        rng_seeds=config.compare,
        num_tasks=4,
        horizon=config.episode.horizon,
        incubation=config.lifecycle.incubation,
        data_dir=config.data_dir,
        out=directory / "comparison",
        workers=config.workers,
        quiet=quiet,
    )

"""evaluate: every contestant leads the same fresh hosts; what they came to, as one table of results.

A unit of work is one contestant on one task, all rng seeds stacked. Units run over the workers; each that is done is
kept under a hash of what determines it, so that an evaluation that was killed goes on where it stood.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import simic
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.evaluation.candidates import Settings, Unit, inputs_from_episodes, inputs_of, play_unit
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.groups import Groups
from simic.evaluation.measures import RENT
from simic.evaluation.output import FORMAT, ProgressReporter, ResultCache, print_tables, write_results
from simic.evaluation.parsing import Candidate, NamedTask, describe_groups
from simic.evaluation.statistics import summarize
from simic.lifecycle.stages import LifecycleConfig
from simic.plugins import plugin_files
from simic.training.episodes import Weights
from simic.workers.pool import WorkerPool

DECISIVE = (
    *("control", "environment", "growth", "lifecycle", "policy", "rewards", "stacked", "tasks"),
    *("evaluation/candidates.py", "evaluation/flops.py", "evaluation/measures.py"),
)
"""The code that episodes follow from: parts made by other code are not used."""


def evaluate(
    controllers: Sequence[str],
    tasks: Sequence[str],
    rng_seeds: Sequence[int],
    *,
    out: Path | None = None,
    workers: int = 0,
    quiet: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Compare controllers on the same fresh hosts; `options` are the other fields of EvaluationConfig.

    Results, parts to resume from and a report are written to `out`. They do not depend on the number of workers.
    """
    config = EvaluationConfig(
        controllers=tuple(controllers), tasks=tuple(tasks), rng_seeds=tuple(map(int, rng_seeds)), **options
    )
    contest = Comparison(config, None if out is None else out / "parts", quiet=quiet)
    for reading in config.lineup.readings:
        contest.reporter.say(reading)
    results = contest.run(workers)
    if out is not None:
        write_results(results, contest.timing(), out)
        print_tables(results, contest.reporter.console)
        for note in results["notes"]:
            contest.reporter.say(note)
        contest.reporter.say(f"results: {out / 'results.json'}")
        write_report(results, out / "report.html", contest.reporter)
    return results


def write_report(results: dict[str, Any], path: Path, reporter: ProgressReporter) -> None:
    """The HTML report, if there is something to plot with."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        reporter.say("no report, because matplotlib is missing: pip install 'simic-rl[report]'")
        return
    from simic.dashboard.evaluation_report import write_evaluation_report

    write_evaluation_report(results, path)
    reporter.say(f"report: {path}")


class Comparison:
    """The units of an evaluation, and the parts that are done."""

    def __init__(self, config: EvaluationConfig, directory: Path | None = None, *, quiet: bool = True) -> None:
        self.config = config
        self.settings = Settings(
            rng_seeds=config.rng_seeds,
            episode=EpisodeConfig(horizon=config.horizon),
            lifecycle=LifecycleConfig(incubation=config.incubation),
            governor=GovernorConfig(),
            greedy=not config.sample,
        )
        self.inputs = {own.label: inputs_of(own) for own in config.candidates}
        for task in config.named_tasks:
            if task.split is None:
                task.find()  # files that are missing are told before any work is done
        self._digests = {label: _digest(inputs) for label, inputs in self.inputs.items()}
        self.parts = ResultCache(directory)
        self.reporter = ProgressReporter(len(config.candidates) * len(config.named_tasks), quiet=quiet)

    def run(self, workers: int) -> dict[str, Any]:
        """Play what is not done yet: first who stands alone, then who derives from their episodes."""
        pool, threads = WorkerPool(_timed_unit, workers), torch.get_num_threads()
        torch.set_num_threads(1)  # as in workers: sums come in one order
        try:
            with self.reporter.shown():
                for derived in (False, True):
                    self._play(pool, [own for own in self.config.candidates if _is_derived(own) == derived])
        finally:
            torch.set_num_threads(threads)
            pool.close()
        return self._results()

    def timing(self) -> dict[str, Any]:
        """Seconds of work in every unit, by contestant and task."""
        return {
            own.label: {str(task): self._part(own, task)["seconds"] for task in self.config.named_tasks}
            for own in self.config.candidates
        }

    def _play(self, pool: WorkerPool, candidates: Sequence[Candidate]) -> None:
        waiting = []
        for task in self.config.named_tasks:
            for own in candidates:
                part = self.parts.get(self._key(own, task))
                if part is None:
                    waiting.append((own, task))
                else:
                    self.reporter.done(own.label, str(task), part, kept=True)
        units = [Unit(task, own.kind, self._inputs(own, task)) for own, task in waiting]
        for index, part in pool.stream(self.settings, units):
            own, task = waiting[index]
            self.parts.put(self._key(own, task), part)
            self.reporter.done(own.label, str(task), part, kept=False)

    def _inputs(self, candidate: Candidate, task: NamedTask) -> Any:
        if not _is_derived(candidate):
            return self.inputs[candidate.label]
        of = next(own for own in self.config.candidates if own.label == candidate.of)
        return inputs_from_episodes(candidate.kind, self._part(of, task))

    def _part(self, candidate: Candidate, task: NamedTask) -> dict[str, Any]:
        part = self.parts.get(self._key(candidate, task))
        assert part is not None, f"{candidate.label} has not played {task}"
        return part

    def _key(self, candidate: Candidate, task: NamedTask) -> str:
        """A hash of what the episodes of a unit follow from."""
        whole = (
            _code(plugin_files()),
            torch.__version__,
            self.settings,
            task,
            candidate.kind,
            self._digests[candidate.label],
        )
        return hashlib.sha256(repr(whole).encode()).hexdigest()[:32]

    def _results(self) -> dict[str, Any]:
        config, episodes, notes = self.config, list[dict[str, Any]](), list[str]()
        for own in config.candidates:
            parts = {str(task): self._part(own, task) for task in config.named_tasks}
            missed = [part["note"] for part in parts.values() if "note" in part]
            if missed:  # comparisons are of the same hosts, or of nothing
                notes.append(f"{own.label} is left out: {missed[0]}")
                continue
            for task, part in parts.items():
                episodes += [{"controller": own.label, "task": task} | episode for episode in part["episodes"]]
        played = {episode["controller"] for episode in episodes}
        controllers = {
            own.label: {"kind": own.kind, "of": own.of, "description": own.description} for own in config.candidates
        }
        groups = {
            name: about
            for name, about in describe_groups(config.candidates).items()
            if played.issuperset(about["members"])
        }
        return {
            "format": FORMAT,
            "command": config.command,
            "versions": {
                "simic": simic.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "settings": {
                "num_tasks": config.num_tasks,
                "horizon": config.horizon,
                "incubation": config.incubation,
                "sample": config.sample,
                "rent_weight": RENT,
            },
            "controllers": controllers,
            "groups": groups,
            "tasks": [str(task) for task in config.named_tasks],
            "rng_seeds": list(config.rng_seeds),
            "notes": notes,
            "episodes": episodes,
            "summary": summarize(episodes, Groups(controllers, groups)),
        }


def _timed_unit(settings: Settings, unit: Unit) -> dict[str, Any]:
    began = time.monotonic()
    return play_unit(settings, unit) | {"seconds": time.monotonic() - began}


def _is_derived(candidate: Candidate) -> bool:
    """Whether what it is given depends on episodes of another."""
    return candidate.kind in ("static_final", "static_wide", "replay")


def _digest(inputs: Any) -> str:
    """A hash of what a contestant is given on every task."""
    if not isinstance(inputs, Weights):
        return repr(inputs)
    digest = hashlib.sha256(repr(inputs.config).encode())
    for name, array in inputs.arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


@cache
def _code(plugins: tuple[Path, ...]) -> str:
    root, digest = Path(simic.__file__).parent, hashlib.sha256()
    for file in plugins:
        digest.update(file.read_bytes())
    for name in DECISIVE:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()

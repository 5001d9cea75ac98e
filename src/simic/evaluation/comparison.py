"""ComparisonRun: every controller trains the same fresh hosts; what they reach becomes one table of results.

A unit of work is one controller on one task, with the hosts of all rng seeds stacked. Units run in worker processes.
Each finished unit is cached under a hash of everything that determines it, so an interrupted evaluation continues.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import time
import uuid
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import simic
from simic.control.registry import CONTROLLERS
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.evaluation.candidates import Settings, Unit, inputs_from_episodes, inputs_of, play_unit
from simic.evaluation.compute_curve import compute_curve
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.groups import Groups
from simic.evaluation.output import FORMAT, MAIN_FIGURE, ResultCache
from simic.evaluation.parsing import Candidate, NamedTask, describe_groups
from simic.evaluation.statistics import summarize
from simic.plugins import plugin_files
from simic.rewards.score import RENT_WEIGHT
from simic.tasks.registry import FAMILIES, TASKS, check_data
from simic.training.episodes import PolicyWeights
from simic.training.progress import Progress
from simic.workers.build import make_pool
from simic.workers.placement import Placement
from simic.workers.protocol import Pool
from simic.workers.threads import single_thread

DECISIVE = (
    *("control", "environment", "growth", "lifecycle", "policy", "rewards", "scheduler", "stacked", "tasks"),
    *("evaluation/candidates.py", "evaluation/flops.py", "evaluation/measures.py", "evaluation/own_loop.py"),
    "training/grow_task.py",
)
"""The code that episodes depend on; cached units of other code are not reused."""
DERIVED = ("static_final", "static_wide", "replay")
"""Ablations whose inputs come from the episodes of the learned controller."""


class ComparisonRun:
    """The units of an evaluation, and those that are done."""

    def __init__(self, config: EvaluationConfig, directory: Path | None = None, *, quiet: bool = True) -> None:
        self.config = config
        self.settings = Settings(
            rng_seeds=config.rng_seeds,
            episode=EpisodeConfig(horizon=config.horizon),
            lifecycle=config.lifecycle,
            governor=GovernorConfig(),
            greedy=not config.sample,
        )
        self.inputs = {own.label: inputs_of(own) for own in config.candidates}
        for task in config.named_tasks:
            if task.split is None:
                task.find()  # missing data files are reported before any work is done
        self._digests = {own.label: _digest(own, self.inputs[own.label]) for own in config.candidates}
        self.parts = ResultCache(directory)
        self.progress = Progress(quiet=quiet)
        self._done, self._pool_status = 0, ""

    def run(self, placement: Placement | None = None) -> dict[str, Any]:
        """Play the units that are not cached and return the content of results.json."""
        names = sorted({task.name for task in self.config.named_tasks})
        check = partial(check_data, names, self.config.data_dir)
        pool = make_pool(_timed_unit, placement, check=check)
        try:
            with single_thread(), self.progress:
                for derived in (False, True):  # ablations need the episodes of their learned controller
                    self._play(pool, [own for own in self.config.candidates if (own.kind in DERIVED) == derived])
        finally:
            pool.close()
        return self._results()

    def timing(self) -> dict[str, Any]:
        """Seconds of work of every unit, by controller and task."""
        return {
            own.label: {str(task): self._part(own, task)["seconds"] for task in self.config.named_tasks}
            for own in self.config.candidates
        }

    def _play(self, pool: Pool, candidates: Sequence[Candidate]) -> None:
        pending = []
        for task in self.config.named_tasks:
            for own in candidates:
                if self.parts.get(self._key(own, task)) is None:
                    pending.append((own, task))
                else:
                    self._show(own, task, None)
        units = [Unit(task, own.kind, self._inputs(own, task)) for own, task in pending]
        for index, part in pool.stream(self.settings, units):
            own, task = pending[index]
            self._pool_status = str(pool.status())
            self.parts.put(self._key(own, task), part)
            self._show(own, task, part)

    def _show(self, candidate: Candidate, task: NamedTask, part: dict[str, Any] | None) -> None:
        """Show a finished unit; a cached one (None) only moves the bar."""
        self._done += 1
        total = len(self.config.candidates) * len(self.config.named_tasks)
        self.progress.describe(candidate.label)
        self.progress.bar(self._done, total, self._pool_status)
        if part is not None and not self.progress.has_bar:
            scores = [episode["score"] for episode in part["episodes"]]
            figure = f"{MAIN_FIGURE} {sum(scores) / len(scores):.2f}" if scores else part["note"]
            self.progress.print(
                f"{self._done}/{total}  {candidate.label} on {task}: {figure}  ({part['seconds']:.1f} s)"
            )

    def _inputs(self, candidate: Candidate, task: NamedTask) -> Any:
        if candidate.kind not in DERIVED:
            return self.inputs[candidate.label]
        of = next(own for own in self.config.candidates if own.label == candidate.of)
        return inputs_from_episodes(candidate.kind, self._part(of, task))

    def _part(self, candidate: Candidate, task: NamedTask) -> dict[str, Any]:
        part = self.parts.get(self._key(candidate, task))
        assert part is not None, f"{candidate.label} has not played {task}"
        return part

    def _key(self, candidate: Candidate, task: NamedTask) -> str:
        """A hash of everything that the episodes of a unit depend on."""
        makers = [
            entry.make for name, entry in (*CONTROLLERS.items(), *TASKS.items()) if name in (candidate.kind, task.name)
        ]
        makers += [FAMILIES[task.name]] if task.name in FAMILIES else []
        sources = [_source(maker.__module__) for maker in makers]
        digest = self._digests[candidate.label]
        whole = (_code(plugin_files()), torch.__version__, self.settings, task, candidate.kind, digest, sources)
        return hashlib.sha256(repr(whole).encode()).hexdigest()[:32]

    def _results(self) -> dict[str, Any]:
        config, episodes, notes = self.config, list[dict[str, Any]](), list[str]()
        all_played = list[dict[str, Any]]()
        for own in config.candidates:
            parts = {str(task): self._part(own, task) for task in config.named_tasks}
            own_episodes = [
                {"controller": own.label, "task": task} | episode
                for task, part in parts.items()
                for episode in part["episodes"]
            ]
            all_played += own_episodes
            missed = [part["note"] for part in parts.values() if "note" in part]
            if missed:  # controllers are compared on the same hosts or not at all
                notes.append(f"{own.label} is left out: {missed[0]}")
                continue
            episodes += own_episodes
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
                "suite": config.suite,
                "num_tasks": config.num_tasks,
                "horizon": config.horizon,
                "incubation": config.incubation,
                "seeds_per_slot": config.seeds_per_slot,
                "sample": config.sample,
                "rent_weight": RENT_WEIGHT,
            },
            "controllers": controllers,
            "groups": groups,
            "tasks": [str(task) for task in config.named_tasks],
            "rng_seeds": list(config.rng_seeds),
            "notes": notes,
            "episodes": episodes,
            "summary": summarize(episodes, Groups(controllers, groups)),
            "compute_curve": compute_curve(all_played, Groups(controllers, groups)),
        }


def _timed_unit(settings: Settings, unit: Unit) -> dict[str, Any]:
    began = time.monotonic()
    return play_unit(settings, unit) | {"seconds": time.monotonic() - began}


def _digest(candidate: Candidate, inputs: Any) -> str:
    """A hash of a controller's inputs."""
    if candidate.kind == "object":
        return uuid.uuid4().hex  # the code of a user's class cannot be hashed: its units are never reused
    if not isinstance(inputs, PolicyWeights):
        return repr(inputs)
    digest = hashlib.sha256(repr(inputs.config).encode())
    for name, array in inputs.arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


@cache
def _source(module: str) -> str:
    """A hash of the file of a module; of a notebook, which has none, a new one in every process."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return uuid.uuid4().hex if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


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

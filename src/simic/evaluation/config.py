"""EvaluationConfig: who is compared, on what. Nothing here loads torch: a wrong setting is named at once."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property

from simic.environment.config import EpisodeConfig
from simic.evaluation.parsing import Candidate, Lineup, NamedTask, parse_controllers, parse_tasks
from simic.lifecycle.stages import Incubation, LifecycleConfig


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """An evaluation; everything that its results follow from."""

    controllers: tuple[str, ...]
    """Words of names of rules, `pretrained`, paths of trained controllers or plans; name=PATH,PATH judges as one."""
    tasks: tuple[str, ...]
    """FAMILY[:SPLIT] or names of tasks."""
    rng_seeds: tuple[int, ...]
    """Every task has one host for each."""
    num_tasks: int = 16
    """Tasks that are drawn from each family."""
    horizon: int = EpisodeConfig.horizon
    """Decisions of an episode."""
    incubation: Incubation = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    ablations: bool = False
    """Whether every learned controller is also compared with baselines derived from its own episodes."""
    sample: bool = False
    """Whether learned controllers draw their actions rather than take the likeliest."""
    data_dir: str | None = None
    """Where tasks that read files find them."""

    def __post_init__(self) -> None:
        if not self.rng_seeds or min(self.rng_seeds) < 0 or len(set(self.rng_seeds)) < len(self.rng_seeds):
            raise ValueError(f"rng seeds must be different numbers from 0 on, at least one, got {self.rng_seeds}")
        if self.ablations and len(self.rng_seeds) < 2:
            raise ValueError("--ablations show controllers the observations of other hosts: give at least 2 rng seeds")
        EpisodeConfig(horizon=self.horizon)
        if len(self.candidates) * len(self.rng_seeds) * len(self.named_tasks) == len(self.candidates):
            raise ValueError("one host says nothing about another: give at least 2 rng seeds, or 2 tasks")

    @cached_property
    def lineup(self) -> Lineup:
        """Who competes, ablations included, and how the words were read."""
        return parse_controllers(self.controllers, ablations=self.ablations)

    @property
    def candidates(self) -> list[Candidate]:
        """Who competes, ablations included."""
        return self.lineup.candidates

    @cached_property
    def named_tasks(self) -> list[NamedTask]:
        """On what."""
        return parse_tasks(self.tasks, self.num_tasks, self.data_dir)

    @property
    def command(self) -> str:
        """The command line that gives the same results; where they go and how many workers there are is left open."""
        first, count = min(self.rng_seeds), len(self.rng_seeds)
        if self.rng_seeds != tuple(range(first, first + count)):
            return f"simic.evaluation.evaluate with {self}"
        controllers = shlex.join(self.controllers)  # words: a comma would let a group go on
        words = ["simic evaluate", f"--controllers {controllers}", f"--tasks {','.join(self.tasks)}"]
        words += [f"--num-tasks {self.num_tasks}", f"--rng-seeds {count}", f"--horizon {self.horizon}"]
        words += [f"--first-rng-seed {first}"] * (first > 0)
        words += [f"--incubation {self.incubation}"] * (self.incubation != LifecycleConfig.incubation)
        words += [f"--data-dir {shlex.quote(self.data_dir)}"] if self.data_dir is not None else []
        words += ["--ablations"] * self.ablations + ["--sample"] * self.sample
        return " ".join(words)

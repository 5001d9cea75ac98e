"""EvaluationConfig: which controllers are compared, on which tasks. Nothing here loads torch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import cached_property

from simic.environment.config import EpisodeConfig
from simic.evaluation.parsing import Candidate, Lineup, NamedTask, parse_controllers, parse_tasks
from simic.evaluation.scale import MAX_FACTOR
from simic.evaluation.suites import SUITES, check_suite, find_suite
from simic.lifecycle.stages import Incubation, LifecycleConfig
from simic.plugins import loaded_plugins


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Everything that the results of an evaluation depend on."""

    controllers: tuple[str, ...] = ("wait", "random", "plan", "heuristic", "autogrow")
    """Controllers, separated by commas or spaces: names, runs, checkpoints, controller files, plans or scales (.json).
    NAME=PATH labels one; NAME=PATH,PATH is one group of several policies, up to the end of the word:
    `wait,heuristic ours=runs/a,runs/b baseline=runs/c`."""
    tasks: tuple[str, ...] = ("mlp:held_out",)
    """Tasks, separated by commas: FAMILY[:SPLIT] (by default held_out) or the name of a task."""
    rng_seeds: tuple[int, ...] = tuple(range(10))
    """Seeds of the hosts of every task."""
    num_tasks: int = 16
    """Tasks drawn from each family."""
    horizon: int = EpisodeConfig.horizon
    """Decisions per episode."""
    incubation: Incubation = LifecycleConfig.incubation
    """How a seed learns before it is blended in."""
    seeds_per_slot: int = LifecycleConfig.seeds_per_slot
    """Seeds that a slot may hold, one after the other."""
    ablations: bool = False
    """Also compare every learned controller with baselines derived from its own episodes: static_final, static_wide (as
    many parameters as it ended with), replay and shuffled; and with static_scaled, every host widened by one factor
    that was found on training tasks (by `simic plan --kind scale`)."""
    scales: tuple[float, ...] = ()
    """Also compare hosts widened to these multiples of their parameters, such as 2 4 8 16: the test metric against
    training compute becomes a curve, and every controller is compared with a wider host of equal compute."""
    suite: str | None = field(default=None, metadata={"choices": lambda: tuple(SUITES)})
    """Fixed sets and baselines, ranked set by set in leaderboard.md. `real` is real data: the files that `make data`
    fetches, none of them seen by the shipped controller, with 5 rng seeds. --controllers are compared with wait,
    heuristic, plan, static_scaled and their own static_wide (by default pretrained is); --tasks restricts the sets."""
    sample: bool = False
    """Learned controllers sample their actions instead of taking the most probable one."""
    data_dir: str | None = None
    """Directory of the files of tasks that read some."""
    objects: tuple[Candidate, ...] = field(
        default=(), repr=False, metadata={"not_a_setting": "it exists in Python only"}
    )
    """Controllers given as Python objects."""

    def __post_init__(self) -> None:
        if not self.rng_seeds or min(self.rng_seeds) < 0 or len(set(self.rng_seeds)) < len(self.rng_seeds):
            raise ValueError(f"rng seeds must be at least one, different and not negative, got {self.rng_seeds}")
        if self.ablations and len(self.rng_seeds) < 2:
            raise ValueError("--ablations show controllers the observations of other hosts: give at least 2 rng seeds")
        in_range = all(1 < scale <= MAX_FACTOR for scale in self.scales)
        if not in_range or len(set(self.scales)) < len(self.scales):
            raise ValueError(
                f"--scales must be different factors above 1, which is the host alone, and at most {MAX_FACTOR:g}, "
                f"got {self.scales}"
            )
        if self.suite is not None:
            check_suite(self.suite, [str(task) for task in self.named_tasks], len(self.rng_seeds))
        EpisodeConfig(horizon=self.horizon)
        _ = self.lifecycle
        if self.candidates and len(self.rng_seeds) * len(self.named_tasks) == 1:
            raise ValueError("one host gives no confidence interval: give at least 2 rng seeds, or 2 tasks")

    @property
    def lifecycle(self) -> LifecycleConfig:
        """The lifecycle of seeds."""
        return LifecycleConfig(incubation=self.incubation, seeds_per_slot=self.seeds_per_slot)

    @cached_property
    def lineup(self) -> Lineup:
        """The candidates, and notes on how ambiguous words were read."""
        derived = () if self.suite is None else find_suite(self.suite).derived
        return parse_controllers(
            self.controllers, ablations=self.ablations, derived=derived, scales=self.scales, objects=self.objects
        )

    @property
    def candidates(self) -> list[Candidate]:
        """The controllers that are compared, ablations included."""
        return self.lineup.candidates

    @cached_property
    def named_tasks(self) -> list[NamedTask]:
        """The tasks, with those drawn from families."""
        return parse_tasks(self.tasks, self.num_tasks, self.data_dir)

    @property
    def command(self) -> str:
        """The command line that gives the same results; output directory and number of workers are left open."""
        first, count = min(self.rng_seeds), len(self.rng_seeds)
        if self.objects or self.rng_seeds != tuple(range(first, first + count)):
            objects = f" and the objects {', '.join(own.label for own in self.objects)}" if self.objects else ""
            return f"simic.evaluate with {self}{objects}"
        controllers = shlex.join(self.controllers)  # separate words: a comma would continue a group
        words = ["simic evaluate", *([] if self.suite is None else [f"--suite {self.suite}"])]
        words += [f"--controllers {controllers}", f"--tasks {','.join(self.tasks)}"]
        words += [f"--num-tasks {self.num_tasks}"] * (self.suite is None)
        words += [f"--rng-seeds {count}", *([f"--horizon {self.horizon}"] if self.suite is None else [])]
        words += [f"--first-rng-seed {first}"] * (first > 0)
        words += [f"--incubation {self.incubation}"] * (self.incubation != LifecycleConfig.incubation)
        per_slot = self.seeds_per_slot
        words += [f"--seeds-per-slot {per_slot}"] * (per_slot != LifecycleConfig.seeds_per_slot)
        words += [f"--data-dir {shlex.quote(self.data_dir)}"] if self.data_dir is not None else []
        words += [f"--plugin {name}" for name in loaded_plugins()]
        words += [f"--scales {' '.join(f'{scale:g}' for scale in self.scales)}"] if self.scales else []
        words += ["--ablations"] * self.ablations + ["--sample"] * self.sample
        return " ".join(words)

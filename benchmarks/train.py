"""How many decisions per second does `simic train` make, what do two workers bring, and what does telemetry cost?

Run: python benchmarks/train.py [--updates 4] [--rounds 3]

Whole runs with the settings of the quick preset but fewer updates: playing, learning, recording, checkpoints. All do
exactly the same work, whatever the workers and the level, so every update is compared with itself: the best of several
interleaved rounds. The first update, in which workers start, does not count.

Two workers cannot halve what is serial, nor the rest if groups take unequal time. Both limits are computed from the run
with one worker, by giving its groups to two workers in the order in which they come. Twins are played while the learner
learns; what is left of them then counts for the first group.

The cost of a level is the time that the record phase takes longer than with level off, as a share of the whole update;
the difference between whole updates is printed too, but is mostly noise. It is measured with two workers, where the
rest of an update is shortest.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro

from simic.config import PRESETS
from simic.storage.run_directory import RunDirectory
from simic.telemetry.events import LEVELS, Level
from simic.training.build import build_run
from simic.training.loop import train
from simic.training.progress import Progress
from simic.workers.threads import single_thread

PHASES = ("rollout", "statistics", "update", "record", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    updates: int = 4
    """Updates that count in each run."""
    rounds: int = 3
    """The best of so many counts."""
    num_groups: int | None = None
    """Groups of hosts; by default as in the preset."""
    group_size: int | None = None
    """Hosts of a group; by default as in the preset."""
    horizon: int | None = None
    """Decisions of an episode; by default as in the preset."""


@dataclass
class Lap:
    """One update: how long its phases and its groups took, in seconds, and how many decisions it had."""

    phases: dict[str, float] = field(default_factory=dict)
    groups: list[float] = field(default_factory=list)
    seconds: float = 0.0
    decisions: float = 0.0

    @property
    def serial(self) -> float:
        """All but the rollout."""
        return self.seconds - self.phases["rollout"]


class StopWatch(Progress):
    """Instead of a progress display."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.laps: list[Lap] = []
        self._lap, self._phase, self._mark, self._group_mark = Lap(), "", 0.0, 0.0

    def describe(self, text: str) -> None:
        """Close the phase before, or note how long a group took: with one worker they come one after the other."""
        now = time.perf_counter()
        if text.startswith("rollout "):
            self._lap.groups.append(now - self._group_mark)
        else:
            if self._phase:
                self._lap.phases[self._phase] = now - self._mark
            self._phase, self._mark = text, now
        self._group_mark = now

    def end_update(self, update: int, metrics: Mapping[str, float]) -> None:
        """Close the update; called as `on_update`."""
        self.describe("")
        self._lap.seconds, self._lap.decisions = sum(self._lap.phases.values()), metrics["decisions"]
        self.laps.append(self._lap)
        self._lap = Lap()


def measure(options: Options, workers: int, level: Level) -> list[Lap]:
    """The updates of a run, without the first."""
    config = PRESETS["quick"][1]
    sizes = {name: getattr(options, name) for name in ("num_groups", "group_size") if getattr(options, name)}
    if options.horizon:
        sizes["episode"] = replace(config.episode, horizon=options.horizon)
    config = replace(config, updates=options.updates + 1, workers=workers, level=level, **sizes)
    with tempfile.TemporaryDirectory() as path:
        directory = RunDirectory(Path(path))
        with directory.lock(), single_thread():
            watch = StopWatch()
            run = build_run(config, directory, on_update=watch.end_update, quiet=True)
            run.progress = watch
            assert train(run).status == "done"
    return watch.laps[1:]


def best_of(runs: list[list[Lap]]) -> list[Lap]:
    """The quickest of each update; each phase and group at its best, for they are compared on their own."""
    best = []
    for laps in zip(*runs, strict=True):
        phases = {name: min(lap.phases[name] for lap in laps) for name in PHASES}
        groups = [min(times) for times in zip(*(lap.groups for lap in laps), strict=True)]
        best.append(Lap(phases, groups, min(lap.seconds for lap in laps), laps[0].decisions))
    return best


def total(laps: list[Lap]) -> float:
    """Seconds of all updates."""
    return sum(lap.seconds for lap in laps)


def in_phase(laps: list[Lap], phase: str) -> float:
    """Seconds of all updates in a phase."""
    return sum(lap.phases[phase] for lap in laps)


def ideal_seconds(lap: Lap, workers: int) -> float:
    """What an update would take if each group took as long as with one worker, and nothing else were lost."""
    free_at = [0.0] * workers
    for seconds in lap.groups:
        first = free_at.index(min(free_at))
        free_at[first] += seconds
    return max(free_at) + lap.serial


def print_table(best: Mapping[tuple[int, Level], list[Lap]]) -> None:
    """One line per kind of run."""
    print("workers  level    decisions/s  s/update  " + "  ".join(f"{phase:>10s}" for phase in PHASES))
    for (workers, level), laps in best.items():
        seconds = total(laps)
        shares = "  ".join(f"{in_phase(laps, phase) / seconds:10.1%}" for phase in PHASES)
        decisions = sum(lap.decisions for lap in laps) / seconds
        print(f"{workers:7d}  {level:8s} {decisions:11.1f}  {seconds / len(laps):8.3f}  {shares}")


def main(options: Options) -> None:
    """Measure and print."""
    kinds: list[tuple[int, Level]] = [(1, "normal"), *((2, level) for level in LEVELS)]
    runs: dict[tuple[int, Level], list[list[Lap]]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind in kinds:
            runs[kind].append(measure(options, *kind))
        print(f"round {number + 1} of {options.rounds} done", flush=True)
    best = {kind: best_of(own) for kind, own in runs.items()}
    print_table(best)

    one, two, off = best[1, "normal"], best[2, "normal"], best[2, "off"]
    speedup = total(one) / total(two)
    serial = sum(lap.serial for lap in one) / total(one)
    ideal = sum(ideal_seconds(lap, 2) for lap in one)
    print(
        f"two workers: {speedup:.2f}x, rollouts alone {in_phase(one, 'rollout') / in_phase(two, 'rollout'):.2f}x; "
        f"serial {serial:.1%}, which alone would allow {2 / (1 + serial):.2f}x, with unequal groups "
        f"{total(one) / ideal:.2f}x"
    )
    cost = {}
    for level in LEVELS[1:]:
        laps = best[2, level]
        cost[level] = (in_phase(laps, "record") - in_phase(off, "record")) / total(laps)
        print(
            f"telemetry {level:8s} {cost[level]:6.2%} of an update; whole updates {total(laps) / total(off) - 1:+.1%}"
        )
    result = {
        "two_worker_speedup": round(speedup, 3),
        "telemetry_normal_cost": round(cost["normal"], 5),
        "decisions_per_second": round(sum(lap.decisions for lap in two) / total(two), 1),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

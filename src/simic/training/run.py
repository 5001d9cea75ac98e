"""Run: the parts of a training run under way, and the steps of an update that the loop calls."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from simic.environment.episodes import EpisodeRecord
from simic.ppo.agent import DivergedError, PPOAgent
from simic.ppo.metrics import RatioAlarm, UpdateMetrics
from simic.ppo.rollout import Rollout, join
from simic.storage.checkpoint import save_checkpoint
from simic.storage.run_directory import RunDirectory
from simic.telemetry.anomalies import AnomalyDetector
from simic.telemetry.events import (
    Anomaly,
    CheckpointSaved,
    PhaseTimings,
    RunFinished,
    RunStarted,
    Update,
    WorkerFault,
)
from simic.telemetry.memory import peak_memory
from simic.telemetry.recorder import Recorder
from simic.training.episode_events import EVENTS_OF
from simic.training.episode_files import save_episodes
from simic.training.episodes import (
    GroupJob,
    GroupSetup,
    PolicyWeights,
    against_twins,
    group_jobs,
    learner_arrays,
    to_rollout,
    twin_jobs,
)
from simic.training.profiler import UpdateProfiler
from simic.training.progress import Progress, show_update
from simic.training.result import OnUpdate, Status, StopTraining, TrainingResult
from simic.training.statistics import episode_figures
from simic.workers.protocol import Fault, Pool
from simic.workers.signals import StopSignals


@dataclass(kw_only=True)
class Run:
    """A training run; `build.build_run` makes one. Without a directory it writes nothing."""

    directory: RunDirectory | None
    agent: PPOAgent
    setup: GroupSetup
    pool: Pool
    recorder: Recorder
    detector: AnomalyDetector
    progress: Progress
    profiler: UpdateProfiler
    started: RunStarted
    rng_seed: int
    num_groups: int
    num_tasks: int
    updates: int
    """Updates after which the run is done."""
    checkpoint_every: int
    keep_checkpoints: int
    record_episodes: bool
    escalate_updates: int
    about: dict[str, Any]
    """What a checkpoint must have in common with this run to be resumed from."""
    on_update: OnUpdate | None = None
    update: int = 0
    """Whole updates so far."""
    saved_update: int = -1
    """`update` of the last checkpoint on disk."""
    history: list[dict[str, float]] = field(default_factory=list)
    signals: StopSignals = field(default_factory=StopSignals)
    _safe: dict[str, Any] = field(default_factory=dict)
    """The state after the last whole update."""
    _stream: Iterator[tuple[int, list[EpisodeRecord]]] = field(default_factory=lambda: iter(()))
    """Results of `_jobs`; while the learner learns, those of the next update's twins are still to come."""
    _jobs: list[tuple[GroupJob, ...]] = field(default_factory=list)
    _ahead: dict[int, list[EpisodeRecord]] = field(default_factory=dict)
    """Twins of the next update that are played already, by the index of their job."""
    _faults: list[tuple[Fault, int]] = field(default_factory=list)
    """Workers that died in this update, and the group that each was playing."""
    _seconds: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the recorder, the workers and the progress display while the run lasts."""
        with ExitStack() as stack:
            stack.enter_context(self.signals.quiet())
            stack.callback(self.pool.close)
            stack.enter_context(self.recorder)
            stack.enter_context(self.progress)
            self._safe = self.state()
            yield

    def begin(self) -> None:
        """Record the start; whoever sees it may stop the run."""
        with self.signals.held():
            self.recorder.record(self.started)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure and display a part of an update."""
        began = time.perf_counter()
        self.progress.describe(name)
        yield
        self._seconds[name] = time.perf_counter() - began

    # The steps of an update, in the order of the loop.

    def collect(self) -> list[EpisodeRecord]:
        """Play the episodes of all groups with the current policy, and let workers begin the twins of the next update.

        Twins do not depend on the policy, so workers play them while the learner learns; the next call takes them:

            jobs     0 1 2 3   the groups; then the twins of the first update, which nobody played before
                     4 5       the twins of the next update, as many jobs as there are workers
        """
        jobs, twins = group_jobs(self.rng_seed, self.update, self.num_groups, self.num_tasks), self._finish_twins()
        if self.setup.twins and not twins:
            jobs += twin_jobs(jobs)
        jobs[0] = jobs[0]._replace(trace=self.profiler.rollout_path(self.update))
        self._jobs = [(job,) for job in jobs] + self._twins_of_next()
        self._stream = self.pool.stream((self.setup, PolicyWeights.of(self.agent.plain)), self._jobs)
        played: dict[int, EpisodeRecord] = {}
        while len(played) < len(jobs):
            index, records = next(self._stream)
            if index >= len(jobs):
                self._ahead[index] = records
                continue
            (played[index],) = records
            progress = [f"rollout {len(played)}/{len(jobs)}", str(self.pool.status())]
            self.progress.describe(" ".join(filter(None, progress)))
        self._note_faults()
        ordered = [played[index] for index in range(len(jobs))]
        groups, twins = ordered[: self.num_groups], twins or ordered[self.num_groups :]
        gamma = self.setup.reward.gamma
        return [against_twins(own, twin, gamma) for own, twin in zip(groups, twins, strict=True)] if twins else groups

    def _twins_of_next(self) -> list[tuple[GroupJob, ...]]:
        """The twins of the next update, dealt out to the workers."""
        if not self.setup.twins or self.update + 1 >= self.updates:
            return []
        twins = twin_jobs(group_jobs(self.rng_seed, self.update + 1, self.num_groups, self.num_tasks))
        shares = min(len(twins), max(1, self.pool.status().workers))
        return [tuple(twins[share::shares]) for share in range(shares)]

    def _finish_twins(self) -> list[EpisodeRecord]:
        """The twins that workers began during the last update, in the order of groups; none at the start of a run."""
        for index, records in self._stream:
            self._ahead[index] = records
        self._note_faults()
        played = {
            job.group: record
            for index in self._ahead
            for job, record in zip(self._jobs[index], self._ahead[index], strict=True)
        }
        self._ahead.clear()
        return [played[group] for group in sorted(played)]

    def _note_faults(self) -> None:
        """Take over the faults of the pool, which number jobs by their place in a call."""
        self._faults += [
            (fault, self._jobs[fault.job][0].group if fault.job >= 0 else -1) for fault in self.pool.faults
        ]
        self.pool.faults.clear()

    def assemble(self, groups: Sequence[EpisodeRecord]) -> tuple[Rollout, dict[str, float]]:
        """One rollout of all groups, and the metrics of their episodes."""
        rollouts = [to_rollout(learner_arrays(record), self.agent.plain.state_size) for record in groups]
        return join(rollouts), episode_figures(groups)

    def save_episodes(self, groups: Sequence[EpisodeRecord]) -> None:
        """Write the episodes for imitation and offline learning, if the config asks for it."""
        if self.record_episodes and self.directory is not None:
            save_episodes(self.directory.episodes, self.update, [learner_arrays(record) for record in groups])

    def find_anomalies(self, metrics: Mapping[str, float], alarms: Sequence[RatioAlarm]) -> list[Anomaly]:
        """Look for anomalies in an update; ratio alarms name the heads at fault."""
        # Of several heads the first, which is the worst, comes last and stays.
        places = {("ratio_exploded" if alarm.ratio > 1 else "ratio_collapsed"): alarm.head for alarm in alarms[::-1]}
        return self.detector.check(self.update, metrics, places)

    def log_update(
        self, groups: Sequence[EpisodeRecord], metrics: dict[str, float], anomalies: Sequence[Anomaly]
    ) -> None:
        """Record the events of the update; an anomaly raises the level of detail for a while."""
        if anomalies:
            self.recorder.escalate(self.escalate_updates)
        for group, record in enumerate(groups):
            for kind, events_of in EVENTS_OF.items():
                if self.recorder.wants(kind):
                    for event in events_of(record, self.update, group):
                        self.recorder.record(event)
        self.recorder.record(Update(update=self.update, metrics=metrics))
        for anomaly in anomalies:
            self.recorder.record(anomaly)
        if plateau := self.detector.check_plateau(self.update, metrics):
            self.recorder.record(plateau)
        for fault, group in self._faults:
            about = {"worker": fault.pid, "group": group, "error": fault.error, "node": fault.node}
            self.recorder.record(WorkerFault(update=self.update, **about))
            self.progress.print(f"update {self.update + 1}: {fault}")
        self._faults.clear()
        self.recorder.end_update()

    def complete_update(self, metrics: dict[str, float]) -> None:
        """Count the update, and keep a copy of the state after it: what a stopped run saves."""
        self.update += 1
        self.history.append({"update": self.update, **metrics})
        self._safe = self.state()

    def save_checkpoint(self) -> None:
        """Write a checkpoint, if one is due."""
        if self.update % self.checkpoint_every == 0 or self.update >= self.updates:
            self._save()

    def log_timings(self) -> None:
        """Record how long the phases of the last update took, and the memory in use."""
        seconds, speed = dict(self._seconds), self._decisions_per_second()
        pool = self.pool.status()
        self.recorder.record(
            PhaseTimings(
                update=self.update - 1,
                seconds=seconds,
                decisions_per_second=speed,
                memory_mb=peak_memory(),
                workers={"count": pool.workers, "nodes": pool.nodes},
            )
        )

    def report_progress(self, anomalies: Sequence[Anomaly]) -> None:
        """Show the main metrics of the last update."""
        speed, workers = self._decisions_per_second(), str(self.pool.status())
        show_update(self.progress, self.update, self.updates, self.history[-1], speed, anomalies, workers)

    def _decisions_per_second(self) -> float:
        return self.history[-1]["decisions"] / max(sum(self._seconds.values()), 1e-9)

    def call_back(self) -> None:
        """Call `on_update`, which may end the run."""
        if self.on_update is not None and self.on_update(self.update, self.history[-1]):
            raise StopTraining("on_update returned True")

    def finish(self, status: Status, *, reason: str = "", exit_code: int = 0) -> TrainingResult:
        """End the run with the state of the last whole update, which is saved if it is not yet."""
        self.pool.close()
        if self.saved_update < self._safe["update"]:
            self._save()
        if status != "done":
            self.agent.load_state_dict(self._safe["agent"])
        elif self.directory is not None:
            self.agent.save_controller(self.directory.controller)
        update, seconds = self._safe["update"], time.monotonic() - self._began
        self.recorder.record(
            RunFinished(update=update, status=status, exit_code=exit_code, seconds=seconds, reason=reason)
        )
        return TrainingResult(
            status=status,
            reason=reason,
            exit_code=exit_code,
            updates=update,
            history=self.history,
            agent=self.agent,
            directory=None if self.directory is None else self.directory.path,
        )

    # The state.

    def state(self) -> dict[str, Any]:
        """A deep copy of everything that the next update depends on."""
        return deepcopy(
            {
                "update": self.update,
                "agent": self.agent.state_dict(),
                "detector": self.detector.state_dict(),
                "recorder": self.recorder.state_dict(),
            }
        )

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        self.agent.load_state_dict(state["agent"])
        self.detector.load_state_dict(state["detector"])
        self.recorder.load_state_dict(state["recorder"])
        self.update = self.saved_update = int(state["update"])

    def _save(self) -> None:
        if self.directory is None:
            return
        began, update = time.perf_counter(), self._safe["update"]
        score = self.history[-1]["score"] if self.history else float("nan")
        path = save_checkpoint(
            self.directory.checkpoints,
            update,
            self._safe,
            metric=score if math.isfinite(score) else None,
            about=self.about,
            keep=self.keep_checkpoints,
        )
        self.saved_update = update
        seconds = time.perf_counter() - began
        self.recorder.record(CheckpointSaved(update=update, path=path.name, metric=score, seconds=seconds))


def check_finite(metrics: UpdateMetrics) -> None:
    """Raise DivergedError if the policy is not finite after an update."""
    if math.isnan(metrics.kl_after):
        raise DivergedError(
            "the policy is not finite after the update and cannot act: lower the learning rate "
            f"({metrics.learning_rate:g}) or look for rewards and observations that are out of range"
        )

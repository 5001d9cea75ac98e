"""Run: the parts of a training run, and what the loop asks of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simic.environment.episodes import EpisodeRecord
from simic.ppo.agent import DivergedError, PPOAgent
from simic.ppo.metrics import UpdateMetrics
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
from simic.telemetry.recorder import Recorder
from simic.training.episode_events import EVENTS_OF
from simic.training.episode_files import save_episodes
from simic.training.episodes import GroupSetup, PolicyWeights, against_twins, group_jobs, learner_arrays, to_rollout
from simic.training.progress import Progress
from simic.training.statistics import episode_figures
from simic.workers.protocol import Pool
from simic.workers.signals import StopSignals


@dataclass(kw_only=True)
class Run:
    """A training run under way. `build.py` puts it together."""

    directory: RunDirectory
    agent: PPOAgent
    setup: GroupSetup
    pool: Pool
    recorder: Recorder
    detector: AnomalyDetector
    progress: Progress
    started: RunStarted
    rng_seed: int
    num_groups: int
    num_tasks: int
    updates: int
    """Updates until the run is done."""
    checkpoint_every: int
    keep_checkpoints: int
    record_episodes: bool
    escalate_updates: int
    about: dict[str, Any]
    """What a checkpoint must have in common with this run."""
    update: int = 0
    """Updates that are done."""
    signals: StopSignals = field(default_factory=StopSignals)
    saved_update: int = -1
    """The update of the last checkpoint on disk."""
    _safe: dict[str, Any] = field(default_factory=dict)
    _figures: dict[str, float] = field(default_factory=dict)
    _anomalies: list[Anomaly] = field(default_factory=list)
    _seconds: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the recorder, the workers and the progress display while the run lasts."""
        with ExitStack() as stack:
            stack.callback(self.pool.close)
            stack.enter_context(self.recorder)
            stack.enter_context(self.progress)
            self.recorder.record(self.started)
            self._safe = self.state()
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of an update."""
        began = time.perf_counter()
        self.progress.phase(name)
        yield
        self._seconds[name] = time.perf_counter() - began

    def collect(self) -> list[EpisodeRecord]:
        """The episodes of all groups under the policy of now."""
        jobs = group_jobs(self.rng_seed, self.update, self.num_groups, self.num_tasks)
        if self.setup.twins:  # last, because they are short: workers end at about the same time
            jobs += [job._replace(twin=True) for job in jobs]
        played: list[Any] = [None] * len(jobs)
        common = (self.setup, PolicyWeights.of(self.agent.plain))
        for done, (group, result) in enumerate(self.pool.stream(common, jobs), 1):
            played[group] = result
            self.progress.groups(done, len(jobs))
        groups, twins = played[: self.num_groups], played[self.num_groups :]
        gamma = self.setup.reward.gamma
        return [against_twins(own, twin, gamma) for own, twin in zip(groups, twins, strict=True)] if twins else groups

    def assemble(self, played: list[EpisodeRecord]) -> tuple[Rollout, dict[str, float]]:
        """One rollout of all groups, and figures of their episodes."""
        groups = [learner_arrays(record) for record in played]
        if self.record_episodes:
            save_episodes(self.directory.episodes, self.update, groups)
        return join([to_rollout(group, self.agent.plain.state_size) for group in groups]), episode_figures(played)

    def log_update(self, played: list[EpisodeRecord], metrics: UpdateMetrics, figures: dict[str, float]) -> None:
        """Record the story of the update, and look for anomalies in it."""
        figures = figures | metrics.flat()
        alarms = metrics.ratio_alarms[::-1]  # the worst last, so that it stays
        places = {("ratio_exploded" if alarm.ratio > 1 else "ratio_collapsed"): alarm.head for alarm in alarms}
        self._anomalies = self.detector.check(self.update, figures, places)
        if self._anomalies:
            self.recorder.escalate(self.escalate_updates)
        for group, record in enumerate(played):
            for kind, events_of in EVENTS_OF.items():
                if self.recorder.wants(kind):
                    for event in events_of(record, self.update, group):
                        self.recorder.record(event)
        self.recorder.record(Update(update=self.update, metrics=figures))
        for anomaly in self._anomalies:
            self.recorder.record(anomaly)
        for fault in self.pool.faults:
            group = fault.job % self.num_groups if fault.job >= 0 else fault.job
            error = f"exit code {fault.exit_code}"
            self.recorder.record(WorkerFault(update=self.update, worker=fault.pid, group=group, error=error))
        self.pool.faults.clear()
        self.recorder.end_update()
        if math.isnan(metrics.kl_after):
            raise DivergedError(
                "the policy is not finite after the update and cannot act: lower the learning rate "
                f"({metrics.learning_rate:g}) or look for rewards and observations that are out of range"
            )
        self._figures = figures
        self.update += 1
        self._safe = self.state()

    def state(self) -> dict[str, Any]:
        """A copy of everything that the next update depends on, safe from what happens next."""
        return deepcopy(
            {
                "update": self.update,
                "agent": self.agent.state_dict(),
                "detector": self.detector.state_dict(),
                "recorder": self.recorder.state_dict(),
            }
        )

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.agent.load_state_dict(state["agent"])
        self.detector.load_state_dict(state["detector"])
        self.recorder.load_state_dict(state["recorder"])
        self.update = self.saved_update = int(state["update"])

    def save_checkpoint(self) -> None:
        """Write a checkpoint, if one is due."""
        if self.update % self.checkpoint_every == 0 or self.update >= self.updates:
            self._save()

    def report_progress(self) -> None:
        """Tell whoever watches; the timings close the record of an update."""
        self.recorder.record(PhaseTimings(update=self.update - 1, seconds=dict(self._seconds)))
        decisions = self._figures["decisions"] / max(sum(self._seconds.values()), 1e-9)
        self.progress.show(self.update, self.updates, self._figures, decisions, self._anomalies)

    def finish(self, status: str, exit_code: int, *, reason: str = "") -> int:
        """Leave the run in good order, with a checkpoint of the last whole update; returns the exit code."""
        self.pool.close()
        if self.saved_update < self._safe["update"]:
            self._save()
        if status == "done":
            self.agent.save_controller(self.directory.controller)
        seconds = time.monotonic() - self._began
        update = self._safe["update"]
        self.recorder.record(
            RunFinished(update=update, status=status, exit_code=exit_code, seconds=seconds, reason=reason)
        )
        self.progress.finish(status, update, self.directory.path, reason)
        return exit_code

    def _save(self) -> None:
        began, score = time.perf_counter(), self._figures.get("score", float("nan"))
        update = self._safe["update"]
        path = save_checkpoint(
            self.directory.checkpoints,
            update,
            self._safe,
            metric=score if np.isfinite(score) else None,
            about=self.about,
            keep=self.keep_checkpoints,
        )
        self.saved_update = update
        seconds = time.perf_counter() - began
        self.recorder.record(CheckpointSaved(update=update, path=path.name, metric=score, seconds=seconds))

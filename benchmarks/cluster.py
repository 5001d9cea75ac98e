"""How fast is Ray against local processes, what does it move, and how far does a run scale?

Run: python benchmarks/cluster.py [--updates 3] [--rounds 4] [--no-contest] [--no-simulation]

Contest: the rollouts of the first updates of preset quick, played by two local processes and by Ray with two workers
in turn, and in reversed order every other round; for each update the best round counts. All play the same jobs with
the same weights, and their results are compared bit by bit. What the first rollout of a pool takes longer than the same
rollout later is its start-up. `ray_over_processes` compares rollouts alone, the part of an update that differs.

Model: the seconds of jobs and of learning are CPU time of this process, and what Ray adds is measured with jobs that
sleep and send back arrays of the same sizes; see cluster_model.py. It is compared with rollouts of such jobs on nodes
that are simulated here (`ray.cluster_utils.Cluster`), and predicts whole updates with up to 1,000 workers and an
assumed network.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from cluster_jobs import PretendJob, arrays_in
from cluster_model import Network, Overheads, Phases, decisions_per_second
from cluster_simulation import check_model, measure_overheads, simulated_cluster

from simic import preset
from simic.config import RunConfig
from simic.environment.episodes import EpisodeRecord
from simic.storage.run_directory import RunDirectory
from simic.training.build import build_run
from simic.training.episodes import GroupJob, PolicyWeights, against_twins, group_jobs, play_group
from simic.training.run import Run
from simic.workers.build import make_pool
from simic.workers.placement import Backend, Placement
from simic.workers.plain_data import to_plain

BACKENDS: tuple[Backend, ...] = ("local", "ray")
WORKERS = 2
LARGER = 4
"""Learning is also measured with a rollout so many times as large."""
SIMULATED_GROUPS = (4, 16)
PREDICTED_GROUPS = (4, 16, 64, 256, 1000)
PREDICTED_WORKERS = (1, 2, 4, 8, 16, 32, 64, 125, 250, 500, 1000)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    updates: int = 3
    """Updates whose rollouts are played."""
    rounds: int = 4
    """The best of so many counts."""
    contest: bool = True
    """Compare Ray with local processes."""
    simulation: bool = True
    """Measure what Ray adds, check the model on simulated nodes, and predict."""
    nodes: int = 4
    """Simulated nodes."""
    cores: int = 4
    """Workers of each simulated node."""
    heavy_task: str = "digits-cnn"
    """Also predict for hosts of this task, which train longer; empty: leave it out."""
    gigabits: float = 10.0
    """Assumed bandwidth of the driver's network, in Gbit/s."""
    latency: float = 0.001
    """Assumed seconds until a result begins to arrive from another machine."""
    workers_per_node: int = 16
    """Assumed workers of a machine."""


class Rollout(NamedTuple):
    """What a pool is given for one update, and the contents of the arrays that it must answer."""

    common: Any
    jobs: list[GroupJob]
    answers: list[list[bytes]]


# Phases of an update, in this process.


@contextmanager
def opened_run(config: RunConfig) -> Iterator[Run]:
    """A run in a temporary directory, so that recording and checkpoints cost what they do."""
    with tempfile.TemporaryDirectory() as path:
        directory = RunDirectory(Path(path))
        with directory.lock():
            run = build_run(replace(config, workers=0), directory, quiet=True)
            with run.open():
                yield run


def learn(run: Run, groups: Sequence[EpisodeRecord]) -> float:
    """All that follows a rollout; returns its CPU seconds."""
    began = time.process_time()
    rollout, figures = run.assemble(groups)
    learned = run.agent.update(rollout)
    metrics = figures | learned.flat()
    run.log_update(groups, metrics, run.find_anomalies(metrics, learned.ratio_alarms))
    run.complete_update(metrics)
    run.save_checkpoint()
    return time.process_time() - began


def contents(result: EpisodeRecord) -> list[bytes]:
    """Of all arrays, so that equal means equal bits, with NaN equal to itself."""
    return [array.tobytes() for array in arrays_in(to_plain(result))]


def measure_phases(config: RunConfig, updates: int, num_played: int) -> tuple[Phases, list[Rollout]]:
    """Play the first groups of each update and learn from them, repeated as often as the rollout needs groups."""
    played: dict[bool, list[PretendJob]] = {False: [], True: []}
    rollouts, records = list[Rollout](), list[EpisodeRecord]()
    with opened_run(config) as run:
        for _ in range(updates):
            jobs = group_jobs(run.rng_seed, run.update, run.num_groups, run.num_tasks)[:num_played]
            jobs += [job._replace(twin=True) for job in jobs]
            common, results = (run.setup, PolicyWeights.of(run.agent.plain)), list[EpisodeRecord]()
            for job in jobs:
                began = time.process_time()
                results.append(play_group(common, job))
                seconds, arrays = time.process_time() - began, arrays_in(to_plain(results[-1]))
                played[job.twin].append(PretendJob(seconds, tuple(array.nbytes for array in arrays)))
            rollouts.append(Rollout(common, jobs, [contents(result) for result in results]))
            pairs = zip(results[:num_played], results[num_played:], strict=True)
            records = [against_twins(own, twin, run.setup.reward.gamma) for own, twin in pairs]
            records *= config.num_groups // num_played
            learn(run, records)
        usual, larger = (min(learn(run, records * times) for _ in range(2)) for times in (1, LARGER))
    per_group = (larger - usual) / (config.num_groups * (LARGER - 1))
    phases = Phases(
        groups=tuple(played[False]),
        twins=tuple(played[True]),
        common_bytes=len(pickle.dumps(rollouts[0].common, protocol=5)),
        decisions_per_group=config.group_size * config.episode.horizon,
        learn_seconds=max(usual - config.num_groups * per_group, 0.0),
        learn_seconds_per_group=per_group,
    )
    return phases, rollouts


def print_phases(name: str, phases: Phases) -> None:
    """What one update of four groups is made of."""
    for kind, jobs in (("group", phases.groups), ("twin", phases.twins)):
        mean, size = (
            sum(values) / len(jobs) for values in zip(*((j.seconds, sum(j.arrays)) for j in jobs), strict=True)
        )
        times = sorted(job.seconds for job in jobs)
        print(f"{name}: {kind} {mean:.3f} s ({times[0]:.3f} to {times[-1]:.3f}), {size / 1e6:.2f} MB back")
    print(
        f"{name}: learning {phases.learn_seconds:.3f} s + {phases.learn_seconds_per_group:.3f} s per group, at most "
        f"{phases.learner_limit:.0f} decisions/s; {phases.common_bytes / 1e6:.2f} MB of weights and settings per node",
        flush=True,
    )


# The contest.


class Contest:
    """The best times of both backends."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.seconds = {backend: [float("inf")] * len(rollouts) for backend in BACKENDS}
        self.rounds: dict[Backend, list[float]] = {backend: [] for backend in BACKENDS}
        self.first: dict[Backend, list[float]] = {backend: [] for backend in BACKENDS}
        self.bytes_per_update = 0.0

    def play_round(self, backend: Backend) -> None:
        """Start a pool and play all updates; the first one twice, because workers start in it."""
        pool = make_pool(play_group, Placement(backend=backend, workers=WORKERS))
        try:
            began = time.perf_counter()
            pool.start()
            self._play(pool, self.rollouts[0])
            self.first[backend].append(time.perf_counter() - began)
            moved = _bytes_moved(pool)
            times = [self._play(pool, rollout) for rollout in self.rollouts]
            if backend == "ray":
                self.bytes_per_update = (_bytes_moved(pool) - moved) / len(self.rollouts)
        finally:
            pool.close()
        self.rounds[backend].append(sum(times))
        self.seconds[backend] = list(map(min, self.seconds[backend], times))

    def _play(self, pool: Any, rollout: Rollout) -> float:
        began = time.perf_counter()
        results = pool.run(rollout.common, rollout.jobs)
        seconds = time.perf_counter() - began
        if [contents(result) for result in results] != rollout.answers:
            raise RuntimeError(f"{type(pool).__name__} played other episodes than this process")
        return seconds

    def start_seconds(self, backend: Backend) -> float:
        """What the first rollout takes longer than the same one later."""
        return min(self.first[backend]) - self.seconds[backend][0]


def _bytes_moved(pool: Any) -> int:
    return getattr(pool, "bytes_sent", 0) + getattr(pool, "bytes_received", 0)


def print_contest(contest: Contest, phases: Phases, config: RunConfig) -> dict[str, float]:
    """Decisions per second of both, and what Ray moves."""
    decisions = phases.decisions_per_group * config.num_groups * len(contest.rollouts)
    learning = phases.learning(config.num_groups) * len(contest.rollouts)
    local, ray = (sum(contest.seconds[backend]) for backend in BACKENDS)
    for backend in BACKENDS:
        best, rounds = sum(contest.seconds[backend]), [decisions / total for total in contest.rounds[backend]]
        print(
            f"{backend:5s} {WORKERS} workers: rollouts {decisions / best:.0f} decisions/s (rounds "
            f"{min(rounds):.0f} to {max(rounds):.0f}), with learning {decisions / (best + learning):.0f}; "
            f"start-up {contest.start_seconds(backend):.1f} s"
        )
    ratios = sorted(own / other for own, other in zip(contest.rounds["local"], contest.rounds["ray"], strict=True))
    moved = contest.bytes_per_update / 1e6
    print(
        f"ray over processes: {local / ray:.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f}); {moved:.2f} MB per update"
    )
    return {
        "ray_over_processes": local / ray,
        "ray_over_processes_whole_updates": (local + learning) / (ray + learning),
        "megabytes_per_update": moved,
        "start_seconds": contest.start_seconds("ray"),
        "start_seconds_processes": contest.start_seconds("local"),
        "ray_decisions_per_second": decisions / (ray + learning),
        "processes_decisions_per_second": decisions / (local + learning),
    }


# The model.


def print_overheads(overheads: Overheads) -> None:
    """What Ray adds."""
    print(
        f"Ray adds {1e3 * overheads.per_stream:.1f} ms per rollout, {1e3 * overheads.per_job_worker:.2f} ms per job "
        f"of a worker, {1e3 * overheads.per_job_driver:.2f} ms per job of the driver, and per wait "
        f"{1e6 * overheads.per_reference:.2f} us for each job in flight"
    )


def print_prediction(name: str, phases: Phases, overheads: Overheads, network: Network) -> dict[str, float]:
    """Decisions per second of whole updates; returns the most that each size of rollout reaches."""
    result = {}
    print(f"{name}: predicted decisions/s; rows: workers, columns: groups per rollout (twice as many jobs)")
    print("workers  " + "  ".join(f"{groups:8d}" for groups in PREDICTED_GROUPS))
    for workers in PREDICTED_WORKERS:
        rates = [
            decisions_per_second(phases, overheads, groups=groups, workers=workers, network=network)
            for groups in PREDICTED_GROUPS
        ]
        print(f"{workers:7d}  " + "  ".join(f"{rate:8.0f}" for rate in rates), flush=True)
        if workers in (1, PREDICTED_WORKERS[-1]):
            key = f"predicted_{name.replace('-', '_')}_{workers}_workers"
            result |= {key: rates[0], f"{key}_largest_rollout": rates[-1]}
    return result | {f"learner_limit_{name.replace('-', '_')}": phases.learner_limit}


def simulate(options: Options, quick: Phases, common: Any) -> dict[str, float]:
    """Measure what Ray adds, check the model, predict."""
    workers = [count for count in (1, 2, 4, 8, 16, 32) if count <= options.nodes * options.cores]
    with simulated_cluster(options.nodes, options.cores) as address:
        overheads = measure_overheads(address, quick, common, options.rounds)
        print_overheads(overheads)
        print(f"{options.nodes} simulated nodes with {options.cores} workers each:")
        sizes = {"workers": workers, "groups": SIMULATED_GROUPS, "rounds": 2}
        error = check_model(address, quick, common, overheads, **sizes)
    network = Network(
        bytes_per_second=options.gigabits * 1e9 / 8, latency=options.latency, workers_per_node=options.workers_per_node
    )
    result = {"model_error": error} | print_prediction("quick", quick, overheads, network)
    if options.heavy_task:
        config = replace(preset("quick"), task=options.heavy_task, num_tasks=1)
        heavy = measure_phases(config, updates=1, num_played=1)[0]
        print_phases(options.heavy_task, heavy)
        result |= print_prediction(options.heavy_task, heavy, overheads, network)
    return result


def main(options: Options) -> None:
    """Measure and print."""
    if find_spec("ray") is None:
        sys.exit("benchmarks/cluster.py measures Ray, which is not installed: pip install simic-rl[cluster]")
    torch.set_num_threads(1)
    print(f"load of this machine before: {os.getloadavg()[0]:.1f}")
    config = preset("quick")
    phases, rollouts = measure_phases(config, options.updates, config.num_groups)
    print_phases("quick", phases)
    result: dict[str, float] = {}
    if options.contest:
        contest = Contest(rollouts)
        for number in range(options.rounds):
            for backend in BACKENDS[:: -1 if number % 2 else 1]:
                contest.play_round(backend)
            print(f"round {number + 1} of {options.rounds} done", flush=True)
        result |= print_contest(contest, phases, config)
    if options.simulation:
        result |= simulate(options, phases, rollouts[0].common)
    print(f"load of this machine after: {os.getloadavg()[0]:.1f}")
    print("RESULT " + json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

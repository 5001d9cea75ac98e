"""Learning without trying: imitate somebody's episodes, or learn offline from them by implicit Q-learning.

The episodes are recorded ones, or fresh ones that a rule, a plan or a saved controller plays. The result is a
controller, and a warm start for PPO.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from simic.config import RunConfig
from simic.control.facts import Facts
from simic.control.learned import network_input, row_masks
from simic.control.legality import Masks
from simic.control.observation import observe
from simic.control.registry import make_controller, names_controller
from simic.ppo.agent import DivergedError, PPOAgent
from simic.ppo.imitation import imitate
from simic.ppo.offline import learn_offline
from simic.ppo.rollout import Rollout
from simic.storage.checkpoint import save_checkpoint
from simic.storage.run_directory import RunDirectory, RunExistsError
from simic.telemetry.events import RunFinished, Update
from simic.training.build import make_agent, make_recorder, make_setup, manifest, start_from, write_config
from simic.training.episode_files import load_episodes, save_episodes
from simic.training.episodes import GroupJob, GroupSetup, Played, group_jobs, make_trainings, play, to_rollout
from simic.training.profiler import profiled_steps
from simic.training.result import OnUpdate, Status, StopTraining, TrainingResult
from simic.workers.pool import WorkerPool
from simic.workers.signals import Stopped, StopSignals

LEARNERS: dict[str, Callable[..., Any]] = {"imitation": imitate, "iql": learn_offline}
"""Each takes an agent, rollouts, and the section of the settings that has its name."""


def learn_from_episodes(
    config: RunConfig,
    directory: RunDirectory | None = None,
    *,
    init: Path | None = None,
    profile: Path | None = None,
    on_update: OnUpdate | None = None,
    say: Callable[[str], None] = print,
    begun: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Train by imitation or IQL. The caller holds the lock of the directory; without one nothing is written."""
    if directory is not None and directory.config.is_file():
        raise RunExistsError(
            f"{directory.path} holds a run already, and this kind is not resumed: choose another --out"
        )
    began, agent = time.monotonic(), make_agent(config)
    if init is not None:
        start_from(agent, init, say=say)
    rollouts = _gather(config, directory, agent.plain.state_size, say)
    started, history = manifest(config), list[dict[str, float]]()
    with make_recorder(config, directory) as recorder:
        if directory is not None:
            write_config(config, directory)  # now: a run that cannot be built leaves no settings behind
        begun()
        recorder.record(started)
        safe = deepcopy(agent.state_dict())

        def save() -> None:
            if directory is not None:
                tree = {"update": len(history), "agent": safe}
                save_checkpoint(directory.checkpoints, len(history), tree, about=agent.about(), keep=config.keep)

        def progress(metrics: Any) -> None:
            nonlocal safe
            done, figures = len(history), flat(asdict(metrics))
            recorder.record(Update(update=done, metrics=figures))
            say(f"{config.algorithm} {done}: " + "  ".join(f"{k} {v:.3f}" for k, v in _main_figures(metrics).items()))
            history.append({"update": done + 1, **figures})
            safe = deepcopy(agent.state_dict())
            if len(history) % config.checkpoint_every == 0:
                save()
            if on_update is not None and on_update(done + 1, history[-1]):
                raise StopTraining("on_update returned True")

        with profiled_steps(profile):
            status, code, reason = _learn(config, agent, rollouts, progress)
        if status != "done":
            save()
            agent.load_state_dict(safe)
        elif directory is not None:
            agent.save_controller(directory.controller)
        seconds = time.monotonic() - began
        recorder.record(RunFinished(update=len(history), status=status, exit_code=code, seconds=seconds, reason=reason))
    path = None if directory is None else directory.path
    return TrainingResult(
        status=status,
        reason=reason,
        exit_code=code,
        updates=len(history),
        history=history,
        agent=agent,
        directory=path,
    )


def _learn(
    config: RunConfig, agent: PPOAgent, rollouts: Sequence[Rollout], progress: Callable[[Any], None]
) -> tuple[Status, int, str]:
    """How learning ended: status, exit code and reason."""
    try:
        with StopSignals().watched():
            LEARNERS[config.algorithm](agent, rollouts, getattr(config, config.algorithm), progress=progress)
        return "done", 0, ""
    except (Stopped, StopTraining) as stop:
        return "stopped", getattr(stop, "exit_code", 0), str(stop)
    except DivergedError as error:
        return "diverged", 3, str(error)


def play_fresh(setup: tuple[GroupSetup, str], job: GroupJob) -> Played:
    """Whole episodes of a group under a rule, plan or saved controller, seen as a network would see them."""
    group_setup, player = setup
    controller = make_controller(player, job.group_seed)

    def decide(facts: Facts, masks: Masks) -> tuple[np.ndarray, dict[str, Any]]:
        return np.asarray(controller.act(facts)), {"mask": row_masks(masks), **network_input(observe(facts, masks))}

    return play(make_trainings(group_setup, job), decide)


def flat(tree: dict[str, Any]) -> dict[str, float]:
    """Numbers of nested tables under one name each, joined by slashes."""
    numbers: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            numbers |= {f"{name}/{key}": figure for key, figure in flat(value).items()}
        elif isinstance(value, (int, float)):
            numbers[name] = float(value)
    return numbers


def _gather(
    config: RunConfig, directory: RunDirectory | None, state_size: int, say: Callable[[str], None]
) -> list[Rollout]:
    rollouts: list[Rollout] = []
    players = [source for source in config.episodes if names_controller(source)]
    for source in config.episodes:
        if source in players:
            first = config.updates * players.index(source)  # each records its episodes behind those before it
            rollouts += _fresh(config, directory, source, first, state_size, say)
        else:
            rollouts += load_episodes(source, state_size)
    say(f"{sum(rollout.shape[1] for rollout in rollouts)} episodes to learn from")
    return rollouts


def _fresh(
    config: RunConfig,
    directory: RunDirectory | None,
    player: str,
    first: int,
    state_size: int,
    say: Callable[[str], None],
) -> Sequence[Rollout]:
    """Episodes that somebody plays now, as many as PPO would try."""
    make_controller(player)  # one that does not fit is refused here, before workers start
    pool, setup, rollouts = WorkerPool(play_fresh, config.workers), make_setup(config), []
    try:
        for update in range(config.updates):
            played = pool.run((setup, player), group_jobs(config.rng_seed, update, config.num_groups, config.num_tasks))
            if config.record and directory is not None:
                save_episodes(directory.episodes, first + update, [group.rollout for group in played])
            rollouts += [to_rollout(group.rollout, state_size) for group in played]
            score = np.mean([group.trace.score.mean() for group in played])
            say(f"episodes of {player} {update + 1}/{config.updates}: score {score:.2f}")
    finally:
        pool.close()
    return rollouts


def _main_figures(metrics: Any) -> dict[str, float]:
    numbers = flat(asdict(metrics))
    return {name: value for name, value in numbers.items() if "/" not in name or name == "head_accuracy/op"}

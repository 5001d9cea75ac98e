"""Learn from demonstrations: imitation, or offline reinforcement learning by implicit Q-learning (IQL).

The demonstrations are recorded episodes, or fresh ones played by a rule, a plan, a saved controller or a look-ahead
search. The result is a controller, which can also be the starting point of PPO.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from simic.config import RunConfig
from simic.control.facts import Facts
from simic.control.learned import network_input, row_masks
from simic.control.legality import Masks
from simic.control.observation import observe
from simic.control.registry import make_controller, names_controller
from simic.environment.episodes import Decide, EpisodeRecord, PolicyRecord, play, stacked
from simic.environment.host_trainings import HostTrainings
from simic.environment.lookahead import make_lookahead
from simic.environment.lookahead_config import LOOKAHEAD
from simic.ppo.agent import DivergedError, PPOAgent
from simic.ppo.imitation import imitate
from simic.ppo.offline import learn_offline
from simic.ppo.rollout import Rollout
from simic.storage.checkpoint import save_checkpoint
from simic.storage.run_directory import RunDirectory, RunExistsError
from simic.telemetry.events import RunFinished, Update
from simic.training.build import data_check, make_agent, make_recorder, make_setup, manifest, start_from, write_config
from simic.training.episode_files import load_episodes, save_episodes
from simic.training.episodes import GroupJob, GroupSetup, group_jobs, learner_arrays, make_trainings, to_rollout
from simic.training.profiler import profiled_steps
from simic.training.result import OnUpdate, Status, StopTraining, TrainingResult
from simic.workers.build import make_pool
from simic.workers.signals import Stopped, StopSignals

LEARNERS: dict[str, Callable[..., Any]] = {"imitation": imitate, "iql": learn_offline}
"""Called with an agent, rollouts and the section of the settings that has the same name."""


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
            f"{directory.path} already contains a run, and {config.algorithm} cannot resume one: choose another --out"
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
            done, numbers = len(history), flat(asdict(metrics))
            recorder.record(Update(update=done, metrics=numbers))
            shown = [f"{k} {v:.3f}" for k, v in numbers.items() if "/" not in k or k == "head_accuracy/op"]
            say(f"{config.algorithm} {done}: " + "  ".join(shown))
            history.append({"update": done + 1, **numbers})
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
    ending = {"status": status, "reason": reason, "exit_code": code, "updates": len(history)}
    return TrainingResult(
        **ending, history=history, agent=agent, directory=None if directory is None else directory.path
    )


def _learn(
    config: RunConfig, agent: PPOAgent, rollouts: Sequence[Rollout], progress: Callable[[Any], None]
) -> tuple[Status, int, str]:
    """Learn until done, stopped or diverged; returns status, exit code and reason."""
    try:
        with StopSignals().watched():
            LEARNERS[config.algorithm](agent, rollouts, getattr(config, config.algorithm), progress=progress)
        return "done", 0, ""
    except (Stopped, StopTraining) as stop:
        return "stopped", getattr(stop, "exit_code", 0), str(stop)
    except DivergedError as error:
        return "diverged", 3, str(error)


def play_fresh(setup: tuple[GroupSetup, str], job: GroupJob) -> EpisodeRecord:
    """Episodes of a group by a rule, plan, saved controller or search, with the observations of a policy network."""
    group_setup, player = setup
    if player == LOOKAHEAD:
        return _play_lookahead(group_setup, job)
    controller = make_controller(player, job.group_seed)
    return _play_observed(make_trainings(group_setup, job), lambda facts, masks: np.asarray(controller.act(facts)))


def _play_lookahead(setup: GroupSetup, job: GroupJob) -> EpisodeRecord:
    """Episodes of a search; where a policy is followed, its states with the actions that the search chose there."""
    trunk = make_trainings(setup, job)

    def branches(rows: int) -> HostTrainings:
        return make_trainings(replace(setup, group_size=rows), job, task=trunk.task)

    search = make_lookahead(trunk, branches, setup.lookahead, rng_seed=job.group_seed)
    record = _play_observed(trunk, search.decide)
    return replace(record, action=np.stack(search.labels) * record.valid[..., None])


def _play_observed(trainings: HostTrainings, decide: Decide) -> EpisodeRecord:
    steps = list[PolicyRecord]()

    def observed(facts: Facts, masks: Masks) -> np.ndarray:
        steps.append(PolicyRecord(observation=network_input(observe(facts, masks)), mask=row_masks(masks)))
        return decide(facts, masks)

    return replace(play(trainings, observed), policy=stacked(steps))


def flat(tree: dict[str, Any]) -> dict[str, float]:
    """Numbers of nested dicts, with names joined by slashes."""
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
    players = [source for source in config.episodes if source == LOOKAHEAD or names_controller(source)]
    for source in config.episodes:
        if source in players:
            first = config.updates * players.index(source)  # players are recorded in files one after another
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
    """Episodes played now: as many as PPO would collect."""
    # An unusable controller is refused here, before workers start.
    for name in config.lookahead.controllers if player == LOOKAHEAD else (player,):
        make_controller(name)
    pool, setup, rollouts = make_pool(play_fresh, config.placement, check=data_check(config)), make_setup(config), []
    try:
        for update in range(config.updates):
            jobs = group_jobs(config.rng_seed, update, config.num_groups, config.num_tasks)
            records = pool.run((setup, player), jobs)
            groups = [learner_arrays(record) for record in records]
            if config.record and directory is not None:
                save_episodes(directory.episodes, first + update, groups)
            rollouts += [to_rollout(group, state_size) for group in groups]
            score = np.mean([record.score.mean() for record in records])
            say(f"episodes of {player} {update + 1}/{config.updates}: score {score:.2f}")
    finally:
        pool.close()
    return rollouts

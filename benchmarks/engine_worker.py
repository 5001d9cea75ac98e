"""Plays one group of hosts and says how long it took: what benchmarks/engine.py asks processes of their own to do.

Run by engine.py; the part about simic also with the source before, so it keeps to what both sources have.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import simic
from simic.config import PRESETS
from simic.control.baselines import WaitController
from simic.control.facts import Facts
from simic.control.learned import network_input, row_masks
from simic.control.legality import Masks
from simic.control.observation import observe
from simic.environment.episodes import Decide, decide_by, play
from simic.environment.seeding import host_rng_seed, task_rng_seed
from simic.policy.acting import choose
from simic.tasks.registry import find_task
from simic.training.build import make_agent, make_setup
from simic.training.episodes import GroupJob, GroupSetup, PolicyWeights, make_trainings

CONFIG = PRESETS["quick"].config
LARGE_HORIZON = 8
"""Decisions of the memory's measurement on hosts larger than the preset's: enough to plant all slots."""
Side = Literal["simic", "jax"]
Kind = Literal["grown", "seed_per_slot", "never_grown"]
"""Hosts with seeds: simic's as the policy plants them, JAX's two each, or one in each slot; or hosts without any."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One group of hosts to play."""

    kind: Kind
    num_hosts: int
    task: int
    """Index of a task of the preset."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """CPU-seconds of all decisions of a group."""

    seconds: float
    """Of the host trainings."""
    acting: float = 0.0
    """Of the policy."""
    making: float = 0.0
    """Of the hosts before their first decision."""
    seeds: float = 0.0
    """Live seeds and fossils of a host, on average over the episode."""


@cache
def untrained() -> PolicyWeights:
    """The policy that preset quick begins with."""
    return PolicyWeights.of(make_agent(CONFIG).plain)


def group_setup(num_hosts: int) -> GroupSetup:
    """Groups of preset quick, of another size."""
    return replace(make_setup(CONFIG), group_size=num_hosts, twins=False)


def sampled(num_hosts: int, rng_seed: int, spent: list[float]) -> Decide:
    """Decisions of the untrained policy, as a training run makes them; appends the seconds of each to `spent`."""
    network, generator = untrained().network(), torch.Generator().manual_seed(rng_seed)
    state = network.initial_state(num_hosts)

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        nonlocal state
        start = time.process_time()
        observation, mask = network_input(observe(facts, masks)), row_masks(masks)
        choice = choose(network, observation, mask, state, generator=generator)
        state, action = choice.state, choice.action.numpy()
        spent.append(time.process_time() - start)
        return action

    return decide


def play_simic(setup: GroupSetup, job: GroupJob, *, grown: bool) -> Answer:
    """Play whole episodes of one group."""
    start, acting = time.process_time(), list[float]()
    trainings = make_trainings(setup, job)
    made = time.process_time()
    decide = sampled(setup.group_size, job.group_seed, acting) if grown else decide_by(WaitController().act)
    record = play(trainings, decide)
    seconds = time.process_time() - made - sum(acting)
    seeds = float(record.slots.occupied.sum(-1).mean())
    return Answer(seconds=seconds, acting=sum(acting), making=made - start, seeds=seeds)


def job_of(task: int) -> GroupJob:
    """A group of preset quick's first rollouts."""
    return GroupJob(CONFIG.rng_seed, 0, task, task)


def answer_simic(question: Question) -> Answer:
    """Play the group that is asked for."""
    return play_simic(group_setup(question.num_hosts), job_of(question.task), grown=question.kind != "never_grown")


@cache
def jax_episodes(question: Question) -> Callable[[], Callable[[], Any]]:
    """Whole episodes of the JAX program with the architecture, data and learning rates of the group's hosts."""
    import engine_jax

    job = job_of(question.task)
    task = find_task(CONFIG.task, rng_seed=task_rng_seed(job.rng_seed, job.task))
    drawn = [task.draw(host_rng_seed(job.group_seed, 0, env)) for env in range(question.num_hosts)]
    slots = range(len(task.slots))
    seeds = {"grown": (slots[0], slots[-1]), "seed_per_slot": tuple(slots), "never_grown": ()}[question.kind]
    traits, data = task.traits, task.data
    architecture = engine_jax.Architecture(
        in_features=data.train_x.shape[1],
        width=int(traits["width"]),
        depth=int(traits["depth"]),
        num_classes=data.num_classes,
        seeds=seeds,
    )
    parts = [np.stack([getattr(own.data, name).numpy() for own in drawn]) for name in engine_jax.HostData._fields]
    rates = np.array([own.learning_rate for own in drawn])
    return engine_jax.episodes(
        architecture, task.batch_size, engine_jax.HostData(*parts), rates, CONFIG.episode.horizon
    )


def answer_jax(question: Question) -> Answer:
    """Play the group that is asked for."""
    episodes = jax_episodes(question)()
    start = time.process_time()
    episodes()
    return Answer(seconds=time.process_time() - start)


def work(side: Side) -> None:
    """Answer questions, one line of JSON each, until there are no more; first say where simic is."""
    if side == "jax" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before jax makes its threads, one per processor
    print(Path(simic.__file__).resolve().parent.parent, flush=True)
    for line in sys.stdin:
        question = Question(**json.loads(line))
        print(json.dumps(asdict(answer_jax(question) if side == "jax" else answer_simic(question))), flush=True)


def measure_memory(task: str, num_hosts: int) -> None:
    """Print the peak memory and the cost of a decision of so many hosts in this process."""
    setup = group_setup(num_hosts)
    if task != CONFIG.task:
        setup = replace(setup, task=task, episode=replace(setup.episode, horizon=LARGE_HORIZON))
    find_task(task)
    untrained().network()
    before = _peak_mb()
    seconds = min(play_simic(setup, job_of(0), grown=True).seconds for _ in range(2))  # the first also warms up
    cost = 1e3 * seconds / num_hosts / setup.episode.horizon
    print(json.dumps({"memory_mb": round(_peak_mb() - before, 1), "ms_per_decision": round(cost, 3)}))


def _peak_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20

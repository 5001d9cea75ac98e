"""Whole episodes of one group of hosts: the unit of work, a pure function of (weights, setup, rng seed, update, group).

Shapes: T decisions, N hosts of a group, S slots, H heads. Results are numpy arrays, so that they travel between
processes by value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from simic.control.facts import Facts
from simic.control.learned import make_network, network_input, row_masks
from simic.control.legality import Masks, legal_masks
from simic.control.observation import observe
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.host_trainings import HostTrainings, Outcome
from simic.environment.seeding import host_rng_seed, task_rng_seed
from simic.gymnasium.vector_env import score
from simic.lifecycle.actions import HEADS
from simic.lifecycle.stages import LIVE, LifecycleConfig
from simic.policy.acting import choose
from simic.policy.config import PolicyConfig
from simic.policy.network import ActorCritic
from simic.ppo.rollout import Rollout
from simic.rewards.gaming import detect
from simic.rewards.schemes import RewardConfig
from simic.tasks.registry import Split, find_task


@dataclass(frozen=True, kw_only=True)
class GroupSetup:
    """Everything about a group but its rng seed."""

    task: str
    """A task family, or one task."""
    data_dir: str | None = None
    """Where a task that reads files finds them."""
    split: Split = "train"
    group_size: int
    twins: bool
    """Whether rewards are what hosts gain over twins that never grow."""
    episode: EpisodeConfig
    lifecycle: LifecycleConfig
    reward: RewardConfig
    governor: GovernorConfig


class GroupJob(NamedTuple):
    """Which group of which update, and which of the run's tasks it has."""

    rng_seed: int
    update: int
    group: int
    task: int
    twin: bool = False
    """Whether the hosts are left alone, for others to be compared with."""

    @property
    def group_seed(self) -> int:
        """What the group's hosts and the policy's choices are drawn from."""
        return host_rng_seed(self.rng_seed, self.update, self.group)


def group_jobs(rng_seed: int, update: int, num_groups: int, num_tasks: int) -> list[GroupJob]:
    """The groups of an update; tasks take turns, or are new ones every time if `num_tasks` is 0."""
    first = update * num_groups
    return [
        GroupJob(rng_seed, update, group, (first + group) % num_tasks if num_tasks else first + group)
        for group in range(num_groups)
    ]


class Weights(NamedTuple):
    """A policy as plain data."""

    config: PolicyConfig
    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, network: ActorCritic) -> Weights:
        """A copy of what a network knows."""
        return cls(network.config, {name: value.cpu().numpy().copy() for name, value in network.state_dict().items()})

    def network(self) -> ActorCritic:
        """A network that knows it."""
        network = make_network(self.config)
        network.load_state_dict({name: torch.from_numpy(value) for name, value in self.arrays.items()})
        return network


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What happened in a group, for whoever tells about it."""

    task: str
    slot_names: tuple[str, ...]
    blueprint_names: tuple[str, ...]
    action: np.ndarray  # (T, N, H)
    probability: np.ndarray  # (T, N, H) of what was chosen
    legal_ops: np.ndarray  # (T, N, ops)
    valid: np.ndarray  # (T, N)
    reward: np.ndarray  # (T, N)
    value: np.ndarray  # (T, N) in the units of the critic
    reward_terms: dict[str, np.ndarray]  # (T, N) each
    verdict: np.ndarray  # (T, N)
    gaming: dict[str, np.ndarray]  # (T, N, S) each; empty without twins, which are its yardstick
    stage: np.ndarray  # (T + 1, N, S)
    blueprint: np.ndarray  # (T + 1, N, S)
    alpha: np.ndarray  # (T + 1, N, S)
    age: np.ndarray  # (T + 1, N, S)
    contribution: np.ndarray  # (T + 1, N, S)
    contribution_age: np.ndarray  # (T + 1, N, S) decisions since it was measured
    seed_gradient: np.ndarray  # (T + 1, N, S)
    host_gradient: np.ndarray  # (T + 1, N)
    val_loss: np.ndarray  # (T + 1, N)
    val_accuracy: np.ndarray  # (T + 1, N)
    train_loss: np.ndarray  # (T + 1, N)
    score: np.ndarray  # (N,) of the exported network, on validation data
    twin_score: np.ndarray  # (N,) of the twin that never grew; NaN without twins
    twin_accuracy: np.ndarray  # (T + 1, N) likewise
    parameters: np.ndarray  # (N,) of the exported network
    host_parameters: np.ndarray  # (N,)
    decisions: np.ndarray  # (N,) until the episode ended
    shapley: np.ndarray  # (N, S) what each seed is worth at the end


class Played(NamedTuple):
    """The episodes of a group: what the learner needs, and what there is to tell."""

    rollout: dict[str, Any]
    trace: Trace


Decide = Callable[[Facts, Masks], tuple[np.ndarray, dict[str, Any]]]
"""From facts and masks to actions (N, H), and what else is worth keeping of the decision (arrays (N, ...))."""


def play_group(common: tuple[GroupSetup, Weights], job: GroupJob) -> Played:
    """Draw a task and its hosts, and let the policy lead them through their episodes, or nobody."""
    setup, weights = common
    trainings = make_trainings(setup, job)
    if job.twin:
        return play(trainings, _never)
    network = weights.network()
    generator = torch.Generator().manual_seed(job.group_seed)
    state = network.initial_state(setup.group_size)

    def decide(facts: Facts, masks: Masks) -> tuple[np.ndarray, dict[str, Any]]:
        nonlocal state
        seen, mask = network_input(observe(facts, masks)), row_masks(masks)
        choice = choose(network, seen, mask, state, generator=generator)
        state = choice.state
        kept = {"mask": mask, "log_prob": choice.log_prob.numpy(), "value": choice.value.numpy(), **seen}
        return choice.action.numpy(), kept

    return play(trainings, decide)


def against_twins(played: Played, twins: Played, gamma: float) -> Played:
    """Episodes whose rewards are gains over the same hosts, same weights and batches, led by somebody else.

    What a host earns on its own does not depend on what is decided, so taking it off favours no decision; but hosts
    differ in it far more than decisions matter, and learning would drown in that. The twins are also the yardstick of
    gaming.
    """
    own, twin = played.trace, owed_to_twins(played.trace, twins.trace.reward, gamma)
    reward = own.reward - twin
    trace = replace(
        own,
        reward=reward,
        reward_terms=own.reward_terms | {"twin": -twin},
        twin_score=twins.trace.score,
        twin_accuracy=twins.trace.val_accuracy,
        gaming=suspected(played, twins),
    )
    return Played(played.rollout | {"reward": reward}, trace)


def owed_to_twins(own: Trace, earned: np.ndarray, gamma: float) -> np.ndarray:
    """What is taken off the rewards of hosts (T, N), given what their twins earned (T, N).

    The last decision of an episode owes all that its twin goes on to earn, discounted: a host that breaks forfeits the
    same whenever it breaks, where otherwise it would pay the less, the earlier it does.
    """
    rest = earned.copy()
    for step in range(len(rest) - 2, -1, -1):
        rest[step] += gamma * rest[step + 1]
    last = np.arange(len(rest))[:, None] == own.decisions - 1
    return np.where(last, rest, np.where(own.valid, earned, 0.0))


def suspected(played: Played, twins: Played) -> dict[str, np.ndarray]:
    """Seeds that look better than they are, by reason (T, N, S).

    Only live seeds are judged: a host comes to rely on its fossils, and what it would lose without them soon exceeds
    what it gained by them. The last decision is that of another network, the exported one.
    """
    own = played.trace
    lasts = own.valid & ~played.rollout["terminated"] & twins.trace.valid & ~twins.rollout["terminated"]
    live = np.isin(own.stage[1:], LIVE) & (own.alpha[1:] > 0)
    gain = own.val_accuracy[1:] - twins.trace.val_accuracy[1:]
    return detect(own.contribution[1:], gain, live & lasts[..., None])


def _never(facts: Facts, masks: Masks) -> tuple[np.ndarray, dict[str, Any]]:
    return np.zeros((facts.num_hosts, len(HEADS)), dtype=np.int64), {}


def make_trainings(setup: GroupSetup, job: GroupJob) -> HostTrainings:
    """The hosts of a group at the start of their episodes."""
    return HostTrainings(
        find_task(
            setup.task, split=setup.split, rng_seed=task_rng_seed(job.rng_seed, job.task), data_dir=setup.data_dir
        ),
        [host_rng_seed(job.group_seed, 0, env) for env in range(setup.group_size)],
        episode=setup.episode,
        lifecycle=setup.lifecycle,
        reward=setup.reward,
        governor=setup.governor,
    )


def play(trainings: HostTrainings, decide: Decide) -> Played:
    """Whole episodes of all hosts; a host whose episode ended early waits for the others, and no longer counts."""
    facts, alive = trainings.facts(), np.ones(trainings.num_hosts, dtype=bool)
    before, steps = [_snapshot(facts)], []
    decisions, ends = np.zeros(len(alive), dtype=np.int64), {}
    for _ in range(trainings.episode.horizon):
        masks = legal_masks(facts)
        action, kept = decide(facts, masks)
        action = action * alive[:, None]
        outcome = trainings.step(action)
        facts, newly = outcome.facts, outcome.ended & alive
        steps.append(_step(action, kept, masks, outcome, alive, newly))
        before.append(_snapshot(facts))
        decisions += alive
        _take(ends, newly, _end(trainings, outcome))
        alive = alive & ~outcome.ended
    return _assemble(trainings, steps, before, ends | {"decisions": decisions})


def to_rollout(parts: dict[str, Any], state_size: int) -> Rollout:
    """The learner's view of episodes that were played."""
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in parts.items() if name not in _SEEN}
    for name in ("reward", "contribution"):
        tensors[name] = tensors[name].float()
    nothing = torch.zeros_like(tensors["reward"])
    return Rollout(
        observation={name: torch.from_numpy(parts[name]) for name in _SEEN},
        truncated=torch.zeros_like(tensors["terminated"]),
        next_value=nothing,
        state=nothing.new_zeros(nothing.shape[1], state_size),
        **tensors,
    )


_SEEN = ("base", "slots", "blueprints")


def _snapshot(facts: Facts) -> dict[str, np.ndarray]:
    slots = facts.slots
    return {
        "stage": slots.stage,
        "blueprint": slots.blueprint,
        "alpha": slots.alpha,
        "age": slots.age,
        "contribution": slots.contribution,
        "contribution_age": slots.contribution_age,
        "seed_gradient": slots.gradient_norm,
        "host_gradient": facts.host_gradient_norm,
        "val_loss": facts.val_loss[:, -1],
        "val_accuracy": facts.val_accuracy[:, -1],
        "train_loss": facts.train_loss[:, -1],
    }


def _step(
    action: np.ndarray, kept: dict[str, Any], masks: Masks, outcome: Outcome, alive: np.ndarray, newly: np.ndarray
) -> dict[str, Any]:
    known = ~outcome.ended & alive
    return kept | {
        "action": action,
        "legal_ops": masks.op,
        "valid": alive,
        "reward": outcome.reward.total * alive,
        "reward_terms": outcome.reward.terms,
        "verdict": np.where(alive, outcome.verdict, 0),
        "terminated": newly | ~alive,
        "measured": np.where(known[:, None], outcome.facts.slots.contribution, np.nan),
    }


def _end(trainings: HostTrainings, outcome: Outcome) -> dict[str, np.ndarray]:
    """How hosts stand, were their episodes to end now."""
    facts, shape = outcome.facts, outcome.facts.slots.stage.shape
    attribution = outcome.attribution
    return {
        "score": score(facts, outcome.ended, rent_weight=trainings.reward.rent_weight),
        "parameters": trainings.parameters(exported=True),
        "shapley": np.full(shape, np.nan) if attribution is None else attribution.shapley,
    }


def _take(ends: dict[str, np.ndarray], which: np.ndarray, values: dict[str, np.ndarray]) -> None:
    for name, value in values.items():
        ends.setdefault(name, np.full(value.shape, np.nan, dtype=np.float64))[which] = value[which]


def _assemble(
    trainings: HostTrainings, steps: list[dict[str, Any]], before: list[dict[str, np.ndarray]], ends: dict[str, Any]
) -> Played:
    def stacked(name: str) -> np.ndarray:
        return np.stack([step[name] for step in steps])

    def nested(name: str) -> dict[str, np.ndarray]:
        return {key: np.stack([step[name][key] for step in steps]) for key in steps[0][name]}

    first = np.zeros_like(stacked("valid"))
    first[0] = True
    rollout = {name: stacked(name) for name in ("action", "valid", "reward", "terminated")} | {"first": first}
    rollout["contribution"] = stacked("measured")
    if "mask" in steps[0]:
        rollout |= {name: stacked(name) for name in ("mask", *_SEEN)}
    heads = rollout["action"]
    trace = Trace(
        task=trainings.task.name,
        slot_names=tuple(trainings.task.slots),
        blueprint_names=tuple(trainings.hosts.blueprint_names),
        action=heads,
        probability=np.exp(stacked("log_prob")) if "log_prob" in steps[0] else np.ones(heads.shape),
        legal_ops=stacked("legal_ops"),
        valid=rollout["valid"],
        reward=rollout["reward"],
        value=stacked("value") if "value" in steps[0] else np.full(rollout["reward"].shape, np.nan),
        reward_terms=nested("reward_terms"),
        verdict=stacked("verdict"),
        gaming={},
        host_parameters=np.full(trainings.num_hosts, trainings.hosts.host_parameters),
        twin_score=np.full(trainings.num_hosts, np.nan),
        twin_accuracy=np.full((len(before), trainings.num_hosts), np.nan),
        **{name: np.stack([own[name] for own in before]) for name in before[0]},
        **ends,
    )
    return Played(rollout, trace)

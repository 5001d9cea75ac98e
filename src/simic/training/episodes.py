"""Episodes of one group of hosts: the unit of work, a pure function of (weights, setup, rng seed, update, group).

Shapes: T decisions, N hosts of a group, S slots, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from simic.control.baselines import WaitController
from simic.control.facts import Facts
from simic.control.learned import make_network, network_input, row_masks
from simic.control.legality import Masks
from simic.control.observation import observe
from simic.environment.config import EpisodeConfig, GovernorConfig
from simic.environment.episodes import EpisodeRecord, PolicyRecord, TwinRecord, decide_by, play, stacked
from simic.environment.host_trainings import HostTrainings
from simic.environment.lookahead_config import LookaheadConfig
from simic.environment.seeding import host_rng_seed, task_rng_seed
from simic.lifecycle.stages import LifecycleConfig
from simic.policy.acting import choose
from simic.policy.config import PolicyConfig
from simic.policy.ensemble import Ensemble
from simic.policy.network import ActorCritic
from simic.ppo.rollout import Rollout
from simic.rewards.gaming import detect
from simic.rewards.schemes import RewardConfig
from simic.stacked.config import HostsConfig
from simic.tasks.registry import Split, find_task
from simic.tasks.task import Task
from simic.training.profiler import profiled_rollout
from simic.workers.devices import own_device

OBSERVATION = ("base", "slots", "blueprints")
"""Parts of an observation, under these names also in recorded episodes."""


@dataclass(frozen=True, kw_only=True)
class GroupSetup:
    """Settings that all groups of a run share."""

    task: str
    """A task family, or one task."""
    data_dir: str | None = None
    """Directory of the files that some tasks read."""
    split: Split = "train"
    group_size: int
    twins: bool
    """Subtract the rewards of twins that never grow."""
    episode: EpisodeConfig
    lifecycle: LifecycleConfig
    reward: RewardConfig
    governor: GovernorConfig
    hosts: HostsConfig = field(default_factory=HostsConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    device: str = "cpu"
    """Of hosts and policy; where there are several of a kind, workers share them out."""


class GroupJob(NamedTuple):
    """One group of one update."""

    rng_seed: int
    update: int
    group: int
    task: int
    """Index of the task within the run."""
    twin: bool = False
    """Play the twins: the same hosts without growth."""
    trace: str | None = None
    """The file for a trace by torch's profiler; None if the group is not profiled."""

    @property
    def group_seed(self) -> int:
        """Rng seed of the group's hosts and of the policy's samples."""
        return host_rng_seed(self.rng_seed, self.update, self.group)


def group_jobs(rng_seed: int, update: int, num_groups: int, num_tasks: int) -> list[GroupJob]:
    """The groups of an update. Groups cycle through `num_tasks` tasks; 0 gives every group a new one."""
    first = update * num_groups
    return [
        GroupJob(rng_seed, update, group, (first + group) % num_tasks if num_tasks else first + group)
        for group in range(num_groups)
    ]


def twin_jobs(jobs: Sequence[GroupJob]) -> list[GroupJob]:
    """The twins of these groups."""
    return [job._replace(twin=True, trace=None) for job in jobs]


class PolicyWeights(NamedTuple):
    """A policy as plain data that can be sent between processes."""

    config: PolicyConfig | tuple[PolicyConfig, ...]
    """Of an ensemble, those of its members."""
    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, network: ActorCritic) -> PolicyWeights:
        """A copy of a network's weights."""
        several = isinstance(network, Ensemble)
        config = tuple(member.config for member in network.networks) if several else network.config
        return cls(config, {name: value.cpu().numpy().copy() for name, value in network.state_dict().items()})

    def network(self) -> ActorCritic:
        """A network with these weights."""
        config = self.config
        network = Ensemble([make_network(own) for own in config]) if isinstance(config, tuple) else make_network(config)
        network.load_state_dict({name: torch.from_numpy(value) for name, value in self.arrays.items()})
        return network


def play_groups(common: tuple[GroupSetup, PolicyWeights], jobs: Sequence[GroupJob]) -> list[EpisodeRecord]:
    """Play several groups one after the other: what a worker is given at once."""
    return [play_group(common, job) for job in jobs]


def play_group(common: tuple[GroupSetup, PolicyWeights], job: GroupJob) -> EpisodeRecord:
    """Draw a task and its hosts and play their episodes with the sampled policy, or as twins without growth."""
    with profiled_rollout(job.trace):
        return _play_group(*common, job)


def _play_group(setup: GroupSetup, weights: PolicyWeights, job: GroupJob) -> EpisodeRecord:
    device = own_device(setup.device)
    trainings = make_trainings(setup, job, device)
    if job.twin:
        return play(trainings, decide_by(WaitController().act))
    network = weights.network().to(device)
    generator = torch.Generator().manual_seed(job.group_seed)
    state, steps = network.initial_state(setup.group_size), list[PolicyRecord]()

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        nonlocal state
        observation, mask = network_input(observe(facts, masks)), row_masks(masks)
        choice = choose(network, observation, mask, state, generator=generator)
        state = choice.state
        probability, value = np.exp(choice.log_prob.cpu().numpy()), choice.value.cpu().numpy()
        steps.append(PolicyRecord(observation=observation, mask=mask, probability=probability, value=value))
        return choice.action.cpu().numpy()

    return replace(play(trainings, decide), policy=stacked(steps))


def make_trainings(
    setup: GroupSetup, job: GroupJob, device: torch.device | None = None, task: Task | None = None
) -> HostTrainings:
    """The hosts of a group at the start of their episodes; `task` is the group's own if it is already built."""
    task_seed = task_rng_seed(job.rng_seed, job.task)
    return HostTrainings(
        task or find_task(setup.task, split=setup.split, rng_seed=task_seed, data_dir=setup.data_dir),
        [host_rng_seed(job.group_seed, 0, env) for env in range(setup.group_size)],
        episode=setup.episode,
        lifecycle=setup.lifecycle,
        reward=setup.reward,
        governor=setup.governor,
        hosts=setup.hosts,
        device=device,
    )


def against_twins(record: EpisodeRecord, twins: EpisodeRecord, gamma: float) -> EpisodeRecord:
    """Subtract from the rewards those of the twins: the same hosts, weights and batches without growth.

    The twins' rewards do not depend on the actions, so subtracting them is a baseline: it changes no preference between
    actions, but removes the variance between hosts, which is far larger than the effect of decisions. Twins are also
    the reference for the detection of gaming.
    """
    assert record.reward is not None
    assert record.reward_terms is not None
    assert twins.reward is not None
    baseline = twin_baseline(record, twins.reward, gamma)
    return replace(
        record,
        reward=record.reward - baseline,
        reward_terms=record.reward_terms | {"twin": -baseline},
        twins=TwinRecord(score=twins.score, val_accuracy=twins.val_accuracy, gaming=detect_gaming(record, twins)),
    )


def twin_baseline(record: EpisodeRecord, earned: np.ndarray, gamma: float) -> np.ndarray:
    """The part (T, N) of the twins' rewards `earned` (T, N) that is subtracted at each decision.

    The last decision of an episode is charged the discounted sum of all that its twin still earns. So a host that
    breaks loses the same whenever it breaks; otherwise breaking early would be cheaper.
    """
    rest = earned.copy()
    for step in range(len(rest) - 2, -1, -1):
        rest[step] += gamma * rest[step + 1]
    last = np.arange(len(rest))[:, None] == record.decisions - 1
    return np.where(last, rest, np.where(record.valid, earned, 0.0))


def detect_gaming(record: EpisodeRecord, twins: EpisodeRecord) -> dict[str, np.ndarray]:
    """Flags (T, N, S) by reason, see `rewards.gaming`.

    Only live seeds are judged: a host adapts to its fossils, so removing one soon costs more than it ever gained. The
    last state is left out, because it is measured on the exported network.
    """
    comparable = record.valid & ~record.terminated & twins.valid & ~twins.terminated
    live = record.slots.live[1:] & (record.slots.alpha[1:] > 0)
    gain = record.val_accuracy[1:] - twins.val_accuracy[1:]
    return detect(record.slots.contribution[1:], gain, live & comparable[..., None])


def learner_arrays(record: EpisodeRecord) -> dict[str, np.ndarray]:
    """What the learner needs of a record, as arrays (T, N, ...); also the contents of recorded episodes."""
    assert record.policy is not None
    assert record.reward is not None
    first = np.zeros_like(record.valid)
    first[0] = True
    return {
        "action": record.action,
        "valid": record.valid,
        "reward": record.reward,
        "terminated": record.terminated,
        "first": first,
        # The contribution in the state after the decision; a terminal state has none.
        "contribution": np.where(record.terminated[..., None], np.nan, record.slots.contribution[1:]),
        "mask": record.policy.mask,
        **record.policy.observation,
    }


def to_rollout(arrays: dict[str, np.ndarray], state_size: int) -> Rollout:
    """The rollout of `learner_arrays`: whole episodes, which start from a zero state and are never truncated."""
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items() if name not in OBSERVATION}
    for name in ("reward", "contribution"):
        tensors[name] = tensors[name].float()
    zeros = torch.zeros_like(tensors["reward"])
    return Rollout(
        observation={name: torch.from_numpy(arrays[name]) for name in OBSERVATION},
        truncated=torch.zeros_like(tensors["terminated"]),
        next_value=zeros,
        state=zeros.new_zeros(zeros.shape[1], state_size),
        **tensors,
    )

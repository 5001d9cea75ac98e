"""Rollouts to learn from: hosts that live by the real rules without being trained, and noise for flat networks.

Shapes: T steps, N environments, S slots, B blueprints. Everything is drawn from generators, so that a rollout is a
function of its arguments and of the agent that played it, in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import nn

from simic.control.facts import FIGURES, Facts
from simic.control.learned import make_network, network_input, row_masks
from simic.control.legality import legal_masks
from simic.control.observation import observe
from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.lifecycle.actions import HEADS, Op
from simic.lifecycle.slots import SlotState, execute, tick
from simic.lifecycle.stages import LifecycleConfig
from simic.policy.config import PolicyConfig
from simic.policy.network import FactoredRecurrentActorCritic
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig
from simic.ppo.rollout import Rollout

FEATURES, HEAD_SIZES = 4, (3, 2)
"""Of the flat network."""


class RandomHosts:
    """N hosts whose slots follow the real rules; what would be measured is drawn."""

    def __init__(self, num_hosts: int, num_slots: int, num_blueprints: int = 4, seed: int = 0) -> None:
        self.rng, self.lifecycle = np.random.default_rng(seed), LifecycleConfig(embargo_decisions=1, min_prune_age=4)
        self.slots, self.decision = SlotState.dormant(num_hosts, num_slots), np.zeros(num_hosts, dtype=np.int64)
        self.previous = np.zeros((num_hosts, len(HEADS)), dtype=np.int64)
        self.sizes = self.rng.integers(10, 900, (num_slots, num_blueprints))
        self.sizes[0, -1] = -1  # one blueprint that does not fit the first slot

    def facts(self) -> Facts:
        """What a controller may know."""
        hosts, (num_slots, num_blueprints) = len(self.decision), self.sizes.shape
        return Facts(
            slots=self.slots,
            lifecycle=self.lifecycle,
            slot_names=tuple(f"slot_{i}" for i in range(num_slots)),
            blueprint_names=tuple(f"blueprint_{i}" for i in range(num_blueprints)),
            blueprint_parameters=self.sizes,
            host_parameters=np.full(hosts, 100),
            seed_parameters=np.zeros((hosts, num_slots), dtype=np.int64),
            decision=self.decision,
            horizon=np.full(hosts, 50),
            previous_action=self.previous,
            random_guess_loss=np.full(hosts, np.nan),
            host_gradient_norm=np.full(hosts, 1.0),
            **{figure: self.rng.random((hosts, 16)) for figure in FIGURES},  # pyright: ignore[reportArgumentType]
        )

    def look(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Observation (N, ...) and legal choices (N, R, W)."""
        facts = self.facts()
        masks = legal_masks(facts)
        return network_input(observe(facts, masks)), row_masks(masks)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Carry out, or refuse; what seeds contribute then (N, S), NaN where unknown."""
        execute(self.slots, action, self.lifecycle)
        tick(self.slots, self.lifecycle)
        shape = self.slots.stage.shape
        self.slots.contribution[:] = np.where(self.slots.live, self.rng.normal(0, 0.05, shape), np.nan)
        self.slots.gradient_norm[:] = np.where(self.slots.live, 1.0, np.nan)
        self.decision, self.previous = self.decision + 1, action
        return self.slots.contribution.copy()

    def reset(self, hosts: np.ndarray) -> None:
        """New hosts in these places (N,) bool."""
        empty = SlotState.dormant(*self.slots.stage.shape)
        for field in fields(SlotState):
            getattr(self.slots, field.name)[hosts] = getattr(empty, field.name)[hosts]
        self.decision, self.previous = np.where(hosts, 0, self.decision), np.where(hosts[:, None], 0, self.previous)


def growth_agent(policy: dict[str, Any] | None = None, *, rng_seed: int = 0, **config: Any) -> PPOAgent:
    """A small agent for hosts with slots."""
    torch.manual_seed(rng_seed)
    shape: dict[str, Any] = {"hidden_size": 12, "encoding_size": 8, **(policy or {})}
    network = make_network(PolicyConfig(**shape))
    return PPOAgent(network, PPOConfig(**config), rng_seed=rng_seed)


def flat_agent(
    policy: dict[str, Any] | None = None, *, rng_seed: int = 0, head_sizes: Sequence[int] = HEAD_SIZES, **config: Any
) -> PPOAgent:
    """A small agent for vectors of noise."""
    torch.manual_seed(rng_seed)
    shape: dict[str, Any] = {"hidden_size": 8, "encoding_size": 8, **(policy or {})}
    network = RecurrentActorCritic(FEATURES, head_sizes, PolicyConfig(**shape))
    return PPOAgent(network, PPOConfig(**config), rng_seed=rng_seed)


def actors(agent: PPOAgent) -> list[nn.Linear]:
    """The layer of each head of a flat agent."""
    assert isinstance(agent.plain, RecurrentActorCritic)
    layers = [layer for layer in agent.plain.actors if isinstance(layer, nn.Linear)]
    assert len(layers) == len(agent.plain.actors)
    return layers


def play(agent: PPOAgent, steps: int = 24, envs: int = 4, *, slots: int = 3, seed: int = 0, resets: float = 0.1):
    """A rollout of `agent`, factored or flat: some episodes end inside, the last ones are cut off."""
    factored = isinstance(agent.plain, FactoredRecurrentActorCritic)
    hosts = (
        RandomHosts(envs, slots, seed=seed)
        if factored
        else Noise(envs, tuple(agent.plain.fixed_head_sizes.values()), seed)
    )
    rng, first, state = np.random.default_rng([seed, 1]), np.ones(envs, dtype=bool), agent.initial_state(envs)
    names = ("mask", "action", "reward", "terminated", "truncated", "first", "contribution", "log_prob")
    kept: dict[str, list] = {name: [] for name in names}
    seen: list[dict] = []
    for step in range(steps):
        observation, mask = hosts.look()
        state = torch.where(torch.from_numpy(first)[:, None], 0.0, state)
        decision = agent.act(observation, mask, state)
        contribution = hosts.step(decision.action)
        ends = rng.random(envs) < resets
        cut = rng.random(envs) < 0.5
        terminated, truncated = ends & ~cut, (ends & cut) | (step == steps - 1) & ~(ends & ~cut)
        hosts.reset(ends)
        values = (mask, decision.action, rng.normal(0.3, 1, envs), terminated, truncated, first, contribution)
        for name, value in zip(names, (*values, decision.log_prob), strict=True):
            kept[name].append(value)
        seen.append(observation)
        state, first = decision.state, ends
    tensors = {name: torch.from_numpy(np.stack(values)) for name, values in kept.items()}
    log_prob = tensors.pop("log_prob")
    next_value = torch.from_numpy(rng.normal(0, 1, (steps, envs))).float() * tensors["truncated"]
    tensors["reward"], tensors["contribution"] = tensors["reward"].float(), tensors["contribution"].float()
    if not factored:
        del tensors["contribution"]
    rollout = Rollout(
        observation={part: torch.from_numpy(np.stack([own[part] for own in seen])) for part in seen[0]},
        next_value=next_value,
        valid=torch.ones(steps, envs, dtype=torch.bool),
        state=agent.initial_state(envs),
        **tensors,
    )
    return rollout, log_prob


class Noise:
    """Vectors and masks without meaning."""

    def __init__(self, envs: int, head_sizes, seed: int) -> None:
        self.rng, self.envs, self.head_sizes = np.random.default_rng(seed), envs, head_sizes

    def look(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Observation and legal choices; the last choice of every head always is."""
        rows, width = len(self.head_sizes), max(self.head_sizes)
        mask = self.rng.random((self.envs, rows, width)) < 0.7
        mask &= np.arange(width) < np.array(self.head_sizes)[:, None]
        for row, size in enumerate(self.head_sizes):
            mask[:, row, size - 1] = True
        return {"base": self.rng.normal(2, 3, (self.envs, FEATURES)).astype(np.float32)}, mask

    def step(self, action: np.ndarray) -> np.ndarray:
        """Nothing happens."""
        return np.zeros((self.envs, 1))

    def reset(self, hosts: np.ndarray) -> None:
        """Nothing to reset."""


def without(rollout: Rollout, op: Op, *, keep: int = 0) -> Rollout:
    """The same rollout with all but the first `keep` actions of this operation made to wait."""
    action = rollout.action.clone()
    where = (action[..., 0] == op).nonzero()[keep:]
    action[where[:, 0], where[:, 1]] = 0
    return Rollout(**{f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name != "action"}, action=action)


def stir(agent: PPOAgent, amount: float = 0.3) -> PPOAgent:
    """The agent with weights away from their quiet start, so that its probabilities are not all alike."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in agent.plain.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
        if isinstance(agent.plain, FactoredRecurrentActorCritic):
            # Operations that are legal rarely should not be rare.
            agent.plain.op.bias.copy_(torch.tensor([0.0, 0.0, 1.0, 0.5, 4.0, 2.5]))
    return agent


AGENTS = {"factored": growth_agent, "flat": flat_agent}


def played(kind: str = "factored", steps: int = 40, envs: int = 6, **config):
    """An agent after a first rollout, the batch of a second, its entropy weights and its log-probabilities."""
    agent = stir(AGENTS[kind](**config))
    agent.update_scales(play(agent, 5, 3, seed=9)[0])
    rollout, acted = play(agent, steps, envs)
    batch, statistics = agent.prepare_batch(agent.update_scales(rollout))
    return agent, batch, agent.entropy_weights(statistics.head_entropy), acted


def recorded(observation, action, mask, **given) -> Rollout:
    """Episodes of T steps that end in a terminal, without reward, unless given."""
    steps, num_envs = action.shape[:2]
    no = torch.zeros(steps, num_envs, dtype=torch.bool)
    first, last = no.clone(), no.clone()
    first[0], last[-1] = True, True
    parts = {
        "reward": torch.zeros(steps, num_envs),
        "terminated": last,
        "truncated": no,
        "next_value": torch.zeros(steps, num_envs),
        "first": first,
        "valid": ~no,
        "state": torch.zeros(num_envs, 1),  # of another network
    }
    return Rollout(observation=observation, action=action, mask=mask, **(parts | given))

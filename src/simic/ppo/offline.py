"""Offline learning: a policy better than whoever acted, from recorded episodes alone, by implicit Q-learning.

Kostrikov, Nair and Levine (2021) never ask what an action is worth that nobody took. V learns a high expectile of the
worth Q of recorded actions: about the best that was done in such a state. Q learns reward + gamma V of what followed.
The policy imitates, and a decision counts the more, the further its worth is above V.

V is the agent's own critic, on the policy's trunk as in PPO: PPO then goes on with the critic that shaped the policy,
and nothing has to be distilled. The twin Q has a trunk of its own, and serves learning only. Gamma is the agent's. Q
and V are told in units of the agent's value scale, so an advantage of 1 is a deviation of returns in every task.

A decision counts if what followed is on record: the next step of its episode, or its end. The last one before a
truncation does not: the state it led to was not recorded, so no value can stand for the rest.

Shapes: T steps, N environments, H heads, D encoding, E numbers that tell an action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from simic.lifecycle.actions import HEAD_VALUES
from simic.policy.network import ActorCritic, Features, RecurrentActorCritic, critic
from simic.policy.recurrence import EpisodeSegments
from simic.policy.tree import TreeDistribution
from simic.ppo import losses
from simic.ppo.agent import PPOAgent, make_optimizer
from simic.ppo.config import IQLConfig
from simic.ppo.imitation import (
    clip_gradients,
    cloning_loss,
    finish_learning,
    follows,
    free_heads,
    prepare_demonstrations,
)
from simic.ppo.rollout import Rollout

STREAM = 2
"""Tells the draws made here from others of the same rng seed."""
REPORT_STEPS = 100
"""Gradient steps that one record of metrics tells of."""


@dataclass(frozen=True, kw_only=True)
class IQLMetrics:
    """Means over the latest gradient steps."""

    step: int
    """Gradient steps taken."""
    policy_loss: float
    value_loss: float
    q_loss: float
    q: float
    """Worth of what was done, in units of the value scale."""
    value: float
    """V, in the same units."""
    weight: float
    """How much a decision counts for the policy."""
    limited: float
    """Share of decisions that would count more than the limit."""
    counted: float
    """Share of valid decisions that count at all, because what followed is on record."""


def learn_offline(
    agent: PPOAgent,
    rollouts: Sequence[Rollout],
    config: IQLConfig | None = None,
    *,
    progress: Callable[[IQLMetrics], None] | None = None,
) -> IQLMetrics:
    """Make `agent` act better than whoever acted; `progress` hears now and then. Draws derive from its rng seed."""
    config = config or IQLConfig()
    record = prepare_demonstrations(agent, rollouts)
    if not outcome_known(record).any():
        raise ValueError("no decision's outcome is on record: give rollouts of more than one step, or with terminals")
    rng = np.random.default_rng([agent.rng_seed, STREAM])
    q = TwinQ(agent.plain, rng_seed=agent.rng_seed).to(agent.device)
    slow_q = AveragedModel(q, multi_avg_fn=get_ema_multi_avg_fn(1 - config.target_rate))
    optimizer = make_optimizer(agent.plain, replace(agent.config, learning_rate=config.learning_rate))
    optimizer.add_param_group({"params": list(q.parameters()), "weight_decay": 0.0})
    latest: deque[dict[str, Tensor]] = deque(maxlen=REPORT_STEPS)
    for step in range(1, config.steps + 1):
        chosen = torch.from_numpy(rng.permutation(record.shape[1])[: config.minibatch_envs])
        terms = iql_terms(agent, q, slow_q, record.environments(chosen), config)
        optimizer.zero_grad(set_to_none=True)
        (terms["policy_loss"] + config.value_coefficient * terms["value_loss"] + terms["q_loss"]).backward()
        for learner in (agent.plain, q):
            clip_gradients(learner.parameters(), config.max_gradient_norm)
        optimizer.step()
        slow_q.update_parameters(q)
        latest.append({name: figure.detach() for name, figure in terms.items()})
        if progress is not None and (step % REPORT_STEPS == 0 or step == config.steps):
            progress(_metrics(step, latest))
    finish_learning(agent)
    return _metrics(config.steps, latest)


def iql_terms(agent: PPOAgent, q: TwinQ, slow_q: nn.Module, record: Rollout, config: IQLConfig) -> dict[str, Tensor]:
    """The three losses on some environments, and figures about them."""
    counts, pieces = outcome_known(record), record.pieces()
    output = agent.network(record.observation, record.state, pieces)
    policy = TreeDistribution(agent.plain.tree, output.logits, record.mask)
    mean, std = agent.value_scale.mean_std()
    with torch.no_grad():
        worth, value = slow_q(record, pieces).amin(0), output.value.detach()
        weight = advantage_weight(worth - value, config.inverse_temperature, config.weight_limit)
        target = q_target(record.reward, agent.value_scale.denormalize(value), record.terminated, agent.config.gamma)
    matters = free_heads(policy, record) & counts.unsqueeze(-1)
    head_weights, weights = losses.head_mean_weights(matters), losses.mean_weights(counts)
    error = (q(record, pieces) - (target - mean) / std) ** 2  # (2, T, N)
    return {
        "policy_loss": cloning_loss(policy, record.action, head_weights * weight.unsqueeze(-1)).sum(),
        "value_loss": (expectile_loss(worth - output.value, config.expectile) * weights).sum(),
        "q_loss": (error.sum(0) * weights).sum(),
        "q": (worth * weights).sum(),
        "value": (value * weights).sum(),
        "weight": (weight * weights).sum(),
        "limited": ((weight >= config.weight_limit) * weights).sum(),
        "counted": counts.sum() / record.valid.sum().clamp(min=1),
    }


def outcome_known(record: Rollout) -> Tensor:
    """Decisions whose next state is on record, or that ended their episode (T, N)."""
    return record.valid & (record.terminated | follows(record))


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Squared difference of a target from a prediction; one above it weighs `expectile`, one below 1 - `expectile`."""
    return torch.where(difference > 0, expectile, 1 - expectile) * difference**2


def advantage_weight(advantage: Tensor, inverse_temperature: float, limit: float) -> Tensor:
    """How much a decision counts for the policy: exp(inverse_temperature * advantage), at most `limit`."""
    return (inverse_temperature * advantage).exp().clamp(max=limit)


def q_target(reward: Tensor, value: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """Reward and the discounted value of the next step (T, N), which is 0 after a terminal; the last step has none."""
    following = torch.cat([value[1:], torch.zeros_like(value[:1])])
    return reward + gamma * torch.where(terminated, 0.0, following)


class TwinQ(nn.Module):
    """Two estimates of what an action is worth in a state; believing the lower one keeps luck from being learned."""

    def __init__(self, network: ActorCritic, *, rng_seed: int) -> None:
        super().__init__()
        self.trunk = deepcopy(network)  # for its features; its actors and critic get no gradient and never change
        slots = 2 * network.config.encoding_size if network.tree.pointed >= 0 else 0
        size = network.config.hidden_size + sum(_one_hot_sizes(network).values()) + slots
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rng_seed)
            self.estimates = nn.ModuleList(critic(size) for _ in range(2))

    def forward(self, record: Rollout, pieces: EpisodeSegments | None) -> Tensor:
        """Worth of what was done (2, T, N), in units of the value scale."""
        features = self.trunk.features(record.observation, record.state, pieces)
        known = torch.cat([features.core, encode_action(self.trunk, features, record.action)], -1)
        return torch.stack([estimate(known).squeeze(-1) for estimate in self.estimates])


def encode_action(network: ActorCritic, features: Features, action: Tensor) -> Tensor:
    """What was done (T, N, E): the chosen slot and blueprint by what they look like, all other heads one-hot.

    Heads that do not matter are 0.
    """
    matters = network.tree.tables(action.device)[1][action[..., 0]]  # (T, N, H)
    choice = dict(zip(network.tree.heads, (action * matters).unbind(-1), strict=True))
    parts = {head: F.one_hot(choice[head], size) for head, size in _one_hot_sizes(network).items()}
    if features.slots is not None and features.blueprints is not None:
        parts["slot"] = _pick(features.slots, choice["slot"])
        parts["blueprint"] = _pick(_pick(features.blueprints, choice["slot"]), choice["blueprint"])
    counts = dict(zip(network.tree.heads, matters.unbind(-1), strict=True))
    return torch.cat([part * counts[head].unsqueeze(-1) for head, part in parts.items()], -1).float()


def _one_hot_sizes(network: ActorCritic) -> dict[str, int]:
    """Number of choices of the heads that are the same in every task."""
    if isinstance(network, RecurrentActorCritic):
        return dict(zip(network.tree.heads, network.head_sizes, strict=True))
    return {head: len(HEAD_VALUES[head]) for head in network.tree.heads if head in HEAD_VALUES}


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """The entries (T, N, ...) of values (T, N, K, ...) that an index (T, N) names."""
    flat = values.flatten(0, 1)
    return flat[torch.arange(len(flat), device=flat.device), index.flatten()].unflatten(0, index.shape)


def _metrics(step: int, latest: Sequence[dict[str, Tensor]]) -> IQLMetrics:
    """Means over steps, fetched from the device at once."""
    rows = torch.stack([torch.stack(list(figures.values())) for figures in latest])
    return IQLMetrics(step=step, **dict(zip(latest[0], rows.mean(0).tolist(), strict=True)))

"""Implicit Q-learning (IQL): a policy better than the recorded one, from recorded episodes alone.

Kostrikov, Nair and Levine (2021) never evaluate actions that were not taken. V regresses to a high expectile of the Q
of recorded actions, so to about the best action taken in such a state. Q regresses to reward + gamma V(next state). The
policy imitates, each decision weighted by exp(inverse_temperature * advantage), where advantage = Q - V.

V is the agent's own critic on the policy's trunk, so PPO can continue with it directly. The twin Q has its own trunk
and is discarded. Q and V are normalized by the agent's value scale: an advantage of 1 is one standard deviation of the
returns in every task.

Only decisions with a known outcome count: the next step of the episode is recorded, or the decision ended it. The last
decision before a truncation does not count, because the state after it was not recorded.

Shapes: T steps, N environments, H heads, D encoding, E the size of an encoded action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from simic.policy.action_tree import TreeDistribution
from simic.policy.network import ActorCritic, Features, make_critic
from simic.ppo import losses
from simic.ppo.agent import PPOAgent
from simic.ppo.config import IQLConfig
from simic.ppo.demonstrations import (
    clip_or_raise,
    cloning_loss,
    finish_learning,
    free_heads,
    has_next_step,
    prepare_demonstrations,
    temporary_optimizer,
)
from simic.ppo.rollout import Rollout

STREAM = 2
"""Separates this random stream from others of the same rng seed."""
REPORT_STEPS = 100
"""Gradient steps between two reports of metrics."""


@dataclass(frozen=True, kw_only=True)
class IQLMetrics:
    """Means over the latest gradient steps."""

    step: int
    """Gradient steps taken."""
    policy_loss: float
    value_loss: float
    q_loss: float
    q: float
    """Q of the recorded actions, normalized by the value scale."""
    value: float
    """V, normalized likewise."""
    weight: float
    """Advantage weight of a decision in the policy loss."""
    limited: float
    """Share of decisions at the weight limit."""
    counted: float
    """Share of valid decisions with a known outcome."""


def learn_offline(
    agent: PPOAgent,
    rollouts: Sequence[Rollout],
    config: IQLConfig | None = None,
    *,
    progress: Callable[[IQLMetrics], None] | None = None,
) -> IQLMetrics:
    """Train `agent` by IQL; `progress` is called every REPORT_STEPS gradient steps and after the last."""
    config = config or IQLConfig()
    episodes = prepare_demonstrations(agent, rollouts)
    if not outcome_known(episodes).any():
        raise ValueError("no recorded decision has a known outcome: pass rollouts of several steps or with terminals")
    rng = np.random.default_rng([agent.rng_seed, STREAM])
    q = TwinQ(agent.plain, rng_seed=agent.rng_seed).to(agent.device)
    target_q = AveragedModel(q, multi_avg_fn=get_ema_multi_avg_fn(1 - config.target_rate))
    optimizer = temporary_optimizer(agent, config.learning_rate)
    optimizer.add_param_group({"params": list(q.parameters()), "weight_decay": 0.0})
    latest: deque[dict[str, Tensor]] = deque(maxlen=REPORT_STEPS)
    for step in range(1, config.steps + 1):
        chosen = torch.from_numpy(rng.permutation(episodes.shape[1])[: config.minibatch_envs])
        terms = iql_terms(agent, q, target_q, episodes.environments(chosen), config)
        optimizer.zero_grad(set_to_none=True)
        (terms["policy_loss"] + config.value_coefficient * terms["value_loss"] + terms["q_loss"]).backward()
        for module in (agent.plain, q):
            clip_or_raise(module.parameters(), config.max_gradient_norm)
        optimizer.step()
        target_q.update_parameters(q)
        latest.append({name: value.detach() for name, value in terms.items()})
        if progress is not None and (step % REPORT_STEPS == 0 or step == config.steps):
            progress(_mean_metrics(step, latest))
    finish_learning(agent)
    return _mean_metrics(config.steps, latest)


def iql_terms(
    agent: PPOAgent, q: TwinQ, target_q: nn.Module, episodes: Rollout, config: IQLConfig
) -> dict[str, Tensor]:
    """The three losses on some environments, and the other values of `IQLMetrics`."""
    known = outcome_known(episodes)
    output = agent.network(episodes.observation, episodes.state, episodes.segments)
    policy = TreeDistribution(agent.plain.tree, output.logits, episodes.mask)
    mean, std = agent.value_scale.mean_std()
    with torch.no_grad():
        # The minimum of both counters overestimation.
        q_value, value = target_q(episodes).amin(0), output.value.detach()
        weight = advantage_weight(q_value - value, config.inverse_temperature, config.weight_limit)
        next_value = agent.value_scale.denormalize(value)
        target = q_target(episodes.reward, next_value, episodes.terminated, agent.config.gamma)
    used = free_heads(policy, episodes) & known.unsqueeze(-1)
    head_weights, weights = losses.head_mean_weights(used), losses.mean_weights(known)
    error = (q(episodes) - (target - mean) / std) ** 2  # (2, T, N)
    return {
        "policy_loss": cloning_loss(policy, episodes.action, head_weights * weight.unsqueeze(-1)).sum(),
        "value_loss": (expectile_loss(q_value - output.value, config.expectile) * weights).sum(),
        "q_loss": (error.sum(0) * weights).sum(),
        "q": (q_value * weights).sum(),
        "value": (value * weights).sum(),
        "weight": (weight * weights).sum(),
        "limited": ((weight >= config.weight_limit) * weights).sum(),
        "counted": known.sum() / episodes.valid.sum().clamp(min=1),
    }


def outcome_known(episodes: Rollout) -> Tensor:
    """Decisions whose next state is recorded, or that ended their episode (T, N)."""
    return episodes.valid & (episodes.terminated | has_next_step(episodes))


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Squared error target - prediction, weighted `expectile` where positive and 1 - `expectile` elsewhere."""
    return torch.where(difference > 0, expectile, 1 - expectile) * difference**2


def advantage_weight(advantage: Tensor, inverse_temperature: float, limit: float) -> Tensor:
    """Weight of a decision in the policy loss: exp(inverse_temperature * advantage), at most `limit`."""
    return (inverse_temperature * advantage).exp().clamp(max=limit)


def q_target(reward: Tensor, value: Tensor, terminated: Tensor, gamma: float) -> Tensor:
    """Reward + gamma times the value of the next step (T, N), which is 0 after a terminal and after the last step."""
    following = torch.cat([value[1:], torch.zeros_like(value[:1])])
    return reward + gamma * torch.where(terminated, 0.0, following)


class TwinQ(nn.Module):
    """Two estimates of the Q of the recorded actions, on a trunk of their own."""

    def __init__(self, network: ActorCritic, *, rng_seed: int) -> None:
        super().__init__()
        self.trunk = deepcopy(network)  # only its features are used; its heads and critic get no gradient
        pointed = 2 * network.config.encoding_size if network.tree.pointed >= 0 else 0
        size = network.config.hidden_size + sum(network.fixed_head_sizes.values()) + pointed
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rng_seed)
            self.estimates = nn.ModuleList(make_critic(size) for _ in range(2))

    def forward(self, episodes: Rollout) -> Tensor:
        """Q of the recorded actions (2, T, N), normalized by the value scale."""
        features = self.trunk.features(episodes.observation, episodes.state, episodes.segments)
        inputs = torch.cat([features.core, encode_action(self.trunk, features, episodes.action)], -1)
        return torch.stack([estimate(inputs).squeeze(-1) for estimate in self.estimates])


def encode_action(network: ActorCritic, features: Features, action: Tensor) -> Tensor:
    """Actions as vectors (T, N, E): slot and blueprint by their features, other heads one-hot, unused heads 0."""
    heads = network.tree.heads
    used = network.tree.tables(action.device)[1][action[..., 0]]  # (T, N, H)
    choice = dict(zip(heads, (action * used).unbind(-1), strict=True))
    parts = {head: F.one_hot(choice[head], size) for head, size in network.fixed_head_sizes.items()}
    if features.slots is not None and features.blueprints is not None:
        parts["slot"] = _pick(features.slots, choice["slot"])
        parts["blueprint"] = _pick(_pick(features.blueprints, choice["slot"]), choice["blueprint"])
    used_by_head = dict(zip(heads, used.unbind(-1), strict=True))
    return torch.cat([part * used_by_head[head].unsqueeze(-1) for head, part in parts.items()], -1).float()


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """Entries (T, N, ...) of values (T, N, C, ...) by an index (T, N)."""
    flat = values.flatten(0, 1)
    return flat[torch.arange(len(flat), device=flat.device), index.flatten()].unflatten(0, index.shape)


def _mean_metrics(step: int, latest: Sequence[dict[str, Tensor]]) -> IQLMetrics:
    """Means over gradient steps, transferred from the device at once."""
    rows = torch.stack([torch.stack(list(values.values())) for values in latest])
    return IQLMetrics(step=step, **dict(zip(latest[0], rows.mean(0).tolist(), strict=True)))

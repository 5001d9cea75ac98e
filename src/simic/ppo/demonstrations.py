"""Recorded episodes as training data, and the steps that imitation and IQL have in common.

Shapes: T steps, N environments, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor, nn

from simic.policy.action_tree import ActionTree, TreeDistribution
from simic.policy.masked_categorical import ILLEGAL
from simic.ppo import losses
from simic.ppo.agent import DivergedError, PPOAgent
from simic.ppo.optimizer import make_optimizer
from simic.ppo.rollout import Rollout, join


def prepare_demonstrations(agent: PPOAgent, rollouts: Sequence[Rollout]) -> Rollout:
    """All recorded episodes as one rollout with scaled rewards, after updating the agent's scales from them.

    Sequences start from a zero state: the recorded state belongs to another network.
    """
    if not rollouts:
        raise ValueError("there is nothing to learn from: pass at least one rollout")
    blank = [replace(rollout, state=torch.zeros(rollout.shape[1], agent.plain.state_size)) for rollout in rollouts]
    for rollout in blank:  # before joining, which pads sizes that are too small
        rollout.check(agent.plain)
    episodes = join(blank)
    check_legal(episodes, agent.plain.tree)
    episodes = agent.update_scales(episodes)
    returns = monte_carlo_returns(episodes, agent.config.gamma)[0]
    # Equal returns have no standard deviation: dividing by it would blow up a fresh critic's values.
    if agent.config.normalize_values and returns[episodes.valid].std(correction=0) > 1e-3:
        device = agent.device
        agent.value_scale.pop_art_update(returns.to(device), episodes.valid.to(device), agent.plain.critic)
    return episodes.to(agent.device)


def check_legal(episodes: Rollout, tree: ActionTree) -> None:
    """Raise if an action is illegal by its mask: no policy could learn it."""
    uniform = TreeDistribution(tree, torch.zeros_like(episodes.mask, dtype=torch.float32), episodes.mask)
    wrong = (uniform.head_log_prob(episodes.action) < ILLEGAL / 2) & episodes.valid.unsqueeze(-1)
    if wrong.any():
        step, env, head = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"the recorded choice {int(episodes.action[step, env, head])} of head {tree.heads[head]} at step {step} of "
            f"environment {env} is illegal by its mask: record the masks that the actions were chosen under"
        )


def has_next_step(episodes: Rollout) -> Tensor:
    """Whether the next step of the sequence continues the same episode (T, N)."""
    result = torch.zeros_like(episodes.valid)
    first = episodes.first.to(episodes.valid.device)
    result[:-1] = episodes.valid[:-1] & episodes.valid[1:] & ~first[1:] & ~episodes.terminated[:-1]
    return result


def monte_carlo_returns(episodes: Rollout, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted sums of the recorded rewards, and whether they are complete, up to a terminal step (T, N) each.

    Those of truncated episodes are incomplete: the value of the remaining steps would be another critic's estimate.
    """
    zero, ended = torch.zeros_like(episodes.reward), ~has_next_step(episodes)
    returns = losses.generalized_advantages(episodes.reward, zero, zero, ended, ended, gamma=gamma, gae_lambda=1.0)
    terminal = episodes.terminated.float()
    terminals = losses.generalized_advantages(terminal, zero, zero, ended, ended, gamma=1.0, gae_lambda=1.0)
    return returns, episodes.valid & (terminals > 0)


def free_heads(policy: TreeDistribution, episodes: Rollout) -> Tensor:
    """Used heads of valid decisions in which a used head had more than one legal choice (T, N, H)."""
    free = policy.has_choice(episodes.action).any(-1) & episodes.valid
    return policy.head_used(episodes.action) & free.unsqueeze(-1)


def cloning_loss(policy: TreeDistribution, action: Tensor, weights: Tensor) -> Tensor:
    """Negative log-likelihood of the recorded actions by head (H,), summed with weights (T, N, H)."""
    return -(policy.head_log_prob(action) * weights).sum((0, 1))


def temporary_optimizer(agent: PPOAgent, learning_rate: float) -> torch.optim.AdamW:
    """An optimizer for one offline run. PPO keeps its own: its losses have gradients of another size."""
    return make_optimizer(agent.plain, replace(agent.config, learning_rate=learning_rate))


def clip_or_raise(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Clip gradients to a norm; raise DivergedError if it is not finite."""
    check_finite(float(nn.utils.clip_grad_norm_(parameters, max_norm)), "the gradient's norm")


def finish_learning(agent: PPOAgent) -> None:
    """Reset PPO's optimizer state, which belongs to the weights before; raise if the new weights are not finite."""
    agent.optimizer.state.clear()
    check_finite(float(nn.utils.get_total_norm(agent.plain.parameters())), "the norm of the weights")


def check_finite(value: float, what: str) -> None:
    """Raise DivergedError unless a value is finite."""
    if not isfinite(value):
        raise DivergedError(
            f"{what} is {value}: look for rewards and observations in the recorded episodes that are out of range"
        )

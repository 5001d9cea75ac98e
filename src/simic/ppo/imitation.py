"""Imitation: behaviour cloning from recorded episodes, as a warm start for PPO.

Shapes: T steps, N environments, H heads. Each head learns from the free decisions that use it, by its own mean. The
critic learns the recorded returns, so that PPO starts with a critic that fits the cloned policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from simic.policy.action_tree import TreeDistribution
from simic.ppo import losses
from simic.ppo.agent import PPOAgent
from simic.ppo.config import ImitationConfig
from simic.ppo.demonstrations import (
    check_finite,
    clip_or_raise,
    cloning_loss,
    finish_learning,
    free_heads,
    monte_carlo_returns,
    prepare_demonstrations,
    temporary_optimizer,
)
from simic.ppo.rollout import Rollout

STREAM = 1
"""Separates this random stream from others of the same rng seed."""


@dataclass(frozen=True, kw_only=True)
class PassMetrics:
    """Prediction of the recorded actions. Per-head values are means over the free decisions that use the head."""

    loss: float
    """Sum of the heads' losses."""
    value_loss: float
    """Half the squared error of complete returns, normalized by the value scale; NaN without a terminal step."""
    head_loss: dict[str, float]
    """Negative log-likelihood; NaN if the head is never used."""
    head_accuracy: dict[str, float]
    """How often the most likely choice, given the earlier heads, is the recorded one; NaN if it is never used."""


@dataclass(frozen=True, kw_only=True)
class ImitationMetrics:
    """The metrics of all passes."""

    training: tuple[PassMetrics, ...]
    """On the training environments, during each pass."""
    held_out: tuple[PassMetrics, ...]
    """On the held-out environments, after each pass; empty if there are none."""
    best_pass: int
    """Index of the pass whose weights were kept."""


def imitate(
    agent: PPOAgent,
    rollouts: Sequence[Rollout],
    config: ImitationConfig | None = None,
    *,
    progress: Callable[[PassMetrics], None] | None = None,
) -> ImitationMetrics:
    """Train `agent` to reproduce recorded actions; `progress` is called after every pass."""
    config = config or ImitationConfig()
    episodes = prepare_demonstrations(agent, rollouts)
    rng = np.random.default_rng([agent.rng_seed, STREAM])
    order = torch.from_numpy(rng.permutation(episodes.shape[1]))
    num_held_out = min(ceil(config.held_out * len(order)), len(order) - 1)
    validation, train = (episodes.environments(part) for part in order.tensor_split([num_held_out]))
    optimizer = temporary_optimizer(agent, config.learning_rate)
    training, held_out, best, best_weights = [], [], 0, None
    for number in range(config.passes):
        training.append(_train_pass(agent, train, config, optimizer, rng))
        if num_held_out:
            held_out.append(_evaluate(agent, validation))
            if number == 0 or held_out[-1].loss < held_out[best].loss:
                best, best_weights = number, {k: v.clone() for k, v in agent.plain.state_dict().items()}
        else:
            best = number
        latest = (held_out or training)[-1]
        check_finite(latest.loss, "the loss")
        if progress is not None:
            progress(latest)
        if number - best >= config.patience:
            break
    if best_weights is not None:
        agent.plain.load_state_dict(best_weights)
    finish_learning(agent)
    return ImitationMetrics(training=tuple(training), held_out=tuple(held_out), best_pass=best)


class Terms(NamedTuple):
    """Measurements of a minibatch. A head's loss and accuracy are means over its decisions."""

    head_loss: Tensor  # (H,)
    head_accuracy: Tensor  # (H,)
    head_decisions: Tensor  # (H,) their number
    value_loss: Tensor
    complete_returns: Tensor  # their number
    entropy: Tensor


def _train_pass(
    agent: PPOAgent,
    episodes: Rollout,
    config: ImitationConfig,
    optimizer: torch.optim.Optimizer,
    rng: np.random.Generator,
) -> PassMetrics:
    """One pass over the episodes, in minibatches of whole environments."""
    num_envs, measured = episodes.shape[1], []
    for chosen in np.array_split(rng.permutation(num_envs), ceil(num_envs / config.minibatch_envs)):
        terms = _terms(agent, episodes.environments(torch.from_numpy(chosen)))
        loss = terms.head_loss.sum() + config.value_coefficient * terms.value_loss
        optimizer.zero_grad(set_to_none=True)
        (loss - config.entropy_coefficient * terms.entropy).backward()
        clip_or_raise(agent.plain.parameters(), config.max_gradient_norm)
        optimizer.step()
        measured.append(Terms(*(value.detach() for value in terms)))
    return _pass_metrics(measured, agent.plain.tree.heads)


@torch.no_grad()
def _evaluate(agent: PPOAgent, episodes: Rollout) -> PassMetrics:
    return _pass_metrics([_terms(agent, episodes)], agent.plain.tree.heads)


def _terms(agent: PPOAgent, episodes: Rollout) -> Terms:
    """Cloning loss and accuracy of the policy, and value loss of the critic."""
    output = agent.network(episodes.observation, episodes.state, episodes.segments)
    policy = TreeDistribution(agent.plain.tree, output.logits, episodes.mask)
    used, (entropy, has_choice) = free_heads(policy, episodes), policy.head_entropy(episodes.action)
    weights = losses.head_mean_weights(used)
    returns, complete = monte_carlo_returns(episodes, agent.config.gamma)
    mean, std = agent.value_scale.mean_std()
    error = (output.value - (returns - mean) / std) ** 2 / 2
    return Terms(
        head_loss=cloning_loss(policy, episodes.action, weights),
        head_accuracy=((policy.head_mode(episodes.action) == episodes.action) * weights).sum((0, 1)),
        head_decisions=used.sum((0, 1)),
        value_loss=(error * losses.mean_weights(complete)).sum(),
        complete_returns=complete.sum(),
        entropy=(entropy * losses.head_mean_weights(has_choice & used)).sum((0, 1)).mean(),
    )


def _pass_metrics(measured: Sequence[Terms], heads: Sequence[str]) -> PassMetrics:
    """Means over all decisions of a pass, from the means of its minibatches."""
    rows = torch.stack([torch.cat([part.reshape(-1) for part in terms]) for terms in measured]).cpu().double()
    first = measured[0]
    columns = rows.split([part.numel() for part in first], 1)
    stacked = Terms(*(part.view(-1, *like.shape) for part, like in zip(columns, first, strict=True)))
    count, complete = stacked.head_decisions, stacked.complete_returns
    head_loss, accuracy = (
        ((values * count).sum(0) / count.sum(0)).tolist() for values in (stacked.head_loss, stacked.head_accuracy)
    )
    return PassMetrics(
        loss=sum(loss for loss, used in zip(head_loss, count.sum(0).tolist(), strict=True) if used),
        value_loss=float((stacked.value_loss * complete).sum() / complete.sum()),
        head_loss=dict(zip(heads, head_loss, strict=True)),
        head_accuracy=dict(zip(heads, accuracy, strict=True)),
    )

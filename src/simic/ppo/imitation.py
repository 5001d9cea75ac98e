"""Imitation: a policy learns to do what somebody did, from recorded episodes. A warm start for PPO.

Shapes: T steps, N environments, H heads. Every head learns from the free decisions where it matters, by its own mean.
The critic learns the returns that followed, in the agent's own units, so that PPO goes on from a critic that knows
whom it judges. Gradient steps are taken by an optimizer that is thrown away: what Adam remembers is the size of these
losses' gradients, not of PPO's, and PPO starts clean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.masked import ILLEGAL
from simic.policy.tree import ActionTree, TreeDistribution
from simic.ppo import losses
from simic.ppo.agent import DivergedError, PPOAgent, make_optimizer
from simic.ppo.config import ImitationConfig
from simic.ppo.rollout import Rollout, join

STREAM = 1
"""Tells the draws made here from others of the same rng seed."""


@dataclass(frozen=True, kw_only=True)
class PassMetrics:
    """How well decisions are foretold. Figures of a head are means over the free decisions where it matters."""

    loss: float
    """Sum of the heads' losses."""
    value_loss: float
    """Half the squared error of known returns, in units of the value scale; NaN if no episode's end is on record."""
    head_loss: dict[str, float]
    """Negative log-likelihood; NaN if the head never matters."""
    head_accuracy: dict[str, float]
    """How often the likeliest choice, given the heads before it, is what was done; NaN if the head never matters."""


@dataclass(frozen=True, kw_only=True)
class ImitationMetrics:
    """What imitation came to, pass by pass."""

    training: tuple[PassMetrics, ...]
    """Of the environments learned from, while they were."""
    held_out: tuple[PassMetrics, ...]
    """Of the held-out environments, after each pass; empty if there are none."""
    best_pass: int
    """Index of the pass whose weights were kept."""


Progress = Callable[[PassMetrics], None]


def imitate(
    agent: PPOAgent,
    rollouts: Sequence[Rollout],
    config: ImitationConfig | None = None,
    *,
    progress: Progress | None = None,
) -> ImitationMetrics:
    """Make `agent` act like whoever acted; `progress` hears of every pass. Draws derive from the agent's rng seed."""
    config = config or ImitationConfig()
    record = prepare_demonstrations(agent, rollouts)
    rng = np.random.default_rng([agent.rng_seed, STREAM])
    order = torch.from_numpy(rng.permutation(record.shape[1]))
    num_held_out = min(ceil(config.held_out * len(order)), len(order) - 1)
    watched, learned = (record.environments(part) for part in order.tensor_split([num_held_out]))
    optimizer = make_optimizer(agent.plain, replace(agent.config, learning_rate=config.learning_rate))
    training, held_out, best, best_weights = [], [], 0, None
    for number in range(config.passes):
        training.append(_learn(agent, learned, config, optimizer, rng))
        if num_held_out:
            held_out.append(_watch(agent, watched))
            if number == 0 or held_out[-1].loss < held_out[best].loss:
                best, best_weights = number, {k: v.clone() for k, v in agent.plain.state_dict().items()}
        else:
            best = number
        check_finite((held_out or training)[-1].loss, "the loss")
        if progress is not None:
            progress((held_out or training)[-1])
        if number - best >= config.patience:
            break
    if best_weights is not None:
        agent.plain.load_state_dict(best_weights)
    finish_learning(agent)
    return ImitationMetrics(training=tuple(training), held_out=tuple(held_out), best_pass=best)


class Terms(NamedTuple):
    """Figures of a minibatch. A head's loss and accuracy are means over its decisions."""

    head_loss: Tensor  # (H,)
    head_accuracy: Tensor  # (H,)
    head_decisions: Tensor  # (H,) how many
    value_loss: Tensor
    known_returns: Tensor  # how many
    entropy: Tensor


def _learn(
    agent: PPOAgent,
    record: Rollout,
    config: ImitationConfig,
    optimizer: torch.optim.Optimizer,
    rng: np.random.Generator,
) -> PassMetrics:
    """One pass over the record, in minibatches of whole environments."""
    num_envs, figures = record.shape[1], []
    for chosen in np.array_split(rng.permutation(num_envs), ceil(num_envs / config.minibatch_envs)):
        terms = _terms(agent, record.environments(torch.from_numpy(chosen)))
        loss = terms.head_loss.sum() + config.value_coefficient * terms.value_loss
        optimizer.zero_grad(set_to_none=True)
        (loss - config.entropy_coefficient * terms.entropy).backward()
        clip_gradients(agent.plain.parameters(), config.max_gradient_norm)
        optimizer.step()
        figures.append(Terms(*(figure.detach() for figure in terms)))
    return _pass_metrics(figures, agent.plain.tree.heads)


@torch.no_grad()
def _watch(agent: PPOAgent, record: Rollout) -> PassMetrics:
    """The same figures, without learning."""
    return _pass_metrics([_terms(agent, record)], agent.plain.tree.heads)


def _terms(agent: PPOAgent, record: Rollout) -> Terms:
    """What the policy makes of the decisions that were taken, and the critic of the returns that followed."""
    output = agent.network(record.observation, record.state, record.pieces())
    policy = TreeDistribution(agent.plain.tree, output.logits, record.mask)
    matters, (entropy, available) = free_heads(policy, record), policy.head_entropy(record.action)
    weights = losses.head_mean_weights(matters)
    returns, known = monte_carlo(record, agent.config.gamma)
    mean, std = agent.value_scale.mean_std()
    error = (output.value - (returns - mean) / std) ** 2 / 2
    return Terms(
        head_loss=cloning_loss(policy, record.action, weights),
        head_accuracy=((policy.head_mode(record.action) == record.action) * weights).sum((0, 1)),
        head_decisions=matters.sum((0, 1)),
        value_loss=(error * losses.mean_weights(known)).sum(),
        known_returns=known.sum(),
        entropy=(entropy * losses.head_mean_weights(available & matters)).sum((0, 1)).mean(),
    )


def _pass_metrics(figures: Sequence[Terms], heads: Sequence[str]) -> PassMetrics:
    """Means over all decisions of a pass, from those of its minibatches."""
    rows = torch.stack([torch.cat([part.reshape(-1) for part in terms]) for terms in figures]).cpu().double()
    sizes = [part.numel() for part in figures[0]]
    stacked = Terms(*(part.view(-1, *like.shape) for part, like in zip(rows.split(sizes, 1), figures[0], strict=True)))
    count, known = stacked.head_decisions, stacked.known_returns
    head_loss, accuracy = (
        ((figure * count).sum(0) / count.sum(0)).tolist() for figure in (stacked.head_loss, stacked.head_accuracy)
    )
    return PassMetrics(
        loss=sum(loss for loss, used in zip(head_loss, count.sum(0).tolist(), strict=True) if used),
        value_loss=float((stacked.value_loss * known).sum() / known.sum()),
        head_loss=dict(zip(heads, head_loss, strict=True)),
        head_accuracy=dict(zip(heads, accuracy, strict=True)),
    )


# What learning from a record has in common, whatever is learned.


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale gradients down to a norm; raise if they are not finite."""
    check_finite(float(nn.utils.clip_grad_norm_(parameters, max_norm)), "the gradient's norm")


def finish_learning(agent: PPOAgent) -> None:
    """Leave an agent to PPO, without the moments of an earlier one; raise if it is not finite."""
    agent.optimizer.state.clear()  # they belong to weights that are gone
    check_finite(float(nn.utils.get_total_norm(agent.plain.parameters())), "the norm of the weights")


def check_finite(figure: float, what: str) -> None:
    """Raise unless learning can go on."""
    if not isfinite(figure):
        raise DivergedError(
            f"{what} is {figure}: look for rewards and observations in the recorded episodes that are out of range"
        )


def free_heads(policy: TreeDistribution, record: Rollout) -> Tensor:
    """Heads that matter in valid decisions in which one of them left a choice (T, N, H)."""
    free = policy.available(record.action).any(-1) & record.valid
    return policy.matters(record.action) & free.unsqueeze(-1)


def cloning_loss(policy: TreeDistribution, action: Tensor, weights: Tensor) -> Tensor:
    """Negative log-likelihood of what was done, by head (H,): sums with weights (T, N, H)."""
    return -(policy.head_log_prob(action) * weights).sum((0, 1))


def prepare_demonstrations(agent: PPOAgent, rollouts: Sequence[Rollout]) -> Rollout:
    """All recorded episodes as one rollout with scaled rewards; the agent's scales have taken them in.

    Episodes that began before the record begin without memory: what another network remembered means nothing to this.
    """
    if not rollouts:
        raise ValueError("there is nothing to learn from: give at least one rollout")
    blank = [replace(rollout, state=torch.zeros(rollout.shape[1], agent.plain.state_size)) for rollout in rollouts]
    for rollout in blank:  # before they are joined, which pads what is too small
        rollout.check(agent.plain)
    record = join(blank)
    check_legal(record, agent.plain.tree)
    record = agent.learn_scales(record)
    returns = monte_carlo(record, agent.config.gamma)[0]
    # Returns that are all alike have no deviation to tell values in: those of a fresh critic would become huge.
    if agent.config.normalize_values and returns[record.valid].std(correction=0) > 1e-3:
        agent.value_scale.learn(returns.to(agent.device), record.valid.to(agent.device), agent.plain.critic)
    return record.to(agent.device)


def check_legal(record: Rollout, tree: ActionTree) -> None:
    """Raise if something was done that its mask forbids: no policy could learn to do it."""
    uniform = TreeDistribution(tree, torch.zeros_like(record.mask, dtype=torch.float32), record.mask)
    wrong = (uniform.head_log_prob(record.action) < ILLEGAL / 2) & record.valid.unsqueeze(-1)
    if wrong.any():
        step, env, head = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"the recorded choice {int(record.action[step, env, head])} of head {tree.heads[head]} at step {step} of "
            f"environment {env} is illegal by its mask: record the masks that the actions were chosen under"
        )


def follows(record: Rollout) -> Tensor:
    """Whether the next step of the sequence is what a decision led to (T, N)."""
    result = torch.zeros_like(record.valid)
    first = record.first.to(record.valid.device)
    result[:-1] = record.valid[:-1] & record.valid[1:] & ~first[1:] & ~record.terminated[:-1]
    return result


def monte_carlo(record: Rollout, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted sums of the rewards on record, and whether they are whole: the episode's end is there (T, N) each.

    A truncated episode's are not: the value that stands for its rest is another critic's opinion.
    """
    zero, ended = torch.zeros_like(record.reward), ~follows(record)
    returns = losses.advantages(record.reward, zero, zero, ended, ended, gamma=gamma, gae_lambda=1.0)
    terminals = losses.advantages(record.terminated.float(), zero, zero, ended, ended, gamma=1.0, gae_lambda=1.0)
    return returns, record.valid & (terminals > 0)

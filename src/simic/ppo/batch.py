"""Batch: a rollout with the quantities that stay fixed during an update.

Shapes: T steps, N environments, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from simic.policy.action_tree import Reading, TreeDistribution
from simic.policy.recurrence import state_health
from simic.policy.segments import EpisodeSegments, Pieces, split_pieces
from simic.ppo import losses
from simic.ppo.config import PPOConfig
from simic.ppo.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rollout with old log-probabilities, values, advantages and value targets."""

    rollout: Rollout
    log_prob: Tensor
    """Log-probability of each head's choice under the policy before the update (T, N, H)."""
    value: Tensor
    """Value before the update, on the scale of scaled rewards (T, N)."""
    target: Tensor
    """Value targets on the same scale (T, N)."""
    advantage: Tensor
    """Advantages, standardized over free decisions (T, N)."""
    head_used: Tensor
    """Heads that are used in a free decision (T, N, H)."""
    has_choice: Tensor
    """Used heads of valid decisions with more than one legal choice (T, N, H)."""
    reading: Reading
    """What the actions read of the action tree."""
    pieces: Pieces | None = None
    """Where sequences are cut, and the states there before the update; None leaves them whole."""

    @property
    def free(self) -> Tensor:
        """Valid decisions with more than one legal action (T, N): the policy learns from these only."""
        return self.has_choice.any(-1)

    @property
    def state(self) -> Tensor:
        """The states from which sequences start: (N, K), or with pieces (M, K)."""
        return self.rollout.state if self.pieces is None else self.pieces.states

    @cached_property
    def segments(self) -> EpisodeSegments | None:
        """The sequences split at episode ends, and into pieces; None if they are whole."""
        if self.pieces is None:
            return self.rollout.segments
        return split_pieces(self.rollout.first.numpy(), self.pieces.row, self.target.device)

    def environments(self, index: Tensor) -> Batch:
        """The part of some environments, by an index on the CPU."""
        here = index.to(self.target.device)
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        chosen = {name: part.index_select(1, here) for name, part in parts.items() if isinstance(part, Tensor)}
        pieces = self.pieces and self.pieces.environments(index.numpy())
        reading = self.reading.environments(here)
        return Batch(rollout=self.rollout.environments(index), reading=reading, pieces=pieces, **chosen)

    def with_values(self, value: Tensor, config: PPOConfig) -> Batch:
        """The batch with advantages and targets from new values (T, N); old values and log-probabilities stay."""
        raw = raw_advantages(self.rollout, value, config)
        return replace(self, advantage=losses.standardize(raw, self.free)[0], target=raw + value)


class BatchStatistics(NamedTuple):
    """Measurements of a batch before the update, named as in `UpdateMetrics`; all are scalars but `head_entropy`."""

    advantage_mean: Tensor
    advantage_std: Tensor
    normalized_advantage_mean: Tensor
    normalized_advantage_std: Tensor
    return_mean: Tensor
    return_std: Tensor
    value_mean: Tensor
    explained_variance: Tensor
    state_rms: Tensor
    state_finite: Tensor
    decisions: Tensor
    forced_share: Tensor
    entropy: Tensor
    head_entropy: Tensor  # (H,)


@torch.no_grad()
def make_batch(
    rollout: Rollout, policy: TreeDistribution, value: Tensor, state: Tensor | None, config: PPOConfig
) -> tuple[Batch, BatchStatistics]:
    """The batch of a rollout, given the network's outputs: policy, values (T, N) on the reward scale, last state."""
    raw = raw_advantages(rollout, value, config)
    target = raw + value
    head_entropy, has_choice = policy.head_entropy(rollout.action)
    has_choice &= rollout.valid.unsqueeze(-1)
    free = has_choice.any(-1)
    advantage, mean, std = losses.standardize(raw, free)
    batch = Batch(
        rollout=rollout,
        log_prob=policy.head_log_prob(rollout.action),
        value=value,
        target=target,
        advantage=advantage,
        head_used=policy.head_used(rollout.action) & free.unsqueeze(-1),
        has_choice=has_choice,
        reading=policy.tree.reading(rollout.action, rollout.mask),
    )
    weights = losses.mean_weights(free)
    center = (advantage * weights).sum()
    return_mean, return_variance = losses.mean_variance(target, rollout.valid)
    return batch, BatchStatistics(
        advantage_mean=mean,
        advantage_std=std,
        normalized_advantage_mean=center,
        normalized_advantage_std=((advantage - center) ** 2 * weights).sum().sqrt(),
        return_mean=return_mean,
        return_std=return_variance.sqrt(),
        value_mean=losses.mean_variance(value, rollout.valid)[0],
        explained_variance=1 - losses.mean_variance(raw, rollout.valid)[1] / return_variance.clamp(min=1e-8),
        **state_health(state, value.device),
        decisions=rollout.valid.sum(),
        forced_share=1 - free.sum() / rollout.valid.sum().clamp(min=1),
        entropy=(policy.entropy() * weights).sum(),
        # 0 / 0 is NaN: a head that never had a choice has neither high nor low entropy.
        head_entropy=(head_entropy * has_choice).sum((0, 1)) / has_choice.sum((0, 1)),
    )


def raw_advantages(rollout: Rollout, value: Tensor, config: PPOConfig) -> Tensor:
    """Generalized advantage estimates before standardization (T, N)."""
    following = torch.cat([value[1:], torch.zeros_like(value[:1])])
    return losses.generalized_advantages(
        rollout.reward,
        value,
        torch.where(rollout.truncated, rollout.next_value, following),
        rollout.terminated,
        rollout.terminated | rollout.truncated | ~rollout.valid,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )

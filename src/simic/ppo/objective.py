"""PPO's objective on a minibatch: the weights of its means, the terms of the loss, and how far an update moved.

Shapes: T steps, N environments, H heads, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from simic.ppo import losses
from simic.ppo.batch import Batch
from simic.ppo.config import PPOConfig
from simic.telemetry.anomalies import Thresholds

MAX_ALARMS = 5
"""Decisions with extreme ratios that are reported one by one, for increases and for decreases."""


class Weights(NamedTuple):
    """Weights whose weighted sums are means over a minibatch, whatever micro-batches it is computed in."""

    joint_and_heads: Tensor  # (T, N, 1 + H) free decisions, and those of them that use each head
    entropy: Tensor  # (T, N, H) decisions in which a head had a choice
    value: Tensor  # (T, N) valid decisions
    contribution: Tensor | None  # (T, N, S) known contributions

    @property
    def policy(self) -> Tensor:
        """Of free decisions (T, N)."""
        return self.joint_and_heads[..., 0]

    @property
    def heads(self) -> Tensor:
        """Of free decisions that use each head (T, N, H)."""
        return self.joint_and_heads[..., 1:]

    def environments(self, index: Tensor) -> Weights:
        """The part of some environments, by an index on the CPU."""
        here = index.to(self.value.device)
        return Weights(*(None if part is None else part[:, here] for part in self))  # pyright: ignore[reportArgumentType]


class Terms(NamedTuple):
    """The terms of the loss and measurements of a gradient step, each a weighted sum over its minibatch."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    auxiliary_loss: Tensor
    kl: Tensor
    clip_fraction: Tensor
    head_entropy: Tensor  # (H,)
    head_kl: Tensor  # (H,)


def mean_weights(minibatch: Batch) -> Weights:
    """The weights of a whole minibatch."""
    rollout, contribution = minibatch.rollout, None
    if rollout.contribution is not None:
        contribution = losses.mean_weights(rollout.contribution.isfinite() & rollout.valid.unsqueeze(-1))
    heads = minibatch.head_used.shape[-1]
    masks = [minibatch.free.unsqueeze(-1), minibatch.head_used, rollout.valid.unsqueeze(-1), minibatch.has_choice]
    each = losses.head_mean_weights(torch.cat(masks, -1))  # in one call
    joint_and_heads, value, entropy = each.split([1 + heads, 1, heads], -1)
    return Weights(joint_and_heads, entropy, value.squeeze(-1), contribution)


def ppo_terms(
    network: nn.Module,
    part: Batch,
    weights: Weights,
    entropy_weights: Tensor,
    value_mean_std: tuple[Tensor, Tensor],
    config: PPOConfig,
) -> Terms:
    """PPO's loss on a micro-batch: surrogate + value loss + auxiliary loss - entropy bonus."""
    rollout = part.rollout
    output = network(rollout.observation, part.state, part.segments)
    log_prob, entropy = part.reading.evaluate(output.logits)
    head_log_ratio = log_prob - part.log_prob
    log_ratio = head_log_ratio.sum(-1)
    if config.surrogate == "joint":
        surrogate = losses.clipped_surrogate(log_ratio, part.advantage, clip_range=config.clip_range)
        policy_loss = (surrogate * weights.policy).sum()
    else:
        advantage = part.advantage.unsqueeze(-1)
        surrogate = losses.clipped_surrogate(head_log_ratio, advantage, clip_range=config.clip_range)
        policy_loss = (surrogate * weights.heads).sum()
    mean, std = value_mean_std
    target, old = (part.target - mean) / std, (part.value - mean) / std
    value_error = losses.value_loss(output.value, target, old, clip_range=config.value_clip_range)
    value_loss = (value_error * weights.value).sum()
    auxiliary = torch.zeros_like(value_loss)
    if output.contribution is not None and rollout.contribution is not None and weights.contribution is not None:
        error = losses.contribution_loss(output.contribution, rollout.contribution)
        auxiliary = (error * weights.contribution).sum()
    head_entropy = (entropy * weights.entropy).sum((0, 1))  # (H,)
    loss = (
        policy_loss
        + config.value_coefficient * value_loss
        + config.auxiliary_coefficient * auxiliary
        - (entropy_weights * head_entropy).sum()
    )
    with torch.no_grad():
        outside = (log_ratio.exp() - 1).abs() > config.clip_range
        log_ratios = torch.cat([log_ratio.unsqueeze(-1), head_log_ratio], -1)  # (T, N, 1 + H)
        kl = (losses.kl_estimate(log_ratios) * weights.joint_and_heads).sum((0, 1))  # (1 + H,)
        return Terms(
            loss=loss,
            policy_loss=policy_loss,
            value_loss=value_loss,
            auxiliary_loss=auxiliary,
            kl=kl[0],
            clip_fraction=(outside * weights.policy).sum(),
            head_entropy=head_entropy,
            head_kl=kl[1:],
        )


def step_means(steps: list[tuple[Terms, Tensor]]) -> dict[str, Tensor]:
    """Means over the gradient steps of an update, each given with its gradient norms (1 + H,)."""
    if not steps:
        return {}
    terms, norms = zip(*steps, strict=True)
    names = ("policy_loss", "value_loss", "auxiliary_loss", "clip_fraction", "head_kl")
    means = {name: torch.stack([getattr(step, name) for step in terms]).mean(0) for name in names}
    norm = torch.stack(norms).mean(0)
    return means | {"gradient_norm": norm[0], "head_gradient_norm": norm[1:]}


@torch.no_grad()
def ratio_statistics(network: nn.Module, batch: Batch, thresholds: Thresholds) -> dict[str, Tensor]:
    """The probability ratios after an update, and the most extreme decisions with the head that moved most."""
    rollout = batch.rollout
    output = network(rollout.observation, rollout.state, rollout.segments)
    moved = torch.where(batch.free.unsqueeze(-1), batch.reading.evaluate(output.logits)[0] - batch.log_prob, 0.0)
    log_ratio, weights = moved.sum(-1), losses.mean_weights(batch.free)
    ratio, count = log_ratio.exp(), min(MAX_ALARMS, log_ratio.numel())
    worst = torch.cat([log_ratio.flatten().topk(count, largest=largest).indices for largest in (True, False)])
    return {
        "kl_after": (losses.kl_estimate(log_ratio) * weights).sum(),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
        "ratio_exploded": ((ratio > thresholds.ratio_high) * weights).sum(),
        "ratio_collapsed": ((ratio < thresholds.ratio_low) * weights).sum(),
        "worst_index": worst,
        "worst_ratio": ratio.flatten()[worst],
        "worst_head": moved.flatten(0, 1)[worst].abs().argmax(-1),
    }

"""PPO's losses and returns as pure functions: tensors in, tensors out, no state.

Shapes are (T, N), or (T, N, H) per head. Means are sums with weights that add up to 1 over a minibatch, so that the
parts of a minibatch add up to the whole. A head's weights cover the decisions where it matters, and each head counts by
its own mean: a head that matters rarely learns as fast as one that always does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_weights(mask: Tensor) -> Tensor:
    """Weights (T, N, ...) that turn a sum into the mean over a mask; all zero if it is empty."""
    return mask / mask.sum().clamp(min=1)


def head_mean_weights(mask: Tensor) -> Tensor:
    """The same for each head alone (T, N, H)."""
    return mask / mask.sum((0, 1)).clamp(min=1)


def moments(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over a mask, both 0 if it is empty; nothing is read from the device."""
    count = mask.sum().clamp(min=1)
    mean = torch.where(mask, values, 0.0).sum() / count
    return mean, torch.where(mask, (values - mean) ** 2, 0.0).sum() / count


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, *, clip_range: float) -> Tensor:
    """Pessimistic surrogate loss of each decision (Schulman et al. 2017, eq. 7), negated to be minimised."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    # The minimum makes the bound pessimistic: gains are capped, losses never are.
    return -torch.minimum(ratio * advantage, clipped * advantage)


def value_loss(value: Tensor, target: Tensor, old_value: Tensor, *, clip_range: float | None = None) -> Tensor:
    """Half the squared error of each value; with `clip_range`, of the worse of it and a value held near the old one.

    Clipping compares with a prediction that is stale after the first ppo epoch, so it is off by default.
    """
    loss = (value - target) ** 2
    if clip_range is not None:
        held = old_value + (value - old_value).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, (held - target) ** 2)
    return loss / 2


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Estimate of KL(old || new) from one decision: r - 1 - log r, never negative, unbiased."""
    return log_ratio.exp() - 1 - log_ratio


def contribution_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Huber loss of each predicted contribution, in points of 100 (T, N, S); 0 where the target is not known."""
    points = 100 * torch.nan_to_num(target).clamp(-1, 1)
    return torch.nn.functional.smooth_l1_loss(predicted, points, reduction="none") * target.isfinite()


def advantages(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimates (T, N), each environment for itself.

    `next_value` is the value of the state after each step; a terminal counts as 0. `ended` is True where what follows
    belongs to another episode.
    """
    result = reward + gamma * next_value * ~terminated - value
    carry = gamma * gae_lambda * ~ended
    for step in range(len(reward) - 2, -1, -1):
        result[step].addcmul_(carry[step], result[step + 1])
    return result


def normalized(values: Tensor, mask: Tensor, *, floor: float = 1e-3) -> tuple[Tensor, Tensor, Tensor]:
    """Values with mean 0 and deviation 1 over a mask, 0 elsewhere, and the mean and deviation they had.

    The divisor has a floor.
    """
    mean, variance = moments(values, mask)
    std = variance.sqrt()
    return torch.where(mask, (values - mean) / std.clamp(min=floor), 0.0), mean, std

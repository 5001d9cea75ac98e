"""PPO's losses and advantages as pure functions: tensors in, tensors out, no state.

Shapes are (T, N), or (T, N, H) per head. A mean is a sum with weights that add up to 1 over the minibatch, so that the
micro-batches of a minibatch add up to the whole. A head's weights cover only the decisions that use it: a head that is
rarely used learns as fast as one that always is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_weights(mask: Tensor) -> Tensor:
    """Weights (T, N, ...) whose weighted sum is the mean over a mask; all zero if the mask is empty."""
    return mask / mask.sum().clamp(min=1)


def head_mean_weights(mask: Tensor) -> Tensor:
    """The same for each head separately (T, N, H)."""
    return mask / mask.sum((0, 1)).clamp(min=1)


def mean_variance(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over a mask, both 0 if it is empty; reads no value back from the device."""
    count = mask.sum().clamp(min=1)
    mean = torch.where(mask, values, 0.0).sum() / count
    return mean, torch.where(mask, (values - mean) ** 2, 0.0).sum() / count


def standardize(values: Tensor, mask: Tensor, *, min_std: float = 1e-3) -> tuple[Tensor, Tensor, Tensor]:
    """Values with mean 0 and standard deviation 1 over a mask, 0 elsewhere; and the mean and deviation before."""
    mean, variance = mean_variance(values, mask)
    std = variance.sqrt()
    return torch.where(mask, (values - mean) / std.clamp(min=min_std), 0.0), mean, std


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, *, clip_range: float) -> Tensor:
    """Clipped surrogate loss of each decision (Schulman et al. 2017, eq. 7), negated to be minimized."""
    ratio = log_ratio.exp()
    # The bound is pessimistic: gains are capped, losses never are. The minimum of the ratio and of its clipped value,
    # each times the advantage, is the same and takes four times as long to differentiate.
    rises = advantage > 0
    capped = torch.where(rises, ratio > 1 + clip_range, ratio < 1 - clip_range)
    bound = 1 + torch.where(rises, clip_range, -clip_range)
    return -torch.where(capped, bound, ratio) * advantage


def value_loss(value: Tensor, target: Tensor, old_value: Tensor, *, clip_range: float | None = None) -> Tensor:
    """Half the squared error of each value; with `clip_range`, the larger of it and that of the clipped value."""
    loss = (value - target) ** 2
    if clip_range is not None:
        clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
        loss = torch.maximum(loss, (clipped - target) ** 2)
    return loss / 2


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Estimate of KL(old || new) from one decision, r - 1 - log r: unbiased and never negative."""
    return log_ratio.exp() - 1 - log_ratio


def contribution_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Huber loss of each predicted contribution in percentage points (T, N, S); 0 where the target is unknown."""
    points = 100 * torch.nan_to_num(target).clamp(-1, 1)
    return torch.nn.functional.smooth_l1_loss(predicted, points, reduction="none") * target.isfinite()


def generalized_advantages(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    ended: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalized advantage estimates (T, N) (Schulman et al. 2016).

    `next_value` is the value of the state after each step, ignored after a terminal step. `ended` is True where the
    next step belongs to another episode.
    """
    result = reward + gamma * next_value * ~terminated - value
    carry = (gamma * gae_lambda * ~ended).unbind()
    steps = result.unbind()  # views: to index a tensor in every step would take longer than to compute
    for step in range(len(steps) - 2, -1, -1):
        steps[step].addcmul_(carry[step], steps[step + 1])
    return result

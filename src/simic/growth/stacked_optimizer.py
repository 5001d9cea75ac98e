"""AdamW and SGD with momentum for networks whose parameters are rows of one matrix.

Shapes: a matrix is (R, P): R networks (or seeds), P parameters each. Every row has its own learning rate and step
count, so a row learns exactly what it would learn alone; rows that are not active are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

OptimizerName = Literal["adamw", "sgd"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How hosts and seeds learn."""

    name: OptimizerName = "adamw"
    """adamw, or sgd with momentum."""
    beta1: float = 0.9
    """Decay of AdamW's mean, and SGD's momentum."""
    beta2: float = 0.999
    """Decay of AdamW's mean square."""
    epsilon: float = 1e-8
    """Keeps AdamW's division finite."""
    weight_decay: float = 0.01
    """Decoupled in AdamW, added to the gradient in SGD."""
    max_gradient_norm: float = 5.0
    """Each host's gradient, its seeds included, is clipped to this norm."""


@dataclass
class Moments:
    """What the optimizer remembers of every row."""

    mean: Tensor  # (R, P)
    square: Tensor  # (R, P)
    steps: Tensor  # (R,)

    @classmethod
    def zeros(cls, like: Tensor) -> Moments:
        """Of rows that have not learned yet."""
        return cls(torch.zeros_like(like), torch.zeros_like(like), like.new_zeros(like.shape[0]))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is remembered."""
        return self.mean, self.square, self.steps


def step(
    rows: Tensor,
    gradient: Tensor,
    moments: Moments,
    rate: Tensor,
    config: OptimizerConfig,
    active: Tensor | None = None,
) -> None:
    """One step in place; `rate` is the learning rate of every row (R,), `active` a mask (R,) or None for all."""
    if active is not None:
        chosen = active.nonzero().squeeze(1)
        part = Moments(*(tensor[chosen] for tensor in moments.tensors()))
        values = rows[chosen]
        _UPDATES[config.name](values, gradient[chosen], part, rate[chosen].unsqueeze(1), config)
        for tensor, new in zip((rows, *moments.tensors()), (values, *part.tensors()), strict=True):
            tensor[chosen] = new
        return
    _UPDATES[config.name](rows, gradient, moments, rate.unsqueeze(1), config)


def _adamw(rows: Tensor, gradient: Tensor, moments: Moments, rate: Tensor, config: OptimizerConfig) -> None:
    moments.steps += 1
    rows.mul_(1 - rate * config.weight_decay)
    moments.mean.lerp_(gradient, 1 - config.beta1)
    moments.square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    steps = moments.steps.unsqueeze(1)
    mean_share, square_share = 1 - config.beta1**steps, 1 - config.beta2**steps
    scale = moments.square.sqrt().div_(square_share.sqrt()).add_(config.epsilon)
    rows.sub_(moments.mean.div(scale).mul_(rate / mean_share))


def _sgd(rows: Tensor, gradient: Tensor, moments: Moments, rate: Tensor, config: OptimizerConfig) -> None:
    moments.steps += 1
    moments.mean.mul_(config.beta1).add_(gradient).add_(rows, alpha=config.weight_decay)
    rows.sub_(moments.mean * rate)


_UPDATES: dict[str, Callable[[Tensor, Tensor, Moments, Tensor, OptimizerConfig], None]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}

"""AdamW and SGD with momentum for networks whose parameters are rows of one matrix.

Shapes: a matrix is (R, P): R networks (or seeds), P parameters each. Every row has its own learning rate and step
count, so a row learns exactly what it would learn alone; rows that are not active are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from simic.stacked.parameters import StackedParameters

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
class OptimizerState:
    """What the optimizer remembers of every row."""

    mean: Tensor  # (R, P)
    square: Tensor  # (R, P)
    steps: Tensor  # (R,)

    @classmethod
    def zeros(cls, like: Tensor) -> OptimizerState:
        """Of rows that have not learned yet."""
        return cls(torch.zeros_like(like), torch.zeros_like(like), like.new_zeros(like.shape[0]))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is remembered."""
        return self.mean, self.square, self.steps


class StackedOptimizer:
    """Steps the rows of several matrices at once: it moves them, and what is remembered of them, into one vector.

    A row belongs to an entity (a host, or a seed whose parts are several rows), an entity to a host.
    """

    def __init__(
        self,
        matrices: Sequence[StackedParameters],
        entities: Sequence[np.ndarray],
        owners: Sequence[np.ndarray],
        config: OptimizerConfig,
    ) -> None:
        self.config, self.matrices = config, list(matrices)
        self._rows, self._mean, self._square = (
            torch.cat([getter(matrix).flatten() for matrix in matrices])
            for getter in (lambda m: m.rows, lambda m: m.moments.mean, lambda m: m.moments.square)
        )
        self._steps = torch.cat([matrix.moments.steps for matrix in matrices])
        self._entity = torch.from_numpy(np.concatenate(entities))
        self._owner = torch.from_numpy(np.concatenate(owners))
        widths = torch.tensor([m.rows.shape[1] for m in matrices]).repeat_interleave(
            torch.tensor([m.rows.shape[0] for m in matrices])
        )
        self._row_of = torch.arange(len(widths)).repeat_interleave(widths)  # of every element
        self._num_entities, self._num_hosts = int(self._entity.max()) + 1, int(self._owner.max()) + 1
        self._move_in()

    def gradients(self, total: Tensor, earlier: Sequence[Tensor] | None) -> list[Tensor]:
        """The gradient of `total` as one matrix (R, P) for each of ours, added to those of earlier parts."""
        leaves = [leaf for matrix in self.matrices for leaf in matrix.leaves.values()]
        found = iter(torch.autograd.grad(total, leaves, allow_unused=True))
        own = [matrix.gradient([next(found) for _ in matrix.leaves]) for matrix in self.matrices]
        return own if earlier is None else [new.add_(old) for new, old in zip(own, earlier, strict=True)]

    def step(self, gradients: Sequence[Tensor], rate: Tensor, active: Tensor) -> Tensor:
        """One step in place; `rate` is (N,), `active` says which rows learn. The gradient norm of every entity."""
        gradient = torch.cat([part.flatten() for part in gradients])
        squares = self._steps.new_zeros(len(self._steps)).index_add_(0, self._row_of, gradient.square())
        hosts = squares.new_zeros(self._num_hosts).index_add_(0, self._owner, squares)
        clip = (self.config.max_gradient_norm / (hosts.sqrt() + 1e-6)).clamp(max=1.0)
        self._steps += active
        _UPDATES[self.config.name](self, gradient, clip[self._owner], rate[self._owner] * active, active)
        return squares.new_zeros(self._num_entities).index_add_(0, self._entity, squares).sqrt()

    def _adamw(self, gradient: Tensor, clip: Tensor, rate: Tensor, active: Tensor) -> None:
        config, steps = self.config, self._steps.clamp(min=1)
        per_row = (
            clip,
            (1 - config.beta1) * active,
            (1 - config.beta2) * active,
            1 - rate * config.weight_decay,
            rate / (1 - config.beta1**steps),
            (1 - config.beta2**steps).sqrt(),
        )
        clip, mean_share, square_share, keep, rate, correction = torch.stack(per_row).index_select(1, self._row_of)
        gradient = gradient * clip
        self._mean.lerp_(gradient, mean_share)
        self._square.lerp_(gradient.square(), square_share)
        scale = self._square.sqrt().div_(correction).add_(config.epsilon)
        self._rows.mul_(keep).sub_(self._mean.div(scale).mul_(rate))

    def _sgd(self, gradient: Tensor, clip: Tensor, rate: Tensor, active: Tensor) -> None:
        momentum = 1 - active * (1 - self.config.beta1)
        clip, rate, active, momentum = torch.stack([clip, rate, active, momentum]).index_select(1, self._row_of)
        change = gradient.mul(clip).add_(self._rows, alpha=self.config.weight_decay).mul_(active)
        self._mean.mul_(momentum).add_(change)
        self._rows.sub_(self._mean * rate)

    def _move_in(self) -> None:
        element, row = 0, 0
        for matrix in self.matrices:
            shape, end = matrix.rows.shape, element + matrix.rows.numel()
            rows, mean, square = (v[element:end].view(shape) for v in (self._rows, self._mean, self._square))
            matrix.move_to(rows, OptimizerState(mean, square, self._steps[row : row + shape[0]]))
            element, row = end, row + shape[0]


_UPDATES = {"adamw": StackedOptimizer._adamw, "sgd": StackedOptimizer._sgd}

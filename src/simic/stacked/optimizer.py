"""AdamW and SGD with momentum for networks whose parameters are the rows of matrices.

Shapes: N hosts. A matrix is (R, P): R networks (or parts of seeds), P parameters each. Every row has its own learning
rate and step count, so it is updated as it would be alone; rows that are not learning stay unchanged.

All matrices are laid out in one vector, so that a step is a few operations on all hosts and seeds at once. Two hosts of
three parameters, and a seed of two parameters in host 1:

    matrices        hosts (2, 3)      seed group (1, 2)
    vector          h0 h0 h0 h1 h1 h1 s1 s1
    row             0  0  0  1  1  1  2  2         of each element
    entity          0        1        2            of each row: whose gradient norm is reported
    owner           0        1        1            of each row: the host whose gradient is clipped as a whole
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
    """Optimizer of hosts and seeds."""

    name: OptimizerName = "adamw"
    """adamw, or sgd with momentum."""
    beta1: float = 0.9
    """Decay of AdamW's first moment, or SGD's momentum."""
    beta2: float = 0.999
    """Decay of AdamW's second moment."""
    epsilon: float = 1e-8
    """Added to the denominator of AdamW."""
    weight_decay: float = 0.01
    """Decoupled in AdamW, added to the gradient in SGD."""
    max_gradient_norm: float = 5.0
    """Norm to which the gradient of each host, its seeds included, is clipped."""


@dataclass
class OptimizerState:
    """Moments and step count of every row."""

    mean: Tensor  # (R, P) first moment, or SGD's momentum buffer
    square: Tensor  # (R, P) second moment
    steps: Tensor  # (R,)

    @classmethod
    def zeros(cls, like: Tensor) -> OptimizerState:
        """The state of parameters (R, P) before their first step."""
        return cls(torch.zeros_like(like), torch.zeros_like(like), like.new_zeros(like.shape[0]))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All tensors; the first dimension is the row."""
        return self.mean, self.square, self.steps


class StackedOptimizer:
    """Updates the rows of several matrices at once; it moves them and their optimizer state into common memory.

    `entities` and `owners` have one array (R,) per matrix, see the example above. A seed with a gate has two rows.
    """

    def __init__(
        self,
        matrices: Sequence[StackedParameters],
        entities: Sequence[np.ndarray],
        owners: Sequence[np.ndarray],
        config: OptimizerConfig,
    ) -> None:
        self.config, self.matrices = config, list(matrices)
        states = [matrix.optimizer_state for matrix in matrices]
        self._rows = torch.cat([matrix.rows.flatten() for matrix in matrices])
        self._mean = torch.cat([state.mean.flatten() for state in states])
        self._square = torch.cat([state.square.flatten() for state in states])
        self._steps = torch.cat([state.steps for state in states])
        self._entity = torch.from_numpy(np.concatenate(entities))
        self._owner = torch.from_numpy(np.concatenate(owners))
        widths = torch.tensor([m.rows.shape[1] for m in matrices]).repeat_interleave(
            torch.tensor([m.rows.shape[0] for m in matrices])
        )
        self._row_of = torch.arange(len(widths)).repeat_interleave(widths)  # of every element
        self.num_entities, self._num_hosts = int(self._entity.max()) + 1, int(self._owner.max()) + 1
        element, row = 0, 0
        for matrix in self.matrices:
            shape, end = matrix.rows.shape, element + matrix.rows.numel()
            rows, mean, square = (v[element:end].view(shape) for v in (self._rows, self._mean, self._square))
            matrix.move_to(rows, OptimizerState(mean, square, self._steps[row : row + shape[0]]))
            element, row = end, row + shape[0]

    def gradients(self, total: Tensor, earlier: Sequence[Tensor] | None) -> list[Tensor]:
        """The gradient of `total` as one matrix (R, P) per matrix of parameters, added to `earlier` ones."""
        leaves = [leaf for matrix in self.matrices for leaf in matrix.leaves.values()]
        found = iter(torch.autograd.grad(total, leaves, allow_unused=True))
        own = [matrix.flatten_gradients([next(found) for _ in matrix.leaves]) for matrix in self.matrices]
        return own if earlier is None else [new.add_(old) for new, old in zip(own, earlier, strict=True)]

    def step(self, gradients: Sequence[Tensor], rate: Tensor, active: Tensor) -> Tensor:
        """One step in place with learning rates (N,); `active` is 1 for rows that learn, else 0. Norms per entity."""
        gradient = torch.cat([part.flatten() for part in gradients])
        # Squared norms by row, then by host; clipping follows torch.nn.utils.clip_grad_norm_.
        squares = self._steps.new_zeros(len(self._steps)).index_add_(0, self._row_of, gradient.square())
        hosts = squares.new_zeros(self._num_hosts).index_add_(0, self._owner, squares)
        clip = (self.config.max_gradient_norm / (hosts.sqrt() + 1e-6)).clamp(max=1.0)
        self._steps += active
        _UPDATES[self.config.name](self, gradient, clip[self._owner], rate[self._owner] * active, active)
        return squares.new_zeros(self.num_entities).index_add_(0, self._entity, squares).sqrt()

    def _adamw(self, gradient: Tensor, clip: Tensor, rate: Tensor, active: Tensor) -> None:
        config, steps = self.config, self._steps.clamp(min=1)
        # With active = 0 every factor below is neutral: the row and its moments keep their values exactly.
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


_UPDATES = {"adamw": StackedOptimizer._adamw, "sgd": StackedOptimizer._sgd}

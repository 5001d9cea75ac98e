"""AdamW and SGD with momentum for networks whose parameters are the rows of matrices.

Shapes: N hosts, E elements of all parameters. A matrix is (R, P): R networks (or parts of seeds), P parameters each.
Every row has its own learning rate and step count, so it is updated as it would be alone; rows that are not learning
stay unchanged.

All matrices are laid out in one vector, so that a step is a few operations on all hosts and seeds at once. Two hosts of
three parameters, and a seed of two parameters in host 1:

    matrices        hosts (2, 3)      seed group (1, 2)
    vector          h0 h0 h0 h1 h1 h1 s1 s1
    row             0  0  0  1  1  1  2  2         of each element
    entity          0        1        3            of each row: whose gradient norm is reported
    owner           0        1        1            of each row: the host whose gradient is clipped as a whole

Entities are numbered hosts first, then slot by slot: the seed in slot s of host n is (s + 1) N + n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from simic.stacked.compiled.adamw import step_adamw

if TYPE_CHECKING:
    from simic.stacked.parameters import StackedParameters
    from simic.stacked.precision import LossScale

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


class _Factors(NamedTuple):
    """What all steps with the same learning rates have in common."""

    rate: Tensor  # (N,) from which it was computed
    active: Tensor | None  # (rows,) likewise
    per_row: Tensor  # (rows,) learning rate
    keep: Tensor  # (E,) what weight decay leaves of each element
    learning: Tensor | None  # (E,) 1 or 0; None if all rows are active


class StackedOptimizer:
    """Updates the rows of several matrices at once; it moves them and their optimizer state into common memory.

    `entities` and `owners` have one array (R,) per matrix, see the example above. The hosts' matrix is the first.
    """

    def __init__(
        self,
        matrices: Sequence[StackedParameters],
        entities: Sequence[np.ndarray],
        owners: Sequence[np.ndarray],
        config: OptimizerConfig,
        *,
        num_slots: int,
    ) -> None:
        self.config, self.matrices = config, list(matrices)
        states = [matrix.optimizer_state for matrix in matrices]
        rows = [matrix.rows.flatten() for matrix in matrices]
        self.vector = torch.cat(rows)
        """All parameters."""
        self._mean = torch.cat([state.mean.flatten() for state in states])
        self._square = torch.cat([state.square.flatten() for state in states])
        self._steps = torch.cat([state.steps for state in states])
        device = self.vector.device
        self._entity = torch.from_numpy(np.concatenate(entities)).to(device)
        self._owner = torch.from_numpy(np.concatenate(owners)).to(device)
        widths = np.repeat([m.rows.shape[1] for m in matrices], [m.rows.shape[0] for m in matrices])
        self._widths = torch.from_numpy(widths).to(device)  # of every row
        self._starts = np.concatenate([[0], np.cumsum(widths)])  # and where it begins
        self._row_of = torch.from_numpy(np.repeat(np.arange(len(widths)), widths)).to(device)  # of every element
        self._factors: _Factors | None = None
        self._arguments: tuple | None = None
        self._num_hosts = len(owners[0])
        self.num_entities = (1 + num_slots) * self._num_hosts
        self._units: list[StackedParameters | Tensor] = list(matrices)
        """What gradients are taken of, in the order of the vector: matrices, or several of them as one tensor."""
        element, row = 0, 0
        for matrix in self.matrices:
            shape, end = matrix.rows.shape, element + matrix.rows.numel()
            rows, mean, square = (v[element:end].view(shape) for v in (self.vector, self._mean, self._square))
            matrix.move_to(rows, OptimizerState(mean, square, self._steps[row : row + shape[0]]))
            element, row = end, row + shape[0]

    def join(self, matrices: Sequence[StackedParameters]) -> Tensor:
        """The parameters of some adjacent matrices as one vector. From then on it receives their gradients."""
        first = next(index for index, unit in enumerate(self._units) if unit is matrices[0])
        assert all(unit is own for unit, own in zip(self._units[first:], matrices, strict=False)), "not adjacent"
        start, size = matrices[0].rows.storage_offset(), sum(matrix.rows.numel() for matrix in matrices)
        vector = self.vector[start : start + size].detach().requires_grad_()
        self._units[first : first + len(matrices)] = [vector]
        return vector

    def gradient(self, total: Tensor, earlier: Tensor | None = None) -> Tensor:
        """The gradient of `total` with respect to all parameters as one vector, added to an earlier one."""
        leaves = [[unit] if isinstance(unit, Tensor) else [*unit.leaves.values()] for unit in self._units]
        found = iter(torch.autograd.grad(total, [leaf for own in leaves for leaf in own], allow_unused=True))
        parts = []
        for unit, own in zip(self._units, leaves, strict=True):
            gradients = [next(found) for _ in own]
            if isinstance(unit, Tensor):
                parts.append(torch.zeros_like(unit) if gradients[0] is None else gradients[0])
            else:
                parts.append(unit.flatten_gradients(gradients).flatten())
        gradient = torch.cat(parts)
        return gradient if earlier is None else gradient.add_(earlier)

    def step(
        self, gradient: Tensor, rate: Tensor, active: Tensor | None = None, loss_scale: LossScale | None = None
    ) -> Tensor:
        """One step in place with learning rates (N,). Returns the gradient norm of every entity.

        `active` is 1 for rows that learn, else 0; None if all do. Gradients of scaled losses are scaled back; hosts
        where they overflow skip the step, with norm 0. What follows from `rate` and `active` is kept for the next step
        with the same two tensors, so they must not be changed in place. The gradient may be overwritten.
        """
        if loss_scale is None and self.config.name == "adamw" and gradient.device.type == "cpu":
            return self._step_compiled(gradient, rate, active)
        squares = torch.segment_reduce(gradient.square(), "sum", lengths=self._widths, unsafe=True)
        norms = squares.new_zeros(self.num_entities).index_add_(0, self._entity, squares).view(-1, self._num_hosts)
        total, norms = norms.sum(0).sqrt_(), norms.sqrt()
        if loss_scale is not None:
            finite = total.isfinite()
            # A host that overflows has zeros everywhere: its NaN times a zero share would still reach its moments.
            back = torch.where(finite, 1 / loss_scale.scale, 0.0)
            total, norms = (torch.where(finite, each, 0.0) * back for each in (total, norms))
            loss_scale.update(finite)
            learns = finite[self._owner]
            active = learns.to(squares.dtype) if active is None else active * learns
            gradient = torch.where(self._spread(learns), gradient * self._spread(back[self._owner]), 0.0)
        self._clip(gradient, total)
        self._steps += 1.0 if active is None else active
        if self._factors is None or self._factors.rate is not rate or self._factors.active is not active:
            self._factors = self._compute_factors(rate, active)
        _UPDATES[self.config.name](self, gradient, self._factors)
        return norms.flatten()

    def _step_compiled(self, gradient: Tensor, rate: Tensor, active: Tensor | None) -> Tensor:
        """The same by the compiled function, whose arguments but these are made once."""
        if self._arguments is None:
            config = self.config
            numbers = (config.beta1, config.beta2, config.epsilon, config.weight_decay, config.max_gradient_norm)
            vectors = [tensor.numpy() for tensor in (self.vector, self._mean, self._square, self._steps)]
            rows = self._starts, self._owner.numpy(), self._entity.numpy()
            every = np.ones(len(self._owner), dtype=bool)
            self._arguments = vectors, rows, every, np.array(numbers), np.empty_like(vectors[0], shape=self._num_hosts)
        vectors, rows, every, numbers, totals = self._arguments
        norms = gradient.new_empty(self.num_entities)
        learns = every if active is None else active.numpy() > 0
        step_adamw(*vectors, gradient.numpy(), *rows, rate.numpy(), learns, numbers, norms.numpy(), totals)
        return norms

    def _clip(self, gradient: Tensor, norms: Tensor) -> None:
        """Clip the gradient of every host with norms (N,), in place, as torch.nn.utils.clip_grad_norm_ does."""
        limit = self.config.max_gradient_norm
        # On the CPU it costs nothing to look. NaN is not below the limit.
        if norms.device.type == "cpu" and norms.max().item() + 1e-6 <= limit:
            return
        clip = (limit / (norms + 1e-6)).clamp_(max=1.0)
        gradient.mul_(self._spread(clip[self._owner]))

    def _compute_factors(self, rate: Tensor, active: Tensor | None) -> _Factors:
        own_rate = rate[self._owner] if active is None else rate[self._owner] * active
        return _Factors(
            rate=rate,
            active=active,
            per_row=own_rate,
            keep=self._spread(1 - own_rate * self.config.weight_decay),
            learning=None if active is None else self._spread(active),
        )

    def _spread(self, per_row: Tensor) -> Tensor:
        """A number per row (rows,) as one per element (E,)."""
        return per_row.index_select(0, self._row_of)

    def _adamw(self, gradient: Tensor, factors: _Factors) -> None:
        config, steps = self.config, self._steps.clamp(min=1)
        # With a share of 0 and a rate of 0 a row that is not active and its moments keep their values exactly.
        mean_share, square_share = 1 - config.beta1, 1 - config.beta2
        if factors.learning is not None:
            mean_share, square_share = mean_share * factors.learning, square_share * factors.learning
        correction = (1 - config.beta2**steps).sqrt_()
        rate = self._spread(correction.mul(factors.per_row).div_(1 - config.beta1**steps))
        self._mean.lerp_(gradient, mean_share)
        self._square.lerp_(gradient.square_(), square_share)
        # mean / (sqrt(square) / correction + epsilon), with numerator and denominator times the correction
        scale = torch.sqrt(self._square, out=gradient).add_(self._spread(correction.mul_(config.epsilon)))
        self.vector.mul_(factors.keep).addcdiv_(rate.mul_(self._mean), scale, value=-1.0)

    def _sgd(self, gradient: Tensor, factors: _Factors) -> None:
        change = gradient.add_(self.vector, alpha=self.config.weight_decay)
        if factors.learning is None:
            self._mean.mul_(self.config.beta1).add_(change)
        else:
            momentum = 1 - factors.learning * (1 - self.config.beta1)
            self._mean.mul_(momentum).add_(change.mul_(factors.learning))
        self.vector.sub_(self._spread(factors.per_row).mul_(self._mean))


_UPDATES = {"adamw": StackedOptimizer._adamw, "sgd": StackedOptimizer._sgd}

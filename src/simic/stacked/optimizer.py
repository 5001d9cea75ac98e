"""AdamW and SGD with momentum for networks whose parameters are the rows of matrices.

Shapes: N hosts. A matrix is (R, P): R networks (or parts of seeds), P parameters each. Every row has its own learning
rate and step count, so it is updated as it would be alone; rows that are not learning stay unchanged.

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

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
        self._rows = torch.cat([matrix.rows.flatten() for matrix in matrices])
        self._mean = torch.cat([state.mean.flatten() for state in states])
        self._square = torch.cat([state.square.flatten() for state in states])
        self._steps = torch.cat([state.steps for state in states])
        device = self._rows.device
        self._entity = torch.from_numpy(np.concatenate(entities)).to(device)
        self._owner = torch.from_numpy(np.concatenate(owners)).to(device)
        widths = np.repeat([m.rows.shape[1] for m in matrices], [m.rows.shape[0] for m in matrices])
        self._widths = torch.from_numpy(widths).to(device)  # of every row
        row_of = np.repeat(np.arange(len(widths)), widths)[matrices[0].rows.numel() :]
        self._row_of = torch.from_numpy(row_of).to(device)  # of every element of the seeds
        self._num_hosts = len(owners[0])
        self.num_entities = (1 + num_slots) * self._num_hosts
        self._units: list[StackedParameters | Tensor] = list(matrices)
        """What gradients are taken of, in the order of the vector: matrices, or several of them as one tensor."""
        element, row = 0, 0
        for matrix in self.matrices:
            shape, end = matrix.rows.shape, element + matrix.rows.numel()
            rows, mean, square = (v[element:end].view(shape) for v in (self._rows, self._mean, self._square))
            matrix.move_to(rows, OptimizerState(mean, square, self._steps[row : row + shape[0]]))
            element, row = end, row + shape[0]

    def join(self, matrices: Sequence[StackedParameters]) -> Tensor:
        """The parameters of some adjacent matrices as one vector. From then on it receives their gradients."""
        first = next(index for index, unit in enumerate(self._units) if unit is matrices[0])
        assert all(unit is own for unit, own in zip(self._units[first:], matrices, strict=False)), "not adjacent"
        start, size = matrices[0].rows.storage_offset(), sum(matrix.rows.numel() for matrix in matrices)
        vector = self._rows[start : start + size].detach().requires_grad_()
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
        where they overflow skip the step, with norm 0.
        """
        squares = torch.segment_reduce(gradient.square(), "sum", lengths=self._widths, unsafe=True)
        norms = squares.new_zeros(self.num_entities).index_add_(0, self._entity, squares).view(-1, self._num_hosts)
        total, norms = norms.sum(0).sqrt(), norms.sqrt()
        back = 1.0
        if loss_scale is not None:
            finite = total.isfinite()
            # A host that overflows has zeros everywhere: its NaN times a zero share would still reach its moments.
            back = torch.where(finite, 1 / loss_scale.scale, 0.0)
            total, norms = (torch.where(finite, each, 0.0) * back for each in (total, norms))
            loss_scale.update(finite)
            learns = finite[self._owner]
            active = learns.to(squares.dtype) if active is None else active * learns
            gradient = torch.where(learns.repeat_interleave(self._widths, output_size=gradient.numel()), gradient, 0.0)
        # Clipping follows torch.nn.utils.clip_grad_norm_.
        clip = (self.config.max_gradient_norm / (total + 1e-6)).clamp(max=1.0) * back
        self._steps += 1.0 if active is None else active
        own_rate = rate[self._owner] if active is None else rate[self._owner] * active
        _UPDATES[self.config.name](self, gradient, clip[self._owner], own_rate, active)
        return norms.flatten()

    def _adamw(self, gradient: Tensor, clip: Tensor, rate: Tensor, active: Tensor | None) -> None:
        config, steps = self.config, self._steps.clamp(min=1)
        per_row = [
            clip,
            1 - rate * config.weight_decay,
            rate / (1 - config.beta1**steps),
            (1 - config.beta2**steps).sqrt(),
        ]
        # With active = 0 every factor below is neutral: the row and its moments keep their values exactly.
        per_row += [] if active is None else [(1 - config.beta1) * active, (1 - config.beta2) * active]
        for part, factors in self._parts(torch.stack(per_row)):
            rows, mean, square, own = (part(v) for v in (self._rows, self._mean, self._square, gradient))
            clip, keep, rate, correction, *shares = factors
            mean_share, square_share = shares or (1 - config.beta1, 1 - config.beta2)
            own = own * clip
            mean.lerp_(own, mean_share)
            square.lerp_(own.square_(), square_share)
            scale = square.sqrt().div_(correction).add_(config.epsilon)
            rows.mul_(keep).sub_(torch.div(mean, scale).mul_(rate))

    def _parts(self, per_row: Tensor) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
        """The hosts, then the seeds: how to take them of a vector, and factors (F, rows) that broadcast over them.

        Hosts are a matrix, so a factor per row broadcasts; seeds differ in length, so each element gets a copy.
        """
        shape = self.matrices[0].rows.shape
        size = shape.numel()
        yield lambda vector: vector[:size].view(shape), per_row[:, : shape[0], None]
        if len(self.matrices) > 1:
            yield lambda vector: vector[size:], per_row.index_select(1, self._row_of)

    def _sgd(self, gradient: Tensor, clip: Tensor, rate: Tensor, active: Tensor | None) -> None:
        active = torch.ones_like(clip) if active is None else active
        per_row = torch.stack([clip, rate, active, 1 - active * (1 - self.config.beta1)])
        for part, factors in self._parts(per_row):
            rows, mean, own = (part(v) for v in (self._rows, self._mean, gradient))
            clip, rate, active, momentum = factors
            change = own.mul(clip).add_(rows, alpha=self.config.weight_decay).mul_(active)
            mean.mul_(momentum).add_(change)
            rows.sub_(mean * rate)


_UPDATES = {"adamw": StackedOptimizer._adamw, "sgd": StackedOptimizer._sgd}

"""Parameters of R networks of one structure as the rows of one matrix, with their optimizer state.

Shapes: R networks (the owners of the rows), P parameters each. A layer with weight (3, 2) and bias (3,), stacked for
the hosts 0, 3 and 4:

                  weight (3, 2)            bias (3,)
    row 0, host 0 [w00 w01 w10 w11 w20 w21 b0 b1 b2]
    row 1, host 3 [ ...                            ]      rows (3, 9)
    row 2, host 4 [ ...                            ]

    leaves: weight (3, 3, 2), bias (3, 3)

The leaves share the memory of the rows: layers and autograd use the leaves, optimizer and snapshot the rows. Running
statistics of batch norms are not learned, so they lie beside the rows, one tensor (R, *shape) per name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from simic.stacked.optimizer import OptimizerState

Parameters = Mapping[str, Tensor]
"""Stacked parameters (R, *shape) by name."""
Rows = Tensor | slice | None
"""Which rows of stacked tensors: indices, a range, or all of them."""


class StackedParameters:
    """Rows (R, P), and every named parameter (R, *shape) as a leaf of autograd that shares their memory.

    `aliases` maps further names of tied parameters to the name used in `shapes`. `statistics` are tensors (R, *shape)
    by name; batch norms update them in place.
    """

    def __init__(
        self,
        rows: Tensor,
        shapes: Mapping[str, torch.Size],
        optimizer_state: OptimizerState | None = None,
        aliases: Mapping[str, str] | None = None,
        statistics: Parameters | None = None,
    ) -> None:
        self.shapes, self.aliases, self.statistics = dict(shapes), dict(aliases or {}), dict(statistics or {})
        rows = rows.contiguous()
        self.move_to(rows, optimizer_state or OptimizerState.zeros(rows))

    def move_to(self, rows: Tensor, optimizer_state: OptimizerState) -> None:
        """Use other memory that already holds the same values."""
        self.rows, self.optimizer_state = rows, optimizer_state
        self.leaves: dict[str, Tensor] = {}
        start = 0
        for name, shape in self.shapes.items():
            view = self.rows[:, start : start + shape.numel()].unflatten(1, shape or (1,))
            view = view if shape else view.squeeze(1)
            self.leaves[name] = view.detach().requires_grad_()
            start += shape.numel()
        tied = {alias: self.leaves[name] for alias, name in self.aliases.items()}
        self.by_name = self.leaves | tied | self.statistics
        """The leaves under all their names, aliases included, and the statistics."""

    def tensors(self) -> list[Tensor]:
        """Weights, optimizer state and statistics, each with one row per network."""
        statistics = {id(tensor): tensor for tensor in self.statistics.values()}  # once each, whatever their names
        return [self.rows, *self.optimizer_state.tensors(), *statistics.values()]

    @classmethod
    def of_modules(cls, modules: Sequence[nn.Module], like: Tensor) -> StackedParameters:
        """One row per module; all modules have the same structure."""
        first = {parameter: name for name, parameter in modules[0].named_parameters()}
        names = modules[0].named_parameters(remove_duplicate=False)
        return cls(
            torch.stack([row_of(module, like) for module in modules]),
            {name: parameter.shape for parameter, name in first.items()},
            aliases={name: first[parameter] for name, parameter in names if name != first[parameter]},
            statistics=stack_statistics(modules, like.device),
        )

    def select(self, chosen: Tensor) -> StackedParameters:
        """A copy of some rows with their optimizer state."""
        state = OptimizerState(*(tensor[chosen] for tensor in self.optimizer_state.tensors()))
        statistics = {name: tensor[chosen] for name, tensor in self.statistics.items()}
        return StackedParameters(self.rows[chosen], self.shapes, state, self.aliases, statistics)

    def append(self, rows: Tensor) -> StackedParameters:
        """A copy with new rows at the end, whose optimizer state is empty."""
        assert not self.statistics, "only hosts keep statistics, and their number is fixed"
        pairs = zip(self.optimizer_state.tensors(), OptimizerState.zeros(rows).tensors(), strict=True)
        state = OptimizerState(*(torch.cat(pair) for pair in pairs))
        return StackedParameters(torch.cat([self.rows, rows]), self.shapes, state, self.aliases)

    def extend(self, other: StackedParameters) -> StackedParameters:
        """A copy with the rows of another one at the end, their optimizer state included."""
        assert not self.statistics, "only hosts keep statistics, and their number is fixed"
        pairs = zip(self.optimizer_state.tensors(), other.optimizer_state.tensors(), strict=True)
        state = OptimizerState(*(torch.cat(pair) for pair in pairs))
        return StackedParameters(torch.cat([self.rows, other.rows]), self.shapes, state, self.aliases)

    def flatten_gradients(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradients of the leaves, in their order, as one matrix (R, P); None becomes zeros."""
        parts = [
            self.rows.new_zeros(self.rows.shape[0], shape.numel()) if part is None else part.reshape(len(self.rows), -1)
            for part, shape in zip(gradients, self.shapes.values(), strict=True)
        ]
        return torch.cat(parts, dim=1)


def row_of(module: nn.Module, like: Tensor) -> Tensor:
    """All parameters of a module as one vector with the dtype and device of `like`."""
    parameters = [parameter.detach().flatten() for parameter in module.parameters()]
    return torch.cat(parameters).to(like) if parameters else like.new_zeros(0)


def batch_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The batch norms in a module that keep running statistics, under all their names."""
    kind = nn.modules.batchnorm._BatchNorm
    parts = module.named_modules(remove_duplicate=False)
    return {name: part for name, part in parts if isinstance(part, kind) and part.running_mean is not None}


def statistics_of(module: nn.Module) -> dict[str, Tensor]:
    """The running statistics in a module, under all their names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, norm in batch_norms(module).items()
        for name, buffer in norm._buffers.items()
        if buffer is not None
    }


def stack_statistics(modules: Sequence[nn.Module], device: torch.device) -> dict[str, Tensor]:
    """The statistics of networks of one structure (R, *shape) by name; those of one norm share their memory."""
    every, stacked = [statistics_of(module) for module in modules], dict[int, Tensor]()
    for name, buffer in every[0].items():
        if id(buffer) not in stacked:
            stacked[id(buffer)] = torch.stack([own[name].detach() for own in every]).to(device)
    return {name: stacked[id(buffer)] for name, buffer in every[0].items()}


def take_rows(parameters: Parameters, rows: Rows, *, constant: bool = False) -> Parameters:
    """Some rows of each parameter; `constant` cuts them off from autograd, and statistics are copies then."""
    if constant:
        parameters = {name: leaf.detach() if leaf.requires_grad else leaf.clone() for name, leaf in parameters.items()}
    if rows is None:
        return parameters
    if isinstance(rows, slice):
        return {name: leaf[rows] for name, leaf in parameters.items()}
    return {name: leaf.index_select(0, rows) for name, leaf in parameters.items()}


def part_of(parameters: Parameters, name: str) -> Parameters:
    """The parameters of a child module, under the names the child uses."""
    return {key[len(name) + 1 :]: value for key, value in parameters.items() if key.startswith(name + ".")}

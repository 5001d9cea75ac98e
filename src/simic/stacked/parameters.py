"""The parameters of R networks of one structure as rows of one matrix, with what the optimizer remembers of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from simic.stacked.optimizer import OptimizerState


class StackedParameters:
    """Rows (R, P), and a view (R, *shape) of every named parameter that autograd takes for a leaf.

    `aliases` are further names of shared (tied) parameters, each with the name that `shapes` has it under.
    """

    def __init__(
        self,
        rows: Tensor,
        shapes: Mapping[str, torch.Size],
        moments: OptimizerState | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.shapes, self.aliases = dict(shapes), dict(aliases or {})
        rows = rows.contiguous()
        self.move_to(rows, OptimizerState.zeros(rows) if moments is None else moments)

    def move_to(self, rows: Tensor, moments: OptimizerState) -> None:
        """Live in other memory from now on; it holds the same numbers already."""
        self.rows, self.moments = rows, moments
        self.leaves: dict[str, Tensor] = {}
        start = 0
        for name, shape in self.shapes.items():
            view = self.rows[:, start : start + shape.numel()].unflatten(1, shape or (1,))
            view = view if shape else view.squeeze(1)
            self.leaves[name] = view.detach().requires_grad_()
            start += shape.numel()
        self.by_name = self.leaves | {alias: self.leaves[name] for alias, name in self.aliases.items()}
        """The leaves under all their names."""

    @classmethod
    def of_modules(cls, modules: Sequence[nn.Module], like: Tensor) -> StackedParameters:
        """One row per module; all have the same structure."""
        shapes = {name: parameter.shape for name, parameter in modules[0].named_parameters()}
        return cls(torch.stack([row_of(module, like) for module in modules]), shapes, aliases=aliases_of(modules[0]))

    def select(self, chosen: Tensor) -> StackedParameters:
        """A copy of some rows, with their moments."""
        moments = OptimizerState(*(tensor[chosen] for tensor in self.moments.tensors()))
        return StackedParameters(self.rows[chosen], self.shapes, moments, self.aliases)

    def joined(self, other: StackedParameters) -> StackedParameters:
        """A copy with the other's rows below."""
        pairs = zip(self.moments.tensors(), other.moments.tensors(), strict=True)
        moments = OptimizerState(*(torch.cat(pair) for pair in pairs))
        return StackedParameters(torch.cat([self.rows, other.rows]), self.shapes, moments, self.aliases)

    def gradient(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Gradients of the leaves, in their order, as one matrix (R, P); what was not used is zero."""
        parts = [
            self.rows.new_zeros(self.rows.shape[0], shape.numel()) if part is None else part.reshape(len(self.rows), -1)
            for part, shape in zip(gradients, self.shapes.values(), strict=True)
        ]
        return torch.cat(parts, dim=1)


def row_of(module: nn.Module, like: Tensor) -> Tensor:
    """All parameters of a module as one vector of the dtype and device of `like`."""
    parameters = [parameter.detach().flatten() for parameter in module.parameters()]
    return torch.cat(parameters).to(like) if parameters else like.new_zeros(0)


def aliases_of(module: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several, and its first."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if name != first[parameter]}

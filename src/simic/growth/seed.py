"""A seed: the module that grows in a slot, and how loudly it speaks."""

from __future__ import annotations

from threading import get_ident

import torch
from torch import Tensor, is_grad_enabled, nn

from simic.growth.blend import OPERATORS, straight_through
from simic.growth.blueprints import Gate, SlotShape
from simic.growth.isolation import preserved_rng


class Seed(nn.Module):
    """The branch of a blueprint with its operator, alpha and, for the gate operator, its gate."""

    def __init__(self, blueprint: str, branch: nn.Module, shape: SlotShape) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.shape = shape
        self.branch = branch
        self.gate: Gate | None = None
        self.operator = "add"
        self.alpha = 0.0
        self._overrides: dict[int, float] = {}  # one alpha per thread that asked for another
        self.met_override: bool | None = None
        """Since the last override began: None if no pass came by, False if only passes of other threads did."""
        self.straight_through = False
        """Whether a seed at alpha 0 receives the gradient of a host that does not hear it."""

    @property
    def override(self) -> float | None:
        """While set, the seed speaks with this alpha: 0 switches it off, its target switches it in.

        It holds for the thread that set it: whoever uses the network in another thread meanwhile sees the true alpha.
        A compiled graph cannot ask which thread runs it, so there it holds for all.
        """
        if torch.compiler.is_compiling():
            return next(iter(self._overrides.values())) if self._overrides else None
        return self._overrides.get(get_ident())

    @override.setter
    def override(self, alpha: float | None) -> None:
        if alpha is None:
            self._overrides.pop(get_ident(), None)
        else:
            self._overrides[get_ident()] = alpha

    def set_operator(self, operator: str) -> None:
        """Choose how the seed is blended; the gate operator owns a gate, the others have none."""
        self.operator = operator
        if operator != "gate":
            self.gate = None
        elif self.gate is None:
            reference = next(self.branch.parameters())
            with preserved_rng():
                self.gate = Gate(self.shape).to(reference.device, reference.dtype)

    @property
    def is_silent(self) -> bool:
        """Whether the branch does not run: nothing of it is blended in, and nothing teaches it."""
        override = self.override if self._overrides else None
        alpha = self.alpha if override is None else override
        return alpha == 0 and (not self.straight_through or override is not None or not is_grad_enabled())

    def forward(self, h: Tensor) -> Tensor:
        override = self.override if self._overrides else None
        if self._overrides and not torch.compiler.is_compiling():
            self.met_override = override is not None or bool(self.met_override)
        if self.is_silent:
            return h
        alpha = self.alpha if override is None else override
        if alpha == 0:
            with preserved_rng():  # the host's dropout masks stay what they are without the seed
                return straight_through(h, self.branch(h.detach()))
        gate = self.gate(h) if self.gate is not None else None
        return OPERATORS[self.operator](h, self.branch(h), alpha, gate)

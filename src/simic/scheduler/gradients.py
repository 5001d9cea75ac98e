"""How strong gradients are, measured before every optimizer step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from simic.growth.model import GrowableModel
from simic.lifecycle.stages import Stage

HOST_NORM_EVERY = 8
"""Optimizer steps between two looks at the host's gradient, which has many tensors."""


class GradientMeter:
    """Mean gradient norm of every seed over the optimizer steps of a host epoch, without waiting for a device."""

    def __init__(self, model: GrowableModel) -> None:
        self._model = model
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}
        self._steps = 0
        self._host_sum: Tensor | float = 0.0
        self._host_count = 0

    def observe(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before every optimizer step."""
        self._steps += 1
        if self._steps % HOST_NORM_EVERY == 1:
            own = [parameter.grad for parameter in self._model.host.parameters() if parameter.grad is not None]
            self._host_sum = self._host_sum + (torch.nn.utils.get_total_norm(own) if own else 0.0)
            self._host_count += 1
        for index in np.flatnonzero(self._model.slot_state.occupied[0]).tolist():
            seed = self._model.seed(index)
            gradients = [p.grad for p in seed.parameters() if p.grad is not None] if seed else []
            if gradients:
                norm = torch.nn.utils.get_total_norm(gradients)
                self._sums[index] = self._sums.get(index, torch.zeros_like(norm)) + norm
                self._counts[index] = self._counts.get(index, 0) + 1

    def report(self, model: GrowableModel) -> None:
        """Write the means into the model's slots."""
        for index in np.flatnonzero(model.slot_state.occupied[0]).tolist():
            count = self._counts.get(index, 0)
            in_training = model.slot_state.stage[0, index] == Stage.TRAINING
            if in_training and self._steps and not count and model.lifecycle.incubation == "shadow":
                raise RuntimeError(
                    f"the seed in slot {model.slot_names[index]!r} received no gradient: with shadow incubation "
                    "compute the loss as loss = scheduler.loss(lambda: criterion(model(x), y))"
                )
            model.slot_state.gradient_norm[0, index] = float(self._sums[index]) / count if count else math.nan

    def host_norm(self) -> float:
        """Mean gradient norm of the host without its seeds; NaN before the first step."""
        return float(self._host_sum) / self._host_count if self._host_count else math.nan

    def clear(self) -> None:
        """Start afresh."""
        self._sums, self._counts, self._steps = {}, {}, 0
        self._host_sum, self._host_count = 0.0, 0

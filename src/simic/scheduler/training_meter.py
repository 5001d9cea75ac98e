"""What a user's training loop tells about itself: gradients, optimizer steps, losses, learning rate, norm of weights.

The stacked environment tells the same of its hosts (see `HostTrainings`), so that a controller trained there can use it
here. What a loop does not tell stays NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Optimizer

from simic.control.architecture import architecture_of
from simic.control.facts import USUAL_RATE, Architecture
from simic.growth.model import GrowableModel
from simic.scheduler.gradients import GradientMeter
from simic.scheduler.parameter_groups import SLOT_KEY


class TrainingMeter:
    """Measurements of the present host epoch; sums stay on the device until they are read."""

    def __init__(self, model: GrowableModel, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._gradients, self._first_rate = GradientMeter(model), math.nan
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self._trained = next((parameter for parameter in model.host_parameters() if parameter in held), None)
        self.clear()

    @cached_property
    def architecture(self) -> Architecture:
        """That of the host, which does not change."""
        model = self._model
        return architecture_of(model.host, model.sites, set(model.seeds.parameters()))

    def clear(self) -> None:
        """Start a new host epoch."""
        self._gradients.clear()
        self._steps, self._losses, self._losses_before = 0, 0, 0
        self._sum: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0
        self._rate: Any = None
        self._weight_norm: float | None = None

    def observe(self, loss: Any = None) -> None:
        """Called before every optimizer step, with the loss that its closure returned, if it has one."""
        self._gradients.observe()
        if self._losses == self._losses_before:
            self._note(loss)
        self._losses_before = self._losses
        rate = self._group().get("lr")
        self._rate = rate.detach().clone() if isinstance(rate, Tensor) else rate  # a scheduler may change it in place
        if math.isnan(self._first_rate):
            self._first_rate = self._relative(self._rate)
        self._steps, self._weight_norm = self._steps + 1, None

    def watched(self, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`closure`, whose first loss is noted: under shadow incubation it is called again for seeds."""
        noted = False

        def watching() -> Tensor:
            nonlocal noted
            loss = closure()
            if not noted and torch.is_grad_enabled():
                noted = True
                self._note(loss)
            return loss

        return watching

    def _note(self, loss: Any) -> None:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Squares of close numbers are subtracted, so double precision where every device has it.
            value = loss.detach().reshape(()).to(torch.float64 if loss.device.type == "cpu" else torch.float32)
            self._sum, self._squares = self._sum + value, self._squares + value**2
            self._losses += 1

    def report(self) -> None:
        """Write the gradient norms of seeds into the model's slot state."""
        self._gradients.report()

    def facts(self, metric_error: float, train_samples: int | None) -> dict[str, Any]:
        """The fields of `Facts` that the loop determines; the error is that of the newest metric."""
        rate = self._rate if self._steps else self._group().get("lr")
        numbers = {
            "host_gradient_norm": self._gradients.host_norm(),
            "batches": self._steps or math.nan,
            "train_samples": train_samples or math.nan,
            "metric_error": metric_error,
            "learning_rate": self._relative(rate),
            "first_learning_rate": self._first_rate,
            "adaptive": float(not _is_plain(self._optimizer)),
            "loss_noise": self._noise(),
            "host_weight_norm": self._norm_of_weights(),
        }
        return {name: np.array([float(value)]) for name, value in numbers.items()} | {"architecture": self.architecture}

    def state_dict(self) -> dict[str, Any]:
        """What was measured in the present host epoch, as JSON values."""
        known = None if math.isnan(self._first_rate) else self._first_rate
        losses = [self._losses, float(self._sum), float(self._squares)]
        rate = None if self._rate is None else float(self._rate)
        return self._gradients.state_dict() | {"losses": losses, "rate": rate, "first_rate": known}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from `state_dict`; what a file lacks starts the host epoch anew."""
        self.clear()
        self._gradients.load_state_dict(state)
        state = state or {}
        self._losses, self._sum, self._squares = state.get("losses", (0, 0.0, 0.0))
        self._losses_before = self._losses
        self._rate, first = state.get("rate"), state.get("first_rate")
        self._steps = 0 if self._rate is None else state["steps"]
        self._first_rate = math.nan if first is None else first

    def _noise(self) -> float:
        if not self._losses:
            return math.nan
        mean, square = float(self._sum) / self._losses, float(self._squares) / self._losses
        return math.sqrt(max(square - mean**2, 0.0)) / abs(mean) if mean and math.isfinite(square) else math.nan

    @torch.no_grad()
    def _norm_of_weights(self) -> float:
        """Of the host; of a frozen one, which has no gradient to compare with, it is not computed."""
        if self._model.freeze_host:
            return math.nan
        if self._weight_norm is None:
            own = [parameter for parameter in self._model.host_parameters() if parameter.is_floating_point()]
            self._weight_norm = float(nn.utils.get_total_norm(own))
        return self._weight_norm

    def _group(self) -> dict[str, Any]:
        """The first group of the optimizer that trains the host; an empty one if none does."""
        groups = [group for group in self._optimizer.param_groups if SLOT_KEY not in group]
        holding = (group for group in groups if any(parameter is self._trained for parameter in group["params"]))
        return next(holding, groups[0] if groups else {})

    def _relative(self, rate: Any) -> float:
        """A learning rate over the optimizer's usual one; that of SGD includes what momentum adds."""
        if rate is None:
            return math.nan
        if _is_plain(self._optimizer):
            momentum = self._group().get("momentum", 0.0)
            return float(rate) / (1 - momentum) / USUAL_RATE["sgd"] if momentum < 1 else math.nan
        return float(rate) / _usual_rate(type(self._optimizer))


def _is_plain(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, (SGD, ASGD))


def _usual_rate(kind: type[Optimizer]) -> float:
    """The default of an adaptive optimizer's own `lr`: 0.001 of AdamW, 0.01 of RMSprop."""
    parameter = inspect.signature(kind.__init__).parameters.get("lr")
    default = None if parameter is None else parameter.default
    return float(default) if isinstance(default, (int, float)) and default > 0 else USUAL_RATE["adaptive"]

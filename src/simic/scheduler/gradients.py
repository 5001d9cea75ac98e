"""Gradient norms of seeds and host, measured before every optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

from simic.growth.model import GrowableModel
from simic.lifecycle.stages import Stage

HOST_NORM_EVERY = 8
"""Optimizer steps between two measurements of the host, which has many tensors."""
_HOST = -1


class GradientMeter:
    """Mean gradient norms over the optimizer steps of a host epoch; sums stay on the device until they are read."""

    def __init__(self, model: GrowableModel) -> None:
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Start a new host epoch."""
        self._steps = 0
        self._norms: dict[int, tuple[Tensor | float, int]] = {}  # sum and count, by slot index or _HOST

    def observe(self) -> None:
        """Called before every optimizer step."""
        self._steps += 1
        if self._steps % HOST_NORM_EVERY == 1:
            self._add(_HOST, _gradients(self._model.host_parameters()))
        for index in np.flatnonzero(self._model.slot_state.occupied[0]).tolist():
            seed = self._model.seed(index)
            if seed is not None and (gradients := _gradients(seed.parameters())):
                self._add(index, gradients)

    def report(self) -> None:
        """Write the seeds' means into the model's slot state."""
        state = self._model.slot_state
        for index in np.flatnonzero(state.occupied[0]).tolist():
            needs_gradient = state.stage[0, index] == Stage.TRAINING and self._model.lifecycle.incubation == "shadow"
            if needs_gradient and self._steps and index not in self._norms:
                raise RuntimeError(
                    f"the seed in slot {self._model.slot_names[index]!r} received no gradient: with shadow incubation "
                    "compute the loss as loss = scheduler.loss(lambda: criterion(model(x), y))"
                )
            state.gradient_norm[0, index] = self._mean(index)

    def host_norm(self) -> float:
        """Mean gradient norm of the host without its seeds; NaN before the first step."""
        return self._mean(_HOST)

    def state_dict(self) -> dict[str, Any]:
        """What was measured in the present host epoch, as JSON values."""
        norms = [[key, float(total), count] for key, (total, count) in self._norms.items()]
        return {"steps": self._steps, "norms": norms}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from `state_dict`; None, of a file that lacks it, starts the host epoch anew."""
        self.clear()
        if state is not None:
            self._steps = state["steps"]
            self._norms = {key: (total, count) for key, total, count in state["norms"]}

    def _add(self, key: int, gradients: list[Tensor]) -> None:
        total, count = self._norms.get(key, (0.0, 0))
        self._norms[key] = total + (nn.utils.get_total_norm(gradients) if gradients else 0.0), count + 1

    def _mean(self, key: int) -> float:
        total, count = self._norms.get(key, (math.nan, 1))
        return float(total) / count


def observe_gradients(observe: Callable[[Any], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `observe` when the gradients of an optimizer's step are there; returns the arguments to use.

    The arguments have the optimizer first. A step that is given a closure, as Lightning's are, computes its gradients
    in there; `observe` gets the loss that it returns, else None.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        observe(None)
        return None

    def observed() -> Any:
        loss = closure()
        observe(loss)
        return loss

    return ((args[0], observed, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": observed})


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]

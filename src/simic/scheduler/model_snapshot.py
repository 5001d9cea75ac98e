"""A snapshot of one model and its optimizer, overwritten in place so that memory use stays constant."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simic.growth.model import GrowableModel
from simic.scheduler.parameter_groups import SLOT_KEY

_OWN = "model."
_FOREIGN = "optimizer."


class ModelSnapshot:
    """Weights, buffers and optimizer state as they were at the last `save`.

    Other parameters of the optimizer, such as those of a head outside the wrapped model, are included, unless several
    growing models share the optimizer: then each has its own snapshot. Settings of parameter groups are not included:
    learning-rate schedulers continue. Buffers of modules outside the wrapped model are out of reach.
    """

    def __init__(self, model: GrowableModel, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.weights: dict[nn.Parameter, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.optimizer_state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def save(self, *, buffers: bool = True) -> None:
        """Save the present weights and optimizer state and, by default, buffers."""
        parameters = {parameter: parameter for _, parameter in self._named_parameters()}
        _overwrite([(self.weights, parameters)])
        present = {p: state for p, state in self._optimizer.state.items() if p in parameters and state}
        self.optimizer_state = {p: self.optimizer_state.get(p, {}) for p in present}
        _overwrite([(self.optimizer_state[parameter], state) for parameter, state in present.items()])
        if buffers:
            _overwrite([(self.buffers, dict(self._model.named_buffers()))])

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the saved state; live seeds must be gone. A fossil younger than it becomes newborn again."""
        for index in range(len(self._model.sites)):
            seed = self._model.seed(index)
            if seed is not None and not any(parameter in self.weights for parameter in seed.parameters()):
                seed.load_state_dict(self._model.newborn(index).state_dict())
        for name, buffer in self._model.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])
        for _, parameter in self._named_parameters():
            parameter.grad = None  # of a loss that broke
            if parameter in self.weights:
                parameter.copy_(self.weights[parameter])
            self._optimizer.state.pop(parameter, None)
            if parameter in self.optimizer_state:
                self._optimizer.state[parameter] = _clone(self.optimizer_state[parameter])

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything, by name, for checkpoints."""
        named = {name: parameter for name, parameter in self._named_parameters() if parameter in self.weights}
        states = self.optimizer_state
        return {
            "weights": {name: self.weights[parameter].clone() for name, parameter in named.items()},
            "buffers": _clone(self.buffers),
            "optimizer": {name: _clone(states[p]) for name, p in named.items() if p in states},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set what `state_dict` returned; the model must hold the seeds that it held then."""
        named = dict(self._named_parameters())
        if unknown := sorted(set(state["weights"]) - set(named)):
            raise ValueError(
                f"the saved governor knows {', '.join(unknown[:5])}, which is not here; load the model first"
            )
        self.weights = {named[name]: value.clone() for name, value in state["weights"].items()}
        self.buffers = _clone(state["buffers"])
        self.optimizer_state = {named[name]: _clone(value) for name, value in state["optimizer"].items()}

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that belongs to the snapshot."""
        known = set()
        for name, parameter in self._model.named_parameters():
            known.add(parameter)
            yield _OWN + name, parameter
        groups = self._optimizer.param_groups
        if all(not known.isdisjoint(group["params"]) for group in groups if SLOT_KEY in group):
            foreign = (p for group in groups for p in group["params"] if p not in known)
            yield from ((f"{_FOREIGN}{index}", parameter) for index, parameter in enumerate(foreign))


def _overwrite(pairs: list[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    """Make each first dict a copy of the second; tensors of the same form are overwritten in place, in one call."""
    old, new = [], []
    for saved, present in pairs:
        for key in saved.keys() - present.keys():
            del saved[key]
        for key, value in present.items():
            if _same_form(saved.get(key), value):
                old.append(saved[key])
                new.append(value.detach())
            else:
                saved[key] = _copy(value)
    if old:
        torch._foreach_copy_(old, new)  # pyright: ignore[reportPrivateImportUsage]


def _same_form(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return False
    return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _clone(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _copy(value) for key, value in values.items()}

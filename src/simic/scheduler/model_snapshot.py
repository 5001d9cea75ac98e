"""The last good state of one model beside its optimizer, kept in place so that memory is flat."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
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

    What else the optimizer trains, such as a head outside the wrapped model, belongs to it, unless models that grow
    share the optimizer: then each keeps its own. Settings of parameter groups are not kept: learning-rate schedulers
    go on. Buffers of modules outside the wrapped model are out of reach.
    """

    def __init__(self, model: GrowableModel, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._weights: dict[nn.Parameter, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._states: dict[Hashable, dict[str, Any]] = {}

    def save(self, *, buffers: bool = True) -> None:
        """Take the present state as good; without buffers, that of weights and optimizer."""
        parameters = [parameter for _, parameter in self._named()]
        _forget(self._weights, set(parameters))
        with torch.no_grad():
            _copy([(self._weights, parameter, parameter) for parameter in parameters])
            self._save_states(set(parameters))
            if buffers:
                named = dict(self._model.named_buffers())
                _forget(self._buffers, set(named))
                _copy([(self._buffers, name, buffer) for name, buffer in named.items()])

    def restore(self) -> None:
        """Go back to the saved state; live seeds must be gone. A fossil younger than it becomes as it was born."""
        with torch.no_grad():
            for index in range(len(self._model.sites)):
                self._renew(index)
            for _, parameter in self._named():
                parameter.grad = None  # of a loss that broke
                if parameter in self._weights:
                    parameter.copy_(self._weights[parameter])
            for name, buffer in self._model.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])
            for _, parameter in self._named():
                self._optimizer.state.pop(parameter, None)
                if parameter in self._states:
                    self._optimizer.state[parameter] = _clone(self._states[parameter])

    def state_dict(self) -> dict[str, Any]:
        """Everything by name, for checkpoints; copies."""
        named = {name: parameter for name, parameter in self._named() if parameter in self._weights}
        return {
            "weights": {name: self._weights[parameter].clone() for name, parameter in named.items()},
            "buffers": {name: buffer.clone() for name, buffer in self._buffers.items()},
            "optimizer": {name: _clone(self._states[p]) for name, p in named.items() if p in self._states},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what `state_dict` said; the model must hold the seeds that it held then."""
        named = dict(self._named())
        if unknown := sorted(set(state["weights"]) - set(named)):
            raise ValueError(
                f"the saved governor knows {', '.join(unknown[:5])}, which is not here; load the model first"
            )
        self._weights = {named[name]: value.clone() for name, value in state["weights"].items()}
        self._buffers = {name: value.clone() for name, value in state["buffers"].items()}
        self._states = {named[name]: _clone(value) for name, value in state["optimizer"].items()}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that is kept."""
        known = set()
        for name, parameter in self._model.named_parameters():
            known.add(parameter)
            yield _OWN + name, parameter
        groups = self._optimizer.param_groups
        if all(not known.isdisjoint(group["params"]) for group in groups if SLOT_KEY in group):
            foreign = (p for group in groups for p in group["params"] if p not in known)
            yield from ((f"{_FOREIGN}{index}", parameter) for index, parameter in enumerate(foreign))

    def _save_states(self, parameters: set[nn.Parameter]) -> None:
        present = {p: state for p, state in self._optimizer.state.items() if p in parameters and state}
        _forget(self._states, set(present))
        tensors = []
        for parameter, state in present.items():
            kept = self._states.setdefault(parameter, {})
            _forget(kept, set(state))
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors.append((kept, key, value))
                else:
                    kept[key] = copy.deepcopy(value)
        _copy(tensors)

    def _renew(self, index: int) -> None:
        """Give a fossil of which nothing good is known the weights of a newborn."""
        seed = self._model.seed(index)
        if seed is not None and not any(parameter in self._weights for parameter in seed.parameters()):
            seed.load_state_dict(self._model.newborn(index).state_dict())


def _forget(kept: dict[Any, Any], wanted: set[Any]) -> None:
    for key in kept.keys() - wanted:
        del kept[key]


def _copy(entries: list[tuple[dict[Any, Any], Any, Tensor]]) -> None:
    """Write tensors into dictionaries, over those that are there where these have the same form."""
    old, new = [], []
    for kept, key, value in entries:
        there = kept.get(key)
        if isinstance(there, Tensor) and (there.shape, there.dtype, there.device) == (
            value.shape,
            value.dtype,
            value.device,
        ):
            old.append(there)
            new.append(value.detach())
        else:
            kept[key] = value.detach().clone()
    if old:
        torch._foreach_copy_(old, new)  # pyright: ignore[reportPrivateImportUsage]


def _clone(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }

"""Checks of the arguments of GrowthScheduler; every error names the remedy."""

from __future__ import annotations

import inspect
from numbers import Integral
from typing import Any

from torch import nn
from torch.optim import Optimizer

from simic.control.baselines import check_controller
from simic.control.governor import GovernorConfig
from simic.growth.model import GrowableModel
from simic.scheduler.validation import METRICS_RETURNED

# By name, because importing these classes is slow and not every build of torch has them.
_WRAPPERS = {
    "DistributedDataParallel": "wrap no part of the host",
    "DataParallel": "start one process per device",
    "FullyShardedDataParallel": "do not shard it",
    "FSDPModule": "do not call fully_shard on it",
    "DeepSpeedEngine": "train it without DeepSpeed",
}
"""Wrappers that are refused around or inside a model, and what to do instead."""


def check_parts(model: Any, optimizer: Any) -> None:
    """Raise unless these are a GrowableModel and an optimizer, in this order."""
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise TypeError("model and optimizer are swapped: write GrowthScheduler(model, optimizer, ...)")
    if not isinstance(model, GrowableModel):
        remedy = "write GrowthScheduler(model, optimizer, ...)"
        if isinstance(model, nn.Module):
            _refuse_wrapper(model, "the model is wrapped in")
            remedy = "wrap it first: GrowableModel(model, example_input=...)"
        raise TypeError(f"model must be a GrowableModel, got {_describe(model)}; {remedy}")
    if not isinstance(optimizer, Optimizer):
        inner = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        remedy = "pass the optimizer inside it" if inner else "build it from model.parameters()"
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {_describe(optimizer)}; {remedy}")


def check_settings(controller: Any, evaluate: Any, horizon: Any, governor: Any) -> None:
    """Raise unless these are a controller, a function without arguments, a number of host epochs and a governor."""
    check_controller(controller)
    if evaluate is not None:
        _check_evaluate(evaluate)
    if not isinstance(horizon, Integral) or horizon < 0:
        raise ValueError(f"horizon must be a number of host epochs, 0 if it is not known, got {horizon!r}")
    if not isinstance(governor, (bool, GovernorConfig)):
        raise TypeError(f"governor must be True, False or a GovernorConfig, got {governor!r}")


def refuse_sharded(model: GrowableModel) -> None:
    """Raise if the model's weights are spread over processes, or a part of it is wrapped for several processes."""
    _refuse_wrapper(model, "a part of the model is wrapped in")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        _refuse("parameters of the model are DTensors, each rank holds a part of them", "keep the model whole")


def _refuse_wrapper(model: nn.Module, found_where: str) -> None:
    bases = (base.__name__ for module in model.modules() for base in type(module).__mro__)
    if wrapper := next((name for name in bases if name in _WRAPPERS), None):
        _refuse(f"{found_where} {wrapper}", _WRAPPERS[wrapper])


def _refuse(reason: str, remedy: str) -> None:
    raise ValueError(
        "GrowthScheduler works on one device or with DistributedDataParallel, where every rank holds the whole model, "
        f"but {reason}: {remedy}, and wrap the GrowableModel itself: DistributedDataParallel(GrowableModel(host))"
    )


def _check_evaluate(evaluate: Any) -> None:
    if not callable(evaluate):
        raise TypeError(f"evaluate must be a function that returns {METRICS_RETURNED}, got {evaluate!r}")
    try:
        signature = inspect.signature(evaluate)
    except (TypeError, ValueError):  # a function written in C
        return
    try:
        signature.bind()
    except TypeError:
        name = getattr(evaluate, "__name__", type(evaluate).__name__)
        raise TypeError(
            f"evaluate is called without arguments, but {name}{signature} needs some: "
            f"write evaluate=lambda: {name}(...) with them filled in"
        ) from None


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"

"""What a GrowthScheduler is given, checked at once: each mistake in one line that says what to do."""

from __future__ import annotations

import inspect
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from simic.control.baselines import check_controller
from simic.control.governor import GovernorConfig
from simic.growth.model import GrowableModel
from simic.scheduler.validation import FIGURES_RETURNED

# Known by name: importing them is slow, and not every build of torch has them.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


def check_parts(model: Any, optimizer: Any) -> None:
    """Raise unless these are a GrowableModel and an optimizer, in this order."""
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise TypeError("model and optimizer are swapped: write GrowthScheduler(model, optimizer, ...)")
    if not isinstance(model, GrowableModel):
        if isinstance(model, nn.Module) and _wrapper_of(model) is not None:
            _refuse(f"the model is wrapped in {_wrapper_of(model)}")
        remedy = "wrap it first: GrowableModel(model, example_input=...)" if isinstance(model, nn.Module) else ""
        remedy = remedy or "write GrowthScheduler(model, optimizer, ...)"
        raise TypeError(f"model must be a GrowableModel, got {_told(model)}; {remedy}")
    if not isinstance(optimizer, Optimizer):
        inner = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        remedy = "pass the optimizer inside it" if inner else "build it from model.parameters()"
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {_told(optimizer)}; {remedy}")


def check_settings(controller: Any, evaluate: Any, horizon: Any, governor: Any) -> None:
    """Raise unless these are a controller, an evaluation without arguments, a number of host epochs, a governor."""
    check_controller(controller)
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate must be a function that returns {FIGURES_RETURNED}, got {evaluate!r}")
    if evaluate is not None:
        _check_no_arguments(evaluate)
    if not isinstance(horizon, Integral) or horizon < 0:
        raise ValueError(f"horizon must be a number of host epochs, 0 if it is not known, got {horizon!r}")
    if not isinstance(governor, (bool, GovernorConfig)):
        raise TypeError(f"governor must be True, False or a GovernorConfig, got {governor!r}")


def refuse_distributed(model: GrowableModel) -> None:
    """Raise if several processes train together: each would grow, and train its seeds, on its own."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        _refuse(f"this process belongs to a group of {distributed.get_world_size()}")
    wrapper = _wrapper_of(model)
    if wrapper is not None:
        _refuse(f"a part of the model is wrapped in {wrapper}")


def _refuse(why: str) -> None:
    raise ValueError(
        f"GrowthScheduler works in a single process without DDP or FSDP, but {why}: seeds would drift apart between "
        "ranks; train on one device"
    )


def _wrapper_of(model: nn.Module) -> str | None:
    found = (base.__name__ for module in model.modules() for base in type(module).__mro__)
    return next((name for name in found if name in _WRAPPERS), None)


def _check_no_arguments(evaluate: Any) -> None:
    try:
        signature = inspect.signature(evaluate)
    except (TypeError, ValueError):  # of something written in C
        return
    try:
        signature.bind()
    except TypeError:
        name = getattr(evaluate, "__name__", type(evaluate).__name__)
        raise TypeError(
            f"evaluate is called without arguments, but {name}{signature} needs some: "
            f"write evaluate=lambda: {name}(...) with them filled in"
        ) from None


def _told(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"

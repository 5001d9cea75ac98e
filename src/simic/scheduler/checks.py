"""Checks of the arguments of GrowthScheduler; every error names the remedy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

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


def check_settings(controller: Any, evaluate: Any, horizon: Any, governor: Any, actions: Any) -> None:
    """Raise unless these are a controller, a function, a number of host epochs, a governor and a number of actions."""
    check_controller(controller)
    if evaluate is not None:
        _check_evaluate(evaluate)
    if not isinstance(horizon, Integral) or horizon < 0:
        raise ValueError(f"horizon must be a number of host epochs, 0 if it is not known, got {horizon!r}")
    if actions is not None and (not isinstance(actions, Integral) or actions < 1):
        raise ValueError(f"actions_per_decision must be an integer of at least 1, or None, got {actions!r}")
    if not isinstance(governor, (bool, GovernorConfig)):
        raise TypeError(f"governor must be True, False or a GovernorConfig, got {governor!r}")


def check_counts(evaluate_every: Any, max_ablations: Any, train_samples: Any) -> None:
    """Raise unless these are numbers of decisions, of seeds (None for all) and of samples (None if not known)."""
    if not isinstance(evaluate_every, Integral) or evaluate_every < 1:
        raise ValueError(f"evaluate_every must be a number of decisions, at least 1, got {evaluate_every!r}")
    if max_ablations is not None and (not isinstance(max_ablations, Integral) or max_ablations < 1):
        raise ValueError(f"max_ablations must be a number of seeds, at least 1, or None for all, got {max_ablations!r}")
    if train_samples is not None and (not isinstance(train_samples, Integral) or train_samples < 1):
        raise ValueError(f"train_samples must be a number of samples, at least 1, or None, got {train_samples!r}")


def refuse_sharded(model: GrowableModel) -> None:
    """Raise if the model's weights are spread over processes, or a part of it is wrapped for several processes."""
    _refuse_wrapper(model, "a part of the model is wrapped in")
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        _refuse("parameters of the model are DTensors, each rank holds a part of them", "keep the model whole")


class ArgumentCheck:
    """Learning-rate schedulers and `evaluate` that a growing model needs and that were not passed."""

    def __init__(self, optimizer: Optimizer, lr_schedulers: Sequence[LRScheduler], *, grows: bool) -> None:
        self._optimizer, self._grows = optimizer, grows
        self._has_unknown = _has_lr_scheduler(optimizer) and not lr_schedulers
        self._known = bool(lr_schedulers) or self._has_unknown

    def warn_about_missing(self, evaluate: Any) -> None:
        """Called by the constructor of GrowthScheduler."""
        if evaluate is None and self._grows:
            warnings.warn(
                "without evaluate=... contributions cannot be measured, so no seed will be fossilized", stacklevel=3
            )
        if self._has_unknown and self._grows:
            warnings.warn(
                "a learning-rate scheduler drives the optimizer but was not passed; many of them fail once a seed "
                "brings a parameter group of its own: pass it as lr_schedulers=[...]",
                stacklevel=3,
            )

    def check_lr_schedulers(self) -> None:
        """Raise if a learning-rate scheduler appeared later."""
        if self._grows and not self._known and _has_lr_scheduler(self._optimizer):
            raise ValueError(
                "a learning-rate scheduler was built after the GrowthScheduler, and would fail once a seed brings a "
                "parameter group of its own: build it first and pass it as lr_schedulers=[...]"
            )


def _has_lr_scheduler(optimizer: Optimizer) -> bool:
    """Whether one of torch's learning-rate schedulers was built on an optimizer; torch marks it so."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


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

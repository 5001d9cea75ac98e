"""Validation metrics as users pass them: read, checked, and reduced to the one metric of contributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

METRICS_RETURNED = '{"val_loss": ..., "val_accuracy": ...}'


def read_metrics(metrics: Any) -> dict[str, float]:
    """The validation metrics that are given, as floats; None counts as not given."""
    names = ("val_loss", "val_accuracy")
    given = [name for name in names if metrics.get(name) is not None] if isinstance(metrics, Mapping) else []
    if not given:
        raise ValueError(f"evaluate must return {METRICS_RETURNED}, got {metrics!r}")
    numbers = {name: read_number(name, metrics[name]) for name in given}
    accuracy = numbers.get("val_accuracy", 0.0)
    if 1 + 1e-6 < accuracy < math.inf:  # a mean of ones may be off by a rounding error
        raise ValueError(f"val_accuracy must be a fraction between 0 and 1, got {accuracy}: divide percent by 100")
    return numbers


def read_number(name: str, value: Any) -> float:
    """A number of any type, also a tensor of one element, as a float."""
    try:
        if not isinstance(value, str):  # float() would parse it
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        pass
    raise TypeError(f"{name} must be one number, got {value!r}; give float(...) of it")


def read_train_loss(train_loss: Any) -> dict[str, float]:
    """The training loss that is given; NaN without one."""
    return {"train_loss": math.nan if train_loss is None else read_number("train_loss", train_loss)}


def complete_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Loss and accuracy; a missing loss is replaced by minus the accuracy, a missing accuracy is NaN."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}: the host diverged; restore a checkpoint")
    return {
        "val_loss": metrics["val_loss"] if "val_loss" in metrics else -metrics["val_accuracy"],
        "val_accuracy": metrics.get("val_accuracy", math.nan),
    }


def contribution_metric(metrics: Mapping[str, float]) -> float:
    """The metric whose change is a seed's contribution: accuracy if there is one, else minus the loss.

    A value that is not finite becomes minus infinity: a broken network is worse than any other.
    """
    accuracy = metrics.get("val_accuracy", math.nan)
    metric = -metrics.get("val_loss", math.nan) if math.isnan(accuracy) else accuracy
    return metric if math.isfinite(metric) else -math.inf

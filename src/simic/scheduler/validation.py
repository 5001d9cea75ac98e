"""Validation figures as users give them: read, checked, and turned into the one metric of contributions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FIGURES_RETURNED = '{"val_loss": ..., "val_accuracy": ...}'


def read_figures(figures: Any) -> dict[str, float]:
    """The validation figures that are there, as floats; one that is None is not there."""
    names = ("val_loss", "val_accuracy")
    given = [name for name in names if figures.get(name) is not None] if isinstance(figures, Mapping) else []
    if not given:
        raise ValueError(f"evaluate must return {FIGURES_RETURNED}, got {figures!r}")
    numbers = {name: read_number(name, figures[name]) for name in given}
    accuracy = numbers.get("val_accuracy", 0.0)
    if 1 + 1e-6 < accuracy < math.inf:  # a mean of ones may be off by a rounding error
        raise ValueError(f"val_accuracy must be a fraction between 0 and 1, got {accuracy}: divide percent by 100")
    return numbers


def read_number(name: str, value: Any) -> float:
    """One number of any type as a float."""
    try:
        if not isinstance(value, str):  # which float() would read
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last is torch's, for a tensor of many
        pass
    raise TypeError(f"{name} must be one number, got {value!r}; give float(...) of it")


def complete_figures(numbers: Mapping[str, float]) -> dict[str, float]:
    """Both figures, all of them finite; where only an accuracy is known, minus it stands in for the loss."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}: the host diverged; restore a checkpoint")
    return {
        "val_loss": numbers["val_loss"] if "val_loss" in numbers else -numbers["val_accuracy"],
        "val_accuracy": numbers.get("val_accuracy", math.nan),
    }


def metric_of(figures: Any) -> float:
    """Accuracy where there is one, else minus the loss; of a network that is broken, minus infinity."""
    numbers = read_figures(figures)
    accuracy = numbers.get("val_accuracy", math.nan)
    metric = -numbers.get("val_loss", math.nan) if math.isnan(accuracy) else accuracy
    return metric if math.isfinite(metric) else -math.inf

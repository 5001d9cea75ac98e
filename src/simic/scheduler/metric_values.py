"""Metrics that `evaluate` returns as several values, one per batch or sample, instead of their mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def average_values(metrics: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The metrics with means in place of several values, and these values (B,) by name."""
    if not isinstance(metrics, Mapping):
        return metrics, {}
    found = {str(name): several for name, value in metrics.items() if (several := _several(value)) is not None}
    means = {name: float(values.mean()) for name, values in found.items()}
    return {**metrics, **means} if means else metrics, found


def paired_differences(whole: np.ndarray, switched: np.ndarray) -> np.ndarray:
    """The differences of values that were measured on the same data, with a seed switched and without."""
    if whole.shape != switched.shape:
        raise ValueError(
            f"evaluate returned {len(whole)} values of the metric that counts, and {len(switched)} with a seed "
            "switched off or in: evaluate the same batches every time"
        )
    return whole - switched


def _several(value: Any) -> np.ndarray | None:
    """A sequence, array or tensor of two or more numbers; None for anything else."""
    if not isinstance(value, (list, tuple, np.ndarray, Tensor)):
        return None
    if isinstance(value, Tensor):
        value = value.detach().cpu().double()
    elif isinstance(value, (list, tuple)):
        try:
            value = [float(each) for each in value if not isinstance(each, str)] if len(value) > 1 else []
        except (TypeError, ValueError, RuntimeError):
            return None
    values = np.asarray(value)
    return values.astype(np.float64) if values.ndim == 1 and len(values) > 1 and values.dtype.kind in "biuf" else None

"""Alpha ramps: monotone curves that end exactly at their target, over numpy arrays of any shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Curve = Callable[[np.ndarray], np.ndarray]


def _sigmoid(steepness: float) -> Curve:
    edge = np.tanh(steepness / 4)  # tanh(x/2) is the logistic curve, recentred on 0
    return lambda progress: (np.tanh(steepness / 2 * (progress - 0.5)) / edge + 1) / 2


_CURVE_TABLE: dict[str, Curve] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - np.cos(np.pi * progress)) / 2,
    "sigmoid-6": _sigmoid(6),
    "sigmoid-12": _sigmoid(12),
    "sigmoid-24": _sigmoid(24),
}
CURVES = tuple(_CURVE_TABLE)


def ramp_alpha(
    start: np.ndarray, target: np.ndarray, step: np.ndarray, length: np.ndarray, curve: np.ndarray
) -> np.ndarray:
    """Alpha after `step` of `length` decisions of a ramp from `start` to `target`; `curve` indexes CURVES."""
    progress = np.where(length > 0, np.minimum(step, length) / np.maximum(length, 1), 1.0)
    eased = np.choose(curve, [shape(progress) for shape in _CURVE_TABLE.values()])
    # The last step takes the target itself: start + (target - start) may miss it by rounding.
    return np.where(progress >= 1, target, start + (target - start) * eased)

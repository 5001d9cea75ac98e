"""The score of a network, the objective of growth: one definition for rewards, environments, evaluation, observations.

    score = POINTS * quality - rent_weight * doublings

Example: accuracy 0.90 and twice the host's parameters score 100 * 0.90 - 1.0 * log2(2) = 89 points.

All functions broadcast; inputs are arrays of any shape, usually (N,) or (N, K).
"""

from __future__ import annotations

import numpy as np

POINTS = 100.0
"""Points of a perfect quality: one point is one percent."""
RENT_WEIGHT = 1.0
"""Points that a doubling of the parameters costs. Part of the definition of the score in evaluations, never tuned."""
MAX_DOUBLINGS = 16.0
"""Growth beyond 2**16 times the host costs no more rent."""


def quality(
    accuracy: np.ndarray, loss: np.ndarray, random_guess_loss: np.ndarray | float, has_accuracy: np.ndarray | bool
) -> np.ndarray:
    """Accuracy or, for tasks without one, the share of the random-guess loss that is gone: in [0, 1], NaN counts as 0.

    `has_accuracy` is a property of the task. It is not derived from `accuracy`: in a task with accuracy a NaN is a
    failure, which must not be excused by switching to the loss.
    """
    known = np.clip(np.where(np.isnan(accuracy), 0.0, accuracy), 0.0, 1.0)
    return np.where(has_accuracy, known, 1.0 - relative_loss(loss, random_guess_loss, limit=1.0))


def relative_loss(loss: np.ndarray, random_guess_loss: np.ndarray | float, *, limit: float) -> np.ndarray:
    """The loss as a multiple of the random-guess loss, in [0, limit]; NaN counts as the limit."""
    with np.errstate(over="ignore"):
        ratio = loss / random_guess_loss
    return np.clip(np.where(np.isnan(ratio), limit, ratio), 0.0, limit)


def doublings(parameters: np.ndarray, base: np.ndarray | int) -> np.ndarray:
    """log2(parameters / base), in [0, MAX_DOUBLINGS]; an empty network counts as one parameter."""
    return np.clip(np.log2(np.maximum(parameters, 1.0) / np.maximum(base, 1.0)), 0.0, MAX_DOUBLINGS)


def score(
    quality: np.ndarray, parameters: np.ndarray, host_parameters: np.ndarray | int, rent_weight: float = RENT_WEIGHT
) -> np.ndarray:
    """Points of quality minus the rent of all parameters beyond those of the host."""
    return POINTS * quality - rent_weight * doublings(parameters, host_parameters)

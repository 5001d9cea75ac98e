"""Standard errors of the metric of a validation: how much of a change may be chance."""

from __future__ import annotations

import numpy as np


def binomial_error(accuracy: np.ndarray, count: int) -> np.ndarray:
    """Standard error of an accuracy over `count` targets, with a success and a failure added, so that it is not 0."""
    share = (np.clip(accuracy, 0, 1) * count + 1) / (count + 2)
    return np.sqrt(share * (1 - share) / count)


def variance_error(explained: np.ndarray, count: int) -> np.ndarray:
    """Standard error of a share of explained variance over `count` targets whose residuals are normal."""
    return (1 - explained) * np.sqrt(2 / count)

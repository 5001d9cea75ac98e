"""Losses of outputs, which are K rows of samples: their sum over samples times `share`, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from simic.compiled.cache import part
from simic.compiled.vector_math import exp, typed
from simic.stacked.compiled.instructions import IGNORED


@part
def cross_entropy(logits: Any, target: Any, grad: Any, share: Any, classes: int, samples: int) -> Any:
    """The loss is NaN if a target is neither a class nor IGNORED."""
    n, zero = samples, typed(logits[0], 0.0)
    largest, mass = logits[:n].copy(), np.zeros_like(logits[:n])
    for k in range(1, classes):
        row = logits[k * n : (k + 1) * n]
        for j in range(n):
            largest[j] = max(largest[j], row[j])
    for k in range(classes):
        row, own = logits[k * n : (k + 1) * n], grad[k * n : (k + 1) * n]
        for j in range(n):
            own[j] = exp(row[j] - largest[j])
            mass[j] += own[j]
    # The sum of logarithms, as the logarithm of products of a few: each mass is between 1 and the number of classes.
    total, product = 0.0, 1.0
    for j in range(n):
        if 0 <= target[j] < classes:
            product *= mass[j]
            total += largest[j] - logits[target[j] * n + j]
            mass[j] = share / mass[j]
        else:
            total += 0.0 if target[j] == IGNORED else math.nan
            mass[j] = zero
        if j % 16 == 15 or j == n - 1:
            total += math.log(product)
            product = 1.0
    for k in range(classes):
        own = grad[k * n : (k + 1) * n]
        for j in range(n):
            own[j] *= mass[j]
    for j in range(n):
        if 0 <= target[j] < classes:
            grad[target[j] * n + j] -= share
    return typed(zero, total) * share


@part
def squared_error(outputs: Any, target: Any, grad: Any, share: Any, n: int) -> Any:
    total = typed(outputs[0], 0.0)
    for j in range(n):
        error = outputs[j] - target[j]
        total += error * error
        grad[j] = error * typed(outputs[0], 2.0) * share
    return total * share

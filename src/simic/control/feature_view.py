"""View: facts, and quantities that several features are computed from.

Shapes: N hosts, S slots, B blueprints, W host epochs of history (the newest last).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simic.control.facts import Architecture, Facts
from simic.lifecycle.slots import SlotState

WINDOW = 16
"""Host epochs of history that features are computed from."""
SPANS = (1, 3, 8)
"""Host epochs over which changes are computed."""
LARGEST = 1e30
"""Values are clamped to this, so that differences and ratios of infinities are defined."""
VAL_LOSS, ACCURACY, TRAIN_LOSS = range(3)


@dataclass(frozen=True, kw_only=True)
class View:
    """Facts, and quantities that several features share."""

    facts: Facts
    host: Architecture
    slots: SlotState
    num_slots: int  # at least 1, to divide by
    legal: np.ndarray  # (N, ops, S)
    blueprints: np.ndarray  # (S, B, F_blueprint)
    live: np.ndarray  # (N, S)
    horizon: np.ndarray  # (N,) NaN if unknown
    history: np.ndarray  # (3, N, W) validation loss, accuracy, training loss
    now: np.ndarray  # (3, N) the newest of each
    change: np.ndarray  # (3, N, spans) the newest minus earlier ones
    relative: np.ndarray  # (3, N, spans) the same over the sum of both
    best: np.ndarray  # (N,) lowest validation loss of the window
    guess_known: np.ndarray  # (N,)
    reference: np.ndarray  # (N,) loss that counts as 1: that of random guessing, else the first of the window


def view_facts(facts: Facts, legal: np.ndarray, blueprints: np.ndarray) -> View:
    history = np.full((3, facts.num_hosts, WINDOW), np.nan)
    for window, figure in zip(history, (facts.val_loss, facts.val_accuracy, facts.train_loss), strict=True):
        recent = figure[:, -WINDOW:]
        window[:, WINDOW - recent.shape[1] :] = recent
    history = np.minimum(np.maximum(history, -LARGEST), LARGEST)
    now, before = history[..., -1:], history[..., [WINDOW - 1 - span for span in SPANS]]
    val_loss = history[VAL_LOSS]
    first = val_loss[np.arange(facts.num_hosts), (~np.isnan(val_loss)).argmax(1)]
    guess_known = np.isfinite(facts.random_guess_loss) & (facts.random_guess_loss > 0)
    return View(
        facts=facts,
        host=facts.architecture or Architecture.unknown(facts.slots.stage.shape[1]),
        slots=facts.slots,
        num_slots=max(1, facts.slots.stage.shape[1]),
        legal=legal,
        blueprints=blueprints,
        live=facts.slots.live,
        horizon=np.where(facts.horizon > 0, facts.horizon, np.nan),
        history=history,
        now=history[..., -1],
        change=now - before,
        relative=relative_change(now, before),
        best=np.fmin.reduce(val_loss, axis=1),
        guess_known=guess_known,
        reference=np.where(guess_known, facts.random_guess_loss, np.abs(first)),
    )


def relative_change(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Difference over the sum of magnitudes: within [-1, 1], about half the relative change if that is small."""
    return (new - old) / (np.abs(new) + np.abs(old))


def slope(window: np.ndarray) -> np.ndarray:
    """Least-squares slope per host epoch over the longest span (N,); NaN are skipped."""
    recent = window[:, -1 - SPANS[-1] :]
    seen, time = ~np.isnan(recent), np.arange(SPANS[-1] + 1)
    # Sums of products rather than matrix products, whose rounding depends on how many hosts there are.
    centred = seen * (time - (seen * time).sum(1, keepdims=True) / seen.sum(1, keepdims=True))
    return (centred * np.where(seen, recent, 0.0)).sum(1) / (centred**2).sum(1)


def relative_slope(window: np.ndarray) -> np.ndarray:
    """`slope` over the mean magnitude of the same host epochs."""
    recent = window[:, -1 - SPANS[-1] :]
    seen = ~np.isnan(recent)
    return slope(window) / (np.abs(np.where(seen, recent, 0.0)).sum(1) / seen.sum(1))

"""Carrying out the actions of one decision: usually one, and as many as a controller wants where many slots wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simic.control.baselines import encode_answer
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import Column, Op
from simic.scheduler.ranks import Ranks


def action_limit(model: GrowableModel, actions_per_decision: int | None) -> int:
    """Maximum number of actions of a decision; by default one or, in a frozen host, as many as the slots could take."""
    if actions_per_decision is not None:
        return actions_per_decision
    # Per slot: a seed may move on twice and be kept or pruned, and another one planted.
    return 4 * len(model.slot_names) if model.freeze_host else 1


def take_actions(
    model: GrowableModel, ask: Callable[[list[np.ndarray]], Any], ranks: Ranks, limit: int
) -> list[np.ndarray]:
    """Ask for actions and carry them out until the answer is wait, at most `limit`; returns their rows (H,), in order.

    `ask` gets the rows of this decision so far; of several ranks, the first decides. If an action is refused, the model
    is as it was before the first.
    """
    names, blueprints = model.slot_names, model.blueprint_names
    seeds = {slot: seed for slot in model.grown_slots if (seed := model.seed(slot)) is not None}
    before, germinations, rows = model.slot_state.copy(), model.germinations, list[np.ndarray]()
    try:
        while len(rows) < limit:
            row = ranks.first("in the controller", lambda: encode_answer(ask(rows), names, blueprints))
            model.execute(row)
            if row[Column.OP] == Op.WAIT:
                return rows or [row]
            rows.append(row)
    except Exception:
        if rows:
            model.set_seeds(seeds, before, germinations)
        raise
    return rows

"""Masks of legal actions: operations, slots under each operation, blueprints in each slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simic.control.facts import Facts
from simic.lifecycle.actions import Op
from simic.lifecycle.slots import legal_ops


@dataclass(frozen=True, kw_only=True)
class Masks:
    """True where a choice is legal. Wait is always legal."""

    op: np.ndarray  # (N, ops)
    slot: np.ndarray  # (N, ops, S)
    blueprint: np.ndarray  # (S, B)


def legal_masks(facts: Facts) -> Masks:
    """The legal choices of N hosts."""
    fits = facts.blueprint_parameters >= 0
    slot = legal_ops(facts.slots, facts.lifecycle)
    slot[:, Op.GERMINATE] &= fits.any(1)
    return Masks(op=np.asarray(slot.any(2)), slot=slot, blueprint=fits)

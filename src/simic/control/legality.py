"""Masks of legal actions: operations, slots under each operation, blueprints in each slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simic.control.facts import Facts
from simic.lifecycle.actions import HEAD_USED, HEAD_VALUES, HEADS, Column, Op
from simic.lifecycle.slots import legal_ops


@dataclass(frozen=True, kw_only=True)
class Masks:
    """True where a choice is legal. Wait is always legal."""

    op: np.ndarray  # (N, ops)
    slot: np.ndarray  # (N, ops, S)
    blueprint: np.ndarray  # (S, B)
    style: np.ndarray | None = None  # (N, ops, styles); None: all

    def allows_style(self, op: Op, style: int) -> np.ndarray:
        """Whether a style is legal under an operation (N,)."""
        return np.ones(len(self.op), dtype=bool) if self.style is None else self.style[:, op, style]


def legal_masks(facts: Facts) -> Masks:
    """The legal choices of N hosts."""
    fits = facts.blueprint_parameters >= 0
    slot = legal_ops(facts.slots, facts.lifecycle)
    slot[:, Op.GERMINATE] &= fits.any(1)
    return Masks(op=np.asarray(slot.any(2)), slot=slot, blueprint=fits, style=facts.legal_styles)


def replace_illegal(actions: np.ndarray, masks: Masks) -> tuple[np.ndarray, np.ndarray]:
    """Actions (N, H) with wait in place of illegal ones and 0 in unused heads; and which were illegal (N,)."""
    op, slot, blueprint = actions[:, Column.OP], actions[:, Column.SLOT], actions[:, Column.BLUEPRINT]
    legal = masks.slot[np.arange(len(actions)), op, slot]
    legal &= (op != Op.GERMINATE) | masks.blueprint[slot, blueprint]
    if masks.style is not None:
        legal &= masks.style[np.arange(len(actions)), op, actions[:, Column.STYLE]]
    return actions * (HEAD_USED[op] & legal[:, None]), ~legal


def flat_mask(masks: Masks) -> np.ndarray:
    """One column per choice of every head (N, sum of head sizes): True if some legal operation but wait can use it.

    A head that none can use keeps its first choice. Wait is always legal, with any choice of the other heads.
    """
    slot = masks.slot.copy()  # (N, ops, S)
    slot[:, Op.WAIT] = False
    blueprint = (masks.slot[:, Op.GERMINATE, :, None] & masks.blueprint).any(1)  # (N, B)
    usable = masks.op @ HEAD_USED  # (N, H)
    heads = [masks.op, np.asarray(slot.any(1)), np.asarray(blueprint)]
    heads += [np.repeat(usable[:, [i]], len(HEAD_VALUES[HEADS[i]]), axis=1) for i in range(len(heads), len(HEADS))]
    for choices in heads:
        choices[:, 0] |= ~choices.any(1)
    return np.concatenate(heads, axis=1)

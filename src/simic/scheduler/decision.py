"""The record of one decision: what a step observed, what it did, and which slots changed their stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simic.control.governor import Verdict
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import Action
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage


@dataclass(frozen=True, kw_only=True)
class StageChange:
    """A slot that moved from one stage to another."""

    slot: str
    blueprint: str
    old: Stage
    new: Stage
    contribution: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one `step` observed and did."""

    index: int
    val_loss: float
    val_accuracy: float
    actions: tuple[Action, ...]
    """What was done, in order; several only if the scheduler takes several actions per decision."""
    changes: tuple[StageChange, ...]
    verdict: Verdict = Verdict.OK
    """If not OK, the network broke and the governor restored its last good state instead of deciding."""

    @property
    def action(self) -> Action:
        """The first action."""
        return self.actions[0]


def stage_changes(model: GrowableModel, before: SlotState) -> tuple[StageChange, ...]:
    """The slots whose stage differs from `before`, without those that merely cool down after a prune."""
    after = model.slot_state
    return tuple(
        StageChange(
            slot=model.slot_names[index],
            blueprint=model.blueprint_names[max(before.blueprint[0, index], after.blueprint[0, index])],
            old=Stage(before.stage[0, index]),
            new=Stage(after.stage[0, index]),
            contribution=float(before.contribution[0, index]),
        )
        for index in np.flatnonzero(before.stage[0] != after.stage[0])
        if before.blueprint[0, index] >= 0 or after.blueprint[0, index] >= 0
    )

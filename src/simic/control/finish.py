"""FinishController: finishes seeds that others have planted. And `for_hosts`: controllers whose hosts are rearranged.

Shapes: N hosts, S slots, H heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simic.control.baselines import Controller, Stateful
from simic.control.facts import Facts
from simic.control.legality import legal_masks
from simic.control.plan import move_on
from simic.lifecycle.actions import Column, Op
from simic.rewards.score import POINTS, RENT_WEIGHT, doublings


class FinishController:
    """Plants nothing: advances seeds, fossilizes those that are worth their parameters and prunes the others."""

    def act(self, facts: Facts) -> np.ndarray:
        """Advance, fossilize, prune or wait (N, H)."""
        masks = legal_masks(facts)
        actions = move_on(masks)
        poor = masks.slot[:, Op.FOSSILIZE] & masks.slot[:, Op.PRUNE] & ~_worth_keeping(facts)
        chosen = poor.any(1)
        actions[chosen] = 0
        actions[chosen, Column.OP] = Op.PRUNE
        actions[chosen, Column.SLOT] = poor[chosen].argmax(1)
        return actions


def _worth_keeping(facts: Facts) -> np.ndarray:
    """Seeds (N, S) whose contribution to the score exceeds their share of the rent."""
    total = facts.host_parameters[:, None] + facts.seed_parameters.sum(1, keepdims=True)  # (N, 1)
    base = facts.host_parameters[:, None]
    rent = RENT_WEIGHT * (doublings(total, base) - doublings(total - facts.seed_parameters, base))
    return POINTS * facts.slots.contribution / facts.metric_scale[:, None] > rent


def for_hosts(controller: Controller, hosts: np.ndarray) -> Controller:
    """A controller for copies of hosts (M,), with what the given one remembers of each, or itself without memory."""
    select: Any = getattr(controller, "for_hosts", None)
    if select is not None:
        return select(hosts)
    if isinstance(controller, Stateful):
        raise TypeError(
            f"a {type(controller).__name__} remembers its hosts, so looking ahead needs its method for_hosts(hosts): "
            "a copy of the controller with the memory of these hosts, in this order"
        )
    return controller

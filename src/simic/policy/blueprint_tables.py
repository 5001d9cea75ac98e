"""Blueprints as tables that many steps share: hosts of one architecture are offered the same blueprints at every step.

Shapes: T steps, N environments, S slots, B blueprints, F features, U tables. A learner passes over a rollout many
times; with tables the network encodes each blueprint once per pass instead of once per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

TABLES, WHICH = "blueprint_tables", "which_table"
"""Parts of an observation that replace `blueprints`: tables (U, S, B, F), and one-hot (T, N, U) the table of a step."""
MOST_TABLES = 8
"""With more tables than these there is little to share."""


def share_blueprints(observation: dict[str, Tensor]) -> dict[str, Tensor]:
    """The observation of a rollout on the CPU with tables, unless it has none or too many."""
    if "blueprints" not in observation:
        return observation
    offers = observation["blueprints"]
    steps = offers.flatten(2).flatten(0, 1).numpy()
    open_, tables, which = torch.ones(len(steps), dtype=torch.bool).numpy(), [], []
    while open_.any():
        if len(tables) == MOST_TABLES:
            return observation
        tables.append(int(open_.argmax()))
        which.append(open_ & (steps == steps[tables[-1]]).all(1))
        open_ &= ~which[-1]
    shared = {part: values for part, values in observation.items() if part != "blueprints"}
    one_hot = torch.stack([torch.from_numpy(own) for own in which], -1).to(offers.dtype)
    return shared | {
        TABLES: offers.flatten(0, 1)[tables],
        WHICH: one_hot.unflatten(0, offers.shape[:2]),
    }

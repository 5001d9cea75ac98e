"""Standard errors of the contributions of a model's seeds, beside `SlotState.contribution`.

Each is kept with the contribution that it belongs to, and counts only while the slot still has that very contribution:
a new measurement, another seed or a loaded state ends it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

ContributionErrors = dict[str, tuple[float, float]]
"""(contribution, its standard error) by slot."""


def paired_error(differences: np.ndarray) -> float:
    """Standard error of the mean of differences (B,) that were measured on the same B batches or samples."""
    return float(differences.std(ddof=1) / math.sqrt(len(differences)))


def contribution_error(model: GrowableModel) -> np.ndarray:
    """The standard error of the contribution in every slot (1, S); NaN where it is not known."""
    found = np.full(model.slot_state.contribution.shape, math.nan)
    for index, slot in enumerate(model.slot_names):
        contribution, error = model.contribution_errors.get(slot, (math.nan, math.nan))
        if contribution == model.slot_state.contribution[0, index]:
            found[0, index] = error
    return found

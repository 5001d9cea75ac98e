"""Seeds that look better than they are: detectors over whole episodes.

The yardstick is the gain over the twin: the metric of a host less that of the same host, same weights and batches, that
never grew. Without twins nothing is detected: a host gains by learning alone, and that says nothing of its seeds.

Shapes: T decisions, N hosts, S slots. Contributions and gains are in units of the metric, a fraction. A flag is an
event to look at, not a punishment; the reward does not change. docs/experiments.md says how often flags are wrong.
"""

from __future__ import annotations

import numpy as np

REASONS: dict[str, str] = {
    "overclaiming": "its contribution is far above what the host gains over its twin that never grew",
    "indispensable": "the host relies on it, and is worse than its twin that never grew",
}

MIN_CONTRIBUTION = 0.1
"""A seed that contributes no more is not suspected."""
OVERCLAIM_FACTOR = 5.0
"""A contribution above this multiple of the gain is suspect."""
LOSS_MARGIN = 0.002
"""A host that is worse than its twin by more than this got worse by growing."""
PATIENCE = 3
"""Decisions in a row that must look suspect: the metric of one decision is too noisy to tell hosts apart."""


def detect(contribution: np.ndarray, gain: np.ndarray, judged: np.ndarray) -> dict[str, np.ndarray]:
    """Flags bool (T, N, S) by the name of their reason.

    `contribution` (T, N, S) and `gain` over the twin (T, N) are those after each decision; `judged`, bool (T, N, S),
    says which seeds were measured in a network that can be compared with its twin.
    """
    gain = gain[..., None]
    claims = judged & (contribution > MIN_CONTRIBUTION)
    indispensable = _lasting(claims & (gain < -LOSS_MARGIN))
    overclaiming = _lasting(claims & (contribution > OVERCLAIM_FACTOR * np.maximum(gain, 0.0)))
    flags = {"overclaiming": overclaiming & ~indispensable, "indispensable": indispensable}
    assert flags.keys() == REASONS.keys()
    return flags


def _lasting(suspect: np.ndarray) -> np.ndarray:
    """Where it was so for PATIENCE decisions in a row."""
    lasting = suspect.copy()
    for back in range(1, PATIENCE):
        lasting[back:] &= suspect[:-back]
        lasting[:back] = False
    return lasting

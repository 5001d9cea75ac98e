"""Detects gaming over whole episodes: seeds whose contribution is not matched by a gain of the host.

The gain is the metric of a host minus that of its twin, the same host with the same weights and batches that never
grows. It needs twins: without them the effect of learning cannot be separated from that of the seeds.

Shapes: T decisions, N hosts, S slots. Contributions and gains are fractions, in units of the metric. A flag is
reported as an event and does not change the reward. docs/experiments.md gives the rate of false flags.
"""

from __future__ import annotations

import numpy as np

MIN_CONTRIBUTION = 0.1
"""Seeds with at most this contribution are not flagged."""
OVERCLAIM_FACTOR = 5.0
"""Contributions above this multiple of the gain are flagged."""
LOSS_MARGIN = 0.002
"""A host that is worse than its twin by more than this was harmed by growth."""
PATIENCE = 3
"""Consecutive decisions that must be suspect, because the metric of one decision is noisy."""


def detect(contribution: np.ndarray, gain: np.ndarray, judged: np.ndarray) -> dict[str, np.ndarray]:
    """Flags, bool (T, N, S), by reason.

    `overclaiming`: the contribution of a seed is far above the gain of its host over the twin. `indispensable`: the
    host depends on the seed, and is worse than its twin.

    `contribution` (T, N, S) and `gain` over the twin (T, N) are measured after each decision; `judged`, bool (T, N, S),
    marks seeds of networks that can be compared with their twin.
    """
    gain = gain[..., None]
    claims = judged & (contribution > MIN_CONTRIBUTION)
    indispensable = _lasting(claims & (gain < -LOSS_MARGIN))
    overclaiming = _lasting(claims & (contribution > OVERCLAIM_FACTOR * np.maximum(gain, 0.0)))
    return {"overclaiming": overclaiming & ~indispensable, "indispensable": indispensable}


def _lasting(suspect: np.ndarray) -> np.ndarray:
    """Where `suspect` held for PATIENCE consecutive decisions."""
    lasting = suspect.copy()
    for back in range(1, PATIENCE):
        lasting[back:] &= suspect[:-back]
        lasting[:back] = False
    return lasting

"""Seeds that look better than they are: detectors that run with every decision.

Shapes: N hosts, S slots. A flag is an event to look at, not a punishment; the reward does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simic.rewards.facts import StepFacts

REASONS: dict[str, str] = {
    "overclaiming": "its contribution is far above what the host has gained since the episode began",
    "indispensable": "its contribution rises while the host is worse than before the seed was blended in",
}

OVERCLAIM_FACTOR = 3.0
"""A contribution above this multiple of the host's gain is suspect."""
MARGIN = 0.05
"""Quality within which measurements are noise."""


@dataclass(frozen=True, kw_only=True)
class GamingMemory:
    """What the detectors remember of the seeds that are blended in; NaN elsewhere."""

    quality_at_blend: np.ndarray
    """Quality of the host just before the seed was blended in (N, S)."""
    highest_contribution: np.ndarray
    """Highest contribution measured since then (N, S)."""

    @classmethod
    def empty(cls, num_hosts: int, num_slots: int) -> GamingMemory:
        """Nothing is blended in."""
        nothing = np.full((num_hosts, num_slots), np.nan)
        return cls(quality_at_blend=nothing, highest_contribution=nothing)


def detect(facts: StepFacts, memory: GamingMemory) -> tuple[dict[str, np.ndarray], GamingMemory]:
    """Flags bool (N, S) by the name of their reason, and the memory for the next decision."""
    memory = _note_blends(facts, memory)
    flags = {"overclaiming": overclaiming(facts), "indispensable": indispensable(facts, memory)}
    assert flags.keys() == REASONS.keys()
    return flags, _note_contributions(facts, memory)


def overclaiming(facts: StepFacts) -> np.ndarray:
    """Seeds whose contribution is far above the host's whole gain since the start of the episode."""
    gain = np.maximum(facts.quality_after - facts.first_quality, 0.0)[:, None]
    return _judged(facts) & (facts.contribution_after > OVERCLAIM_FACTOR * gain + MARGIN)


def indispensable(facts: StepFacts, memory: GamingMemory) -> np.ndarray:
    """Seeds whose contribution reaches a new high while the host is worse than before they were blended in."""
    worse = facts.quality_after[:, None] < memory.quality_at_blend - MARGIN
    # A seed that is not blended in contributes nothing, so the contribution itself is the rise since then.
    contribution = facts.contribution_after
    rising = (contribution > MARGIN) & (contribution > np.fmax(memory.highest_contribution, 0.0))
    return _judged(facts) & worse & rising


def _judged(facts: StepFacts) -> np.ndarray:
    # The last quality is that of another network, the exported one; it says nothing of contributions in this one.
    return facts.counted_after & ~facts.terminal[:, None]


def _note_blends(facts: StepFacts, memory: GamingMemory) -> GamingMemory:
    before, after = facts.slots_before.alpha > 0, facts.slots_after.alpha > 0
    quality = np.where(after & ~before, facts.quality_before[:, None], memory.quality_at_blend)
    highest = np.where(after & ~before, np.nan, memory.highest_contribution)
    return GamingMemory(quality_at_blend=quality, highest_contribution=highest)


def _note_contributions(facts: StepFacts, memory: GamingMemory) -> GamingMemory:
    """Remember new highs; forget seeds that are gone and hosts whose episode is over."""
    contribution = np.where(facts.counted_after, facts.contribution_after, np.nan)
    kept = (facts.slots_after.alpha > 0) & ~facts.terminal[:, None]
    return GamingMemory(
        quality_at_blend=np.where(kept, memory.quality_at_blend, np.nan),
        highest_contribution=np.where(kept, np.fmax(memory.highest_contribution, contribution), np.nan),
    )

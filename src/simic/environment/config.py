"""EpisodeConfig; the settings of the governor are defined in `control.governor`."""

from __future__ import annotations

from dataclasses import dataclass

from simic.control.governor import GovernorConfig as GovernorConfig


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Settings of an episode."""

    horizon: int = 24
    """Decisions per episode; one host epoch passes between two decisions."""
    anneal: bool = True
    """Anneal each host's learning rate to zero along a cosine over the episode."""

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"horizon must be at least 1, got {self.horizon}")

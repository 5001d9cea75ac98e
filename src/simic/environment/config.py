"""What an episode is; when a host counts as broken stands in `control.governor`."""

from __future__ import annotations

from dataclasses import dataclass

from simic.control.governor import GovernorConfig as GovernorConfig


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """What an episode is."""

    horizon: int = 24
    """Decisions of an episode; one host epoch passes between two."""
    anneal: bool = True
    """Whether each host's learning rate falls to zero along a cosine over the episode."""
    attribute_at_end: bool = True
    """Whether the seeds of an episode that reaches its horizon get Shapley values; at most 2^S validation passes."""

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"horizon must be at least 1, got {self.horizon}")

"""What an episode is, and when a host counts as broken."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    """When a host counts as broken. Both its training and its validation loss must say so: overfitting is no fault."""

    window: int = 5
    """Decisions of loss history that divergence is judged against; before there is one, random guessing stands in."""
    deviations: float = 5.0
    """A diverging loss exceeds the median of its history by this many median absolute deviations,"""
    relative_rise: float = 1.0
    """and by at least this multiple of the median,"""
    absolute_rise: float = 0.1
    """and by at least this share of the random-guess loss: a memorised training set is no reason to panic."""
    learned_share: float = 0.6
    """A host whose median validation loss fell below this share of the random-guess loss had learned something."""
    collapsed_share: float = 0.9
    """A host that had learned has collapsed when its losses are back above this share of the random-guess loss."""
    patience: int = 2
    """Decisions in a row that look diverged or collapsed before the verdict; losses that are not finite need one."""

    def __post_init__(self) -> None:
        for name, least in (("window", 3), ("patience", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("deviations", "relative_rise", "absolute_rise"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, or any noise would count, got {getattr(self, name)}")
        if not 0 < self.learned_share < self.collapsed_share <= 1:
            raise ValueError(
                "learned_share must be positive and below collapsed_share, which is at most 1: "
                f"got {self.learned_share} and {self.collapsed_share}"
            )

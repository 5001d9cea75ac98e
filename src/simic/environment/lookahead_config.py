"""LookaheadConfig: the settings of the search in `environment.lookahead`. It loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Follow = Literal["search", "policy"]
LOOKAHEAD = "lookahead"
"""Name of the search among the sources of episodes."""


@dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """How the search looks ahead. It costs about candidates * (decisions left) host epochs per search and host."""

    every: int = 4
    """Decisions between two searches; in between, the rule that won goes on."""
    candidates: int = 15
    """Seeds that a search tries in a host, drawn from all that fit in its empty slots."""
    depth: int | None = None
    """Host epochs that a candidate is played for; null plays it to the end of the episode."""
    rules: tuple[str, ...] = ("finish",)
    """Controllers that go on from a candidate: names or files. The first one at the start; the others compete with it,
    and the one that wins goes on. finish only advances seeds and fossilizes those that are worth their parameters."""
    margin: float = 0.3
    """Points of score by which an action must lead the rule's own; below, several actions are equally good and the
    choice between them would be noise."""
    pooling: float = 0.5
    """Weight from 0 to 1 of what the same action brings in the other hosts of the group, against what it brings in the
    host itself."""
    rows: int = 64
    """Hosts that are played side by side while searching."""
    follow: Follow = "search"
    """Whose actions the recorded hosts carry out: those of the search, or those of `policy`, whose states are then
    labelled with the actions of the search (DAgger)."""
    policy: str = "pretrained"
    """The controller that is followed with follow policy: a name or a file."""

    @property
    def controllers(self) -> tuple[str, ...]:
        """All controllers that take part."""
        return (*self.rules, self.policy) if self.follow == "policy" else self.rules

    def __post_init__(self) -> None:
        for name in ("every", "candidates", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"depth must be at least 1, or null for the whole episode, got {self.depth}")
        if not 0 <= self.pooling <= 1:
            raise ValueError(f"pooling must be a weight from 0 to 1, got {self.pooling}")
        if not self.margin >= 0:
            raise ValueError(f"margin must be at least 0 points, got {self.margin}")
        if not self.rules:
            raise ValueError("rules must name at least one controller, such as finish: it goes on from a candidate")
        if self.follow not in get_args(Follow):
            raise ValueError(f"follow must be one of {', '.join(get_args(Follow))}, got {self.follow!r}")

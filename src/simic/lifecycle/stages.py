"""The life of a seed: stages, which may follow which, and the numbers that govern it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from numbers import Integral
from typing import Literal, get_args


class Stage(IntEnum):
    """Where a slot stands."""

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    HOLDING = 4
    FOSSILIZED = 5
    PRUNED = 6
    EMBARGOED = 7
    RESETTING = 8

    def __str__(self) -> str:
        return self.name.lower()


NEXT: dict[Stage, frozenset[Stage]] = {
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.BLENDING, Stage.PRUNED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.BLENDING, Stage.FOSSILIZED, Stage.PRUNED}),
    Stage.FOSSILIZED: frozenset(),
    Stage.PRUNED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.RESETTING}),
    Stage.RESETTING: frozenset({Stage.DORMANT}),
}
LIVE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
"""Stages of a seed whose fate is still open."""

Incubation = Literal["direct", "shadow", "straight_through"]
INCUBATIONS: tuple[Incubation, ...] = get_args(Incubation)


class IllegalTransitionError(ValueError):
    """A stage that cannot follow another."""


class IllegalActionError(ValueError):
    """An action that the rules refuse; nothing was changed."""


def check_transition(old: Stage, new: Stage) -> None:
    """Raise unless `new` may directly follow `old`."""
    if new not in NEXT[old]:
        allowed = ", ".join(str(stage) for stage in sorted(NEXT[old])) or "nowhere: it is final"
        raise IllegalTransitionError(f"a {old} slot cannot become {new}; it may go to {allowed}")


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """The numbers that govern a seed's life; times are decisions (one host epoch each)."""

    incubation: Incubation = "direct"
    """How a seed learns before it counts: direct, shadow or straight_through."""
    max_seeds: int | None = None
    """Most seeds a host may hold, fossils included; None means one per slot."""
    min_training_decisions: int = 3
    """Decisions a seed must spend in training before it may be blended in."""
    min_gradient_norm: float = 1e-10
    """Mean gradient norm below which a seed counts as not learning, so not ready for blending."""
    min_prune_age: int = 1
    """Decisions a seed lives before it may be pruned."""
    embargo_decisions: int = 2
    """Decisions a slot rests after a prune before it is reset."""

    def __post_init__(self) -> None:
        if self.incubation not in INCUBATIONS:
            raise ValueError(f"incubation must be one of {', '.join(INCUBATIONS)}, got {self.incubation!r}")
        counts = ("min_training_decisions", "min_prune_age", "embargo_decisions")
        for name in ("max_seeds", *counts):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Integral):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        if self.max_seeds is not None and self.max_seeds < 1:
            raise ValueError(f"max_seeds must be at least 1 or None, got {self.max_seeds}")
        if not isfinite(self.min_gradient_norm):
            raise ValueError(f"min_gradient_norm must be finite, got {self.min_gradient_norm}")
        for name in (*counts, "min_gradient_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def has_training_stage(self) -> bool:
        """Whether seeds learn in a stage of their own before their first ramp."""
        return self.incubation != "direct"

"""Stages of a slot, the allowed transitions between them, and the lifecycle settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import isfinite
from numbers import Integral
from typing import Literal, get_args


class Stage(IntEnum):
    """Stage of a slot, from dormant to fossilized, or over pruned back to dormant.

    >>> [report.stage == simic.Stage.DORMANT for report in model.growth()]
    [True]
    """

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
"""Stages of a seed that is neither fossilized nor pruned yet."""
STAGE_COLOURS = {
    Stage.GERMINATED: "#E69F00",
    Stage.TRAINING: "#CC79A7",
    Stage.BLENDING: "#56B4E9",
    Stage.HOLDING: "#1A80C4",
    Stage.FOSSILIZED: "#009E73",
}
"""In figures, of the stages in which a slot holds a seed; safe for colour blindness."""

Incubation = Literal["direct", "shadow", "straight_through"]
MAX_SEEDS_PER_SLOT = 8
INCUBATIONS: tuple[Incubation, ...] = get_args(Incubation)


class IllegalActionError(ValueError):
    """An action that the lifecycle rules or the budget refuse; the state is unchanged.

    >>> model.execute(simic.Action("prune", 0))
    Traceback (most recent call last):
    simic.lifecycle.stages.IllegalActionError: ...
    """


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """Lifecycle settings; times are in decisions, one host epoch each.

    >>> lifecycle = simic.LifecycleConfig(seeds_per_slot=2, embargo_decisions=5)
    >>> GrowableModel(make_net(), example_input=x[:2], lifecycle=lifecycle).slot_names
    ('0', '0#2')
    """

    incubation: Incubation = "direct"
    """How a seed is trained before it affects the output: direct, shadow or straight_through."""
    seeds_per_slot: int = 1
    """Seeds that a slot's submodule may hold; the next may germinate when the one before it is a fossil."""
    max_seeds: int | None = None
    """Maximum number of seeds in a host, fossils included; None means no other limit than seeds_per_slot."""
    ramp_factor: float = 1.0
    """Factor on the length of a seed's first alpha ramp; 0: it counts fully from birth, as LoRA does."""
    min_training_decisions: int = 3
    """Minimum decisions in the training stage before a seed may be blended in."""
    min_gradient_norm: float = 1e-10
    """Mean gradient norm below which a training seed counts as not learning and may not be blended in."""
    min_prune_age: int = 1
    """Minimum age of a seed, in decisions, before it may be pruned."""
    embargo_decisions: int = 2
    """Decisions a slot stays embargoed after a prune."""

    def __post_init__(self) -> None:
        if self.incubation not in INCUBATIONS:
            raise ValueError(f"incubation must be one of {', '.join(INCUBATIONS)}, got {self.incubation!r}")
        counts = ("min_training_decisions", "min_prune_age", "embargo_decisions")
        for name in ("seeds_per_slot", "max_seeds", *counts):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Integral):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        if not 1 <= self.seeds_per_slot <= MAX_SEEDS_PER_SLOT:
            raise ValueError(f"seeds_per_slot must be from 1 to {MAX_SEEDS_PER_SLOT}, got {self.seeds_per_slot}")
        if self.max_seeds is not None and self.max_seeds < 1:
            raise ValueError(f"max_seeds must be at least 1 or None, got {self.max_seeds}")
        for name in ("min_gradient_norm", "ramp_factor"):
            if not isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")
        for name in (*counts, "min_gradient_norm", "ramp_factor"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def has_training_stage(self) -> bool:
        """Whether seeds pass through the training stage before their first alpha ramp."""
        return self.incubation != "direct"

"""Observations: the features that a policy sees, computed from facts by one table each for hosts, slots and blueprints.

Shapes: N hosts, S slots, B blueprints, F features, W host epochs of history (the newest last). For N = 2 hosts with
S = 3 slots and B = 7 blueprints:

    base (2, F_base)          host 0 | elapsed 0.25 | val_loss 0.4 | ... | previous_op.wait 1 | ... |
                              host 1 | ...
    slots (2, 3, F_slot)      host 0, slot 0 | stage.training 1 | alpha 0 | contribution 0 | ... |
                              host 0, slot 1 | stage.dormant 1  | ...
    blueprints (3, 7, F_bp)   slot 0, norm   | fits 1 | size 0.1 | normalises 1 | ... |
                              slot 0, mlp    | fits 0, so zeros throughout

The numbers of features are the same for every task, number of slots and number of blueprints. Every feature
- lies in [-1, 1] for any facts: shares, flags and ratios are clamped; a feature with `soft` = h becomes x / (|x| + h),
  which is 1/2 at h and 1 at infinity;
- is NaN inside the tables and 0 in the result if it is unknown; a `..._known` flag tells this apart where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simic.control.facts import Facts
from simic.control.feature_view import view_facts
from simic.control.features import BASE_FEATURES, BLUEPRINT_FEATURES, SLOT_FEATURES
from simic.control.legality import Masks, legal_masks


@dataclass(frozen=True)
class ObservationSpec:
    """Numbers of features of a host, a slot and a blueprint; by default those of the tables."""

    base: int = len(BASE_FEATURES.names)
    slot: int = len(SLOT_FEATURES.names)
    blueprint: int = len(BLUEPRINT_FEATURES.names)

    def check(self, other: ObservationSpec, who: str) -> None:
        """Raise unless `who`, built for `other`, agrees with this."""
        if self != other:
            raise ValueError(f"{who} is built for {other}, but observations are {self}; build both from one spec")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Features of N hosts: finite float32 arrays with values in [-1, 1]."""

    base: np.ndarray  # (N, F_base)
    slots: np.ndarray  # (N, S, F_slot)
    blueprints: np.ndarray  # (S, B, F_blueprint), the same for every host

    @property
    def spec(self) -> ObservationSpec:
        """The sizes of these arrays."""
        return ObservationSpec(self.base.shape[-1], self.slots.shape[-1], self.blueprints.shape[-1])


def observe(facts: Facts, masks: Masks | None = None) -> Observation:
    """The features of N hosts; pass `masks` if `legal_masks(facts)` was computed already."""
    if (facts.host_parameters != facts.host_parameters[0]).any():
        low, high = facts.host_parameters.min(), facts.host_parameters.max()
        raise ValueError(
            f"hosts observed together share one blueprint table, so they must be of one size, got {low} to {high} "
            "parameters; observe them apart"
        )
    num_hosts, num_slots = facts.slots.stage.shape
    # Overflow and division by zero happen in hosts that diverge: infinities are clamped, NaN becomes 0.
    with np.errstate(all="ignore"):
        blueprints = BLUEPRINT_FEATURES.fill(facts, facts.blueprint_parameters.shape)
        view = view_facts(facts, (masks or legal_masks(facts)).slot, blueprints)
        base = BASE_FEATURES.fill(view, (num_hosts,))
        slots = SLOT_FEATURES.fill(view, (num_hosts, num_slots))
    return Observation(base=base, slots=slots, blueprints=blueprints)


def flatten(observation: Observation, max_slots: int | None = None) -> np.ndarray:
    """One row per host (N, F_base + max_slots * F_slot), padded with zeros.

    Blueprint features are left out: they are constant within a task, where blueprints are known by index.
    """
    num_hosts, num_slots, size = observation.slots.shape
    if max_slots is not None and num_slots > max_slots:
        raise ValueError(f"max_slots must be at least the number of slots, {num_slots}, got {max_slots}")
    padding = np.zeros((num_hosts, ((max_slots or num_slots) - num_slots) * size), dtype=np.float32)
    return np.concatenate([observation.base, observation.slots.reshape(num_hosts, -1), padding], axis=1)


def flat_names(max_slots: int) -> tuple[str, ...]:
    """A name for every column of `flatten`."""
    slots = (f"slot_{slot}.{name}" for slot in range(max_slots) for name in SLOT_FEATURES.names)
    return (*BASE_FEATURES.names, *slots)

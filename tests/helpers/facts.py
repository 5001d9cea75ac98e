"""Facts by hand: hosts with given slots, and what a controller decides on them."""

import numpy as np

from simic import (
    Action,
    Facts,
    LifecycleConfig,
    Stage,
)
from simic.lifecycle.actions import HEADS
from simic.lifecycle.slots import SlotState

SMALL, MIDDLE, LARGE, HUGE = 0, 1, 2, 3
SIZES = np.array([[10, 50, 90, 900], [10, 50, 90, 900]])
"""Parameters of four blueprints in two slots, beside a host of 100."""


def make_facts(decision=5, loss=1.0, slots=None, sizes=SIZES, lifecycle=None, num_hosts=1) -> Facts:
    """N hosts with the slots given, all at the same time; the loss is one number or one per host."""
    num_slots = len(sizes)
    val_loss = np.full((num_hosts, 16), np.nan)
    val_loss[:, -1] = loss
    return Facts(
        slots=slots if slots is not None else SlotState.dormant(num_hosts, num_slots),
        lifecycle=lifecycle or LifecycleConfig(),
        slot_names=tuple("abcdef"[:num_slots]),
        blueprint_names=("small", "middle", "large", "huge"),
        blueprint_parameters=sizes,
        host_parameters=np.full(num_hosts, 100),
        seed_parameters=np.zeros((num_hosts, num_slots), dtype=np.int64),
        decision=np.full(num_hosts, decision),
        horizon=np.zeros(num_hosts, dtype=np.int64),
        previous_action=np.zeros((num_hosts, len(HEADS)), dtype=np.int64),
        random_guess_loss=np.full(num_hosts, np.nan),
        host_gradient_norm=np.full(num_hosts, np.nan),
        train_loss=np.full((num_hosts, 16), np.nan),
        val_loss=val_loss,
        val_accuracy=np.full((num_hosts, 16), np.nan),
        parameters=np.full((num_hosts, 16), np.nan),
    )


def one_slot_in(stage, slot: int | slice = 0, **fields) -> SlotState:
    """One host with two slots, one of them (or a slice) with a seed of the middle blueprint in this stage."""
    slots = SlotState.dormant(1, 2)
    for name, value in {"stage": stage, "blueprint": MIDDLE, "age": 9, **fields}.items():
        getattr(slots, name)[0, slot] = value
    return slots


def says(controller, facts) -> Action:
    """The controller's action for the first host, in words."""
    return Action.decode(controller.act(facts)[0], facts.slot_names, facts.blueprint_names)


def random_facts(rng, decision) -> Facts:
    """Five hosts in unrelated but possible states."""
    slots = SlotState.dormant(5, 2)
    slots.stage[:] = rng.integers(len(Stage), size=(5, 2))
    holds_seed = np.isin(
        slots.stage, (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
    )
    slots.blueprint[:] = np.where(holds_seed, rng.integers(4, size=(5, 2)), -1)
    slots.stage_age[:] = rng.integers(5, size=(5, 2))
    slots.age[:] = slots.stage_age + rng.integers(3, size=(5, 2))
    slots.contribution[:] = np.where(rng.random((5, 2)) < 0.2, np.nan, rng.normal(size=(5, 2)))
    slots.gradient_norm[:] = np.where(rng.random((5, 2)) < 0.2, np.nan, rng.random((5, 2)))
    slots.ramp_length[:] = rng.integers(4, size=(5, 2))
    slots.ramp_step[:] = np.minimum(rng.integers(4, size=(5, 2)), slots.ramp_length)
    slots.alpha_target[:] = 1.0
    return make_facts(decision, loss=rng.choice([0.5, 0.8, 1.0], size=5), slots=slots, num_hosts=5)

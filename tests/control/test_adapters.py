"""The rule for frozen hosts, on facts whose answers are known."""

import dataclasses

import numpy as np
import pytest

from simic import Action, Facts, LifecycleConfig, Op, Stage
from simic.control.adapters import AdapterConfig, AdapterController
from simic.control.facts import FIGURES, HISTORY
from simic.lifecycle.actions import HEADS
from simic.lifecycle.slots import SlotState, execute

NAMES = ("lora_2", "lora_8", "lora_32", "adapter")
LAYERS = 8
SLOTS = tuple(f"{layer}{seat}" for layer in range(LAYERS) for seat in ("", "#2"))
LIFECYCLE = LifecycleConfig(ramp_factor=0.0, seeds_per_slot=2)


def make_facts(state: SlotState, decision: int = 0, horizon: int = 10) -> Facts:
    """Facts of one host whose layers all take the same seeds."""
    nothing = np.full((1, HISTORY), np.nan)
    return Facts(
        slots=state,
        lifecycle=LIFECYCLE,
        slot_names=SLOTS,
        blueprint_names=NAMES,
        blueprint_parameters=np.tile([20, 80, 320, 60], (len(SLOTS), 1)),
        host_parameters=np.array([10_000]),
        seed_parameters=np.where(state.occupied, 20, 0),
        decision=np.array([decision]),
        horizon=np.array([horizon]),
        previous_action=np.zeros((1, len(HEADS)), dtype=np.int64),
        random_guess_loss=np.array([np.nan]),
        host_gradient_norm=np.array([np.nan]),
        **dict.fromkeys(FIGURES, nothing),
    )


def ask_until_wait(controller: AdapterController, state: SlotState, decision: int) -> list[Action]:
    """The actions of a decision, carried out in `state`."""
    actions = []
    for _ in range(100):
        row = controller.act(make_facts(state, decision))
        if row[0, 0] == Op.WAIT:
            return actions
        execute(state, row, LIFECYCLE)
        actions.append(Action.decode(row[0], SLOTS, NAMES))
    raise AssertionError("it never waits")


def planted() -> tuple[AdapterController, SlotState]:
    controller, state = AdapterController(), SlotState.dormant(1, len(SLOTS))
    ask_until_wait(controller, state, 0)
    return controller, state


def test_at_first_every_layer_gets_the_smallest_seed_beside_it():
    controller, state = AdapterController(), SlotState.dormant(1, len(SLOTS))
    actions = ask_until_wait(controller, state, 0)
    assert [(action.op, action.blueprint) for action in actions if action.op == "germinate"] == [
        ("germinate", "lora_2")
    ] * LAYERS
    assert [action.slot for action in actions if action.op == "germinate"] == list(SLOTS[::2])
    assert (state.alpha[0, ::2] == 1).all()


def test_then_the_layers_with_the_largest_gradients_get_larger_ones():
    controller, state = planted()
    state.gradient_norm[0, ::2] = [3, 8, 1, 7, 2, 6, 4, 5]
    state.contribution[0, ::2] = 0.1
    actions = ask_until_wait(controller, state, 1)
    assert (state.stage[0, ::2] == Stage.FOSSILIZED).all()
    grown = [(action.slot, action.blueprint) for action in actions if action.op == "germinate"]
    # Six of eight layers in order of their gradients; the first two get the largest.
    assert grown[:2] == [("1#2", "lora_32"), ("3#2", "lora_32")]
    assert grown[2:] == [(f"{layer}#2", "lora_8") for layer in (5, 7, 6, 0)]


def test_a_seed_that_does_not_contribute_is_held_for_a_while_and_then_pruned():
    controller, state = planted()
    ask_until_wait(controller, state, 1)
    state.contribution[0, ::2] = 0.1
    state.contribution[0, 4] = -0.01
    state.stage_age[0, 4] = 3
    assert [action.op for action in ask_until_wait(controller, state, 2)] == ["fossilize"] * 7
    state.stage_age[0, 4] = 4
    state.age[:] = 9
    assert [str(action.op) for action in ask_until_wait(controller, state, 3)] == ["prune"]
    state.clear((np.array([0]), np.array([4])))
    assert not ask_until_wait(controller, state, 4)  # a slot that had a seed does not get another


@pytest.mark.parametrize(("error", "ops"), [(0.004, ["prune"]), (0.006, []), (np.nan, ["prune"])])
def test_a_seed_is_pruned_only_if_its_contribution_is_too_small_by_two_standard_errors(error, ops):
    controller, state = planted()
    state.contribution[0, ::2] = 0.1
    ask_until_wait(controller, state, 1)
    state.stage[0, 4], state.contribution[0, 4], state.stage_age[0, 4] = Stage.HOLDING, -0.01, 4
    state.age[:] = 9
    errors = np.full((1, len(SLOTS)), error)
    row = controller.act(dataclasses.replace(make_facts(state, 2), contribution_error=errors))
    assert [Action.decode(row[0], SLOTS, NAMES).op] == (ops or ["wait"])


def test_nothing_larger_is_planted_in_the_second_half():
    controller, state = planted()
    state.gradient_norm[0, ::2] = 1.0
    state.contribution[0, ::2] = 0.1
    assert not [action for action in ask_until_wait(controller, state, 6) if action.op == "germinate"]


def test_where_nothing_fits_beside_it_grows_behind():
    controller, state = AdapterController(), SlotState.dormant(1, len(SLOTS))
    facts = make_facts(state)
    facts = dataclasses.replace(facts, blueprint_parameters=np.tile([-1, -1, -1, 60], (len(SLOTS), 1)))
    assert Action.decode(controller.act(facts)[0], SLOTS, NAMES).blueprint == "adapter"


def test_memory_can_be_saved():
    controller, state = planted()
    state.gradient_norm[0, ::2] = np.arange(LAYERS)
    controller.act(make_facts(state, 1))
    other = AdapterController()
    other.load_state_dict(controller.state_dict())
    state.contribution[0, ::2] = 0.1
    twin = state.copy()
    assert ask_until_wait(other, twin, 1) == ask_until_wait(controller, state, 1)


def test_a_new_model_is_grown_from_the_start():
    controller, state = planted()
    state.gradient_norm[0, ::2] = 1.0
    controller.act(make_facts(state, 1))
    fresh = SlotState.dormant(1, len(SLOTS))
    assert len([action for action in ask_until_wait(controller, fresh, 0) if action.op == "germinate"]) == LAYERS


def test_it_refuses_several_hosts_and_shares_beyond_one():
    state = SlotState.dormant(2, len(SLOTS))
    with pytest.raises(ValueError, match="beside one model, got 2 hosts"):
        AdapterController().act(make_facts(state))
    with pytest.raises(ValueError, match="grow_share must be from 0 to 1, got 2"):
        AdapterController(AdapterConfig(grow_share=2))

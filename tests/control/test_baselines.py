"""Controllers that ignore measurements: wait, random, scripted."""

import numpy as np
import pytest
from helpers.facts import MIDDLE, make_facts, random_facts, says

from simic import (
    Action,
    IllegalActionError,
    LifecycleConfig,
    Op,
    RandomController,
    ScriptedController,
    Stage,
    WaitController,
)
from simic.control.legality import legal_masks
from simic.lifecycle.actions import HEADS, TEMPOS
from simic.lifecycle.slots import SlotState, execute, tick


def test_wait_never_acts():
    rng = np.random.default_rng(0)
    controller = WaitController()
    for decision in range(50):
        assert (controller.act(random_facts(rng, decision)) == 0).all()


def test_random_draws_are_legal_and_miss_nothing():
    """2,000 draws on hosts that live by them: executing raises on an illegal one, and every operation comes up."""
    lifecycle = LifecycleConfig(incubation="shadow", embargo_decisions=1)
    sizes = np.array([[10, 50, -1, -1], [-1, -1, 90, 900], [-1, -1, -1, -1]])  # nothing fits the third slot
    slots, controller = SlotState.dormant(5, 3), RandomController(0)
    drawn, fitting = [], {0: {0, 1}, 1: {2, 3}}
    for decision in range(400):
        facts = make_facts(decision, slots=slots, sizes=sizes, lifecycle=lifecycle, num_hosts=5)
        allowed = legal_masks(facts).op
        actions = controller.act(facts)
        assert allowed[np.arange(5), actions[:, 0]].all()
        execute(slots, actions, lifecycle)
        drawn.append(actions)
        slots.gradient_norm[:], slots.contribution[:] = 1.0, 0.1
        tick(slots, lifecycle)
        if (slots.stage == Stage.FOSSILIZED)[:, :2].all():
            slots = SlotState.dormant(5, 3)  # everything is settled: a new life
    drawn = np.concatenate(drawn)
    assert len(drawn) == 2_000
    assert set(drawn[:, 0]) == set(Op)
    germinated = drawn[drawn[:, 0] == Op.GERMINATE]
    for slot, blueprints in fitting.items():
        assert set(germinated[germinated[:, 1] == slot, 2]) == blueprints
    assert set(germinated[:, 1]) == {0, 1}
    assert set(germinated[:, HEADS.index("tempo")]) == set(range(len(TEMPOS)))
    assert (drawn[drawn[:, 0] == Op.WAIT] == 0).all()


def test_legal_operations_are_equally_likely():
    """An empty slot allows wait and germinate: of 2,000 draws 1,000 each, within five standard deviations of 22."""
    controller = RandomController(0)
    facts = make_facts(num_hosts=2_000)
    ops = controller.act(facts)[:, 0]
    assert set(ops) == {Op.WAIT, Op.GERMINATE}
    assert abs((ops == Op.GERMINATE).sum() - 1_000) < 110


def test_random_streams_are_restored():
    original, resumed, other = RandomController(7), RandomController(8), RandomController(8)
    facts = make_facts(num_hosts=20)
    original.act(facts)
    resumed.load_state_dict(original.state_dict())
    expected = original.act(facts)
    np.testing.assert_array_equal(resumed.act(facts), expected)
    assert (other.act(facts) != expected).any()


def test_a_script_plays_a_list_or_a_mapping():
    first, second = Action("germinate", "a", "middle"), Action("prune", "a")
    listed, mapped = ScriptedController([first, second]), ScriptedController({1: first, 3: second})
    for schedule, ops in (
        (listed, ["germinate", "prune", "wait", "wait", "wait"]),
        (mapped, ["wait", "germinate", "wait", "prune", "wait"]),
    ):
        assert [says(schedule, make_facts(decision)).op for decision in range(5)] == ops
    rows = mapped.act(make_facts(1, num_hosts=3))
    np.testing.assert_array_equal(rows, [[Op.GERMINATE, 0, MIDDLE, 0, 0, 2, 0, 0]] * 3)  # target 1.0 is the third


def test_a_script_that_is_illegal_or_unknown_raises_when_its_time_comes():
    facts = make_facts(0)
    rows = ScriptedController([Action("fossilize", "b")]).act(facts)
    with pytest.raises(IllegalActionError, match=r"cannot fossilize .* the seed must be holding"):
        execute(facts.slots, rows, facts.lifecycle)
    for wrong, message in (
        (Action("germinate", "z"), "slot must be one of a, b, got 'z'"),
        (Action("germinate", "a", "smal"), "got 'smal'; did you mean small"),
        (Action("sprout"), "op must be one of wait, germinate"),
    ):
        with pytest.raises(ValueError, match=message):
            ScriptedController([wrong]).act(facts)


@pytest.mark.parametrize("script", [["wait"], {0: Action(), 3: "wait"}, "wait"], ids=str)
def test_a_script_of_something_else_is_refused(script):
    with pytest.raises(TypeError, match=r'made of actions such as Action\("wait"\), got \'w(ait)?\' for decision [03]'):
        ScriptedController(script)

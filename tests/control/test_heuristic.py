"""The heuristic on facts by hand: plateaus, sizes, judging seeds, memory."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers.facts import make_facts, one_slot_in, random_facts, says

from simic import (
    Action,
    Facts,
    HeuristicConfig,
    HeuristicController,
    Op,
    Stage,
)
from simic.control.facts import TRAINING_FACTS
from simic.control.legality import legal_masks
from simic.lifecycle.slots import SlotState

CONFIG = HeuristicConfig(
    patience=2, min_improvement=0.1, holding_decisions=2, min_contribution=0.0, max_live_seeds=1, max_seed_ratio=1.0,
    style="sigmoid-add", tempo=5,
)  # fmt: skip


def stalled_controller(config=CONFIG) -> HeuristicController:
    """One that has seen a plateau for longer than its patience."""
    controller = HeuristicController(config)
    busy = one_slot_in(Stage.BLENDING, slice(None), ramp_length=8, alpha_target=1.0)
    for decision in range(4):
        assert says(controller, make_facts(decision, slots=busy)).op == "wait"
    return controller


def test_a_plateau_germinates_after_the_patience_and_improvement_starts_it_anew():
    controller = HeuristicController(CONFIG)
    # 0.95 is no improvement on 1.0 by a tenth; 0.8 is; 0.75 is none on 0.8.
    losses = [1.0, 0.95, 0.8, 0.79, 0.75]
    ops = [says(controller, make_facts(t, loss)).op for t, loss in enumerate(losses)]
    assert ops == ["wait", "wait", "wait", "wait", "germinate"]


def test_a_negative_loss_can_improve_too():
    controller = HeuristicController(CONFIG)
    losses = [-1.0, -1.05, -1.2, -1.25, -1.3]  # an accuracy that stands in for the loss
    ops = [says(controller, make_facts(t, loss)).op for t, loss in enumerate(losses)]
    assert ops == ["wait", "wait", "wait", "wait", "germinate"]


def test_it_plants_the_largest_seed_that_is_not_too_large():
    action = says(stalled_controller(), make_facts())
    assert action == Action("germinate", "a", "large", style="sigmoid-add", tempo=5, alpha_target=1.0)


def test_the_smallest_seed_is_never_too_large():
    frugal = dataclasses.replace(CONFIG, max_seed_ratio=0.01)
    assert says(stalled_controller(frugal), make_facts()).blueprint == "small"


def test_after_planting_it_waits_for_a_new_plateau():
    controller = stalled_controller(dataclasses.replace(CONFIG, max_live_seeds=2))
    assert says(controller, make_facts(5)).op == "germinate"
    slots = one_slot_in(Stage.BLENDING, ramp_length=8, alpha_target=1.0)
    assert [says(controller, make_facts(t, slots=slots)).op for t in (6, 7)] == ["wait", "germinate"]


def test_no_more_seeds_than_may_be_live():
    slots = one_slot_in(Stage.BLENDING, ramp_length=8, alpha_target=1.0)
    assert says(stalled_controller(), make_facts(slots=slots)).op == "wait"
    fossil = one_slot_in(Stage.FOSSILIZED, alpha=1.0)
    assert says(stalled_controller(), make_facts(slots=fossil)).slot == "b"  # a fossil is not live


@pytest.mark.parametrize(
    ("stage", "fields", "op"),
    [
        (Stage.GERMINATED, {}, "advance"),
        (Stage.TRAINING, {"stage_age": 3, "gradient_norm": 0.1}, "advance"),
        (Stage.TRAINING, {"stage_age": 2, "gradient_norm": 0.1}, "wait"),  # too young
        (Stage.TRAINING, {"stage_age": 9, "gradient_norm": 0.0}, "wait"),  # does not learn
        (Stage.TRAINING, {"stage_age": 9}, "wait"),  # nobody measured
        (Stage.BLENDING, {"ramp_step": 3, "ramp_length": 3, "alpha": 1.0, "alpha_target": 1.0}, "advance"),
        (Stage.BLENDING, {"ramp_step": 2, "ramp_length": 3, "alpha": 0.7, "alpha_target": 1.0}, "wait"),
        (Stage.HOLDING, {"stage_age": 1, "contribution": 0.5, "alpha": 1.0}, "wait"),
        (Stage.HOLDING, {"stage_age": 2, "contribution": 0.5, "alpha": 1.0}, "fossilize"),
        (Stage.HOLDING, {"stage_age": 2, "contribution": 0.0, "alpha": 1.0}, "prune"),
        (Stage.HOLDING, {"stage_age": 2, "contribution": -0.5, "alpha": 1.0}, "prune"),
        (Stage.HOLDING, {"stage_age": 2, "alpha": 1.0}, "prune"),  # never measured: no reason to keep it
        (Stage.HOLDING, {"stage_age": 2, "contribution": -np.inf, "alpha": 1.0}, "prune"),  # it breaks the host
        (Stage.FOSSILIZED, {"alpha": 1.0}, "wait"),
        (Stage.EMBARGOED, {"blueprint": -1}, "wait"),
    ],
)
@pytest.mark.parametrize("slot", [0, 1])
def test_what_is_decided_about_a_seed(stage, fields, op, slot):
    action = says(HeuristicController(CONFIG), make_facts(slots=one_slot_in(stage, slot, **fields)))
    assert action.op == op
    if op != "wait":
        assert action.slot == "ab"[slot]


def test_a_seed_is_judged_by_the_bar_that_was_set():
    slots = one_slot_in(Stage.HOLDING, stage_age=2, contribution=0.02, alpha=1.0)
    for bar, op in ((0.01, "fossilize"), (0.02, "prune"), (0.03, "prune")):
        config = dataclasses.replace(CONFIG, min_contribution=bar)
        assert says(HeuristicController(config), make_facts(slots=slots)).op == op


def test_a_failed_blueprint_comes_after_all_others():
    """Every seed fails: no place sees the same one again before all that are small enough were tried everywhere."""
    controller = HeuristicController(CONFIG)
    tried = []
    for decision in range(0, 40, 4):
        action = plant(controller, decision)
        tried.append((action.slot, action.blueprint))
        assert isinstance(action.slot, str)
        slots = one_slot_in(Stage.HOLDING, "ab".index(action.slot), stage_age=2, contribution=-1.0, alpha=1.0)
        slots.blueprint[slots.occupied] = ("small", "middle", "large").index(action.blueprint)
        assert says(controller, make_facts(decision + 3, slots=slots)).op == "prune"
    expected = [(slot, size) for size in ("large", "middle", "small") for slot in "ab"]
    assert tried[:6] == expected
    assert tried[6:] == expected[:4]


def plant(controller, decision) -> Action:
    """Let a plateau last until something is planted in the empty host."""
    for wait in range(5):
        action = says(controller, make_facts(decision + 1 + wait))
        if action.op == "germinate":
            return action
    raise AssertionError("the rule never planted")


# Seeds behind and beside: of two slots for "mlp" (20 parameters) and "widen" (15), one after the other is judged.

KINDS: dict[str, int] = {"mlp": 0, "widen": 1}
"""Indices of the blueprints, and of their kinds."""


def facts_of_kinds(decision: int, slots: SlotState | None = None) -> Facts:
    facts = make_facts(decision, slots=slots, sizes=np.array([[20, 15], [20, 15]]))
    return dataclasses.replace(facts, blueprint_names=tuple(KINDS))


def judge(controller, decision: int, blueprint: str, contribution: float) -> Action:
    """What becomes of a seed in the first slot that contributes so much."""
    slots = one_slot_in(Stage.HOLDING, blueprint=KINDS[blueprint], stage_age=2, contribution=contribution, alpha=1.0)
    return says(controller, facts_of_kinds(decision, slots))


def next_planted(controller, decision: int, slots: SlotState | None = None) -> Any:
    """The blueprint that is planted on the next plateau."""
    for wait in range(4):
        action = says(controller, facts_of_kinds(decision + wait, slots))
        if action.op == "germinate":
            return action.blueprint
    raise AssertionError("the rule never planted")


def test_the_kind_that_was_not_tried_comes_next():
    controller = HeuristicController(CONFIG)
    assert next_planted(controller, 0) == "mlp"  # the larger one
    assert judge(controller, 5, "mlp", 0.2).op == "fossilize"
    assert next_planted(controller, 6) == "widen"


def test_a_live_seed_counts_as_tried():
    controller = HeuristicController(dataclasses.replace(CONFIG, max_live_seeds=2))
    for tried, expected in (("mlp", "widen"), ("widen", "mlp")):
        slots = one_slot_in(Stage.BLENDING, blueprint=KINDS[tried], ramp_length=8, alpha_target=1.0)
        assert next_planted(controller, 0, slots) == expected


@pytest.mark.parametrize(("behind", "beside", "expected"), [(0.3, 0.1, "mlp"), (0.1, 0.3, "widen")])
def test_the_kind_that_contributed_more_is_preferred(behind, beside, expected):
    controller = HeuristicController(CONFIG)
    next_planted(controller, 0)
    for decision, (blueprint, contribution) in enumerate((("mlp", behind), ("widen", beside)), 5):
        assert judge(controller, decision, blueprint, contribution).op == "fossilize"
    assert next_planted(controller, 7) == expected


def test_the_mean_counts_and_a_seed_that_was_not_measured_counts_as_nothing():
    controller = HeuristicController(CONFIG)
    next_planted(controller, 0)
    for decision, (blueprint, contribution) in enumerate((("mlp", 0.3), ("mlp", np.nan), ("widen", 0.2)), 5):
        judge(controller, decision, blueprint, contribution)
    assert np.array(controller.state_dict()["gained"]).tolist() == [[0.3, 0.2]]
    assert np.array(controller.state_dict()["judged"]).tolist() == [[2, 1]]
    assert next_planted(controller, 8) == "widen"


@pytest.mark.parametrize(("reads", "expected"), [("output", "mlp"), ("input", "widen")])
def test_only_seeds_that_read_what_they_may(reads, expected):
    controller = HeuristicController(dataclasses.replace(CONFIG, reads=reads))
    for decision in (0, 10):
        assert next_planted(controller, decision) == expected
        assert judge(controller, decision + 4, expected, -0.2).op == "prune"


def test_a_memory_without_contributions_can_be_loaded():
    controller, later = stalled_controller(), HeuristicController(CONFIG)
    state = controller.state_dict()
    later.load_state_dict({name: state[name] for name in ("best", "stalled", "failures")})
    np.testing.assert_array_equal(later.act(make_facts()), controller.act(make_facts()))
    nothing = HeuristicController(CONFIG)
    nothing.load_state_dict({"best": None, "stalled": None, "failures": None})
    assert says(nothing, make_facts(0)).op == "wait"


def alone(facts, index) -> Facts:
    """The facts of one host alone."""
    one = slice(index, index + 1)
    names = ("host_parameters", "seed_parameters", "decision", "val_loss", "val_accuracy")
    names += ("metric_scale", "awaits_contribution", *TRAINING_FACTS)
    slots = SlotState(**{field.name: getattr(facts.slots, field.name)[one] for field in dataclasses.fields(SlotState)})
    return dataclasses.replace(facts, slots=slots, **{name: getattr(facts, name)[one] for name in names})


def test_many_hosts_at_once_equal_one_at_a_time():
    rng = np.random.default_rng(0)
    together, single = HeuristicController(CONFIG), [HeuristicController(CONFIG) for _ in range(5)]
    seen = set()
    for decision in range(60):
        facts = random_facts(rng, decision)
        actions = together.act(facts)
        singly = np.concatenate([one.act(alone(facts, index)) for index, one in enumerate(single)])
        np.testing.assert_array_equal(actions, singly)
        seen |= set(actions[:, 0].tolist())
        masks = legal_masks(facts)
        assert masks.slot[np.arange(5), actions[:, 0], actions[:, 1]].all()
    assert seen == {Op.WAIT, Op.GERMINATE, Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE}


def test_a_new_episode_starts_without_memory():
    """Decision 0 of a host forgets what was learned about its predecessor, and only that host's."""
    controller = HeuristicController(CONFIG)
    rng = np.random.default_rng(1)
    for decision in range(10):
        controller.act(random_facts(rng, decision))
    facts = random_facts(rng, 10)
    facts.decision[2] = 0
    controller.act(facts)
    fresh = HeuristicController(CONFIG)
    fresh.act(alone(facts, 2))
    for name in ("best", "stalled", "failures", "judged", "gained"):
        np.testing.assert_array_equal(controller.state_dict()[name][2:3], fresh.state_dict()[name])
    assert np.array(controller.state_dict()["failures"])[[0, 1, 3, 4]].any()


def test_the_heuristic_remembers_across_a_state_dict():
    original, copied = HeuristicController(CONFIG), HeuristicController(CONFIG)
    copied.load_state_dict(original.state_dict())  # before it has seen anything
    rng = np.random.default_rng(2)
    for decision in range(15):
        original.act(random_facts(rng, decision))
    state = original.state_dict()
    copied.load_state_dict(state)
    for decision in range(15, 40):
        facts = random_facts(rng, decision)
        np.testing.assert_array_equal(original.act(facts), copied.act(facts))
    assert (np.array(copied.state_dict()["failures"]) >= state["failures"]).all()


def test_a_copied_state_is_independent():
    controller = stalled_controller()
    state = controller.state_dict()
    saved = {name: np.array(value) for name, value in state.items()}
    slots = one_slot_in(Stage.HOLDING, stage_age=2, contribution=-1.0, alpha=1.0)
    assert says(controller, make_facts(slots=slots)).op == "prune"
    for name, value in saved.items():
        np.testing.assert_array_equal(state[name], value)


def test_memory_of_other_hosts_is_refused():
    controller = stalled_controller()
    with pytest.raises(ValueError, match=r"memory is of \(1, 2, 4\), the facts are of \(5, 2, 4\)"):
        controller.act(random_facts(np.random.default_rng(0), 7))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"max_live_seeds": 0}, "max_live_seeds must be at least 1"),
        ({"style": "bold"}, "style must be one of linear-add, .* got 'bold'"),
        ({"tempo": 4}, r"tempo must be one of \(3, 5, 8\), got 4"),
        ({"reads": "any"}, "reads must be one of output, input, both, got 'any'"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        HeuristicConfig(**fields)


def test_a_held_seed_that_awaits_its_measurement_is_neither_kept_nor_pruned():
    held = one_slot_in(Stage.HOLDING, slice(None), stage_age=9, alpha=1.0, alpha_target=1.0)
    facts = make_facts(slots=held)
    assert says(HeuristicController(CONFIG), facts).op == "prune", "one that is never measured"
    waiting = dataclasses.replace(facts, awaits_contribution=np.ones_like(facts.awaits_contribution))
    assert says(HeuristicController(CONFIG), waiting).op == "wait"

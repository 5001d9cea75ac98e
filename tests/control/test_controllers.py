"""Controllers on hand-made facts: the rule of thumb, the three that do not look, and the masks they all obey."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from simic import (
    Action,
    Facts,
    GrowableModel,
    HeuristicConfig,
    HeuristicController,
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

CONFIG = HeuristicConfig(
    patience=2, min_improvement=0.1, holding_decisions=2, min_contribution=0.0, max_live_seeds=1, max_seed_ratio=1.0,
    style="sigmoid-add", tempo=5,
)  # fmt: skip
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


def stalled_controller(config=CONFIG) -> HeuristicController:
    """One that has seen a plateau for longer than its patience."""
    controller = HeuristicController(config)
    busy = one_slot_in(Stage.BLENDING, slice(None), ramp_length=8, alpha_target=1.0)
    for decision in range(4):
        assert says(controller, make_facts(decision, slots=busy)).op == "wait"
    return controller


# The rule of thumb.


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


def alone(facts, index) -> Facts:
    """The facts of one host alone."""
    one = slice(index, index + 1)
    names = ("host_parameters", "seed_parameters", "decision", "val_loss", "val_accuracy")
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
    for name in ("best", "stalled", "failures"):
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
    ],
)
def test_a_rule_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        HeuristicConfig(**fields)


# Those that do not look.


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


def test_a_schedule_plays_a_list_or_a_mapping():
    first, second = Action("germinate", "a", "middle"), Action("prune", "a")
    listed, mapped = ScriptedController([first, second]), ScriptedController({1: first, 3: second})
    for schedule, ops in (
        (listed, ["germinate", "prune", "wait", "wait", "wait"]),
        (mapped, ["wait", "germinate", "wait", "prune", "wait"]),
    ):
        assert [says(schedule, make_facts(decision)).op for decision in range(5)] == ops
    rows = mapped.act(make_facts(1, num_hosts=3))
    np.testing.assert_array_equal(rows, [[Op.GERMINATE, 0, MIDDLE, 0, 0, 2, 0, 0]] * 3)  # target 1.0 is the third


def test_a_schedule_that_is_illegal_or_unknown_raises_when_its_time_comes():
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


@pytest.mark.parametrize("schedule", [["wait"], {0: Action(), 3: "wait"}, "wait"], ids=str)
def test_a_schedule_of_something_else_is_refused(schedule):
    with pytest.raises(TypeError, match=r'made of actions such as Action\("wait"\), got \'w(ait)?\' for decision [03]'):
        ScriptedController(schedule)


# What is legal.


def test_waiting_is_always_allowed():
    rng = np.random.default_rng(3)
    for decision in range(200):
        masks = legal_masks(random_facts(rng, decision))
        assert masks.op[:, Op.WAIT].all()
        np.testing.assert_array_equal(masks.op, masks.slot.any(2))


def test_no_room_no_germination():
    full = one_slot_in(Stage.FOSSILIZED)
    masks = legal_masks(make_facts(slots=full, lifecycle=LifecycleConfig(max_seeds=1)))
    assert not masks.op[0, Op.GERMINATE]
    assert legal_masks(make_facts(slots=full)).slot[0, Op.GERMINATE].tolist() == [False, True]


def test_blueprints_are_masked_by_topology():
    host = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 6), nn.Linear(6, 2))
    model = GrowableModel(host, ["0", "2"], example_input=torch.zeros(2, 1, 6, 6))
    facts = dataclasses.replace(
        make_facts(), blueprint_names=model.blueprint_names, blueprint_parameters=model.blueprint_table()
    )
    mask = legal_masks(facts).blueprint
    fits = [{name for name, ok in zip(model.blueprint_names, row, strict=True) if ok} for row in mask]
    assert fits[0] & fits[1] == {"norm", "low_rank"}
    assert fits[0] - fits[1] == {"squeeze_excite", "pointwise", "depthwise", "bottleneck", "conv", "conv_double"}
    assert fits[1] - fits[0] == {"mlp_small", "mlp", "mlp_large", "glu"}
    for slot, row in zip(model.slot_names, mask, strict=True):
        for blueprint, ok in zip(model.blueprint_names, row, strict=True):
            if ok:
                own = copy.deepcopy(host)
                GrowableModel(own, ["0", "2"], example_input=torch.zeros(2, 1, 6, 6)).plant(slot, blueprint)
            else:
                with pytest.raises(ValueError, match="does not fit"):
                    model.execute(Action("germinate", slot, blueprint))

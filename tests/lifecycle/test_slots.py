"""Lifecycle rules of slots, by hand-worked histories and as invariants of random ones.

N hosts, S slots; arrays are (N, S). A decision is: execute one action per host, then tick.
"""

import json
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.lifecycle.actions import HEADS, STYLES, Action, Op
from simic.lifecycle.slots import (
    CONTRIBUTION_LIMIT,
    RULES,
    SlotState,
    execute,
    legal_ops,
    note_contributions,
    plant_fossil,
    tick,
    to_measure,
)
from simic.lifecycle.stages import INCUBATIONS, NEXT, IllegalActionError, LifecycleConfig, Stage

NAN, INF = float("nan"), float("inf")
FIELDS = [field.name for field in fields(SlotState)]
BLUEPRINTS = ("first", "second", "third")


class OneHost:
    """One host that takes actions by value; every call is one decision."""

    def __init__(self, num_slots: int = 1, **config) -> None:
        self.config = LifecycleConfig(**config)
        self.slots = SlotState.dormant(1, num_slots)
        self.names = [str(index) for index in range(num_slots)]

    def decide(self, op: str = "wait", slot: int = 0, **heads) -> str:
        """Execute and tick; the stage of that slot afterwards."""
        execute(self.slots, Action(op, slot, **heads).encode(self.names, BLUEPRINTS)[None], self.config)
        tick(self.slots, self.config)
        return self.stage(slot)

    def stage(self, slot: int = 0) -> str:
        return str(Stage(self.slots.stage[0, slot]))

    def alpha(self, slot: int = 0) -> float:
        return float(self.slots.alpha[0, slot])

    def measure(self, **figures: float) -> None:
        for name, value in figures.items():
            getattr(self.slots, name)[:] = value

    def legal(self, slot: int = 0) -> set[str]:
        return {str(op) for op in Op if legal_ops(self.slots, self.config)[0, op, slot]}


def assert_same(first: SlotState, second: SlotState) -> None:
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


def test_every_operation_has_rules():
    assert RULES.keys() == set(Op)
    assert RULES[Op.WAIT] == ()


# Hand-worked histories.


def test_a_life_with_direct_incubation():
    host = OneHost()
    assert host.decide("germinate", style="linear-add", tempo=3) == "blending"
    assert host.alpha() == pytest.approx(1 / 3)
    assert host.legal() == {"wait", "prune"}
    assert host.decide() == "blending"
    assert host.alpha() == pytest.approx(2 / 3)
    assert host.decide() == "blending"
    assert host.alpha() == 1.0
    assert host.legal() == {"wait", "prune", "advance", "set_alpha_target"}
    assert host.decide("advance") == "holding"
    assert host.legal() == {"wait", "prune", "set_alpha_target"}
    host.measure(contribution=0.02)
    assert host.legal() == {"wait", "prune", "set_alpha_target", "fossilize"}
    assert host.decide("set_alpha_target", alpha_target=0.5, alpha_speed=5) == "blending"
    assert host.alpha() == pytest.approx(0.9)
    assert [host.decide() for _ in range(4)] == ["blending"] * 4
    assert host.alpha() == 0.5
    assert host.decide("advance") == "holding"
    assert host.decide("fossilize") == "fossilized"
    assert (host.alpha(), host.legal()) == (0.5, {"wait"})
    assert host.slots.age[0, 0] == 11


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_a_life_with_a_training_stage(incubation):
    host = OneHost(incubation=incubation, min_training_decisions=3)
    assert host.decide("germinate", style="sigmoid-add", tempo=5, alpha_target=0.7) == "germinated"
    assert host.legal() == {"wait", "prune", "advance"}
    assert host.decide("advance") == "training"
    for _ in range(2):
        host.measure(gradient_norm=0.1)
        assert host.legal() == {"wait", "prune"}
        assert host.decide() == "training"
        assert host.alpha() == 0.0
    host.measure(gradient_norm=0.1)
    assert host.legal() == {"wait", "prune", "advance"}
    assert host.decide("advance") == "blending"
    assert 0 < host.alpha() < 0.1  # a sigmoid starts slowly
    for _ in range(4):
        host.decide()
    assert host.alpha() == 0.7
    assert host.decide("advance") == "holding"


def test_waiting_moves_no_seed_on_by_itself():
    direct, shadow = OneHost(), OneHost(incubation="shadow")
    direct.decide("germinate")
    shadow.decide("germinate")
    assert {direct.decide() for _ in range(20)} == {"blending"}
    assert {shadow.decide() for _ in range(20)} == {"germinated"}


def test_a_pruned_slot_rests_for_the_embargo():
    host = OneHost(embargo_decisions=2)
    host.decide("germinate")
    stages = [host.decide("prune", alpha_speed=0)]
    while host.legal() == {"wait"}:
        stages.append(host.decide())
    assert stages == ["pruned", "embargoed", "embargoed", "resetting", "dormant"]
    assert host.decide("germinate") == "blending"


@pytest.mark.parametrize("embargo", [0, 1, 2, 5])
def test_the_embargo_lasts_as_long_as_configured(embargo):
    host = OneHost(embargo_decisions=embargo)
    host.decide("germinate")
    host.decide("prune", alpha_speed=0)
    stages = []
    while "germinate" not in host.legal():
        stages.append(host.decide())
    assert stages.count("embargoed") == embargo


def test_pruning_with_a_ramp_fades_first():
    host = OneHost()
    host.decide("germinate")
    for _ in range(2):
        host.decide()
    alphas = [host.alpha()]
    assert host.decide("prune", alpha_speed=3) == "blending"
    assert host.legal() == {"wait"}  # it leaves, and nothing may call it back
    alphas.append(host.alpha())
    assert host.decide() == "blending"
    alphas.append(host.alpha())
    np.testing.assert_allclose(alphas, [1, 2 / 3, 1 / 3])
    assert host.decide() == "pruned"
    assert host.slots.blueprint[0, 0] == -1
    assert host.alpha() == 0.0


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_a_seed_at_alpha_zero_is_pruned_at_once_whatever_the_speed(incubation):
    host = OneHost(incubation=incubation)
    host.decide("germinate")
    assert host.decide("prune", alpha_speed=8) == "pruned"


def test_a_seed_may_not_be_pruned_before_its_age():
    host = OneHost(min_prune_age=3)
    host.decide("germinate")
    for _ in range(2):
        assert "prune" not in host.legal()
        host.decide()
    assert "prune" in host.legal()


def test_max_seeds_counts_fossils_and_not_pruned_seeds():
    host = OneHost(num_slots=3, max_seeds=2)
    host.decide("germinate", 0)
    host.decide("germinate", 1)
    assert "germinate" not in host.legal(2)
    for _ in range(3):
        host.decide()
    host.measure(contribution=1.0)
    host.decide("advance", 0)
    host.decide("fossilize", 0)
    assert "germinate" not in host.legal(2)
    host.decide("prune", 1)
    assert "germinate" in host.legal(2)


@pytest.mark.parametrize("gradient_norm", [NAN, INF, -INF, 0.0, 1e-11], ids=str)
def test_a_seed_without_healthy_gradients_is_not_ready(gradient_norm):
    host = OneHost(incubation="shadow", min_training_decisions=0)
    host.decide("germinate")
    host.decide("advance")
    host.measure(gradient_norm=gradient_norm)
    before = host.slots.copy()
    with pytest.raises(IllegalActionError, match="healthy measured gradients"):
        host.decide("advance")
    assert_same(host.slots, before)


@pytest.mark.parametrize(
    ("contribution", "counterfactual"), [(NAN, False), (INF, False), (0.1, True)], ids=["unmeasured", "inf", "guess"]
)
def test_a_seed_is_not_fossilized_without_a_measured_contribution(contribution, counterfactual):
    host = OneHost()
    host.decide("germinate")
    for _ in range(2):
        host.decide()
    host.decide("advance")
    host.measure(contribution=contribution, counterfactual=counterfactual)
    assert "fossilize" not in host.legal()


def test_measurements_end_with_their_seed():
    host = OneHost()
    host.decide("germinate", blueprint="third", style="gated")
    host.measure(contribution=0.3, gradient_norm=2.0, contribution_age=7)
    host.decide("prune")
    empty = SlotState.dormant(1, 1)
    for name in set(FIELDS) - {"stage", "stage_age"}:
        np.testing.assert_array_equal(getattr(host.slots, name), getattr(empty, name), err_msg=name)


# What is measured when.


def planted(*stages: Stage, **figures) -> SlotState:
    """One host with these stages in its slots; seeds that are in or past blending are fully in."""
    slots = SlotState.dormant(1, len(stages))
    slots.stage[0], slots.blueprint[0], slots.alpha_target[0] = stages, 0, 1.0
    slots.alpha[0] = [stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED) for stage in stages]
    for name, values in figures.items():
        getattr(slots, name)[0] = values
    return slots


FOSSIL = Stage.FOSSILIZED


def test_every_live_seed_and_the_fossil_of_the_oldest_measurement_are_measured():
    stages = (FOSSIL, Stage.HOLDING, FOSSIL, Stage.TRAINING, Stage.GERMINATED, Stage.DORMANT, FOSSIL)
    slots = planted(*stages, contribution_age=(1, 9, 4, 9, 9, 9, 4))
    assert to_measure(slots)[0].tolist() == [False, True, True, True, False, False, False]
    assert not to_measure(planted(Stage.DORMANT, Stage.PRUNED)).any()


def test_fossils_take_turns_and_none_is_forgotten():
    slots, config, turns = planted(FOSSIL, Stage.DORMANT, FOSSIL, FOSSIL), LifecycleConfig(), []
    for decision in range(9):
        tick(slots, config)
        measured = to_measure(slots)
        note_contributions(slots, measured, np.array([0.9]), np.full((1, 4), 0.9 - decision / 100))
        turns.append(int(np.flatnonzero(measured)[0]))
        if decision >= 2:
            assert slots.contribution_age[0, [0, 2, 3]].max() == 2
            last = decision - slots.contribution_age[0, [0, 2, 3]]
            assert slots.contribution[0, [0, 2, 3]] == pytest.approx(last / 100), "each by its own last measurement"
    assert turns == [0, 2, 3] * 3


def test_contributions_by_hand():
    slots = planted(Stage.HOLDING, Stage.TRAINING, FOSSIL, FOSSIL, contribution=0.7, contribution_age=5)
    measured = np.array([[True, True, True, False]])
    note_contributions(slots, measured, np.array([0.8]), np.array([[0.5, 0.9, 0.85, 0.1]]))
    assert slots.contribution[0] == pytest.approx([0.3, 0.1, -0.05, 0.7])
    assert slots.counterfactual[0].tolist() == [False, True, False, False]
    assert slots.contribution_age[0].tolist() == [0, 0, 0, 5]


def test_a_network_that_breaks_without_its_seed_owes_it_everything():
    slots = planted(Stage.HOLDING, Stage.TRAINING, FOSSIL)
    note_contributions(slots, np.ones((1, 3), dtype=bool), np.array([0.8]), np.array([[NAN, NAN, -INF]]))
    assert slots.contribution[0].tolist() == [CONTRIBUTION_LIMIT, -CONTRIBUTION_LIMIT, CONTRIBUTION_LIMIT]
    note_contributions(slots, np.ones((1, 3), dtype=bool), np.array([-INF]), np.full((1, 3), NAN))
    assert np.isnan(slots.contribution).all(), "both broken: nothing is known"


def test_a_refusal_names_host_slot_stage_and_rule():
    slots, config = SlotState.dormant(2, 2), LifecycleConfig()
    rows = np.zeros((2, len(HEADS)), dtype=np.int64)
    rows[1, :2] = Op.FOSSILIZE, 1
    with pytest.raises(IllegalActionError, match=r"fossilize in slot 1 of host 1, whose stage is dormant: .*holding"):
        execute(slots, rows, config)


@pytest.mark.parametrize(
    ("head", "value"), [("op", 6), ("op", -1), ("slot", 2), ("slot", -1), ("style", 4), ("tempo", 3), ("blueprint", -1)]
)
def test_an_index_out_of_range_is_refused(head, value):
    slots, rows = SlotState.dormant(1, 2), np.zeros((1, len(HEADS)), dtype=np.int64)
    rows[0, HEADS.index(head)] = value
    with pytest.raises(IllegalActionError, match=f"head {head} of host 0 .*got {value}"):
        execute(slots, rows, LifecycleConfig())
    assert_same(slots, SlotState.dormant(1, 2))


@pytest.mark.parametrize("shape", [(8,), (1, 7), (3, 8)])
def test_actions_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(IllegalActionError, match=r"must have shape \(2, 8\)"):
        execute(SlotState.dormant(2, 2), np.zeros(shape, dtype=np.int64), LifecycleConfig())


# Planting and clearing.


def test_a_planted_fossil_is_fully_blended_in_and_its_ramp_is_over():
    slots, config = SlotState.dormant(2, 3), LifecycleConfig()
    rows = np.stack([Action("germinate", 1, 2, tempo=8).encode("abc", BLUEPRINTS), np.zeros(len(HEADS), dtype=int)])
    execute(slots, rows, config)
    plant_fossil(slots, (np.array([0]), np.array([1])), alpha=0.7)
    for _ in range(10):
        assert slots.stage.tolist() == [[0, Stage.FOSSILIZED, 0], [0, 0, 0]]
        assert slots.alpha.tolist() == slots.alpha_target.tolist() == [[0, 0.7, 0], [0, 0, 0]]
        assert slots.ramp_step[0, 1] == slots.ramp_length[0, 1] == 8
        assert slots.blueprint[0, 1] == 2
        assert not slots.ramping.any()
        tick(slots, config)


def test_clearing_empties_some_slots_or_all_slots_of_some_hosts():
    slots, empty = planted(Stage.HOLDING, Stage.BLENDING, contribution=0.5), SlotState.dormant(1, 2)
    slots.clear((np.array([0]), np.array([1])))
    assert (slots.stage.tolist(), slots.blueprint.tolist()) == ([[Stage.HOLDING, Stage.DORMANT]], [[0, -1]])
    slots.clear(np.array([0]))
    assert_same(slots, empty)


# Random histories.

CONFIGS = st.builds(
    LifecycleConfig,
    incubation=st.sampled_from(INCUBATIONS),
    max_seeds=st.none() | st.integers(1, 3),
    min_training_decisions=st.integers(0, 2),
    min_prune_age=st.integers(0, 3),
    embargo_decisions=st.integers(0, 3),
)
NUM_HOSTS = 3
EAGERNESS = np.array([1.0, 2.0, 1.0, 0.3, 1.0, 3.0])  # per operation: rarely prune, so that seeds grow old
HEALTH = (0.25, 0.25, 0.25, 0.25, NAN, INF, 0.0)


@st.composite
def histories(draw: st.DrawFn):
    """A config, a number of slots, a number of decisions, and the rng seed that fills them."""
    return draw(CONFIGS), draw(st.integers(1, 4)), draw(st.integers(1, 40)), draw(st.integers(0, 2**32))


def legal_row(legal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random legal action of one host, whose legal operations are (ops, S)."""
    weights = EAGERNESS * legal.any(1)
    op = rng.choice(len(Op), p=weights / weights.sum())
    slot = rng.choice(np.flatnonzero(legal[op]))
    return np.array([op, slot, *(rng.integers(size) for size in (len(BLUEPRINTS), len(STYLES), 3, 3, 4, 5))])


def play(history, observe=lambda slots, rows, config: None) -> SlotState:
    """Play a drawn history; `observe` sees the slots and the actions before each decision. Returns the last slots."""
    config, num_slots, num_decisions, rng_seed = history
    rng = np.random.default_rng(rng_seed)
    slots = SlotState.dormant(NUM_HOSTS, num_slots)
    for _ in range(num_decisions):
        occupied = slots.occupied
        slots.gradient_norm[occupied] = rng.choice(HEALTH, occupied.sum())
        slots.contribution[occupied] = rng.choice(HEALTH, occupied.sum())
        slots.counterfactual[occupied] = rng.random(occupied.sum()) < 0.2
        rows = np.stack([legal_row(legal, rng) for legal in legal_ops(slots, config)])
        observe(slots, rows, config)
        execute(slots, rows, config)
        tick(slots, config)
    return slots


def alone(slots: SlotState, host: int) -> SlotState:
    return SlotState(**{name: getattr(slots, name)[host : host + 1].copy() for name in FIELDS})


def after(slots: SlotState, rows: np.ndarray, config: LifecycleConfig) -> tuple[SlotState, SlotState]:
    """Copies of the slots after execution, and after the tick that follows."""
    executed = slots.copy()
    execute(executed, rows, config)
    ticked = executed.copy()
    tick(ticked, config)
    return executed, ticked


@settings(max_examples=40, deadline=None)
@given(histories())
def test_stages_follow_the_table_and_blueprints_follow_stages(history):
    def observe(slots, rows, config):
        executed, ticked = after(slots, rows, config)
        for old, mid, new in zip(slots.stage.flat, executed.stage.flat, ticked.stage.flat, strict=True):
            # With direct incubation a seed is germinated and blending within one decision.
            born = not config.has_training_stage and (old, mid) == (Stage.DORMANT, Stage.BLENDING)
            assert mid == old or mid in NEXT[Stage(old)] or born
            # Without an embargo a slot goes from pruned through embargoed to resetting within one tick.
            unembargoed = not config.embargo_decisions and (mid, new) == (Stage.PRUNED, Stage.RESETTING)
            assert new == mid or new in NEXT[Stage(mid)] or unembargoed
        for state in (executed, ticked):
            holds_seed = np.isin(state.stage, [*range(Stage.GERMINATED, Stage.FOSSILIZED + 1)])
            np.testing.assert_array_equal(state.blueprint >= 0, holds_seed)
            np.testing.assert_array_equal(state.occupied, holds_seed)
            limit = state.stage.shape[1] if config.max_seeds is None else config.max_seeds
            assert (holds_seed.sum(1) <= limit).all()

    play(history, observe)


@settings(max_examples=40, deadline=None)
@given(histories())
def test_alpha_is_bounded_monotone_within_a_ramp_and_lands_exactly(history):
    def observe(slots, rows, config):
        executed, ticked = after(slots, rows, config)
        assert ((ticked.alpha >= 0) & (ticked.alpha <= 1)).all()
        moving = (executed.stage == Stage.BLENDING) & (ticked.stage == Stage.BLENDING)
        step = (ticked.alpha - executed.alpha)[moving]
        way = (executed.alpha_target - executed.alpha_start)[moving]
        assert (step * np.sign(way) >= 0).all()
        landed = moving & (ticked.ramp_step >= ticked.ramp_length)
        np.testing.assert_array_equal(ticked.alpha[landed], ticked.alpha_target[landed])
        still = np.isin(executed.stage, [Stage.HOLDING, Stage.FOSSILIZED])
        np.testing.assert_array_equal(ticked.alpha[still], slots.alpha[still])
        inactive = ~executed.occupied | np.isin(executed.stage, [Stage.GERMINATED, Stage.TRAINING])
        assert (ticked.alpha[inactive] == 0).all()

    play(history, observe)


@settings(max_examples=40, deadline=None)
@given(histories())
def test_what_is_legal_executes_and_what_is_not_raises_and_changes_nothing(history):
    config, slots = history[0], play(history)
    legal = legal_ops(slots, config)
    for host, op, slot in np.ndindex(NUM_HOSTS, len(Op), slots.stage.shape[1]):
        attempt, rows = slots.copy(), np.zeros((NUM_HOSTS, len(HEADS)), dtype=np.int64)
        rows[host, :2] = op, slot
        if legal[host, op, slot]:
            execute(attempt, rows, config)
            assert (op == Op.WAIT) == (attempt.state_dict() == slots.state_dict())
        else:
            with pytest.raises(IllegalActionError):
                execute(attempt, rows, config)
            assert_same(attempt, slots)


def test_one_illegal_action_among_legal_ones_changes_no_host():
    slots, config = SlotState.dormant(3, 1), LifecycleConfig()
    rows = np.zeros((3, len(HEADS)), dtype=np.int64)
    rows[:, 0] = Op.GERMINATE, Op.ADVANCE, Op.GERMINATE
    with pytest.raises(IllegalActionError, match="of host 1"):
        execute(slots, rows, config)
    assert_same(slots, SlotState.dormant(3, 1))


@settings(max_examples=15, deadline=None)
@given(histories())
def test_hosts_side_by_side_live_as_hosts_alone(history):
    def observe(slots, rows, config):
        together, legal = after(slots, rows, config)[1], legal_ops(slots, config)
        for host in range(NUM_HOSTS):
            single = alone(slots, host)
            np.testing.assert_array_equal(legal_ops(single, config)[0], legal[host])
            assert_same(alone(together, host), after(single, rows[host : host + 1], config)[1])

    play(history, observe)


@settings(max_examples=40, deadline=None)
@given(histories())
def test_slots_survive_json(history):
    slots = play(history)
    again = SlotState.from_state_dict(json.loads(json.dumps(slots.state_dict(), allow_nan=False)))
    assert_same(again, slots)
    assert all(getattr(again, name).dtype == getattr(slots, name).dtype for name in FIELDS)


def test_saved_slots_that_lack_a_field_are_refused():
    state = SlotState.dormant(1, 1).state_dict()
    del state["alpha"]
    with pytest.raises(ValueError, match="lack alpha"):
        SlotState.from_state_dict(state)


def test_a_copy_is_independent():
    slots = SlotState.dormant(1, 2)
    slots.copy().alpha[:] = 1.0
    assert_same(slots, SlotState.dormant(1, 2))


@settings(max_examples=50)
@given(histories())
def test_no_measurement_of_a_fossil_gets_older_than_its_host_has_fossils(history):
    def observe(slots: SlotState, rows: np.ndarray, config: LifecycleConfig) -> None:
        note_contributions(slots, to_measure(slots), np.full(NUM_HOSTS, 0.5), np.full(slots.stage.shape, 0.4))
        fossil = slots.stage == FOSSIL
        assert (np.where(fossil, slots.contribution_age, 0).max(1) <= np.maximum(fossil.sum(1) - 1, 0)).all()

    play(history, observe)

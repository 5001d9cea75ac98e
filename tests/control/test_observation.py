"""Observation: numbers worked by hand, symmetries, and bounds that hold whatever happens to a host.

N hosts, S slots, B blueprints. `base`, `slot` and `offered` look a value up by its name.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.control.baselines import RandomController
from simic.control.facts import LAYER_KINDS, TRAINING_FACTS, Architecture, Facts
from simic.control.feature_view import view_facts
from simic.control.features import BASE_FEATURES, BLUEPRINT_FEATURES, BLUEPRINT_KINDS, KINDS, SLOT_FEATURES
from simic.control.legality import legal_masks
from simic.control.observation import Observation, ObservationSpec, flat_names, flatten, observe
from simic.growth.blueprints import BLUEPRINTS
from simic.lifecycle.actions import HEADS, Op
from simic.lifecycle.slots import SlotState, execute, tick
from simic.lifecycle.stages import INCUBATIONS, LifecycleConfig, Stage

NAN, INF = float("nan"), float("inf")
NAMES = ("norm", "conv", "attention", "homemade")
SIZES = np.array([[10, 300, -1, 100], [-1, -1, 700, -1]])
"""Parameters of four blueprints in two slots, beside a host of 100."""
TABLES = {"base": BASE_FEATURES, "slot": SLOT_FEATURES, "blueprint": BLUEPRINT_FEATURES}


HOST = Architecture(
    inputs=31,
    outputs=7,
    depth=7,
    shares=np.array([0.5, 0.25, 0, 0, 0.1]),
    batch_norm=1.0,
    features=np.array([31, 8]),
    in_features=np.array([62, 0]),
    positions=np.array([15, 1]),
)
"""A host with two slots; nothing can read what goes into the second submodule."""


def make_facts(num_hosts=1, slots=None, sizes=SIZES, lifecycle=None, architecture=None, **values) -> Facts:
    """N empty hosts of which nothing is known; values are given as one number or per host."""
    num_slots = len(sizes)
    arrays = {
        "host_parameters": np.full(num_hosts, 100),
        "seed_parameters": np.zeros((num_hosts, num_slots), dtype=np.int64),
        "decision": np.zeros(num_hosts, dtype=np.int64),
        "horizon": np.zeros(num_hosts, dtype=np.int64),
        "previous_action": np.zeros((num_hosts, len(HEADS)), dtype=np.int64),
        "random_guess_loss": np.full(num_hosts, NAN),
        "host_gradient_norm": np.full(num_hosts, NAN),
        "train_loss": np.full((num_hosts, 16), NAN),
        "val_loss": np.full((num_hosts, 16), NAN),
        "val_accuracy": np.full((num_hosts, 16), NAN),
        "parameters": np.full((num_hosts, 16), NAN),
        **{name: np.full(num_hosts, NAN) for name in TRAINING_FACTS},
    }
    for name, value in values.items():
        array = np.asarray(value)
        is_history = arrays[name].shape[-1:] == (16,)
        arrays[name] = np.broadcast_to(array, (num_hosts, array.shape[-1]) if is_history else arrays[name].shape)
    return Facts(
        slots=slots if slots is not None else SlotState.dormant(num_hosts, num_slots),
        lifecycle=lifecycle or LifecycleConfig(),
        slot_names=tuple("abcdef"[:num_slots]),
        blueprint_names=NAMES,
        blueprint_parameters=sizes,
        architecture=architecture,
        **arrays,
    )


def with_seed(slot=0, **fields) -> SlotState:
    """One host whose slot 0 or 1 holds a conv seed."""
    slots = SlotState.dormant(1, 2)
    for name, value in {"stage": Stage.HOLDING, "blueprint": 1, **fields}.items():
        getattr(slots, name)[0, slot] = value
    return slots


def base(name, facts, host=0) -> float:
    return float(observe(facts).base[host, BASE_FEATURES.names.index(name)])


def slot(name, facts, index=0) -> float:
    return float(observe(facts).slots[0, index, SLOT_FEATURES.names.index(name)])


def offered(name, facts, index, blueprint) -> float:
    row = observe(facts).blueprints[index, NAMES.index(blueprint)]
    return float(row[BLUEPRINT_FEATURES.names.index(name)])


def soft(x, half) -> float:
    return x / (abs(x) + half)


# By hand.


@pytest.mark.parametrize(
    ("name", "facts", "expected"),
    [
        ("horizon_known", {"horizon": 40}, 1),
        ("elapsed", {"horizon": 40, "decision": 10}, 0.25),
        ("elapsed", {"horizon": 40, "decision": 50}, 1),
        ("remaining", {"horizon": 40, "decision": 32}, 0.5),
        ("remaining", {"horizon": 40, "decision": 50}, 0),
        ("decisions", {"horizon": 40, "decision": 32}, 0.5),
        # Nobody knows how long: only the count speaks.
        ("horizon_known", {"decision": 10}, 0),
        ("elapsed", {"decision": 10}, 0),
        ("remaining", {"decision": 10}, 0),
        ("decisions", {"decision": 96}, 0.75),
        # The loss is a third of a guess's: 1/3 / (1/3 + 1).
        ("val_loss", {"val_loss": [2.4, 0.8], "random_guess_loss": 2.4}, 0.25),
        ("guess_known", {"val_loss": [2.4, 0.8], "random_guess_loss": 2.4}, 1),
        # No guess: relative to the first that was measured.
        ("val_loss", {"val_loss": [NAN, 4.0, 1.0]}, 0.2),
        ("guess_known", {"val_loss": [NAN, 4.0, 1.0]}, 0),
        ("val_loss", {"val_loss": [-4.0, -1.0]}, -0.2),  # minus a metric stands in for the loss
        ("val_loss", {"val_loss": [1.0, INF]}, 1),
        ("val_loss", {"val_loss": [1.0, NAN]}, 0),
        ("val_loss_known", {"val_loss": [1.0, NAN]}, 0),
        ("val_loss_known", {"val_loss": [1.0]}, 1),
        # From 3 to 2: -1 of 5. Three host epochs ago it was 6: -4 of 8. Eight ago there was nothing.
        ("val_loss_change.over_1", {"val_loss": [6.0, 9.0, 3.0, 2.0]}, soft(-0.2, 0.1)),
        ("val_loss_change.over_3", {"val_loss": [6.0, 9.0, 3.0, 2.0]}, soft(-0.5, 0.1)),
        ("val_loss_change.over_8", {"val_loss": [6.0, 9.0, 3.0, 2.0]}, 0),
        ("val_loss_change.over_8", {"val_loss": [9.0, 3, 3, 3, 3, 3, 3, 3, 3, 1.0]}, soft(-0.5, 0.1)),
        ("train_loss_change.over_1", {"train_loss": [1.0, 3.0]}, soft(0.5, 0.1)),
        ("val_accuracy_change.over_1", {"val_accuracy": [0.5, 0.55]}, 0.5),
        ("val_accuracy_change.over_3", {"val_accuracy": [0.7, 0.1, 0.1, 0.55]}, -0.75),
        # 5, 4, 3, (not measured), 1: one down per host epoch, at a mean of 13/4.
        ("val_loss_slope", {"val_loss": [5.0, 4.0, 3.0, NAN, 1.0]}, soft(-4 / 13, 0.05)),
        ("val_loss_slope", {"val_loss": [2.0]}, 0),
        ("val_loss_change.over_1", {"val_loss": [1.0, INF]}, soft(1, 0.1)),  # a host that broke
        ("guess_known", {"val_loss": [4.0, 1.0], "random_guess_loss": 0.0}, 0),  # nothing can be relative to 0
        ("val_loss_slope", {"val_loss": [9.0, 1, 1, 1, 1, 1, 1, 1, 1, 1]}, 0),  # the 9 is too long ago
        ("best_val_loss", {"val_loss": [4.0, 1.0, 3.0]}, 0.2),
        ("above_best", {"val_loss": [4.0, 1.0, 3.0]}, soft(0.5, 0.1)),
        ("since_best", {"val_loss": [4.0, 1.0, 3.0, 1.0, NAN]}, soft(3, 8)),  # reached first, three ago
        ("since_best", {}, 0),
        ("val_accuracy", {"val_accuracy": [0.9, 0.6]}, 0.6),
        ("val_accuracy_known", {"val_accuracy": [0.6]}, 1),
        ("val_accuracy_known", {}, 0),
        ("overfitting", {"val_loss": [3.0], "train_loss": [1.0]}, 0.5),
        ("host_size", {"host_parameters": 2**16 - 1}, 0.5),
        ("growth", {"seed_parameters": [100, 200]}, soft(2, 1)),  # four times the host's parameters
        ("growth", {"seed_parameters": [1, 2], "host_parameters": 0}, soft(2, 1)),  # an empty host counts as 1
        ("gradient", {"host_gradient_norm": 1e-2}, -0.5),
        ("gradient", {"host_gradient_norm": 0.0}, -1),
        ("gradient_known", {"host_gradient_norm": 0.0}, 1),
        ("gradient_known", {}, 0),
        ("previous_op.wait", {}, 1),
        ("previous_op.prune", {"previous_action": [Op.PRUNE, 1, 0, 0, 0, 0, 0, 0]}, 1),
        ("previous_op.wait", {"previous_action": [Op.PRUNE, 1, 0, 0, 0, 0, 0, 0]}, 0),
        ("room", {}, 1),
        ("incubation.direct", {"lifecycle": LifecycleConfig(incubation="shadow")}, 0),
        ("incubation.shadow", {"lifecycle": LifecycleConfig(incubation="shadow")}, 1),
        ("room", {"slots": with_seed()}, 0.5),
        ("room", {"slots": with_seed(), "lifecycle": LifecycleConfig(max_seeds=1)}, 0),
        ("occupied", {"slots": with_seed()}, 0.5),
        ("live", {"slots": with_seed()}, 0.5),
        ("live", {"slots": with_seed(stage=Stage.FOSSILIZED)}, 0),
        ("fossilized", {"slots": with_seed(stage=Stage.FOSSILIZED)}, 0.5),
        ("fossilized", {"slots": with_seed()}, 0),
    ],
)
def test_a_host_by_hand(name, facts, expected):
    assert base(name, make_facts(**facts)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "facts", "expected"),
    [
        ("batches", {"batches": 31}, 0.5),
        ("batches", {"batches": 1}, soft(1, 5)),  # not 0, which means that it is not known
        ("samples", {"train_samples": 2**16 - 1}, 0.5),
        ("samples_per_parameter", {"train_samples": 1600}, 0.5),  # 16 for each of the host's 100
        ("samples_per_parameter", {"train_samples": 25}, soft(-2, 4)),
        ("inputs", {"architecture": HOST}, 0.5),
        ("outputs", {"architecture": HOST}, 0.5),
        ("depth", {"architecture": HOST}, 0.5),
        ("layers.linear", {"architecture": HOST}, 0.5),
        ("layers.norm", {"architecture": HOST}, 0.1),
        ("layers.attention", {"architecture": HOST}, 0),
        ("batch_norm", {"architecture": HOST}, 1),
        ("learning_rate", {"learning_rate": 10}, 0.5),
        ("learning_rate", {"learning_rate": 1}, 0),
        ("learning_rate", {"learning_rate": 0}, -1),
        ("annealed", {"learning_rate": 1, "first_learning_rate": 3}, 0.5),
        ("annealed", {"learning_rate": 3, "first_learning_rate": 1}, -0.5),  # a warm-up
        ("optimizer.adaptive", {"adaptive": 1}, 1),
        ("optimizer.sgd", {"adaptive": 1}, 0),
        ("optimizer.sgd", {"adaptive": 0}, 1),
        ("optimizer.adaptive", {}, 0),
        ("optimizer.sgd", {}, 0),
        ("loss_noise", {"loss_noise": 0.1}, 0.5),
        ("loss_noise_known", {"loss_noise": 0.0}, 1),
        ("loss_noise_known", {}, 0),
        ("gradient_to_weight", {"host_gradient_norm": 0.5, "host_weight_norm": 5}, -0.5),
        ("gradient_to_weight", {"host_weight_norm": 5}, 0),
        # Validation over training loss rises from 1/1 to 3/1: from 0 to 0.5 in two host epochs.
        ("overfitting_slope", {"val_loss": [1.0, NAN, 3.0], "train_loss": [1.0, 1.0, 1.0]}, soft(0.25, 0.02)),
        ("overfitting_slope", {"val_loss": [3.0], "train_loss": [1.0]}, 0),
        ("metric_error", {"metric_error": 0.02}, 0.5),
        ("above_chance", {"architecture": HOST, "val_accuracy": [4 / 7]}, 0.5),  # halfway from 1/7 to 1
        ("above_chance", {"architecture": HOST, "val_accuracy": [0.0]}, -1 / 6),
        ("above_chance", {"val_accuracy": [0.5]}, 0),
    ],
)
def test_what_tells_hosts_apart_by_hand(name, facts, expected):
    assert base(name, make_facts(**facts)) == pytest.approx(expected, abs=1e-6)


def test_of_a_single_output_nothing_is_chance():
    single = dataclasses.replace(HOST, outputs=1)
    assert base("above_chance", make_facts(architecture=single, val_accuracy=[0.5])) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("width", (0.5, soft(np.log2(9), 5))), ("in_to_out", (0.5, 0)), ("positions", (0.5, soft(1, 4)))],
)
def test_the_place_of_a_slot_by_hand(name, expected):
    facts = make_facts(architecture=HOST)
    assert [slot(name, facts, index) for index in (0, 1)] == pytest.approx(expected)
    assert [slot(name, make_facts(), index) for index in (0, 1)] == [0, 0]


BLENDING = {"stage": Stage.BLENDING, "alpha": 0.2, "alpha_target": 0.7, "ramp_step": 2, "ramp_length": 8}


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("stage.holding", {}, 1),
        ("stage.dormant", {}, 0),
        ("occupied", {}, 1),
        ("live", {}, 1),
        ("live", {"stage": Stage.FOSSILIZED}, 0),
        ("stage_age", {"stage_age": 8}, 0.5),
        ("age", {"age": 48}, 0.75),
        ("alpha", BLENDING, 0.2),
        ("alpha_target", BLENDING, 0.7),
        ("ramp_progress", BLENDING, 0.25),
        ("ramp_progress", {}, 1),
        ("ramp_left", BLENDING, 0.6),
        ("ramping", BLENDING, 1),
        ("ramping", {}, 0),
        ("leaving", BLENDING, 0),
        ("leaving", BLENDING | {"alpha_target": 0.0}, 1),
        ("style.gated", {"style": 3}, 1),
        ("style.linear-add", {"style": 3}, 0),
        ("contribution", {"contribution": -0.05}, -0.5),
        ("contribution", {"contribution": -INF}, -1),
        ("contribution_known", {"contribution": -INF}, 1),
        ("contribution_known", {}, 0),
        ("contribution_age", {"contribution": 0.1, "contribution_age": 4}, 0.5),
        ("contribution_age", {"contribution_age": 4}, 0),  # never measured: it has no age
        ("counterfactual", {"counterfactual": True}, 1),
        ("gradient", {"gradient_norm": 100.0}, 0.5),
        ("gradient_ratio", {"gradient_norm": 100.0}, 0.5),  # ten times the host's
        ("gradient_known", {"gradient_norm": 100.0}, 1),
        ("gradient_known", {}, 0),
        ("seed_size", {}, soft(2, 1)),  # 300 beside 100
        ("legal.fossilize", {}, 0),
        ("legal.fossilize", {"contribution": 0.1}, 1),
        ("legal.germinate", {}, 0),
        ("legal.wait", {}, 1),
        ("acted_on", {}, 0),
        ("blueprint.fits", {}, 1),
        ("blueprint.size", {}, soft(2, 1)),
        ("blueprint.size_rank", {}, 1),
        ("blueprint.kind.mixes_space", {}, 1),
        ("blueprint.kind.attends", {}, 0),
        ("offers.mixes_space", {}, 1),
        ("offers.attends", {}, 0),
        ("position", {}, 0.5),
        ("slot_share", {}, 0.5),
    ],
)
def test_a_slot_with_a_seed_by_hand(name, fields, expected):
    facts = make_facts(slots=with_seed(**fields), seed_parameters=[300, 0], host_gradient_norm=10.0)
    assert slot(name, facts) == pytest.approx(expected, abs=1e-6)


def test_an_empty_slot_says_only_where_it_is_and_what_it_offers():
    facts = make_facts(slots=with_seed(), previous_action=[Op.PRUNE, 1, 0, 0, 0, 0, 0, 0])
    values = observe(facts).slots[0, 1]
    said = {name: float(value) for name, value in zip(SLOT_FEATURES.names, values, strict=True) if value}
    attention = {f"offers.{kind}": 1.0 for kind in BLUEPRINT_KINDS["attention"]}
    where = {"position": 1.0, "slot_share": 0.5, "stage.dormant": 1.0, "acted_on": 1.0}
    assert said == where | attention | {"legal.wait": 1.0, "legal.germinate": 1.0}


def test_waiting_acts_on_no_slot():
    assert slot("acted_on", make_facts()) == 0
    assert slot("acted_on", make_facts(previous_action=[Op.ADVANCE, 0, 0, 0, 0, 0, 0, 0])) == 1


@pytest.mark.parametrize(
    ("name", "index", "blueprint", "expected"),
    [
        ("fits", 0, "norm", 1),
        ("fits", 1, "norm", 0),
        ("size", 0, "conv", soft(2, 1)),
        ("size", 0, "homemade", 0.5),  # as large as the host
        ("size", 1, "attention", 0.75),  # eight times the host: three doublings
        ("size", 1, "conv", 0),
        ("size_rank", 0, "norm", 0),
        ("size_rank", 0, "homemade", 0.5),  # larger than one of two others
        ("size_rank", 0, "conv", 1),
        ("size_rank", 1, "attention", 0),  # the only one
        ("kind.normalises", 0, "norm", 1),
        ("kind.normalises", 1, "norm", 0),  # does not fit there
        ("kind.mixes_channels", 0, "norm", 0),
        ("kind.attends", 1, "attention", 1),
        ("kind.mixes_channels", 0, "homemade", 0),  # nobody said what it does
    ],
)
def test_a_blueprint_by_hand(name, index, blueprint, expected):
    assert offered(name, make_facts(), index, blueprint) == pytest.approx(expected, abs=1e-6)


def test_every_built_in_blueprint_has_a_kind_and_topologies_can_be_told_apart():
    built_in = {name for name, entry in BLUEPRINTS.items() if entry.build.__module__ == "simic.growth.blueprints"}
    assert built_in == set(BLUEPRINT_KINDS)
    assert all(kinds and set(kinds) <= set(KINDS) for kinds in BLUEPRINT_KINDS.values())
    offers = {
        topology: frozenset().union(*(BLUEPRINT_KINDS[n] for n in built_in if topology in BLUEPRINTS[n].topologies))
        for topology in ("conv", "features", "sequence")
    }
    assert len(set(offers.values())) == 3


# The tables.


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_names_are_distinct_and_every_feature_has_a_meaning(table):
    assert len(set(table.names)) == len(table.names)
    assert all(feature.meaning for feature in table.features)
    assert all(feature.soft is None or feature.soft > 0 for feature in table.features)


@pytest.mark.parametrize("table", TABLES, ids=TABLES)
def test_every_feature_computes_as_many_values_as_it_names(table):
    """Assigning into the result would broadcast one value over several parts."""
    facts = live(1, 3, 2, "shadow", 9, lambda shape: np.full(shape, 0.5))
    blueprints = observe(facts).blueprints
    source = facts if table == "blueprint" else view_facts(facts, legal_masks(facts).slot, blueprints)
    leading = {"base": (3,), "slot": (3, 2), "blueprint": (2, len(NAMES))}[table]
    for feature in TABLES[table].features:
        with np.errstate(all="ignore"):
            shape = np.shape(feature.compute(source))
        parts = shape[-1:] if feature.parts else ()
        assert parts == ((len(feature.parts),) if feature.parts else ()), feature.name
        assert np.broadcast_shapes(shape, leading + parts) == leading + parts, feature.name


def test_the_sizes_are_those_of_the_tables_and_of_no_host():
    expected = ObservationSpec(*(len(table.names) for table in TABLES.values()))
    wide = np.array([[10, 20, 30, 40]] * 5)
    for facts in (make_facts(), make_facts(3, sizes=wide), make_facts(2, sizes=wide[:1])):
        observation = observe(facts)
        assert observation.spec == ObservationSpec() == expected
        assert observation.base.shape[:-1] == (facts.num_hosts,)
        assert observation.slots.shape[:-1] == (facts.num_hosts, len(facts.slot_names))
        assert observation.blueprints.shape[:-1] == facts.blueprint_parameters.shape


def test_a_mismatch_names_both_sides():
    ObservationSpec().check(ObservationSpec(), "the policy")
    other = dataclasses.replace(ObservationSpec(), slot=7)
    with pytest.raises(ValueError, match=rf"the policy is built for .*slot=7.* are .*slot={ObservationSpec().slot}"):
        ObservationSpec().check(other, "the policy")


def test_hosts_of_different_size_are_refused():
    with pytest.raises(ValueError, match="of one size, got 100 to 200 parameters; observe them apart"):
        observe(make_facts(2, host_parameters=[100, 200]))


# Random lives and nasty values.

NASTY = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1e30, -1e30, 1e308, -1e308, 5e-324, 1e-10, -1.0, 0.3, 1.0, 50.0])


def live(rng_seed, num_hosts, num_slots, incubation, decisions, nasty) -> Facts:
    """Hosts after some random legal decisions, with measurements drawn from `nasty` (a function of a shape)."""
    rng = np.random.default_rng(rng_seed)
    lifecycle = LifecycleConfig(incubation=incubation, embargo_decisions=1, max_seeds=[None, 1, 9][rng_seed % 3])
    sizes = rng.choice([-1, 0, 3, 500, 2**40], size=(num_slots, len(NAMES)))
    controller, slots = RandomController(rng_seed), SlotState.dormant(num_hosts, num_slots)
    facts = make_facts(num_hosts, slots, sizes, lifecycle)
    for _ in range(decisions):
        actions = controller.act(facts)
        execute(slots, actions, lifecycle)
        tick(slots, lifecycle)
        healthy = rng.random(slots.stage.shape) < 0.7
        slots.contribution[:] = np.where(healthy, rng.normal(size=slots.stage.shape), nasty(slots.stage.shape))
        slots.gradient_norm[:] = np.where(healthy, rng.random(slots.stage.shape), nasty(slots.stage.shape))
        facts = dataclasses.replace(facts, previous_action=actions, decision=facts.decision + 1)
    length = int(rng.integers(20))
    return dataclasses.replace(
        facts,
        seed_parameters=rng.choice([0, 1, 10**6, 2**60], size=slots.stage.shape),
        host_parameters=np.full(num_hosts, rng.choice([0, 1, 1000, 2**62])),
        horizon=rng.choice([0, 1, 50, 2**62], size=num_hosts),
        random_guess_loss=nasty((num_hosts,)),
        host_gradient_norm=nasty((num_hosts,)),
        train_loss=nasty((num_hosts, length)),
        val_loss=nasty((num_hosts, length)),
        val_accuracy=nasty((num_hosts, length)),
        architecture=nasty_architecture(num_slots, nasty) if rng_seed % 4 else None,
        **{name: nasty((num_hosts,)) for name in TRAINING_FACTS},
    )


def nasty_architecture(num_slots, nasty) -> Architecture:
    numbers = dict(zip(("inputs", "outputs", "depth", "batch_norm"), nasty((4,)).tolist(), strict=True))
    slots = {name: nasty((num_slots,)) for name in ("features", "in_features", "positions")}
    return Architecture(**numbers, shares=nasty((len(LAYER_KINDS),)), **slots)


LIVES = {
    "rng_seed": st.integers(0, 10**6),
    "num_hosts": st.integers(1, 4),
    "num_slots": st.integers(1, 4),
    "incubation": st.sampled_from(INCUBATIONS),
    "decisions": st.integers(0, 25),
    "values": st.lists(NASTY, min_size=1, max_size=8),
}


def draw_life(rng_seed, num_hosts, num_slots, incubation, decisions, values) -> Facts:
    rng = np.random.default_rng(rng_seed)
    return live(rng_seed, num_hosts, num_slots, incubation, decisions, lambda shape: rng.choice(values, size=shape))


@settings(max_examples=200, deadline=None)
@given(**LIVES)
def test_every_value_is_finite_and_bounded_whatever_happens(**slot_state):
    facts = draw_life(**slot_state)
    observation = observe(facts)
    for array in (observation.base, observation.slots, observation.blueprints):
        assert array.dtype == np.float32
        assert np.isfinite(array).all()
        assert (np.abs(array) <= 1).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, 1e308, -1e308, 0.0, -1.0])
def test_facts_that_are_nonsense_throughout_stay_bounded(value):
    """Not only measurements: every float of the slots, and ages no host reaches."""
    slots = with_seed(
        stage=Stage.BLENDING, age=2**62, stage_age=2**62, ramp_step=9, ramp_length=2, contribution_age=2**62
    )
    for name in ("alpha", "alpha_start", "alpha_target", "contribution", "gradient_norm"):
        getattr(slots, name)[:] = value
    history = np.full(16, value)
    facts = make_facts(slots=slots, val_loss=history, val_accuracy=history, train_loss=history,
                       random_guess_loss=value, host_gradient_norm=value, host_parameters=0)  # fmt: skip
    observation = observe(facts)
    for array in (observation.base, observation.slots, observation.blueprints):
        assert np.isfinite(array).all()
        assert (np.abs(array) <= 1).all()


@settings(max_examples=50, deadline=None)
@given(**LIVES)
def test_hosts_do_not_see_each_other(**slot_state):
    facts = draw_life(**slot_state)
    together = observe(facts)
    order = np.random.default_rng(slot_state["rng_seed"]).permutation(facts.num_hosts)
    permuted = observe(pick_hosts(facts, order))
    assert_equal(
        permuted, Observation(base=together.base[order], slots=together.slots[order], blueprints=together.blueprints)
    )
    alone = observe(pick_hosts(facts, np.array([0])))
    assert_equal(alone, Observation(base=together.base[:1], slots=together.slots[:1], blueprints=together.blueprints))


@settings(max_examples=50, deadline=None)
@given(**LIVES)
def test_the_order_of_slots_is_the_order_of_rows(**slot_state):
    facts = draw_life(**slot_state)
    before = observe(facts)
    num_slots = facts.slots.stage.shape[1]
    order = np.random.default_rng(slot_state["rng_seed"]).permutation(num_slots)
    actions = facts.previous_action.copy()
    actions[:, 1] = np.argsort(order)[actions[:, 1]]
    after = observe(
        dataclasses.replace(
            facts,
            slots=SlotState(**{f.name: getattr(facts.slots, f.name)[:, order] for f in dataclasses.fields(SlotState)}),
            blueprint_parameters=facts.blueprint_parameters[order],
            seed_parameters=facts.seed_parameters[:, order],
            previous_action=actions,
            architecture=facts.architecture and permuted_slots(facts.architecture, order),
        )
    )
    rest = np.array([name != "position" for name in SLOT_FEATURES.names])
    np.testing.assert_array_equal(after.slots[..., rest], before.slots[:, order][..., rest])
    np.testing.assert_array_equal(after.slots[..., ~rest], before.slots[..., ~rest])
    np.testing.assert_array_equal(after.blueprints, before.blueprints[order])
    np.testing.assert_array_equal(after.base, before.base)


def permuted_slots(host: Architecture, order) -> Architecture:
    names = ("features", "in_features", "positions")
    return dataclasses.replace(host, **{name: getattr(host, name)[order] for name in names})


def pick_hosts(facts, index) -> Facts:
    """These hosts, in this order."""
    slots = SlotState(**{f.name: getattr(facts.slots, f.name)[index] for f in dataclasses.fields(SlotState)})
    shared = {
        "slots",
        "lifecycle",
        "slot_names",
        "blueprint_names",
        "blueprint_parameters",
        "legal_styles",
        "contribution_error",
        "in_features",
        "architecture",
    }
    names = [f.name for f in dataclasses.fields(Facts) if f.name not in shared]
    return dataclasses.replace(facts, slots=slots, **{name: getattr(facts, name)[index] for name in names})


def assert_equal(first: Observation, second: Observation) -> None:
    for name in ("base", "slots", "blueprints"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)


def test_masks_at_hand_change_nothing_and_facts_are_left_as_they_were():
    facts = live(3, 4, 3, "shadow", 12, lambda shape: np.full(shape, 0.5))
    untouched = facts.slots.copy()
    assert_equal(observe(facts), observe(facts, legal_masks(facts)))
    for field in dataclasses.fields(SlotState):
        np.testing.assert_array_equal(getattr(facts.slots, field.name), getattr(untouched, field.name))


def test_only_the_last_sixteen_host_epochs_count():
    history = np.linspace(3.0, 1.0, 16)
    longer = np.concatenate([[0.1, 50.0], history])
    figures = ("val_loss", "val_accuracy", "train_loss")
    assert_equal(
        observe(make_facts(**dict.fromkeys(figures, history))), observe(make_facts(**dict.fromkeys(figures, longer)))
    )


# Flat clients.


def test_flat_rows_hold_the_host_then_its_slots_then_nothing():
    facts = make_facts(2, val_accuracy=[0.6])
    observation = observe(facts)
    flat = flatten(observation, max_slots=4)
    names = flat_names(4)
    assert flat.shape == (2, len(names))
    assert flat.dtype == np.float32
    assert flat[1, names.index("val_accuracy")] == pytest.approx(0.6)
    assert flat[1, names.index("slot_0.position")] == 0.5
    assert flat[1, names.index("slot_1.position")] == 1.0
    missing = np.array([name.startswith(("slot_2.", "slot_3.")) for name in names])
    assert not flat[:, missing].any()
    np.testing.assert_array_equal(flatten(observation), flat[:, ~missing])
    assert len(set(names)) == len(names)


def test_more_slots_than_there_is_room_for_are_refused():
    with pytest.raises(ValueError, match="max_slots must be at least the number of slots, 2, got 1"):
        flatten(observe(make_facts()), max_slots=1)


def test_previous_reward_is_the_change_of_accuracy_minus_that_of_rent():
    accuracy, parameters = np.full(16, NAN), np.full(16, NAN)
    accuracy[-2:], parameters[-2:] = [0.50, 0.55], [100, 200]
    grown = make_facts(val_accuracy=accuracy, parameters=parameters)
    assert base("previous_reward", grown) == pytest.approx(4 / (4 + 2))  # 5 points won, one doubling paid
    assert base("previous_reward", make_facts(val_accuracy=accuracy)) == 0  # not known


def test_a_slot_tells_which_seat_of_its_submodule_it_is():
    column = SLOT_FEATURES.names.index("seat")
    for seeds_per_slot, expected in ((1, [0, 0]), (2, [0, 0.5])):
        facts = make_facts(lifecycle=LifecycleConfig(seeds_per_slot=seeds_per_slot))
        assert observe(facts).slots[0, :, column].tolist() == expected

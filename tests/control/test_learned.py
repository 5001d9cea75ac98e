"""The learned controller: its masks are exactly the rules, it acts legally anywhere, and remembers what it must."""

import itertools
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_comparison import EAGER, make_planted, make_settings, make_task
from torch import nn
from torch.nn.functional import cross_entropy

from simic import (
    Facts,
    GrowableModel,
    GrowthScheduler,
    IllegalActionError,
    LearnedController,
    LifecycleConfig,
    Op,
    Stage,
)
from simic.control.baselines import RandomController
from simic.control.features import BLUEPRINT_FEATURES
from simic.control.learned import load_network, make_network, network_input, row_masks
from simic.control.legality import legal_masks
from simic.control.observation import observe
from simic.control.registry import make_controller
from simic.evaluation.candidates import ShuffledController
from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.lifecycle.actions import HEAD_VALUES, HEADS, HEADS_USED_BY
from simic.lifecycle.slots import SlotState, check_actions, execute, tick
from simic.policy.config import PolicyConfig
from simic.policy.network import GROWTH_TREE, FactoredRecurrentActorCritic
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig
from simic.storage.bundle import BundleError, load_bundle, save_bundle

SMALL = PolicyConfig(hidden_size=16, encoding_size=16)


def make_facts(slots: SlotState, decision: int, lifecycle: LifecycleConfig, sizes: np.ndarray | None = None) -> Facts:
    """What is known of hosts whose slots stand like this."""
    n, s = slots.stage.shape
    history = np.random.default_rng(decision).random((n, 16))
    sizes = np.tile([10, 50, -1], (s, 1)) if sizes is None else sizes
    return Facts(
        slots=slots,
        lifecycle=lifecycle,
        slot_names=tuple(f"slot{i}" for i in range(s)),
        blueprint_names=("norm", "mlp", "conv")[: sizes.shape[1]],
        blueprint_parameters=sizes,
        host_parameters=np.full(n, 100),
        seed_parameters=np.where(slots.occupied, 10, 0),
        decision=np.full(n, decision),
        horizon=np.full(n, 12),
        previous_action=np.zeros((n, len(HEADS)), dtype=np.int64),
        random_guess_loss=np.full(n, 1.0),
        host_gradient_norm=np.full(n, 1.0),
        train_loss=history,
        val_loss=history,
        val_accuracy=history,
        parameters=np.full((n, 16), 100.0),
    )


def random_lives(num_hosts: int, num_slots: int, incubation: Any = "direct", decisions: int = 12):
    """Facts of hosts that somebody leads at random, one decision after the other."""
    lifecycle, slots = LifecycleConfig(incubation=incubation), SlotState.dormant(num_hosts, num_slots)
    controller, rng = RandomController(0), np.random.default_rng(0)
    for decision in range(decisions):
        facts = make_facts(slots.copy(), decision, lifecycle)
        yield facts
        execute(slots, controller.act(facts), lifecycle)
        tick(slots, lifecycle)
        slots.gradient_norm = np.where(slots.live, rng.choice([np.nan, 0.0, 1.0], slots.stage.shape), np.nan)
        slots.contribution = np.where(slots.live & (rng.random(slots.stage.shape) < 0.7), 0.1, np.nan)


# Masks.


def allowed_by_rows(row: tuple[int, ...], rows: np.ndarray) -> bool:
    """Whether every head that matters may be chosen so, by the rows (R, W) of one host."""
    op, slot = row[0], row[1]
    for position, head in enumerate(HEADS):
        if head in HEADS_USED_BY[Op(op)]:
            index = GROWTH_TREE.num_rows + slot if head == "blueprint" else GROWTH_TREE.row_of[op, position]
            if not rows[index, row[position]]:
                return False
    return True


def allowed_by_rules(row: tuple[int, ...], facts: Facts, host: int) -> bool:
    one = SlotState(**{name: values[host : host + 1] for name, values in vars(facts.slots).items()})
    try:
        check_actions(one, np.array([row]), facts.lifecycle)
    except IllegalActionError:
        return False
    return row[0] != Op.GERMINATE or bool(facts.blueprint_parameters[row[1], row[2]] >= 0)


def any_slots(num_hosts: int, num_slots: int) -> SlotState:
    """Slots in every stage and state."""
    rng, shape = np.random.default_rng(0), (num_hosts, num_slots)
    slots = SlotState.dormant(*shape)
    slots.stage = rng.integers(0, len(Stage), shape)
    slots.blueprint = np.where(slots.live | (slots.stage == Stage.FOSSILIZED), 1, -1)
    slots.ramp_length, slots.ramp_step = rng.integers(0, 3, shape), rng.integers(0, 3, shape)
    slots.alpha_target = rng.choice([0.0, 1.0], shape)
    slots.age, slots.stage_age = rng.integers(0, 3, shape), rng.integers(0, 5, shape)
    slots.contribution, slots.counterfactual = rng.choice([np.nan, 0.1], shape), rng.random(shape) < 0.3
    slots.gradient_norm = rng.choice([np.nan, 0.0, 1.0], shape)
    return slots


@pytest.mark.parametrize("max_seeds", [None, 1])
def test_an_action_is_legal_exactly_if_its_rows_allow_it(max_seeds):
    sizes = np.array([[10, -1, 5], [-1, 10, 10], [-1, -1, -1]])
    facts = make_facts(any_slots(60, 3), 5, LifecycleConfig(incubation="shadow", max_seeds=max_seeds), sizes)
    rows = row_masks(legal_masks(facts))
    seen: dict[bool, set[int]] = {True: set(), False: set()}
    for host, op, slot, blueprint in itertools.product(range(60), range(6), range(3), range(3)):
        row = (op, slot, blueprint, 3, 2, 2, 3, 4)
        legal = allowed_by_rules(row, facts, host)
        assert allowed_by_rows(row, rows[host]) == legal, (row, facts.slots.stage[host])
        seen[legal].add(op)
    assert seen[False] == set(range(1, 6))
    assert seen[True] == set(range(6))


def test_plain_heads_may_choose_all_they_have_and_no_more():
    (facts,) = random_lives(1, 1, decisions=1)
    (rows,) = row_masks(legal_masks(facts))
    for row, head in enumerate(GROWTH_TREE.row_head):
        if HEADS[head] in HEAD_VALUES and HEADS[head] != "op":
            assert rows[row].sum() == len(HEAD_VALUES[HEADS[head]])
            assert rows[row, : len(HEAD_VALUES[HEADS[head]])].all()


@pytest.mark.parametrize("num_slots", [1, 3, 12])
def test_no_row_is_empty_and_shapes_fit_the_network(num_slots):
    network = make_network(SMALL)
    for facts in random_lives(2, num_slots, decisions=4):
        masks = legal_masks(facts)
        rows, seen = row_masks(masks), network_input(observe(facts, masks))
        assert rows.any(-1).all()
        tensors = {name: torch.from_numpy(np.array(value))[None] for name, value in seen.items()}
        assert network(tensors, network.initial_state(2)).logits.shape[1:] == rows.shape
        assert seen["blueprints"].shape[:3] == (2, num_slots, 3)


# Acting.


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("num_slots", [1, 3, 12])
def test_it_acts_legally_on_any_host(num_slots, greedy):
    torch.manual_seed(num_slots)
    controller = LearnedController(make_network(SMALL), greedy=greedy)
    lifecycle, slots = LifecycleConfig(), SlotState.dormant(8, num_slots)
    done = set()
    for decision in range(12):
        facts = make_facts(slots.copy(), decision, lifecycle)
        actions = controller.act(facts)
        fits = facts.blueprint_parameters[actions[:, 1], actions[:, 2]] >= 0
        assert (fits | (actions[:, 0] != Op.GERMINATE)).all()
        execute(slots, actions, lifecycle)  # raises if anything is illegal
        tick(slots, lifecycle)
        slots.contribution[slots.live] = 0.1
        done |= set(actions[:, 0].tolist())
    assert greedy or len(done) >= 4


def test_one_who_is_greedy_takes_the_likeliest_and_draws_nothing():
    (facts,) = random_lives(5, 2, decisions=1)
    network = make_network(SMALL)
    assert isinstance(network, FactoredRecurrentActorCritic)
    tempo = network.plain["tempo"]
    assert isinstance(tempo, nn.Linear)
    with torch.no_grad():
        network.op.bias[Op.GERMINATE] = 20.0
        tempo.bias[1] = 20.0
    first = LearnedController(network, rng_seed=1).act(facts)
    assert np.array_equal(first, LearnedController(network, rng_seed=2).act(facts))
    assert (first[:, 0] == Op.GERMINATE).all()
    assert (first[:, HEADS.index("tempo")] == 1).all()


def test_draws_follow_from_the_rng_seed():
    (facts,) = random_lives(40, 2, decisions=1)
    network = make_network(SMALL)
    one, same, other = (LearnedController(network, greedy=False, rng_seed=s).act(facts) for s in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def memory(controller: LearnedController) -> torch.Tensor:
    state = controller.state_dict()["state"]
    assert state is not None
    return state


def test_hosts_at_their_first_decision_start_from_nothing_and_others_go_on():
    facts = list(random_lives(2, 2, decisions=3))
    network = make_network(SMALL)
    old = LearnedController(network)
    for own in facts:
        old.act(own)
    before = memory(old).clone()
    mixed = make_facts(facts[1].slots, 1, facts[1].lifecycle)
    mixed.decision[0] = 0  # the first host's episode begins anew
    old.act(mixed)
    fresh = LearnedController(network)
    fresh.act(mixed)
    torch.testing.assert_close(memory(old)[0], memory(fresh)[0])
    assert not torch.allclose(memory(old)[1], memory(fresh)[1])
    assert not torch.equal(memory(old), before)


def test_another_number_of_hosts_starts_afresh():
    (two,), (three,) = random_lives(2, 1, decisions=1), random_lives(3, 1, decisions=1)
    controller = LearnedController(make_network(SMALL))
    controller.act(two)
    assert controller.act(three).shape == (3, len(HEADS))


def test_a_state_that_was_saved_goes_on_and_is_nobody_s_to_change(tmp_path):
    facts = list(random_lives(4, 2, decisions=4))
    network = make_network(SMALL)
    one = LearnedController(network, greedy=False, rng_seed=3)
    for own in facts[:2]:
        one.act(own)
    state = one.state_dict()
    save_bundle(tmp_path / "state", state)
    two = LearnedController(network, greedy=False, rng_seed=9)
    two.load_state_dict(load_bundle(tmp_path / "state"))
    for own in facts[2:]:
        assert np.array_equal(one.act(own), two.act(own))
    again = LearnedController(network, greedy=False)
    again.load_state_dict(state)
    kept = state["state"].clone()
    again.act(facts[0])  # a first decision forgets, but not what was saved
    assert torch.equal(state["state"], kept)


# In the scheduler.

X = torch.linspace(-2, 2, 16 * 6).view(16, 6).sin()
Y = (X.sum(1) > 0).long()


class Growing:
    """A host of two slots that trains and grows."""

    def __init__(self, controller: LearnedController) -> None:
        torch.manual_seed(0)
        host = nn.Sequential(OrderedDict(a=nn.Linear(6, 5), b=nn.Linear(5, 4), head=nn.Linear(4, 2)))
        self.model = GrowableModel(host, ["a", "b"], example_input=X)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = GrowthScheduler(
            self.model, self.optimizer, controller, evaluate=self.evaluate, horizon=12, rng_seed=0
        )

    def evaluate(self) -> dict[str, float]:
        logits = self.model(X)
        return {
            "val_loss": float(cross_entropy(logits, Y)),
            "val_accuracy": float((logits.argmax(1) == Y).float().mean()),
        }

    def step(self) -> tuple[str, list[float]]:
        loss = self.scheduler.loss(lambda: cross_entropy(self.model(X), Y))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        action = str(self.scheduler.step().action)
        return action, self.model(X).flatten().tolist()


def test_it_leads_a_scheduler_and_goes_on_after_a_checkpoint(tmp_path):
    torch.manual_seed(1)
    network = make_network(SMALL)
    assert isinstance(network, FactoredRecurrentActorCritic)
    with torch.no_grad():
        network.op.bias[Op.WAIT] = -2.0
    first = Growing(LearnedController(network, greedy=False, rng_seed=5))
    for _ in range(5):
        first.step()
    first.scheduler.save(tmp_path / "checkpoint")
    second = Growing(LearnedController(network, greedy=False, rng_seed=6))
    second.scheduler.load(tmp_path / "checkpoint")
    for _ in range(5):
        (action, output), (same_action, same_output) = first.step(), second.step()
        assert action == same_action
        assert output == same_output
    assert len({decision.action.op for decision in first.scheduler.decisions}) >= 3


# Files.


def saved(path: Path, config: PolicyConfig = SMALL) -> PPOAgent:
    agent = PPOAgent(make_network(config), PPOConfig())
    agent.save(path)
    return agent


def test_a_saved_agent_is_a_controller(tmp_path):
    agent = saved(tmp_path / "agent")
    controller = make_controller(str(tmp_path / "agent"), rng_seed=4)
    assert isinstance(controller, LearnedController)
    assert controller.greedy
    for name, value in agent.plain.state_dict().items():
        assert torch.equal(controller.network.state_dict()[name], value)
    assert controller.network.config == SMALL


def test_names_are_controllers_and_other_words_are_not(tmp_path):
    assert [type(make_controller(name)).__name__ for name in ("heuristic", "random", "wait")] == [
        "HeuristicController",
        "RandomController",
        "WaitController",
    ]
    with pytest.raises(
        ValueError, match=r"one of heuristic, .*random, .*, the path of a plan, a run or a trained one.*got 'nobody'"
    ):
        make_controller("nobody")


def test_foreign_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BundleError, match="not a readable safetensors file"):
        load_network(tmp_path / "text")
    for tree in ({"a": 1}, [1], {"about": {"network": "Other"}}):
        save_bundle(tmp_path / "other", tree)
        with pytest.raises(BundleError, match="other: not a saved agent: its format is"):
            load_network(tmp_path / "other")
    PPOAgent(RecurrentActorCritic(4, [2]), PPOConfig()).save(tmp_path / "cartpole")
    with pytest.raises(BundleError, match="its network is 'RecurrentActorCritic'"):
        load_network(tmp_path / "cartpole")


def test_a_controller_that_looks_at_other_features_is_refused(tmp_path):
    tree = saved(tmp_path / "agent").state_dict()
    tree["about"]["sizes"]["slots"] = 3
    save_bundle(tmp_path / "agent", tree)
    with pytest.raises(BundleError, match=r"'slots': 3.* features, this simic shows .*; train it anew"):
        load_network(tmp_path / "agent")


@pytest.mark.parametrize("make", [LearnedController, lambda network: ShuffledController(network, 3)])
def test_a_network_without_weights_for_seeds_beside_a_submodule_plants_them_only_if_it_must(make):
    """As a controller that was saved before there were any: it takes them where nothing else fits."""
    network, facts = make_planted(EAGER), make_settings(3).trainings(make_task()).facts()
    parameters = np.where(facts.reads_input, facts.blueprint_parameters, -1)
    only_beside = replace(facts, blueprint_parameters=parameters)
    assert (make(network).act(only_beside)[:, 0] == Op.GERMINATE).all()
    with torch.no_grad():
        network.get_parameter("encode_blueprint.0.weight")[:, BLUEPRINT_FEATURES.names.index("reads_input")] = 0
    assert (make(network).act(only_beside)[:, 0] == Op.GERMINATE).all()
    actions = make(network).act(facts)
    assert (actions[:, 0] == Op.GERMINATE).all()
    assert not facts.reads_input[actions[:, 2]].any()

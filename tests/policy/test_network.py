"""The networks: any number of slots, symmetric in them, exact over time, and quiet at birth."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from simic.gymnasium.flat_network import RecurrentActorCritic
from simic.lifecycle.actions import HEADS, HEADS_USED_BY, Op
from simic.policy.action_tree import TreeDistribution
from simic.policy.config import PolicyConfig
from simic.policy.network import (
    GROWTH_TREE,
    INITIAL_OP_LOGITS,
    FactoredRecurrentActorCritic,
    check_heads,
    compile_network,
    unwrap,
)
from simic.policy.segments import split_episodes

BASE, SLOT, BLUEPRINT = 5, 6, 4
SMALL = PolicyConfig(hidden_size=8, encoding_size=8)
SLOT_ROWS = [row for row, head in enumerate(GROWTH_TREE.row_head) if HEADS[head] == "slot"]
PLAIN_ROWS = [row for row in range(1, GROWTH_TREE.num_rows) if row not in SLOT_ROWS]


def make_network(config=SMALL, *, trained=True) -> FactoredRecurrentActorCritic:
    """With weights away from their quiet start, and normalisers that saw something, if `trained`."""
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(BASE, SLOT, BLUEPRINT, config)
    if trained:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        network.update_normalizers(make_observation(6, 3), torch.ones(6, 3, dtype=torch.bool))
    return network


def make_observation(steps, envs, slots=3, blueprints=4, seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"base": (BASE,), "slots": (slots, SLOT), "blueprints": (slots, blueprints, BLUEPRINT)}
    return {part: torch.randn(steps, envs, *size, generator=generator) for part, size in sizes.items()}


def flat(network) -> RecurrentActorCritic:
    """The other network, for tests that hold for both."""
    torch.manual_seed(0)
    return RecurrentActorCritic(BASE, [3, 2], network.config)


@pytest.mark.parametrize("slots", [1, 3, 12])
@pytest.mark.parametrize("blueprints", [1, 9])
def test_the_same_weights_act_on_any_number_of_slots(slots, blueprints):
    network = make_network()
    output = network(make_observation(2, 5, slots, blueprints), network.initial_state(5))
    rows, width = GROWTH_TREE.num_rows + slots, max(6, slots, blueprints)
    assert output.logits.shape == (2, 5, rows, width)
    assert output.value.shape == (2, 5)
    assert output.contribution.shape == (2, 5, slots)
    mask = torch.zeros(2, 5, rows, width, dtype=torch.bool)
    mask[..., :1] = mask[:, :, 0, :6] = mask[:, :, SLOT_ROWS, :slots] = mask[:, :, -slots:, :blueprints] = True
    action = TreeDistribution(GROWTH_TREE, output.logits, mask).sample(torch.Generator().manual_seed(0))
    assert action.shape == (2, 5, len(HEADS))
    assert (action[..., HEADS.index("slot")] < slots).all()


def test_permuting_slots_permutes_what_points_at_them_and_nothing_else():
    network, observation, order = make_network(), make_observation(4, 2), torch.tensor([2, 0, 1])
    moved = observation | {part: observation[part][:, :, order] for part in ("slots", "blueprints")}
    before, after = (network(seen, network.initial_state(2)) for seen in (observation, moved))
    first_pointed = GROWTH_TREE.num_rows
    assert torch.allclose(before.logits[:, :, SLOT_ROWS][..., order], after.logits[:, :, SLOT_ROWS][..., :3], atol=1e-5)
    assert torch.allclose(
        before.logits[:, :, first_pointed:][:, :, order], after.logits[:, :, first_pointed:], atol=1e-5
    )
    assert torch.allclose(before.logits[:, :, [0, *PLAIN_ROWS]], after.logits[:, :, [0, *PLAIN_ROWS]], atol=1e-5)
    assert torch.allclose(before.value, after.value, atol=1e-5)
    assert torch.allclose(before.contribution[..., order], after.contribution, atol=1e-5)
    # And they are not all the same, which would prove nothing.
    assert (before.logits[:, :, SLOT_ROWS][..., :3].std(-1) > 1e-3).all()


def test_permuting_blueprints_permutes_their_logits_and_nothing_else():
    network, observation, order = make_network(), make_observation(2, 2), torch.tensor([3, 1, 0, 2])
    moved = observation | {"blueprints": observation["blueprints"][:, :, :, order]}
    before, after = (network(seen, network.initial_state(2)) for seen in (observation, moved))
    first_pointed = GROWTH_TREE.num_rows
    expected = before.logits[:, :, first_pointed:][..., order]
    assert torch.allclose(expected, after.logits[:, :, first_pointed:, :4], atol=1e-5)
    assert torch.allclose(before.logits[:, :, :first_pointed], after.logits[:, :, :first_pointed], atol=1e-5)
    assert torch.allclose(before.value, after.value, atol=1e-5)


def test_slots_and_blueprints_that_are_not_there_change_nothing():
    """Zeros for two more slots and three more blueprints: the same logits where something is, the same value."""
    network, observation = make_network(), make_observation(3, 2)
    padded = {
        "base": observation["base"],
        "slots": torch.nn.functional.pad(observation["slots"], (0, 0, 0, 2)),
        "blueprints": torch.nn.functional.pad(observation["blueprints"], (0, 0, 0, 3, 0, 2)),
    }
    small, large = (network(seen, network.initial_state(2)) for seen in (observation, padded))
    real = GROWTH_TREE.num_rows + 3
    for row in range(real):
        width = 3 if row in SLOT_ROWS else 4 if row >= GROWTH_TREE.num_rows else 3
        assert torch.allclose(small.logits[:, :, row, :width], large.logits[:, :, row, :width], atol=1e-5), row
    assert torch.allclose(small.value, large.value, atol=1e-5)
    assert torch.allclose(small.contribution, large.contribution[..., :3], atol=1e-5)
    assert torch.allclose(small.state, large.state, atol=1e-5)
    twin = copy.deepcopy(network)
    network.update_normalizers(observation, torch.ones(3, 2, dtype=torch.bool))
    twin.update_normalizers(padded, torch.ones(3, 2, dtype=torch.bool))
    for part in ("slots", "blueprints"):
        assert torch.allclose(network.normalizer(part).mean, twin.normalizer(part).mean)
        assert network.normalizer(part).count == twin.normalizer(part).count


def test_only_valid_steps_are_seen():
    network, observation = make_network(trained=False), make_observation(4, 2)
    valid = torch.tensor([[True, True], [True, False], [False, False], [True, False]])
    network.update_normalizers(observation, valid)
    rows = observation["base"][valid].double()
    assert torch.allclose(network.normalizer("base").mean, rows.mean(0))
    assert network.normalizer("slots").count == 4 * 3
    assert network.normalizer("blueprints").count == 4 * 3 * 4


def test_features_of_a_slot_reach_its_logits_and_the_ops():
    """No part of the observation is ignored, and slots are looked at with what may grow in them."""
    network, observation = make_network(), make_observation(1, 1)
    before = network(observation, network.initial_state(1))
    for part in observation:
        changed = observation | {part: observation[part] + 1.0}
        after = network(changed, network.initial_state(1))
        for name, a, b in zip(before._fields, before, after, strict=True):
            assert not torch.allclose(a, b, atol=1e-4), (part, name)


def test_blueprint_logits_depend_on_the_slot_they_are_for():
    """Two slots that offer the same blueprints rank them differently, because the slots differ."""
    network, observation = make_network(), make_observation(1, 1, slots=2)
    observation["blueprints"][:, :, 1] = observation["blueprints"][:, :, 0]
    rows = network(observation, network.initial_state(1)).logits[0, 0, GROWTH_TREE.num_rows :, :4]
    assert not torch.allclose(rows[0] - rows[0].mean(), rows[1] - rows[1].mean(), atol=1e-3)


def test_every_head_is_conditioned_on_the_op():
    """Slot logits under two ops differ, and so do those of every other head that several ops share."""
    network = make_network()
    logits = network(make_observation(1, 1), network.initial_state(1)).logits[0, 0]
    for head in ("slot", "style", "alpha_target", "alpha_speed", "alpha_curve"):
        rows = [row for row, index in enumerate(GROWTH_TREE.row_head) if HEADS[index] == head]
        assert len(rows) == sum(head in heads for heads in HEADS_USED_BY.values())
        for row in rows[1:]:
            assert not torch.allclose(logits[rows[0], :3], logits[row, :3], atol=1e-4), head


def test_the_network_is_nearly_uniform_at_birth():
    """Whatever it sees, no choice starts far from its fair share, but for operations, of which it likes some."""
    network = FactoredRecurrentActorCritic(BASE, SLOT, BLUEPRINT)
    logits = network(make_observation(4, 4), network.initial_state(4)).logits.detach().clone()
    logits[:, :, 0] -= torch.tensor([INITIAL_OP_LOGITS.get(op, 0.0) for op in Op])
    assert 0 < logits.abs().max() < 0.15
    plain = RecurrentActorCritic(BASE, [3, 2])
    assert plain(make_observation(4, 4), plain.initial_state(4)).logits.abs().max() < 0.15


def test_orthogonal_weights_and_zero_biases():
    network = FactoredRecurrentActorCritic(BASE, SLOT, BLUEPRINT, SMALL)
    gains = {"op": 0.01, "encode_base.0": 2**0.5, "attend": 2**0.5, "skip": 2**0.5, "slot.query": 0.01, "critic.2": 1.0}
    for name, gain in gains.items():
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        weight = layer.weight.detach()
        small = weight if weight.shape[0] <= weight.shape[1] else weight.T
        assert torch.allclose(small @ small.T, gain**2 * torch.eye(len(small)), atol=1e-5), name
        expected = [INITIAL_OP_LOGITS.get(op, 0.0) for op in Op] if name == "op" else [0.0] * len(layer.bias)
        assert layer.bias.tolist() == expected, name


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("kind", ["factored", "flat"])
def test_steps_in_one_call_are_steps_one_by_one(core, kind):
    network = make_network(PolicyConfig(hidden_size=8, encoding_size=8, core=core))
    network = network if kind == "factored" else flat(network)
    observation = make_observation(7, 3)
    state = torch.randn(3, network.state_size)
    whole = network(observation, state)
    for step in range(7):
        output = network({part: values[step : step + 1] for part, values in observation.items()}, state)
        state = output.state
        assert torch.allclose(output.logits[0], whole.logits[step], atol=1e-5)
        assert torch.allclose(output.value[0], whole.value[step], atol=1e-5)
    assert torch.allclose(state, whole.state, atol=1e-5)


@given(seed=st.integers(0, 10**6), rate=st.sampled_from([0.0, 0.1, 0.5]), kind=st.sampled_from(["factored", "flat"]))
@settings(max_examples=6, deadline=None)
def test_pieces_are_steps_with_zeroed_states(seed, rate, kind):
    """Resets inside and states carried in, for logits, values and predictions."""
    network = make_network()
    network = network if kind == "factored" else flat(network)
    rng = np.random.default_rng(seed)
    first = rng.random((12, 3)) < rate
    observation, state = make_observation(12, 3, seed=seed), torch.randn(3, network.state_size)
    whole = network(observation, torch.where(torch.from_numpy(first[0])[:, None], 0.0, state), split_episodes(first))
    for step in range(12):
        state = torch.where(torch.from_numpy(first[step])[:, None], 0.0, state)
        output = network({part: values[step : step + 1] for part, values in observation.items()}, state)
        state = output.state
        assert torch.allclose(output.logits[0], whole.logits[step], atol=1e-5)
        assert torch.allclose(output.value[0], whole.value[step], atol=1e-5)


def test_environments_do_not_mix():
    network, observation = make_network(), make_observation(3, 4)
    alone = {part: values[:, 1:2] for part, values in observation.items()}
    whole = network(observation, network.initial_state(4))
    assert torch.allclose(whole.logits[:, 1:2], network(alone, network.initial_state(1)).logits, atol=1e-5)


@pytest.mark.parametrize("isolate", [False, True])
def test_an_isolated_prediction_shapes_nothing_but_itself(isolate):
    network = make_network(PolicyConfig(hidden_size=8, encoding_size=8, isolate_prediction=isolate))
    network(make_observation(2, 2), network.initial_state(2)).contribution.sum().backward()
    own = {id(parameter) for parameter in network.contribution.parameters()}
    moved = {name for name, p in network.named_parameters() if id(p) not in own and p.grad is not None and p.grad.any()}
    assert all(p.grad is not None and p.grad.any() for p in network.contribution.parameters())
    assert bool(moved) is not isolate


def test_without_prediction_there_is_none():
    network = make_network(PolicyConfig(hidden_size=8, encoding_size=8, predict_contributions=False))
    assert network(make_observation(1, 1), network.initial_state(1)).contribution is None


def test_head_parameters_are_disjoint_and_serve_their_head_only():
    """One entry per head, nothing twice; a head's own weights change the rows of that head and no other."""
    network, observation = make_network(), make_observation(1, 1)
    table = network.head_parameters()
    assert list(table) == list(HEADS)
    ids = [id(parameter) for own in table.values() for parameter in own]
    assert len(ids) == len(set(ids))
    assert set(ids) < {id(parameter) for parameter in network.parameters()}
    row_heads = GROWTH_TREE.row_names(GROWTH_TREE.num_rows + 3)
    before = network(observation, network.initial_state(1)).logits[0, 0]
    for head, own in table.items():
        assert own
        other = copy.deepcopy(network)
        with torch.no_grad():
            for parameter in other.head_parameters()[head]:
                parameter.add_(torch.randn_like(parameter))
        changed = (other(observation, network.initial_state(1)).logits[0, 0] - before).abs().amax(-1) > 1e-6
        assert {name for name, is_so in zip(row_heads, changed.tolist(), strict=True) if is_so} == {head}


def test_head_parameters_are_complete():
    """Parameters whose gradient comes from one head alone are all in the table."""
    network = make_network()
    output = network(make_observation(2, 2), network.initial_state(2))
    names, reached = GROWTH_TREE.row_names(output.logits.shape[2]), {}
    for head in HEADS:
        rows = [row for row, name in enumerate(names) if name == head]
        noise = torch.randn(2, 2, len(rows), output.logits.shape[-1])
        grads = torch.autograd.grad(
            (output.logits[:, :, rows] * noise).sum(), list(network.parameters()), retain_graph=True, allow_unused=True
        )
        for (name, _), grad in zip(network.named_parameters(), grads, strict=True):
            if grad is not None and grad.abs().max() > 1e-7:
                reached.setdefault(name, set()).add(head)
    of = {id(p): head for head, own in network.head_parameters().items() for p in own}
    for name, parameter in network.named_parameters():
        if len(reached.get(name, ())) == 1:
            assert of.get(id(parameter)) in reached[name], name


def test_the_value_knows_nothing_of_the_action():
    """V(s): no head, and no gradient from the value to any of them."""
    network = make_network()
    network(make_observation(2, 2), network.initial_state(2)).value.sum().backward()
    for head, own in network.head_parameters().items():
        assert all(p.grad is None or not p.grad.any() for p in own), head
    assert network.op_embedding.grad is None or not network.op_embedding.grad.any()


def test_the_state_is_an_argument_and_nothing_is_kept():
    network, observation = make_network(), make_observation(2, 2)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    first = network(observation, network.initial_state(2))
    second = network(observation, network.initial_state(2))
    assert (first.logits == second.logits).all()
    assert all((value == before[name]).all() for name, value in network.state_dict().items())
    assert not torch.allclose(network(observation, first.state).logits, first.logits)
    assert (network.initial_state(3) == 0).all()


def test_unknown_and_missing_heads_are_named():
    check_heads({"op": 1.0, "slot": 2.0}, ("op", "slot"), "head_entropy")
    with pytest.raises(ValueError, match=r"head_entropy must name exactly the heads op, slot; unknown: \['slt'\]"):
        check_heads({"op": 1.0, "slot": 1.0, "slt": 1.0}, ("op", "slot"), "head_entropy")
    with pytest.raises(ValueError, match=r"missing: \['slot'\]"):
        check_heads({"op": 1.0}, ("op", "slot"), "head_entropy")


@pytest.mark.parametrize("name", ["hidden_size", "encoding_size"])
def test_sizes_must_be_positive(name):
    sizes: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        PolicyConfig(**sizes)


# torch.compile


RESET_INSIDE = np.array([[False, False], [False, True], [False, False]])


def assert_compiled_says_the_same(network, first, **options):
    """A graph break would raise, because the whole is asked for as one graph."""
    torch._dynamo.reset()
    compiled = compile_network(network, **options)
    assert unwrap(compiled) is network
    arguments = make_observation(len(first), 2), network.initial_state(2), split_episodes(first)
    ours, theirs = compiled(*arguments), network(*arguments)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    assert torch.allclose(ours.value, theirs.value, atol=1e-5)


def test_unwrap_of_a_plain_network_is_itself():
    network = make_network()
    assert unwrap(network) is network


@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
def test_compiling_breaks_no_graph():
    network = make_network()
    compile_network(network)
    torch._dynamo.reset()
    found = torch._dynamo.explain(network)(make_observation(2, 1), network.initial_state(1), None)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


@pytest.mark.filterwarnings("ignore")
def test_a_traced_network_says_the_same_with_resets_inside():
    assert_compiled_says_the_same(flat(make_network()), RESET_INSIDE, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.filterwarnings("ignore")
def test_a_traced_factored_network_says_the_same_with_resets_inside(core):
    network = make_network(PolicyConfig(hidden_size=8, encoding_size=8, core=core))
    assert_compiled_says_the_same(network, RESET_INSIDE, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_says_the_same():
    whole = np.array([[True, True], [False, False]])
    assert_compiled_says_the_same(make_network(), whole)


def test_ops_are_in_the_order_of_the_first_row():
    """Raising the op layer's bias of one operation raises that column of row 0."""
    network, observation = make_network(), make_observation(1, 1)
    before = network(observation, network.initial_state(1)).logits[0, 0, 0, :6]
    with torch.no_grad():
        network.op.bias[Op.PRUNE] += 1.0
    after = network(observation, network.initial_state(1)).logits[0, 0, 0, :6]
    assert torch.allclose(after - before, torch.tensor([0.0, 0, 0, 1, 0, 0]), atol=1e-5)

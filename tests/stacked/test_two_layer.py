"""Seeds in blocks against their modules one by one: the drawn example, any mixture, and what counts as two layers."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from helpers.slot_example import Planted, SlotExample, gradients_of, randomized
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from simic import Action, blueprint, zeroed
from simic.growth.blueprints import new_branch
from simic.growth.branch_layers import GatedLinear
from simic.growth.slot_shape import SlotShape
from simic.stacked.hosts import StackedHosts
from simic.stacked.parameters import row_of
from simic.stacked.seed_groups import blend_seeds
from simic.stacked.two_layer import GATED, GELU, LINEAR, Seeds, TwoLayer, plan_blocks, run_blocks, two_layer
from simic.tasks.hosts import plain_mlp_host
from simic.tasks.task import accuracy, mean_cross_entropy

CPU = torch.device("cpu")


def make_branch(
    kind: str, features: int, hidden: int, biases: tuple[bool, bool] = (True, True), read: int | None = None
) -> nn.Module:
    """`read` features in, by default as many as out."""
    (first, out), read = biases, read or features
    if kind == "gated":
        branch = GatedLinear(features, hidden)
        branch.value, branch.gate = (nn.Linear(read, hidden, bias=first) for _ in range(2))
        branch.out = nn.Linear(hidden, features, bias=out)
        return branch
    layers = [nn.Linear(read, hidden, bias=first), nn.Linear(hidden, features, bias=out)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1]) if kind == "gelu" else nn.Sequential(*layers)


def seeds_of(branches: list[nn.Module], numbers: list[int]) -> tuple[list[Seeds], torch.Tensor]:
    """Each branch as a group of its own, and the vector of all their parameters."""
    seeds, rows, start = [], [], 0
    for branch, number in zip(branches, numbers, strict=True):
        kind, shapes = two_layer(branch), {name: own.shape for name, own in branch.named_parameters()}
        assert kind is not None
        seeds.append(Seeds(kind, shapes, start, np.array([0]), np.array([number])))
        rows.append(row_of(branch, torch.zeros(0, dtype=torch.double)))
        start += rows[-1].numel()
    return seeds, torch.cat(rows).requires_grad_()


def test_the_drawn_example():
    branches = [make_branch(*each) for each in (("linear", 8, 4), ("gelu", 8, 32), ("gated", 8, 16))]
    seeds, vector = seeds_of(branches, [0, 1, 2])
    plan = plan_blocks(seeds, np.array([5, 3, 4]), SlotShape("features", 8), "output", vector.numel(), CPU)
    assert plan.block == 16
    assert plan.owner.tolist() == [0, 2, 1, 1, 2]
    assert plan.source.tolist() == [5, 4, 3, 3, 4]
    assert (plan.num_out, plan.num_hidden) == (4, 5)
    assert (plan.gated, plan.gelu) == (slice(1, 2), slice(2, 4))
    assert plan.chosen is None
    assert len(set(plan.places.tolist())) == vector.numel() <= sum(plan.sizes)


@pytest.mark.parametrize(("features", "block", "blocks"), [(3, 16, 3), (16, 16, 3), (20, 20, 2)])
def test_blocks_are_as_wide_as_the_slot_and_not_too_narrow(features, block, blocks):
    seeds, vector = seeds_of([make_branch("linear", features, 40)], [0])
    plan = plan_blocks(seeds, np.array([0]), SlotShape("features", features), "output", vector.numel(), CPU)
    assert (plan.block, plan.num_out) == (block, blocks)


def test_padded_units_are_zero_and_parameters_lie_where_their_layer_reads_them():
    branch = randomized(make_branch("gelu", 2, 3), 0)
    first_weight, own_first_bias, out_weight, own_out_bias = branch.parameters()
    seeds, vector = seeds_of([branch], [0])
    plan = plan_blocks(seeds, np.array([0]), SlotShape("features", 2), "output", vector.numel(), CPU)
    buffer = torch.zeros(sum(plan.sizes), dtype=torch.double).scatter(0, plan.places, vector.detach())
    first, first_bias, out, out_bias = plan.split(buffer)
    for found, expected in ((first[0].T, first_weight), (out[0].T, out_weight.T)):
        assert torch.equal(found[:3], expected)
        assert not found[3:].any()
    assert torch.equal(first_bias[0, :3, 0], own_first_bias)
    assert not first_bias[0, 3:].any()
    assert torch.equal(out_bias[0, :, 0], own_out_bias)


@pytest.mark.parametrize(("read", "reads"), [(2, "output"), (3, "input")])
def test_gradients_are_those_of_small_differences(read, reads):
    """With a seed left out, and one number of a seed of another kind."""
    branches = [randomized(make_branch(kind, 2, 2, read=read), 1) for kind in ("gelu", "gated", "linear", "gelu")]
    seeds, vector = seeds_of(branches, [0, 1, 3, 3])
    shape = SlotShape("features", 2, in_features=read)
    plan = plan_blocks(seeds[:3], np.array([1, 0, 2, 2]), shape, reads, vector.numel(), CPU)
    h = torch.randn(3, read, 3, dtype=torch.double, requires_grad=True)
    assert not run_blocks(h, vector, plan)[2].any(), "the seed of another kind has no blocks"
    assert torch.autograd.gradcheck(lambda h, vector: run_blocks(h, vector, plan), [h, vector])


@st.composite
def slots(draw):
    """A slot of up to eight hosts with seeds of all kinds and operators, and the hosts of a pass."""
    features, in_features = (draw(st.one_of(st.integers(1, 20), st.just(33))) for _ in range(2))
    kinds, biases = st.sampled_from(["linear", "gelu", "gated", "norm"]), st.tuples(st.booleans(), st.booleans())
    structure = st.tuples(kinds, st.integers(1, 70), biases, st.sampled_from(["output", "input"]))
    structures = draw(st.lists(structure, min_size=1, max_size=4, unique=True))
    num_hosts = draw(st.integers(1, 8))
    seeds, shape = {}, SlotShape("features", features)
    for host in draw(st.permutations(range(num_hosts))):
        if draw(st.integers(0, 3)):
            kind, hidden, biases, reads = draw(st.sampled_from(structures))
            name, operator = f"{kind}, {hidden}, {biases}, {reads}", draw(st.sampled_from(["add", "multiply", "gate"]))
            if kind == "norm":
                seeds[host] = Planted("norm", new_branch("norm", shape, (host,)), operator)
            else:
                read = features if reads == "output" else in_features
                seeds[host] = Planted(name, make_branch(kind, features, hidden, biases, read), operator, reads)
    alpha = draw(st.lists(st.sampled_from([0.0, 0.2, 0.7, 1.0]), min_size=num_hosts, max_size=num_hosts))
    hosts = draw(st.lists(st.integers(0, num_hosts - 1), min_size=1, unique=True))
    return SlotExample(features, seeds, alpha, in_features=in_features), hosts


@settings(max_examples=80, deadline=None)
@given(slots())
def test_any_mixture_of_seeds_gives_what_their_modules_give(drawn):
    slot, hosts = drawn
    generator = torch.Generator().manual_seed(len(hosts))
    h = torch.randn(len(hosts), 3, slot.features, dtype=torch.double, generator=generator).requires_grad_()
    x = torch.randn(len(hosts), 3, slot.shape.in_features, dtype=torch.double, generator=generator).requires_grad_()
    blended, expected = blend_seeds(h, x, slot.plan(hosts)), slot.one_by_one(h, hosts, x)
    torch.testing.assert_close(blended, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn(expected.shape, dtype=torch.double, generator=generator)
    one, other = (blended * weights).sum(), (expected * weights).sum()
    torch.testing.assert_close(gradients_of(one, [h, x]), gradients_of(other, [h, x]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slot.gradients(one), slot.gradients_one_by_one(other), rtol=1e-9, atol=1e-9)


# What runs in blocks.


class OwnLinear(nn.Linear):
    pass


class OwnSequential(nn.Sequential):
    pass


class OwnGatedLinear(GatedLinear):
    pass


def hooked() -> nn.Module:
    branch = make_branch("gelu", 4, 6)
    branch.get_submodule("1").register_forward_hook(lambda module, inputs, output: None)
    return branch


def with_own_forward() -> nn.Module:
    branch = make_branch("linear", 4, 6)
    branch.forward = lambda x: x
    return branch


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.GELU(), layer)


def gated_by_own_layer() -> nn.Module:
    branch = GatedLinear(4, 6)
    branch.gate = OwnLinear(4, 6)
    return branch


RECOGNIZED = {
    "linear": (lambda: make_branch("linear", 4, 6), TwoLayer(LINEAR, "0", None, "1", 6)),
    "gelu": (lambda: make_branch("gelu", 4, 6, (False, False)), TwoLayer(GELU, "0", None, "2", 6)),
    "gated": (lambda: make_branch("gated", 4, 6), TwoLayer(GATED, "value", "gate", "out", 6)),
    "named layers": (
        lambda: nn.Sequential(OrderedDict(up=nn.Linear(4, 6), bend=nn.GELU(), down=nn.Linear(6, 4))),
        TwoLayer(GELU, "up", None, "down", 6),
    ),
}
OF_ANOTHER_KIND = {
    "another approximation": lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(approximate="tanh"), nn.Linear(6, 4)),
    "another activation": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)),
    "three layers": lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)),
    "one layer": lambda: nn.Sequential(nn.Linear(4, 4)),
    "activation last": lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.GELU()),
    "not in a Sequential": lambda: nn.Linear(4, 4),
    "a subclass of Linear": lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), OwnLinear(6, 4)),
    "a subclass of Sequential": lambda: OwnSequential(nn.Linear(4, 6), nn.Linear(6, 4)),
    "a subclass of GatedLinear": lambda: OwnGatedLinear(4, 6),
    "a gate of another class": gated_by_own_layer,
    "a hook": hooked,
    "a forward of its own": with_own_forward,
    "tied layers": tied,
    "a parametrization": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 4)),
}


@pytest.mark.parametrize("case", RECOGNIZED)
def test_a_branch_of_two_layers_is_recognized(case):
    make, expected = RECOGNIZED[case]
    assert two_layer(make()) == expected


@pytest.mark.parametrize("case", OF_ANOTHER_KIND)
def test_what_computes_something_else_is_not(case):
    assert two_layer(OF_ANOTHER_KIND[case]()) is None


@pytest.mark.parametrize("case", ["named layers", "tied layers", "another approximation"])
def test_a_blueprint_of_a_user_runs_as_its_module(case, own_names):
    def build(shape: SlotShape) -> nn.Module:
        branch = (RECOGNIZED[case][0] if case in RECOGNIZED else OF_ANOTHER_KIND[case])()
        return zeroed(branch)

    blueprint("own", topology="features")(build)
    x, y = torch.randn(2, 9, 3), torch.arange(9).remainder(2).expand(2, 9)
    rows = []
    for join in (True, False):
        hosts = StackedHosts(
            lambda: plain_mlp_host(3, 4, 1, 2), ("stem",), example_input=x[0], rng_seeds=(1, 2),
            loss=mean_cross_entropy, metric=accuracy, join_seeds=join,
        )  # fmt: skip
        hosts.plant(np.stack([Action("germinate", "stem", "own").encode(("stem",), hosts.blueprint_names)] * 2))
        (group,) = hosts.groups.values()
        assert (group.two_layer is not None) == (join and case == "named layers")
        group.parameters.rows.copy_(torch.linspace(-1, 1, group.parameters.rows.numel()).view_as(group.parameters.rows))
        for _ in range(3):
            hosts.train_step(x, y, torch.full((2,), 0.05))
        rows.append((hosts.hosts.rows, group.parameters.rows, hosts.evaluate(x, y)[0]))
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)

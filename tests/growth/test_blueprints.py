"""Blueprints: parameter counts by hand, causality, shapes, and blueprints of the user's own, good and bad."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import simic
from simic.growth.blueprints import BLUEPRINTS, blueprints_for, count_parameters
from simic.growth.model import GrowableModel
from simic.growth.slot_shape import SlotShape
from simic.lifecycle.actions import Action

CONV1, CONV2, CONV3 = (SlotShape("conv", 16, dims) for dims in (1, 2, 3))
FEATURES, SEQUENCE = SlotShape("features", 16), SlotShape("sequence", 16)
WIDE_FEATURES, WIDE_SEQUENCE = SlotShape("features", 16, in_features=5), SlotShape("sequence", 16, in_features=5)
WIDE_CONV1 = SlotShape("conv", 16, 1, in_features=5, stride=(2,))
WIDE_CONV2 = SlotShape("conv", 16, 2, in_features=5, stride=(2, 1))
BOTH_WAYS = SlotShape("sequence", 16, causal=False)


# With C = 16 features.
@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("norm", FEATURES, 2 * 16 + 1),
        ("norm", CONV2, 2 * 16 + 1),
        ("low_rank", FEATURES, 16 * 2 + 2 * 16 + 16),  # rank 2, a bias behind it
        ("low_rank", CONV2, 16 * 2 + 2 * 16 + 16),
        ("mlp_small", FEATURES, (16 + 1) * 8 + (8 + 1) * 16),
        ("mlp_small", SEQUENCE, (16 + 1) * 8 + (8 + 1) * 16 + 32),  # and a layer norm
        ("mlp", FEATURES, (16 + 1) * 16 * 2),
        ("mlp_large", FEATURES, (16 + 1) * 64 + (64 + 1) * 16),
        ("glu", FEATURES, 2 * (16 + 1) * 16 + (16 + 1) * 16),
        ("causal_conv", SEQUENCE, 32 + 16 * 4 + 16 + (16 + 1) * 16),
        ("attention", SEQUENCE, 32 + (16 + 1) * 48 + (16 + 1) * 16),
        ("causal_conv", BOTH_WAYS, 32 + 16 * 5 + 16 + (16 + 1) * 16),
        ("attention", BOTH_WAYS, 32 + (16 + 1) * 48 + (16 + 1) * 16),
        ("squeeze_excite", CONV2, (16 + 1) * 4 + (4 + 1) * 16),
        ("pointwise", CONV2, (16 + 1) * 32 + (32 + 1) * 16),
        ("depthwise", CONV2, 16 * 9 + 32 + (16 + 1) * 16),
        ("depthwise", CONV1, 16 * 3 + 32 + (16 + 1) * 16),
        ("bottleneck", CONV2, 16 * 8 + 16 + 8 * 8 * 9 + 16 + (8 + 1) * 16),
        ("conv", CONV2, 32 + 16 * 16 * 9 + 16),
        ("conv", CONV1, 32 + 16 * 16 * 3 + 16),
        ("conv", CONV3, 32 + 16 * 16 * 27 + 16),
        ("conv_double", CONV2, 16 * 16 * 9 + 32 + 16 * 16 * 9 + 16),
        ("widen_small", WIDE_FEATURES, (5 + 1) * 8 + (8 + 1) * 16),
        ("widen", WIDE_FEATURES, (5 + 1) * 16 + (16 + 1) * 16),
        ("widen_large", WIDE_FEATURES, (5 + 1) * 64 + (64 + 1) * 16),
        ("widen", WIDE_SEQUENCE, 10 + (5 + 1) * 16 + (16 + 1) * 16),
        ("widen_attention", WIDE_SEQUENCE, 10 + (5 + 1) * 48 + (16 + 1) * 16),
        ("widen", WIDE_CONV2, 5 * 16 * 9 + 32 + 16 * 16 * 9 + 16),
        ("widen", WIDE_CONV1, 5 * 16 * 3 + 32 + 16 * 16 * 3 + 16),
        ("widen_pointwise", WIDE_CONV2, (5 + 1) * 32 + (32 + 1) * 16),
    ],
    ids=str,
)
def test_parameters_by_hand(name, shape, parameters):
    assert count_parameters(name, shape) == parameters
    assert sum(p.numel() for p in BLUEPRINTS[name].build(shape).parameters()) == parameters


def test_every_topology_has_its_blueprints():
    features = ("norm", "low_rank", "mlp_small", "mlp", "mlp_large", "glu")
    assert blueprints_for([FEATURES]) == features
    assert blueprints_for([SEQUENCE]) == (*features, "causal_conv", "attention")
    assert set(blueprints_for([CONV2])) == {
        *("norm", "low_rank", "squeeze_excite", "pointwise", "depthwise", "bottleneck", "conv", "conv_double")
    }


def test_seeds_grow_beside_a_submodule_whose_input_can_be_read():
    for without, readable, beside in (
        (FEATURES, WIDE_FEATURES, {"widen_small", "widen", "widen_large"}),
        (SEQUENCE, WIDE_SEQUENCE, {"widen", "widen_attention"}),
        (CONV2, WIDE_CONV2, {"widen", "widen_pointwise"}),
    ):
        assert set(blueprints_for([readable])) - set(blueprints_for([without])) == beside
        assert {name for name in blueprints_for([readable]) if BLUEPRINTS[name].reads == "input"} == beside


@pytest.mark.parametrize(("size", "stride"), [((7, 6), (2, 1)), ((8, 3), (2, 3)), ((1, 1), (1, 1))])
@pytest.mark.parametrize("name", ["widen", "widen_pointwise"])
def test_beside_a_strided_convolution_a_branch_makes_the_same_positions(name, size, stride):
    branch = BLUEPRINTS[name].build(SlotShape("conv", 4, 2, in_features=3, stride=stride))
    assert branch(torch.randn(2, 3, *size)).shape == nn.Conv2d(3, 4, 3, stride, 1)(torch.randn(2, 3, *size)).shape


@pytest.mark.parametrize("name", BLUEPRINTS)
@pytest.mark.parametrize("features", [1, 3, 8], ids="features={}".format)
def test_every_blueprint_fits_slots_of_any_width(name, features):
    examples = {
        "features": [torch.randn(2, features)],
        "sequence": [torch.randn(2, 5, features)],
        "conv": [torch.randn(2, features, *[3] * dims) for dims in (1, 2, 3)],
    }
    for topology in BLUEPRINTS[name].topologies:
        for x in examples[topology]:
            dims = x.dim() - 2 if topology == "conv" else 0
            shape = SlotShape(topology, features, dims, in_features=features, stride=(1,) * dims)
            branch = BLUEPRINTS[name].build(shape)
            assert torch.equal(branch(x), torch.zeros_like(x))
            if name == "norm" and features == 1 and topology != "conv":
                continue  # a single feature normalised is a constant: there is nothing to learn
            (gradient,) = torch.autograd.grad((branch(x) * torch.randn_like(x)).sum(), list(branch.parameters())[-1:])
            assert gradient.abs().sum() > 0, "a newborn seed must be able to learn"


MIXING = ("causal_conv", "attention", "widen_attention")


@pytest.mark.parametrize("name", blueprints_for([WIDE_SEQUENCE]))
def test_sequence_blueprints_do_not_look_ahead(name):
    branch = BLUEPRINTS[name].build(replace(SEQUENCE, in_features=16))
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.normal_(0, 0.5)
    x = torch.randn(1, 6, 16)
    changed = x.clone()
    changed[:, 4] = torch.randn(16)
    before, after = branch(x), branch(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4], after[:, 4])
    assert (name in MIXING) == (not torch.allclose(before[:, 5], after[:, 5]))


@pytest.mark.parametrize("name", MIXING)
def test_sequence_blueprints_look_both_ways_in_a_bidirectional_slot(name):
    branch = BLUEPRINTS[name].build(replace(BOTH_WAYS, in_features=16))
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.normal_(0, 0.5)
    x = torch.randn(1, 5, 16)
    changed = x.clone()
    changed[:, 2] = torch.randn(16)
    assert ((branch(x) - branch(changed)).abs().sum(-1) > 1e-4).all()


def test_zeroed_sets_every_parameter_to_zero():
    layer = simic.zeroed(nn.Linear(3, 2))
    assert all((parameter == 0).all() for parameter in layer.parameters())


def test_slot_shapes_speak():
    assert str(CONV2) == "conv 2-D, 16 features"
    assert str(SEQUENCE) == "sequence, 16 features"
    assert [shape.rank for shape in (CONV1, CONV2, CONV3, FEATURES, SEQUENCE)] == [3, 4, 5, 2, 3]


# Registration.


@pytest.mark.usefixtures("own_names")
def test_names_and_topologies_are_checked():
    with pytest.raises(ValueError, match="'norm' exists already"):
        simic.blueprint("norm", topology="conv")(lambda shape: torch.nn.Identity())
    with pytest.raises(ValueError, match="topology must be one of conv, features, sequence, got 'image'"):
        simic.blueprint("mine", topology=("conv", "image"))
    with pytest.raises(ValueError, match="reads must be one of output, input, got 'inputs'"):
        simic.blueprint("mine", topology="conv", reads="inputs")  # pyright: ignore[reportArgumentType]


def test_an_unknown_blueprint_lists_close_matches():
    with pytest.raises(ValueError, match="there is no blueprint named 'mlp_smal'; did you mean mlp_small"):
        BLUEPRINTS["mlp_smal"]


# Blueprints of the user's own.

X, Y = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2


def make_host() -> nn.Sequential:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.usefixtures("own_names")
def test_a_blueprint_in_one_function_grows_learns_and_exports():
    @simic.blueprint("wide", topology="features")
    def wide(shape):
        return nn.Sequential(nn.Linear(shape.features, 32), nn.ReLU(), simic.zeroed(nn.Linear(32, shape.features)))

    model = GrowableModel(make_host(), ["1"], example_input=X)
    assert model.blueprint_table()[0, model.blueprint_names.index("wide")] == 5 * 32 + 33 * 4
    alone = model(X)
    model.plant("1", "wide")
    assert torch.equal(model(X), alone)
    optimizer = torch.optim.Adam(model.seeds.parameters(), lr=0.01)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    torch.testing.assert_close(model.export()(X), model.eval()(X))


class Raises(nn.Module):
    """Has parameters, but no forward pass."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(1, 1), error

    def forward(self, x):
        raise self.error


class Pair(nn.Module):
    """Outputs two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.factor, x


def fails_to_build(shape):
    raise RuntimeError("boom")


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda shape: simic.zeroed(nn.Linear(shape.features, 7)), r"must preserve shape: .*\(32, 4\) into \(32, 7\)"),
        (lambda shape: nn.Linear(shape.features, shape.features), "not born as identity"),
        (lambda shape: nn.Tanh(), "has no parameters"),
        (lambda shape: Pair(), "into tuple"),
        (lambda shape: simic.zeroed(nn.Linear(9, shape.features)), "fails on slot '1'"),
        (lambda shape: Raises(RuntimeError("boom")), "fails on slot '1' .*boom"),
        (lambda shape: Raises(TypeError("boom")), "fails on slot '1' .*boom"),
        (fails_to_build, "boom"),
    ],
    ids=["shape", "not identity", "no parameters", "tuple", "wrong input", "forward", "type error", "build"],
)
def test_a_bad_blueprint_is_refused_and_nothing_changes(build, message):
    simic.blueprint("bad", topology="features")(build)
    model = GrowableModel(make_host(), ["1"], example_input=X)
    model.train()
    before, slot_state = (
        {name: value.clone() for name, value in model.state_dict().items()},
        model.slot_state.state_dict(),
    )
    rng = torch.get_rng_state()
    alone = model(X)
    for attempt in (lambda: model.execute(Action("germinate", "1", "bad")), lambda: model.plant("1", "bad")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            attempt()
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert model.slot_state.state_dict() == slot_state
        assert model.germinations == 0
        assert model.seed("1") is None
        assert torch.equal(torch.get_rng_state(), rng)
        assert torch.equal(model(X), alone)


def test_a_blueprint_of_another_topology_is_refused_with_those_that_fit():
    host = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2))
    model = GrowableModel(host, ["0", "2"], example_input=torch.randn(2, 2, 5))
    with pytest.raises(ValueError, match=r"'conv' does not fit slot '2' \(features, 4 features\); these do: norm, low"):
        model.execute(Action("germinate", "2", "conv"))
    table = model.blueprint_table()
    fits = {name: tuple(table[:, index] >= 0) for index, name in enumerate(model.blueprint_names)}
    assert fits["norm"] == (True, True)
    assert fits["conv"] == (True, False)
    assert fits["mlp"] == (False, True)


@pytest.mark.usefixtures("own_names")
def test_a_newborn_seed_s_own_statistics_are_untouched_by_the_check():
    @simic.blueprint("with_batch_norm", topology="features")
    def build(shape):
        return nn.Sequential(nn.BatchNorm1d(shape.features), simic.zeroed(nn.Linear(shape.features, shape.features)))

    model = GrowableModel(make_host(), ["1"], example_input=X)
    model.execute(Action("germinate", "1", "with_batch_norm"))
    seed = model.seed("1")
    assert seed is not None
    assert seed.state_dict()["branch.0.num_batches_tracked"] == 0
    assert (seed.state_dict()["branch.0.running_mean"] == 0).all()

"""Newborn seeds, as a single model and stacked hosts build them."""

import pytest
import torch
from torch import nn

from simic import GrowableModel, zeroed
from simic.growth.blueprints import blueprint, new_branch
from simic.growth.seed import new_gate, new_seed
from simic.growth.slot_discovery import Site
from simic.growth.slot_shape import SlotShape

SITE = Site("body", SlotShape("features", 4), (2, 4), "tensor")
LIKE = torch.zeros((), dtype=torch.float64)


def weights(seed: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in seed.parameters()])


def test_weights_depend_on_the_entropy_alone():
    torch.manual_seed(0)
    rng = torch.get_rng_state()
    first = new_seed(["norm", "mlp"], 1, SITE, (3, 0, 0), LIKE)
    assert torch.equal(torch.get_rng_state(), rng)
    torch.manual_seed(1)
    assert torch.equal(weights(new_seed(["norm", "mlp"], 1, SITE, (3, 0, 0), LIKE, check=False)), weights(first))
    assert not torch.equal(weights(new_seed(["norm", "mlp"], 1, SITE, (3, 0, 1), LIKE)), weights(first))
    assert torch.equal(weights(first), weights(new_branch("mlp", SITE.shape, (3, 0, 0)).double()))


def test_device_dtype_mode_and_gate():
    seed = new_seed(["mlp"], 0, SITE, (0,), LIKE, training=False)
    assert not seed.branch.training
    assert {parameter.dtype for parameter in seed.parameters()} == {torch.float64}
    seed.set_operator("gate")
    assert seed.gate is not None
    assert torch.equal(weights(seed.gate), weights(new_gate(SITE.shape, LIKE)))
    assert weights(seed.gate).tolist() == [0.0, 0.0, 0.0, 0.0, 2.0]


@pytest.mark.usefixtures("own_names")
def test_a_check_may_be_left_out_but_not_a_wrong_place():
    @blueprint("wide", topology="features")
    def wide(shape):
        return zeroed(nn.Linear(shape.features, shape.features + 1))

    with pytest.raises(ValueError, match="must preserve shape"):
        new_seed(["wide"], 0, SITE, (0,), LIKE)
    new_seed(["wide"], 0, SITE, (0,), LIKE, check=False)
    with pytest.raises(ValueError, match="a blueprint index must be below 1, got 1"):
        new_seed(["wide"], 1, SITE, (0,), LIKE)
    with pytest.raises(ValueError, match="'conv' does not fit slot 'body'"):
        new_seed(["conv"], 0, SITE, (0,), LIKE, check=False)


def test_a_model_holds_exactly_the_seeds_it_is_given():
    def make_model() -> GrowableModel:
        host = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        return GrowableModel(host, ["0", "1"], example_input=torch.zeros(2, 4))

    model, other = make_model(), make_model()
    model.plant("0", "mlp")
    other.plant("0", "norm")
    other.plant("1", "mlp")
    kept = other.seed("1")
    seeds = {"0": model.build_seed(0, model.blueprint_names.index("mlp")), "1": kept}
    model.set_seeds(seeds, other.slot_state.copy(), 5)
    assert model.grown_slots == ["0", "1"]
    assert [model.seed("0"), model.seed("1")] == list(seeds.values())
    assert sum(len(part._forward_hooks) for part in model.host.modules()) == 2
    assert (model.germinations, seeds["0"].alpha) == (5, 1.0)

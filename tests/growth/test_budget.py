"""The menu of blueprints and the budget of a model: what exceeds them is refused and changes nothing."""

import logging
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from simic import Action, GrowableModel, IllegalActionError
from simic.growth.budget import styles_within_budget, table_within_budget

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
HOST_PARAMETERS = (4 * 8 + 8) + (8 * 8 + 8) + (8 * 2 + 2)  # 130
MLP_SMALL = (8 * 4 + 4) + (4 * 8 + 8)  # 76 behind 8 features
GATE = 8 + 1


def make_host() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def make_model(**settings) -> GrowableModel:
    return GrowableModel(make_host(), ["0", "1"], example_input=X, **settings)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        model(X)
    return counter.get_total_flops()


def test_blueprints_are_those_named_in_the_order_of_registration():
    model = make_model(blueprints=["widen", "norm"])
    assert model.blueprint_names == ("norm", "widen")
    with pytest.raises(ValueError, match="blueprint must be one of norm, widen, got 'mlp'"):
        model.execute(Action("germinate", "0", "mlp"))
    assert not model.grown_slots


@pytest.mark.parametrize(
    ("blueprints", "error", "message"),
    [
        (["mpl"], ValueError, r"blueprints has no choice 'mpl'; did you mean mlp\?"),
        (["conv", "attention"], ValueError, r"none of .* fits a slot .*\(features, 8 features\); these do: norm, low"),
        ("mlp", TypeError, r'a list of names such as \["mlp", "low_rank"\], got \'mlp\''),
        ([], ValueError, "none of"),
    ],
)
def test_a_menu_that_cannot_be_is_refused(blueprints, error, message):
    with pytest.raises(error, match=message):
        make_model(blueprints=blueprints)


def test_a_blueprint_that_fits_nowhere_is_told(caplog):
    with caplog.at_level(logging.WARNING, "simic"):
        assert make_model(blueprints=["mlp", "conv"]).blueprint_names == ("mlp",)
    assert caplog.messages == ["blueprints that fit no slot of this model: conv"]


def test_a_state_dict_loads_under_another_menu_if_it_has_the_blueprint():
    model = make_model(blueprints=["mlp", "norm"])
    model.plant("1", "mlp")
    wider, narrower = make_model(), make_model(blueprints=["norm"])
    wider.load_state_dict(model.state_dict())
    assert wider.growth()[1].blueprint == "mlp"
    assert torch.equal(wider(X), model(X))
    with pytest.raises(ValueError, match=r"a seed of blueprint 'mlp'; build the model with it in blueprints="):
        narrower.load_state_dict(model.state_dict())
    assert not narrower.grown_slots


@pytest.mark.parametrize(
    "settings",
    [{"max_parameters": HOST_PARAMETERS + MLP_SMALL}, {"max_growth": (HOST_PARAMETERS + MLP_SMALL) / HOST_PARAMETERS}],
    ids=str,
)
def test_a_seed_that_just_fits_is_allowed_and_one_more_parameter_is_not(settings):
    model = make_model(**settings)
    refused = re.escape("adds 76 parameters to 206, more than ") + next(iter(settings))
    with pytest.raises(IllegalActionError, match="cannot germinate slot '0': mlp adds"):
        model.execute(Action("germinate", "0", "mlp"))
    with pytest.raises(IllegalActionError, match="adds 85 parameters to 130"):  # with its gate
        model.execute(Action("germinate", "0", "mlp_small", style="gated"))
    assert not model.grown_slots
    model.execute(Action("germinate", "0", "mlp_small"))
    with pytest.raises(IllegalActionError, match=refused):
        model.execute(Action("germinate", "1", "mlp_small"))
    model.tick()
    model.execute(Action("prune", "0"))
    model.execute(Action("germinate", "1", "mlp_small"))  # what is pruned no longer counts
    assert size(model) == HOST_PARAMETERS + MLP_SMALL


def test_a_gate_that_comes_later_counts_too():
    model = make_model(max_parameters=HOST_PARAMETERS + MLP_SMALL + GATE - 1)
    model.execute(Action("germinate", "0", "mlp_small"))
    for _ in range(4):
        model.tick()
    with pytest.raises(IllegalActionError, match="cannot set_alpha_target slot '0': the gate adds 9 parameters to 206"):
        model.execute(Action("set_alpha_target", "0", style="gated"))
    model.execute(Action("set_alpha_target", "0", style="linear-multiply"))
    roomy = make_model(max_parameters=HOST_PARAMETERS + MLP_SMALL + GATE)
    roomy.execute(Action("germinate", "0", "mlp_small", style="gated"))
    assert size(roomy) == HOST_PARAMETERS + MLP_SMALL + GATE


def test_controllers_see_what_fits_into_the_budget():
    model = make_model(blueprints=["norm", "mlp_small", "mlp"], max_parameters=HOST_PARAMETERS + MLP_SMALL + 2)
    norm, large = 17, (8 * 16 + 16) + (16 * 8 + 8)
    np.testing.assert_array_equal(model.blueprint_table(), [[norm, MLP_SMALL, large]] * 2)
    np.testing.assert_array_equal(table_within_budget(model), [[norm, MLP_SMALL, -1]] * 2)
    styles = styles_within_budget(model)
    assert styles is not None
    assert styles[0].tolist()[1] == [True, True, True, False]  # mlp_small and a gate do not fit
    model.plant("1", "norm")
    # The row of a slot with a seed stays: it describes the seed.
    np.testing.assert_array_equal(table_within_budget(model), [[norm, -1, -1], [norm, MLP_SMALL, large]])
    assert styles_within_budget(model) is None
    np.testing.assert_array_equal(table_within_budget(make_model()), make_model().blueprint_table())


class Twice(nn.Module):
    """Runs its first layer twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x)))


def test_operations_are_those_that_torch_counts():
    host = Twice()
    own = flops(host)
    with_seed = GrowableModel(Twice(), ["body"], example_input=X)
    with_seed.plant("body", "mlp", style="gated")
    needed = flops(with_seed)
    assert needed == own + 2 * 2 * 3 * (4 * 16 + 16 * 4 + 4)
    model = GrowableModel(host, ["body"], example_input=X, max_flops=needed - 1)
    with pytest.raises(IllegalActionError, match=f"more than max_flops={needed - 1} allows"):
        model.plant("body", "mlp", style="gated")
    model.plant("body", "mlp")
    exact = GrowableModel(Twice(), ["body"], example_input=X, max_flops=needed)
    exact.plant("body", "mlp", style="gated")
    assert flops(exact) == needed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_parameters": 129}, "the host alone has 130 parameters, more than max_parameters=129 allows"),
        ({"max_parameters": 140}, "nothing can grow within max_parameters=140: .*the smallest seed adds 17"),
        ({"max_parameters": True}, "max_parameters must be a whole number, got True"),
        ({"max_parameters": 1e3}, "max_parameters must be a whole number, got 1000.0"),
        ({"max_growth": 0.5}, "max_growth is a multiple of the host, so at least 1, got 0.5"),
        ({"max_growth": float("nan")}, "max_growth must be a finite number, got nan"),
        ({"max_growth": "2x"}, "max_growth must be a finite number, got '2x'"),
        ({"max_flops": 10}, "the host alone has 672 operations per pass, more than max_flops=10 allows"),
    ],
    ids=str,
)
def test_budgets_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        make_model(**settings)


def test_loading_a_larger_network_is_not_growth():
    grown = make_model()
    grown.plant("0", "mlp_large")
    model = make_model(max_growth=1.5)
    model.load_state_dict(grown.state_dict())
    assert torch.equal(model(X), grown(X))
    with pytest.raises(IllegalActionError, match=re.escape("max_growth=1.5")):
        model.execute(Action("germinate", "1", "norm"))

"""Models that are cast, moved, built without values or run under autocast, with seeds inside."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from simic import Action, GrowableModel, GrowthScheduler, LifecycleConfig, ScriptedController

X = torch.linspace(-1, 1, 96).view(16, 6)
Y = torch.arange(16) % 2
SCRIPT = {
    0: Action("germinate", "2", "mlp"),
    2: Action("germinate", "5", "norm", style="gated"),
    4: Action("advance", "2"),
    5: Action("fossilize", "2"),
    6: Action("prune", "5"),
}


def make_host() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())
    return block.append(nn.Linear(8, 2))


def make_model(**settings: Any) -> GrowableModel:
    return GrowableModel(make_host(), ["2", "5"], example_input=X, **settings)


def grown(model: GrowableModel) -> GrowableModel:
    model.plant("2", "mlp")
    model.plant("5", "norm", style="gated")
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.fill_(0.1)
    return model


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def live(model: GrowableModel, autocast: Any, x=X, scaler: Any = None, script: Any = SCRIPT) -> GrowthScheduler:
    """A whole life of seeds under a precision."""
    optimizer = AdamW(model.parameters(), lr=0.01)

    def loss():
        with autocast():
            return cross_entropy(model(x).float(), Y)

    growth = GrowthScheduler(
        model, optimizer, ScriptedController(script), evaluate=lambda: {"val_loss": float(loss())}, governor=True
    )
    for _ in range(8):
        for _ in range(2):
            optimizer.zero_grad()
            value = growth.loss(loss)
            if scaler is None:
                value.backward()
                optimizer.step()
            else:
                scaler.scale(value).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        growth.step()
    return growth


def check_life(growth: GrowthScheduler, dtype: torch.dtype, scale: float = 1.0) -> None:
    assert [report.stage.name for report in growth.model.growth()] == ["FOSSILIZED", "EMBARGOED"]
    assert dtypes(growth.model) == {dtype}
    assert growth.decisions[-1].val_loss < growth.decisions[0].val_loss
    norm = float(growth.model.slot_state.gradient_norm[0, 0])
    assert 0 < norm < 10 * scale


def test_seeds_live_under_autocast_with_weights_of_full_precision():
    check_life(live(make_model(), lambda: torch.autocast("cpu", torch.bfloat16)), torch.float32)


def test_seeds_live_with_a_gradient_scaler():
    """Gradient norms are those of the loss, not of the scaled loss."""
    scaler = torch.amp.GradScaler("cpu")
    check_life(live(make_model(), lambda: torch.autocast("cpu", torch.float16), scaler=scaler), torch.float32)


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_seeds_are_incubated_under_autocast(incubation):
    model = make_model(lifecycle=LifecycleConfig(incubation=incubation, min_training_decisions=1))
    script = {0: Action("germinate", "2", "mlp"), 1: Action("advance", "2"), 4: Action("advance", "2")}
    growth = live(model, lambda: torch.autocast("cpu", torch.bfloat16), script=script)
    assert model.growth()[0].stage.name == "BLENDING"
    assert float(growth.model.slot_state.gradient_norm[0, 0]) > 0


def test_seeds_live_in_a_model_of_bfloat16():
    check_life(live(make_model().bfloat16(), contextlib.nullcontext, X.bfloat16()), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("first", ["grow", "cast"])
def test_a_cast_model_grows_runs_loads_and_is_exported(dtype, first):
    model = grown(make_model()).to(dtype) if first == "grow" else grown(make_model().to(dtype))
    assert dtypes(model) == {dtype}
    x = X.to(dtype)
    expected = model.eval()(x)
    assert expected.dtype == dtype
    again = make_model().to(dtype).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), expected)
    torch.testing.assert_close(model.export()(x), expected)


def test_a_cast_model_stays_exportable_with_tokens_and_masks():
    """Only floats of the example are cast."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 2)

        def forward(self, tokens, scale):
            return self.out(self.embed(tokens) * scale)

    example = {"tokens": torch.arange(4).view(2, 2), "scale": torch.ones(1)}
    model = GrowableModel(Tokens(), ["embed"], example_input=example).double()
    model.plant("embed", "mlp")
    assert model.export()(example["tokens"], example["scale"].double()).dtype == torch.float64


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_built_without_values_takes_those_of_a_checkpoint(assign):
    saved = grown(make_model()).eval()
    with torch.device("meta"):
        model = GrowableModel(make_host(), ["2", "5"], example_input=torch.empty(2, 6)).eval()
    assert all(parameter.is_meta for parameter in model.parameters())
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(copy.deepcopy(saved.state_dict()), assign=assign)
    assert torch.equal(model(X), saved(X))


def test_a_model_that_grew_on_meta_is_emptied_with_its_seeds():
    saved = grown(make_model()).eval()
    model = make_model().to("meta").eval()
    model.plant("2", "mlp")
    model.to_empty(device="cpu")
    model.load_state_dict(saved.state_dict())
    assert torch.equal(model(X), saved(X))

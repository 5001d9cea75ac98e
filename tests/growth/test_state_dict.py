"""A state dict can be gone back to, whatever has grown since; a refused one changes nothing."""

import copy
import json
from collections import OrderedDict
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from simic import Action, GrowableModel, LifecycleConfig, Stage

X = torch.linspace(-1, 1, 12).view(4, 3)


def make_host() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def make_model(*slots: str) -> GrowableModel:
    return GrowableModel(make_host(), slots or ("2", "3"), example_input=X, lifecycle=LifecycleConfig()).eval()


def shake(module: nn.Module, rng_seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(rng_seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def grow(model: GrowableModel) -> GrowableModel:
    """A fossil in slot 2, a live seed in slot 3, other weights everywhere."""
    model.plant("2", "mlp", style="gated")
    model.execute(Action("germinate", "3", "norm"))
    model.tick()
    shake(model)
    return model


def everything(model: GrowableModel) -> dict[str, object]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = sum(len(part._forward_hooks) for part in model.host.modules())
    return {"state": state, "life": model.slot_state.state_dict(), "germinations": model.germinations, "hooks": hooks}


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def through_torch_save(state, tmp_path):
    torch.save(state, tmp_path / "best.pt")
    return torch.load(tmp_path / "best.pt", weights_only=True)


CARRIERS = {
    "deepcopy": lambda state, _: copy.deepcopy(state),
    "torch.save": through_torch_save,
    "a dict of clones": lambda state, _: {name: value.clone() for name, value in state.items()},
    "safetensors": lambda state, _: load(save(dict(state))),
}
KNOWS_DORMANCY = ("deepcopy", "torch.save")


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_grown_model_goes_back_to_before_any_growth(carrier, assign, tmp_path):
    model = make_model()
    for _ in range(3):
        model.tick()
    before, output = everything(model), model(X)
    best = CARRIERS[carrier](model.state_dict(), tmp_path)
    grow(model)
    assert not torch.equal(model(X), output)
    if carrier in KNOWS_DORMANCY:
        keys = model.load_state_dict(best, assign=assign)
        assert same(everything(model), before)  # how long the slots were empty included
    else:
        with pytest.warns(UserWarning, match=r"the seeds in slots 2, 3 are removed.*strict=False"):
            keys = model.load_state_dict(best, assign=assign)
        assert same(everything(model)["state"], before["state"])
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert torch.equal(model(X), output)
    assert model.germinations == 0
    assert not list(model.seeds)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [False, True])
def test_seeds_are_added_changed_and_removed(carrier, strict, assign, tmp_path):
    saved = grow(make_model())
    saved.execute(Action("prune", "3", alpha_speed=0))
    before, output = everything(saved), saved(X)
    state = CARRIERS[carrier](saved.state_dict(), tmp_path)
    for slots in ((), ("2",), ("3",), ("2", "3")):
        model = make_model()
        for slot in slots:
            model.plant(slot, "norm")
        shake(model, 2)
        keys = model.load_state_dict(state, strict=strict, assign=assign)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        assert same(everything(model), before)
        assert torch.equal(model(X), output)


@pytest.mark.parametrize("carrier", KNOWS_DORMANCY)
def test_the_topology_follows_a_load_that_is_not_strict(carrier, tmp_path):
    """As trainers load the best model at the end."""
    model = make_model()
    best, output = CARRIERS[carrier](model.state_dict(), tmp_path), model(X)
    grow(model).load_state_dict(best, strict=False)
    assert torch.equal(model(X), output)
    assert not list(model.seeds)


@pytest.mark.parametrize("wrap", [False, True], ids=["alone", "inside another module"])
def test_what_is_missing_and_unexpected_is_named_as_the_state_dict_does(wrap):
    def wrapped(model: nn.Module) -> nn.Module:
        return nn.Sequential(OrderedDict([("host", nn.Identity()), ("net", model)])) if wrap else model

    prefix = "net." if wrap else ""
    state = dict(wrapped(grow(make_model())).state_dict())
    for name in ("0.weight", "seeds.2.branch.0.weight"):
        del state[prefix + name]
    state |= {prefix + "extra": torch.zeros(1), prefix + "seeds.9.weight": torch.zeros(1)}
    model = make_model()
    own = model.host.get_parameter("0.weight").clone()
    keys = wrapped(model).load_state_dict(state, strict=False)
    assert sorted(keys.missing_keys) == [prefix + "0.weight", prefix + "seeds.2.branch.0.weight"]
    assert sorted(keys.unexpected_keys) == [prefix + "extra", prefix + "seeds.9.weight"]
    assert torch.equal(model.host.get_parameter("0.weight"), own)
    assert torch.equal(model.host.get_parameter("3.weight"), state[prefix + "3.weight"])
    assert [report.blueprint for report in model.growth()] == ["mlp", "norm"]


def test_host_weights_go_into_a_grown_model_and_its_seeds_stay():
    model, host = grow(make_model()), make_host()
    seeds = {name: value.clone() for name, value in model.seeds.state_dict().items()}
    slot_state = model.slot_state.state_dict()
    keys = model.load_state_dict(host.state_dict(), strict=False)
    assert all(name.startswith("seeds.") for name in keys.missing_keys)
    assert len(keys.missing_keys) == len(seeds)
    assert same(dict(model.seeds.state_dict()), seeds)
    assert model.slot_state.state_dict() == slot_state
    assert torch.equal(model.host.get_parameter("0.weight"), host.get_parameter("0.weight"))


def test_a_model_that_never_grew_fits_other_slots():
    state = make_model("2", "3").state_dict()
    model = grow(make_model("2", "3"))
    other = make_model("3")
    other.plant("3", "norm")
    for receiver in (model, other):
        receiver.load_state_dict(copy.deepcopy(state))
        assert not list(receiver.seeds)
        np.testing.assert_array_equal(receiver.slot_state.stage, Stage.DORMANT)


def test_a_model_inside_another_module_goes_back_too():
    model = make_model()
    whole = nn.Sequential(nn.Linear(3, 3), model).eval()
    best, output = copy.deepcopy(whole.state_dict()), whole(X)
    grow(model)
    grown, outgrown = copy.deepcopy(whole.state_dict()), whole(X)
    whole.load_state_dict(best)
    assert torch.equal(whole(X), output)
    assert not list(model.seeds)
    whole.load_state_dict(grown)
    assert torch.equal(whole(X), outgrown)


def test_a_state_dict_can_be_loaded_with_and_without_assign():
    """Torch notes `assign` in the metadata of what it loads; the caller's state dict stays as it was."""
    model, state = make_model(), copy.deepcopy(make_model().state_dict())
    model.load_state_dict(state, assign=True)
    assert model.host.get_parameter("0.weight").data_ptr() == state["0.weight"].data_ptr()
    model = make_model()
    model.load_state_dict(state)
    assert model.host.get_parameter("0.weight").data_ptr() != state["0.weight"].data_ptr()


def spoiled_record(state: dict, **changes) -> None:
    record = json.loads(bytes(state["growth"].numpy().tobytes()))
    if changes.get("slot_state"):
        record["slot_state"] |= changes.pop("slot_state")
    text = json.dumps({k: v for k, v in (record | changes).items() if v is not None}).encode()
    state["growth"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def test_a_record_of_version_1_is_upgraded():
    grown = grow(make_model())
    state, metadata = dict(grown.state_dict()), copy.deepcopy(make_model().state_dict())
    record = json.loads(bytes(state["growth"].numpy().tobytes()))
    spoiled_record(state, version=1, slot_state=None, life=record["slot_state"])
    model = make_model()
    model.load_state_dict(state)
    assert same(everything(model), everything(grown))
    # A model that has not grown has its record in the metadata.
    own = cast(Any, metadata)._metadata[""]
    text = own["growth"].replace('"version": 2', '"version": 1').replace("slot_state", "life")
    own["growth"] = text
    model.load_state_dict(metadata)
    assert not model.grown_slots


SPOILS = {
    "shape": (lambda s: s.update({"0.weight": torch.zeros(9, 9)}), r"0.weight has shape \(9, 9\)"),
    "no tensor": (lambda s: s.update({"0.weight": s["0.weight"].numpy()}), "0.weight is a ndarray, not a tensor"),
    "slots cut": (lambda s: spoiled_record(s, slot_state={"stage": [[4]]}), "damaged"),
    "no such stage": (lambda s: spoiled_record(s, slot_state={"stage": [[99, 0]]}), "damaged"),
    "no such style": (lambda s: spoiled_record(s, slot_state={"style": [[99, 0]]}), "damaged"),
    "no such blueprint": (lambda s: spoiled_record(s, slot_state={"blueprint": [[99, 0]]}), "damaged"),
    "no slot state": (lambda s: spoiled_record(s, slot_state={"alpha": None}), "damaged"),
    "no incubation": (lambda s: spoiled_record(s, incubation=None), "damaged"),
    "newer": (lambda s: spoiled_record(s, version=99), "format version 99, this simic reads version 2"),
    "unknown blueprint": (lambda s: spoiled_record(s, blueprints=["unheard_of"] * 99), "'unheard_of'; register it"),
}


@pytest.mark.parametrize("name", SPOILS)
@pytest.mark.parametrize("strict", [True, False])
def test_a_refused_load_changes_nothing(name, strict):
    spoil, message = SPOILS[name]
    state = dict(grow(make_model()).state_dict())
    spoil(state)
    model = make_model()
    model.plant("3", "low_rank")
    shake(model, 3)
    before, seed = everything(model), model.seed("3")
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(state, strict=strict)
    assert same(everything(model), before)
    assert model.seed("3") is seed


def test_host_weights_that_do_not_fit_remove_no_seed():
    state = dict(make_host().state_dict())
    del state["4.bias"]
    model = grow(make_model())
    before = everything(model)
    with pytest.raises(ValueError, match=r"missing 4\.bias"):
        model.load_state_dict(state)
    with pytest.raises(ValueError, match=r"4\.bias has shape \(9,\)"):
        model.load_state_dict(state | {"4.bias": torch.zeros(9)})
    assert same(everything(model), before)


def test_what_is_no_state_dict_is_torch_s_to_refuse():
    with pytest.raises(TypeError, match="dict-like"):
        make_model().load_state_dict([1])  # pyright: ignore[reportArgumentType]

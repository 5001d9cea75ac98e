"""Growth in place: the host holds, saves and loads its own seeds."""

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from simic import Action, GrowableModel, GrowthScheduler, Stage
from simic.growth.in_place import grow_in_place

X = torch.linspace(-1, 1, 8).view(2, 4)


class Tied(nn.Module):
    """Two layers that share one weight, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.body(torch.relu(self.first(x)))))


def make(rng_seed: int = 0) -> GrowableModel:
    torch.manual_seed(rng_seed)
    return grow_in_place(Tied(), ["first", "body"], example_input=X)


def grown() -> GrowableModel:
    model = make()
    model.plant("body", "low_rank")
    seed = model.seed("body")
    assert seed is not None
    for parameter in seed.parameters():
        nn.init.normal_(parameter)
    return model


def without_alias(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors files are: a tied weight under one of its names."""
    return {name: value for name, value in state_dict.items() if name != "last.weight"}


def test_the_host_holds_its_seeds():
    model = grown()
    host, seed = model.host, model.seed("body")
    assert seed is not None
    assert model.in_place
    assert host.get_submodule("seeds.body") is seed
    assert set(seed.parameters()) <= set(host.parameters())
    assert set(model.parameters()) == set(host.parameters())
    assert set(model.host_parameters()) == set(host.parameters()) - set(seed.parameters())
    host.to(torch.float64)
    assert {parameter.dtype for parameter in seed.parameters()} == {torch.float64}


def test_it_computes_what_a_wrapped_model_does():
    model = grown()
    torch.manual_seed(0)
    wrapped = GrowableModel(Tied(), ["first", "body"], example_input=X)
    wrapped.load_state_dict(model.host.state_dict())
    assert torch.equal(wrapped(X), model.host(X))
    assert wrapped.state_dict().keys() == model.host.state_dict().keys()


def test_pruned_seeds_leave_the_host():
    model = make()
    names = list(model.host.state_dict())
    model.execute(Action("germinate", "body", "low_rank"))
    model.remove_live_seeds()
    assert [name for name in model.host.state_dict() if name != "growth"] == names


@pytest.mark.parametrize("through", ["host", "model"])
def test_a_load_rebuilds_the_seeds(through):
    model, fresh = grown(), make(rng_seed=1)
    if through == "host":
        fresh.host.load_state_dict(without_alias(model.host.state_dict()), strict=False)
    else:
        fresh.load_state_dict(model.state_dict())
    assert fresh.grown_slots == ["body"]
    assert fresh.slot_state.stage[0, 1] == Stage.FOSSILIZED
    assert torch.equal(fresh.host(X), model.host(X))


def test_a_state_before_growth_removes_the_seeds(caplog):
    model, before = grown(), make()
    with caplog.at_level(logging.WARNING, "simic"):
        result = model.host.load_state_dict(without_alias(before.host.state_dict()), strict=False)
    assert "seeds in slots body are removed" in caplog.text
    assert model.grown_slots == []
    assert result.missing_keys == ["last.weight"]
    assert torch.equal(model.host(X), before.host(X))


def test_a_part_of_a_state_keeps_the_seeds():
    model = grown()
    model.host.load_state_dict({"body.bias": torch.zeros(4)}, strict=False)
    assert model.grown_slots == ["body"]


def test_a_state_without_record_but_with_the_seeds_keeps_them():
    model = grown()
    state = {name: value + 1 for name, value in model.host.state_dict().items() if name != "growth"}
    model.host.load_state_dict(state)
    assert model.grown_slots == ["body"]
    assert all(torch.equal(value, state[name]) for name, value in model.host.state_dict().items() if name != "growth")


def test_an_average_that_no_longer_matches_is_refused():
    """A copy of the host, as averaged weights are, whose source has grown since."""
    model = make()
    averaged = torch.optim.swa_utils.AveragedModel(model.host)
    model.plant("body", "low_rank")
    averaged.update_parameters(model.host)
    averaged.update_parameters(model.host)
    with pytest.raises(RuntimeError, match="has grown or pruned since the copy was made"):
        averaged.state_dict()


def test_seeds_without_their_record_are_refused():
    """As in a checkpoint that is loaded file by file: torch would drop them."""
    state = grown().host.state_dict()
    del state["growth"]
    fresh = make()
    with pytest.raises(
        ValueError, match=r"tensors of seeds, such as seeds\.body\.branch\.0\.weight, but not the growth"
    ):
        fresh.host.load_state_dict(state, strict=False)
    assert fresh.grown_slots == []


def test_a_refused_load_changes_nothing():
    model, other = make(), grown()
    state = other.host.state_dict()
    state["first.weight"] = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"first\.weight has shape"):
        model.host.load_state_dict(state, strict=False)
    assert model.grown_slots == []


def test_a_copy_of_the_host_is_whole():
    model = grown()
    twin = copy.deepcopy(model.host)
    assert torch.equal(twin(X), model.host(X))
    nn.init.ones_(twin.get_submodule("seeds.body.branch.1").weight)  # pyright: ignore[reportArgumentType]
    assert not torch.equal(twin(X), model.host(X))
    empty = make().host.state_dict()
    twin.load_state_dict(empty)
    assert len(twin.get_submodule("seeds")._modules) == 0
    assert model.grown_slots == ["body"]


def test_an_exported_host_has_no_trace():
    model = grown()
    plain = model.export()
    assert not hasattr(plain, "seeds")
    assert not plain._state_dict_hooks
    assert not plain._load_state_dict_pre_hooks
    assert "growth" not in plain.state_dict()
    torch.testing.assert_close(plain(X), model.host.eval()(X))
    assert model.grown_slots == ["body"]


def test_newborn_seeds_have_the_mode_of_the_host():
    model = make()
    model.host.eval()
    model.execute(Action("germinate", "body", "low_rank"))
    seed = model.seed("body")
    assert seed is not None
    assert not any(part.training for part in seed.branch.modules())


def test_counts_and_groups_of_the_host_leave_seeds_out():
    model = grown()
    host = sum(parameter.numel() for parameter in Tied().parameters())
    optimizer = torch.optim.SGD(model.host.parameters(), lr=0.1)
    scheduler = GrowthScheduler(model, optimizer, "wait", evaluate=lambda: {"val_loss": 1.0})
    assert scheduler.facts().host_parameters.tolist() == [host]
    assert [group.get("simic_slot") for group in optimizer.param_groups] == [None, "body"]
    assert len(optimizer.param_groups[0]["params"]) == 5
    model.host(X).sum().backward()
    grads = [parameter.grad for parameter in model.host_parameters() if parameter.grad is not None]
    optimizer.step()
    norm = nn.utils.get_total_norm(grads)
    assert scheduler.facts().host_gradient_norm[0] == pytest.approx(float(norm))


def test_a_scheduler_saves_and_loads_a_model_in_place(tmp_path):
    def build() -> tuple[GrowableModel, GrowthScheduler]:
        model = make()
        optimizer = torch.optim.Adam(model.host.parameters())
        return model, GrowthScheduler(model, optimizer, "wait", evaluate=lambda: {"val_loss": 1.0})

    model, scheduler = build()
    model.plant("body", "low_rank")
    scheduler.save(tmp_path / "growth.safetensors")
    fresh, other = build()
    other.load(tmp_path / "growth.safetensors")
    assert fresh.grown_slots == ["body"]
    assert torch.equal(fresh.host(X), model.host(X))


def test_a_host_grows_once():
    model = make()
    with pytest.raises(ValueError, match="has an attribute `seeds` already"):
        grow_in_place(model.host, ["body"], example_input=X)

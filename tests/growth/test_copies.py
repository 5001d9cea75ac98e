"""Copies of a model that grows on: whole, independent, and never averaged in part."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from simic import Action, GrowableModel

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def make_model() -> GrowableModel:
    torch.default_generator.manual_seed(0)
    host = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    return GrowableModel(host, ["0", "2"], example_input=X)


class Shared(nn.Module):
    """One block, registered and run twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)
        self.again = self.block

    def forward(self, x):
        return self.last(self.again(self.block(self.first(x))))


def move(model: nn.Module, by: float = 1.0) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by


def averaged_copy(model: GrowableModel) -> AveragedModel:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    return averaged


@pytest.mark.parametrize("grow_first", [False, True], ids=["grown", "pruned"])
def test_an_average_over_another_structure_is_refused_at_once(grow_first):
    model = make_model()
    if grow_first:
        model.execute(Action("germinate", "2", "mlp"))
        model.tick()
    averaged = averaged_copy(model)
    model.execute(Action("prune", "2") if grow_first else Action("germinate", "2", "mlp"))
    averaged.eval()(X)  # a copy from before is no fault
    with pytest.raises(RuntimeError, match=r"no longer match; call averaged.module.follow\(model\) before"):
        averaged.update_parameters(model)
    for use in (lambda: averaged(X), averaged.state_dict):
        with pytest.raises(RuntimeError, match="no longer match"):
            use()


def test_an_average_that_follows_holds_the_seeds_too():
    model = make_model()
    averaged = averaged_copy(model)
    followed = averaged.module
    assert isinstance(followed, GrowableModel)
    host = [value.clone() for value in followed.host.parameters()]
    model.execute(Action("germinate", "2", "mlp"))
    model.tick()
    followed.follow(model)
    at_birth = [value.clone() for value in model.seeds.parameters()]
    move(model)
    averaged.update_parameters(model)
    for value, before in zip(followed.host.parameters(), host, strict=True):
        torch.testing.assert_close(value, before + 0.5)
    for value, before in zip(followed.seeds.parameters(), at_birth, strict=True):
        torch.testing.assert_close(value, before + 0.5)
    move(model, -0.5)
    torch.testing.assert_close(averaged.eval()(X), model.eval()(X))
    model.execute(Action("prune", "2"))
    followed.follow(model)
    averaged.update_parameters(model)
    assert len(list(averaged.parameters())) == len(list(model.parameters()))


def test_an_average_over_another_structure_is_refused_in_training_mode_too():
    """Inside another module nothing stops the update itself; the copy's next pass does."""
    model = make_model()
    averaged = AveragedModel(nn.Sequential(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(nn.Sequential(model))
    model.execute(Action("germinate", "2", "mlp"))
    averaged.update_parameters(nn.Sequential(model))
    with pytest.raises(RuntimeError, match="no longer match"):
        averaged.train()(X)


def test_a_copy_follows_a_compiled_source():
    model = make_model()
    averaged = averaged_copy(model)
    model.execute(Action("germinate", "2", "mlp"))
    followed = averaged.module
    assert isinstance(followed, GrowableModel)
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    followed.follow(compiled)
    averaged.update_parameters(compiled)
    assert followed.grown_slots == ["2"]


def test_a_copy_follows_only_a_growable_model():
    with pytest.raises(TypeError, match="follows the GrowableModel that it was made of, got a Sequential"):
        make_model().follow(make_model().host)


def test_a_submodule_under_two_names_grows_saves_exports_and_is_averaged():
    model = GrowableModel(Shared(), ["block"], example_input=X)
    averaged = averaged_copy(model)
    model.plant("block", "mlp")
    move(model.seeds, 0.1)
    expected = model.eval()(X)
    again = GrowableModel(Shared(), ["block"], example_input=X).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(X), expected)
    torch.testing.assert_close(model.export()(X), expected)
    followed = averaged.module
    assert isinstance(followed, GrowableModel)
    followed.follow(model)
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged.eval()(X), expected)


def test_a_copy_follows_only_a_model_with_its_slots():
    other = GrowableModel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), ["0"], example_input=X)
    with pytest.raises(ValueError, match="a copy has the slots of its source"):
        make_model().follow(other)


def test_a_kept_copy_may_be_run_saved_and_trained_while_the_model_grows():
    model = make_model()
    best, branched = copy.deepcopy(model), copy.deepcopy(model)
    model.execute(Action("germinate", "2", "mlp"))
    best.eval()(X)
    best.state_dict()
    optimizer = torch.optim.SGD(branched.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        branched(X).sum().backward()
        optimizer.step()
    branched.eval()(X)
    best.load_state_dict(model.state_dict())
    assert torch.equal(best.eval()(X), model.eval()(X))
    best.execute(Action("germinate", "0", "norm"))
    assert model.seed("0") is None


def test_a_copied_model_can_be_pickled():
    model = make_model()
    model.plant("2", "mlp")
    file = io.BytesIO()
    torch.save(copy.deepcopy(model), file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again.eval()(X), model.eval()(X))

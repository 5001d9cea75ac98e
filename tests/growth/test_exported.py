"""What goes with an exported network: the config that builds it again, and its optimizer."""

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import simic
from simic import Action, GrowableModel, GrowthScheduler

X = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A Sequential, a plain layer, and a recurrent layer that returns a tuple and has its batch second."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.linear, self.rnn, self.head = nn.Linear(6, 6), nn.RNN(6, 6), nn.Linear(6, 2)
        self.alias = self.body

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.alias(x)).transpose(0, 1)
        return self.head(self.rnn(x)[0].mean(0))


def grown_model() -> GrowableModel:
    model = GrowableModel(Net(), ["body", "linear", "rnn"], example_input=X)
    model.plant("body", "widen")
    model.plant("linear", "low_rank", style="gated", alpha=0.7)
    model.plant("rnn", "mlp", style="linear-multiply")
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 9)
    return model


def test_a_config_builds_the_exported_network_again():
    model = grown_model()
    plain, config = model.export(config=True)
    rebuilt = simic.build_exported(Net(), json.loads(json.dumps(config)))
    assert not rebuilt.training
    rebuilt.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(rebuilt(X), plain(X))
    assert torch.allclose(rebuilt(X), model.eval()(X), atol=1e-6)
    assert not any(type(part).__module__.startswith("simic") for part in rebuilt.modules())
    assert isinstance(model.export(), nn.Module)


def test_a_config_knows_which_live_seeds_were_kept():
    model = GrowableModel(Net(), ["body", "linear"], example_input=X)
    model.plant("body", "mlp")
    model.execute(Action("germinate", "linear", "mlp"))
    model.tick()
    with pytest.warns(UserWarning, match="export leaves out seeds"):
        _, dropped = model.export(config=True)
    plain, kept = model.export(live="keep", config=True)
    assert [part["site"]["name"] for part in dropped["grown"]] == ["body"]
    assert [part["site"]["name"] for part in kept["grown"]] == ["body", "linear"]
    assert kept["grown"][1]["alpha"] == pytest.approx(1 / 3)
    simic.build_exported(Net(), kept).load_state_dict(plain.state_dict())


def changed(config, **values):
    return {**config, "grown": [{**part, **values} for part in config["grown"]]}


def test_configs_that_do_not_fit_are_refused():
    _, config = grown_model().export(config=True)
    host = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"config does not fit this host.*no attribute"):
        simic.build_exported(host, config)
    with pytest.raises(TypeError, match=r"got a str; if it is in a file, read that with json.load"):
        simic.build_exported(Net(), json.dumps(config))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="host must be the plain network, freshly built, got a GrowableModel"):
        simic.build_exported(grown_model(), config)
    for broken, message in (
        ({}, "'format'"),
        ({"format": "other", "version": 1, "grown": []}, "its format is 'other'"),
        ({**config, "version": 9}, "version 9"),
        (changed(config, blueprint="mpl"), "no choice 'mpl'; did you mean mlp"),
        (changed(config, blueprint="conv"), "'conv' does not fit slot 'body'"),
        (changed(config, operator="divide"), "'divide' at alpha 1.0 is no way to blend"),
        (changed(config, alpha=2), "at alpha 2 is no way"),
        (changed(config, site={"name": "body"}), "'shape'"),
    ):
        host = Net()
        with pytest.raises(ValueError, match=message):
            simic.build_exported(host, broken)
        assert host.state_dict().keys() == Net().state_dict().keys()


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    network.train()
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(network(X), Y).backward()
        optimizer.step()


def two_groups(model: nn.Module) -> list[dict]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("groups", [two_groups, lambda model: model.parameters()], ids=["two", "one"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_training_goes_on_with_the_optimizer_of_the_exported_network(groups, kind):
    model = grown_model()
    optimizer = kind(groups(model))
    GrowthScheduler(model, optimizer, "wait")  # it gives seeds groups of their own
    train(model, optimizer, 3)
    plain, follower = model.export(optimizer=optimizer)
    assert type(follower) is type(optimizer)
    assert len(follower.param_groups) == (2 if groups is two_groups else 1)
    assert not any(key.startswith("simic") for group in follower.param_groups for key in group)
    train(model, optimizer, 3)
    train(plain, follower, 3)
    assert torch.allclose(plain.eval()(X), model.eval()(X), atol=1e-6)


def test_its_state_dict_loads_into_a_new_optimizer():
    model = grown_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    GrowthScheduler(model, optimizer, "wait")
    train(model, optimizer, 3)
    plain, config, follower = model.export(config=True, optimizer=optimizer)
    rebuilt = simic.build_exported(Net(), config)
    rebuilt.load_state_dict(plain.state_dict())
    fresh = torch.optim.Adam(rebuilt.parameters(), lr=0.01)
    fresh.load_state_dict(follower.state_dict())
    train(model, optimizer, 3)
    train(rebuilt, fresh, 3)
    assert torch.allclose(rebuilt.eval()(X), model.eval()(X), atol=1e-6)


def test_seeds_left_out_are_forgotten_and_other_networks_stay():
    model, other = GrowableModel(Net(), ["body", "linear"], example_input=X), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*model.named_parameters(), *(("other." + n, p) for n, p in other.named_parameters())])
    scheduler = GrowthScheduler(model, optimizer, "wait")
    model.plant("body", "mlp")
    model.execute(Action("germinate", "linear", "mlp"))
    model.tick()
    scheduler.groups.sync()
    train(model, optimizer, 1)
    before = optimizer.state_dict()
    with pytest.warns(UserWarning, match="export leaves out seeds"):
        plain, follower = model.export(optimizer=optimizer)
    (group,) = follower.param_groups
    assert set(group["params"]) == {*plain.parameters(), *other.parameters()}
    assert group["param_names"][: len(list(plain.parameters()))] == [name for name, _ in plain.named_parameters()]
    assert set(follower.state) <= set(group["params"])
    assert len(follower.state) == len(list(plain.parameters()))
    assert str(optimizer.state_dict()) == str(before)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got a list"):
        grown_model().export(optimizer=[])  # pyright: ignore[reportCallIssue, reportArgumentType]

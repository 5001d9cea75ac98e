"""Saved models are built again from the host and the file alone."""

import json

import pytest
import torch
from torch import Tensor, nn

import simic
from simic import Action, GrowableModel, GrowthScheduler, LifecycleConfig
from simic.growth.settings import describe_example, make_example
from simic.growth.state_dict import GROWTH_KEY
from simic.storage.bundle import load_bundle, save_bundle

X = torch.randint(3, 9, (2, 5), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Tokens, a causal mixture over positions, and a convolution over (N, C, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.project = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.conv, self.head = nn.Conv1d(8, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.project(self.table(tokens)).cumsum(1)
        return self.head(self.conv(x.transpose(1, 2)).mean(2))


def grown_model(**settings) -> GrowableModel:
    lifecycle = LifecycleConfig(seeds_per_slot=2, incubation="shadow", embargo_decisions=5)
    example = {"tokens": X, "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    model = GrowableModel(
        Net(), {"project": "sequence-causal", "conv": "conv"}, example_input=example, lifecycle=lifecycle, **settings
    )
    model.plant("project", "attention")
    model.plant("conv", "widen", style="gated", alpha=0.5)
    model.execute(Action("germinate", "project#2", "mlp"))
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(0.1)
    return model


def assert_same(loaded: GrowableModel, model: GrowableModel) -> None:
    assert loaded.sites == model.sites
    assert loaded.lifecycle == model.lifecycle
    assert loaded.blueprint_names == model.blueprint_names
    assert loaded.budget == model.budget
    assert loaded.rng_seed == model.rng_seed
    assert str(loaded.growth()) == str(model.growth())  # as text, because contributions are NaN
    assert torch.equal(loaded(X), model(X))
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("way", ["save", "state dict"])
def test_a_model_is_rebuilt_from_host_and_file(way, tmp_path):
    menu = ["attention", "widen", "mlp", "norm"]
    model = grown_model(rng_seed=7, blueprints=menu, max_growth=9.0, max_flops=1e9)
    path = tmp_path / "model"
    if way == "save":
        simic.save(model, path)
    else:
        torch.save(model.state_dict(), path)
    loaded = simic.load(path, Net())
    assert_same(loaded, model)
    # It grows on alike, and can be exported: its example has the shapes and the range of the one it was built with.
    for each in (loaded, model):
        each.execute(Action("germinate", "conv#2", "norm"))
    assert_same(loaded, model)
    assert isinstance(loaded.example_input, dict)
    assert loaded.example_input["tokens"].min() >= 3
    with pytest.warns(UserWarning, match="mix positions"):
        exported = loaded.export()
    assert torch.allclose(exported(X), model.eval()(X), atol=1e-6)


def test_a_file_of_the_scheduler_is_rebuilt_too(tmp_path):
    model = grown_model()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = GrowthScheduler(model, optimizer, "wait")
    scheduler.save(tmp_path / "growth")
    assert_same(simic.load(tmp_path / "growth", Net()), model)


@pytest.mark.parametrize("way", ["save", "state dict"])
def test_a_model_that_never_grew_is_rebuilt(way, tmp_path):
    model = GrowableModel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), example_input=torch.randn(2, 3))
    if way == "save":
        simic.save(model, tmp_path / "model")
    else:
        torch.save(model.state_dict(), tmp_path / "model")
    loaded = simic.load(tmp_path / "model", nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    assert loaded.slot_names == ("0",)
    assert torch.equal(loaded(torch.ones(1, 3)), model(torch.ones(1, 3)))


def as_earlier_versions_wrote(model: GrowableModel, path) -> None:
    weights = dict(model.state_dict())
    record = json.loads(bytes(weights[GROWTH_KEY].numpy().tobytes()))
    del record["settings"]
    weights[GROWTH_KEY] = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    save_bundle(path, {"kind": "growth", "model": weights})


def test_files_of_earlier_versions_need_an_example(tmp_path):
    model = grown_model()
    as_earlier_versions_wrote(model, tmp_path / "old")
    with pytest.raises(ValueError, match=r"written by an earlier simic.*pass example_input="):
        simic.load(tmp_path / "old", Net())
    loaded = simic.load(tmp_path / "old", Net(), example_input=X)
    assert loaded.slot_names == model.slot_names
    assert torch.equal(loaded(X), model(X))


def test_hosts_and_files_that_do_not_fit_are_refused(tmp_path):
    simic.save(grown_model(), tmp_path / "model")
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match="the model has no submodule 'project'"):
        simic.load(tmp_path / "model", other)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    larger = Net()
    larger.head = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"head.bias has shape \(2,\), the model's is \(3,\)"):
        simic.load(tmp_path / "model", larger)
    assert not any(part._forward_hooks for part in larger.modules())
    with pytest.raises(ValueError, match="GrowableModel already"):
        simic.load(tmp_path / "model", grown_model())
    torch.save(Net().state_dict(), tmp_path / "plain")
    with pytest.raises(ValueError, match=r"no growth record.*host.load_state_dict"):
        simic.load(tmp_path / "plain", Net())
    torch.save(X, tmp_path / "tensor")
    with pytest.raises(ValueError, match="holds a Tensor, not the state dict"):
        simic.load(tmp_path / "tensor", Net())
    save_bundle(tmp_path / "other", {"kind": "agent"})
    with pytest.raises(ValueError, match="does not hold a growing model"):
        simic.load(tmp_path / "other", Net())
    with pytest.raises(FileNotFoundError):
        simic.load(tmp_path / "nothing", Net())
    with pytest.raises(TypeError, match="must be a GrowableModel, got a Net"):
        simic.save(Net(), tmp_path / "model")  # pyright: ignore[reportArgumentType]


def test_damaged_settings_are_refused(tmp_path):
    model = grown_model()
    simic.save(model, tmp_path / "model")
    tree = load_bundle(tmp_path / "model")
    record = json.loads(bytes(tree["model"][GROWTH_KEY].numpy().tobytes()))
    for change in (
        {"sites": [{"name": "project"}]},
        {"lifecycle": {"seeds_per_slot": 99}},
        {"example": {"example": {"tensor": [2**20, 2**20], "dtype": "float32", "range": [0, 0]}}},
        {"example": {"example": {"tensor": [2], "dtype": "load", "range": [0, 0]}}},
        {"rng_seed": None, "sites": None},
    ):
        text = json.dumps(record | {"settings": record["settings"] | change}).encode()
        tree["model"][GROWTH_KEY] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        save_bundle(tmp_path / "damaged", tree)
        with pytest.raises(ValueError, match="settings of the saved model cannot be read"):
            simic.load(tmp_path / "damaged", Net())


def test_examples_keep_their_structure():
    example = (torch.randn(2, 3, dtype=torch.float64), [X, None], {"flag": True, "keep": torch.tensor([True, False])})
    made = make_example(json.loads(json.dumps(describe_example(example))))
    assert made[0].shape == (2, 3)
    assert made[0].dtype == torch.float64
    assert made[1][0].dtype == X.dtype
    assert X.min() <= made[1][0].min() <= made[1][0].max() <= X.max()
    assert made[1][1] is None
    assert made[2]["flag"] is True
    assert made[2]["keep"].all()
    assert describe_example((X, object())) is None
    assert make_example(None) is None

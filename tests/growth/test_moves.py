"""A GrowableModel as any module: other dtypes, the meta device, shared submodules, `repr`."""

import copy

import pytest
import torch
from torch import Tensor, nn

import simic
from simic import Action, GrowableModel

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def make_host() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 6), nn.ReLU(), nn.Linear(6, 2)
    )


def grown_model() -> GrowableModel:
    model = GrowableModel(make_host(), ["0", "3"], example_input=X)
    model.plant("0", "conv")
    model.plant("3", "widen", style="gated", alpha=0.7)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(0.1)
    return model.eval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_seeds_follow_a_change_of_dtype(dtype, tmp_path):
    model = grown_model()
    expected, x = model(X), X.to(dtype)
    model = model.half() if dtype == torch.float16 else model.to(dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert torch.allclose(model(x).float(), expected, atol=0.1)
    assert torch.allclose(model.export()(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    simic.save(model, tmp_path / "model")
    loaded = simic.load(tmp_path / "model", make_host().to(dtype)).eval()
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded.export()(x), model(x))
    as_float = simic.load(tmp_path / "model", make_host()).eval()  # the host's dtype counts
    assert {p.dtype for p in as_float.parameters()} == {torch.float32}
    assert as_float.export()(X).dtype == torch.float32
    plain, config = model.export(config=True)
    rebuilt = simic.build_exported(make_host().to(dtype), config)
    rebuilt.load_state_dict(plain.state_dict())
    assert torch.equal(rebuilt(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_seeds_are_born_with_the_dtype_that_the_host_has_then(dtype):
    model = GrowableModel(make_host(), ["0", "3"], example_input=X, max_growth=9.0).to(dtype)
    for slot, blueprint in (("0", "widen"), ("3", "mlp")):
        model.execute(Action("germinate", slot, blueprint, style="gated"))
    for _ in range(4):
        model.tick()
    model(X.to(dtype)).sum().backward()
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


def on_meta() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return make_host(), torch.randn(X.shape)


@pytest.mark.parametrize("way", ["assign", "to_empty", "load"])
def test_a_model_built_on_the_meta_device_takes_the_weights_of_another(way, tmp_path):
    model = grown_model()
    host, x = on_meta()
    if way == "load":
        simic.save(model, tmp_path / "model")
        built = simic.load(tmp_path / "model", host)
    else:
        built = GrowableModel(host, ["0", "3"], example_input=x)
        assert built.sites == model.sites
        if way == "to_empty":
            built.plant("0", "conv")
            assert {p.device.type for p in built.parameters()} == {"meta"}
            built.to_empty(device="cpu")
        built.load_state_dict(model.state_dict(), assign=way == "assign")
    assert {p.device.type for p in built.parameters()} == {"cpu"}
    assert torch.equal(built.eval()(X), model(X))
    assert torch.equal(built.export()(X), model(X))


def test_growth_and_export_on_the_meta_device():
    host, x = on_meta()
    model = GrowableModel(host, "auto", example_input=x, max_growth=3.0)
    model.plant("0", "conv")
    model.plant("3", "mlp", style="gated")
    assert model(x).shape == (2, 2)
    assert {p.device.type for p in model.export().parameters()} == {"meta"}
    model = grown_model().to("meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with pytest.raises(ValueError, match=r"the host is on meta, so move the example there with .to"):
        GrowableModel(on_meta()[0], example_input=X)


class Shared(nn.Module):
    """One layer under two names and in two places, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.again, self.head = self.layer, nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.again(self.layer(self.table(tokens)).relu()))


def test_a_submodule_under_two_names_keeps_one_seed_in_all_forms(tmp_path):
    tokens = torch.arange(6).reshape(2, 3)
    model = GrowableModel(Shared(), ["again"], example_input=tokens)
    assert model.sites[0].runs == 2
    model.plant("again", "mlp")
    nn.init.normal_(next(p for p in list(model.seeds.parameters())[::-1] if p.dim() > 1))
    assert model.half().float().head.weight is model.table.weight
    expected = model(tokens)
    simic.save(model, tmp_path / "model")
    assert torch.equal(simic.load(tmp_path / "model", Shared())(tokens), expected)
    plain, config = model.export(config=True)
    assert torch.allclose(plain(tokens), expected, atol=1e-6)
    rebuilt = simic.build_exported(Shared(), config)
    rebuilt.load_state_dict(plain.state_dict())
    assert torch.equal(rebuilt(tokens), plain(tokens))


def test_an_example_that_cannot_be_saved_is_asked_for_at_export(tmp_path):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, _: object) -> Tensor:
            return self.head(self.body(x))

    x = (torch.ones(1, 3), object())
    model = GrowableModel(Odd(), ["body"], example_input=x)
    model.plant("body", "mlp")
    simic.save(model, tmp_path / "model")
    loaded = simic.load(tmp_path / "model", Odd())
    with pytest.raises(ValueError, match=r"set model.example_input = a batch"):
        loaded.export()
    loaded.example_input = x
    assert torch.equal(loaded.export()(*x), model.eval()(*x))
    assert torch.equal(simic.load(tmp_path / "model", Odd(), example_input=x).export()(*x), model(*x))


def test_repr_tells_slots_seeds_and_sizes():
    model = grown_model()
    lines = repr(model).splitlines()
    host = sum(p.numel() for p in model.host.parameters())
    grown = sum(p.numel() for p in model.seeds.parameters())
    assert lines[:4] == [
        "GrowableModel(",
        f"  2 slots with 2 seeds; parameters: host {host:,}, grown {grown:,}",
        "  0: conv, fossilized, alpha 1.00, 156",
        "  3: widen, fossilized, alpha 0.70, 2,429",
    ]
    assert "  (host): Sequential(" in lines
    assert "    2 slots with 2 seeds" in repr(nn.Sequential(model))
    many = GrowableModel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(16))), example_input=torch.ones(1, 2))
    assert "  empty: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more" in repr(many)


def test_trainable_parameters_are_told_as_peft_does(capsys):
    model = GrowableModel(nn.Sequential(nn.Linear(9, 99), nn.Linear(99, 1)), ["0"], example_input=torch.ones(1, 9))
    model.host.requires_grad_(False)
    model.plant("0", "norm")
    model.print_trainable_parameters()
    assert capsys.readouterr().out == "trainable params: 199 || all params: 1,289 || trainable%: 15.4383\n"

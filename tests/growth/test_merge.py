"""Linear seeds folded into weights: the exported network computes the same without the seed's layers."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import simic
from simic import GrowableModel, SlotShape
from simic.growth.blueprints import new_branch
from simic.growth.merge import affine_map
from simic.growth.peft_files import write_peft


class TwoLayers(nn.Module):
    """A linear layer with bias, one without, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


def grown(host: nn.Module, plants: list[tuple[str, str, float]], x: torch.Tensor, **settings) -> GrowableModel:
    """A model with awake fossils: (slot, blueprint, alpha) each."""
    slots = list(dict.fromkeys(slot.partition("#")[0] for slot, _, _ in plants))
    model = GrowableModel(host.double(), slots, example_input=x, freeze_host=True, **settings)
    for slot, blueprint, alpha in plants:
        model.plant(slot, blueprint, alpha=alpha)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    return model.eval()


def kinds(module: nn.Module) -> list[str]:
    return [type(part).__name__ for part in module.modules()]


def test_a_frozen_host_does_not_train_and_its_seeds_do():
    x = torch.randn(4, 5)
    host = TwoLayers()
    model = GrowableModel(host, ["first", "second"], example_input=x, freeze_host=True)
    assert model.blueprint_names == ("lora_2", "lora_8", "lora_32", "adapter")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.plant("first", "lora_2")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"seeds.first.branch.0.weight", "seeds.first.branch.1.weight"}
    model(x).sum().backward()
    assert all(parameter.grad is None for parameter in host.parameters())


def test_seeds_of_frozen_hosts_are_not_offered_to_hosts_that_train():
    names = GrowableModel(TwoLayers(), ["first"], example_input=torch.randn(4, 5)).blueprint_names
    assert "mlp" in names
    assert not {"lora_2", "lora_8", "lora_32", "adapter"} & set(names)


@pytest.mark.parametrize("alpha", [1.0, 0.7])
def test_lora_beside_linear_layers_becomes_their_weights(alpha):
    x, host = torch.randn(9, 5, dtype=torch.double), TwoLayers()
    model = grown(host, [("first", "lora_2", alpha), ("first#2", "lora_8", 1.0), ("second", "lora_8", alpha)], x)
    plain = model.export(merge=True)
    assert kinds(plain) == kinds(TwoLayers())
    assert "second.bias" not in plain.state_dict()  # LoRA has none either
    torch.testing.assert_close(plain(x), model(x), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(plain.get_parameter("first.weight"), host.first.weight)


def test_a_branch_that_is_not_linear_stays_a_layer_and_so_does_what_follows_it():
    x = torch.randn(9, 5, dtype=torch.double)
    model = grown(TwoLayers(), [("first", "adapter", 1.0), ("first#2", "lora_2", 1.0), ("second", "lora_2", 1.0)], x)
    plain = model.export(merge=True)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-9, atol=1e-9)
    names = [name for name, _ in plain.named_parameters()]
    assert any(name.startswith("first.grown.") for name in names)
    assert any(name.startswith("first.grown_.") for name in names)
    assert not any(name.startswith("second.grown") for name in names)


def test_a_bias_of_the_seed_gives_a_layer_without_one_a_bias():
    x = torch.randn(9, 5, dtype=torch.double)
    host = TwoLayers().double()
    model = GrowableModel(host, ["second"], example_input=x)
    model.plant("second", "low_rank", alpha=0.5)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(0.3)
    plain = model.eval().export(merge=True)
    assert "second.bias" in plain.state_dict()
    torch.testing.assert_close(plain(x), model(x), rtol=1e-9, atol=1e-9)


def test_a_linear_map_behind_a_convolution_becomes_its_kernel():
    x = torch.randn(3, 2, 6, 6, dtype=torch.double)
    host = nn.Sequential(nn.Conv2d(2, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).double()
    host(x)
    model = GrowableModel(host, ["0"], example_input=x)
    model.plant("0", "low_rank")
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(0.3)
    plain = model.eval().export(merge=True)
    assert "Conv2d" in kinds(plain)
    assert len(list(plain.parameters())) == len(list(host.parameters()))
    torch.testing.assert_close(plain(x), model(x), rtol=1e-9, atol=1e-9)


class Tied(nn.Module):
    """A decoder whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.body(self.embed(tokens))))


def test_a_weight_that_others_share_is_left_alone():
    tokens = torch.arange(12).view(2, 6) % 11
    model = grown(Tied(), [("out", "lora_2", 1.0), ("body", "lora_2", 1.0)], tokens)
    plain = model.export(merge=True)
    assert plain.get_parameter("out.weight") is plain.get_parameter("embed.weight")
    assert torch.equal(plain.get_parameter("embed.weight"), model.host.get_parameter("embed.weight"))
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-9, atol=1e-9)
    assert not any(name.startswith("body.grown") for name, _ in plain.named_parameters())


def test_a_gate_cannot_be_folded():
    x = torch.randn(9, 5, dtype=torch.double)
    model = GrowableModel(TwoLayers().double(), ["first"], example_input=x, freeze_host=True)
    model.plant("first", "lora_8", style="gated")
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(0.3)
    plain = model.eval().export(merge=True)
    assert any("grown" in name for name, _ in plain.named_parameters())
    torch.testing.assert_close(plain(x), model(x), rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5), bias=st.booleans(), rng_seed=st.integers(0, 99))
def test_the_affine_map_of_a_chain_of_linear_layers_is_what_it_computes(sizes, bias, rng_seed):
    torch.manual_seed(rng_seed)
    layers = [nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes)]
    chain = nn.Sequential(*layers, nn.Dropout(0.5), nn.Identity()).double().eval()
    found = affine_map(chain)
    assert found is not None
    x = torch.randn(3, sizes[0], dtype=torch.double)
    torch.testing.assert_close(x @ found.matrix.T + found.bias, chain(x))


@pytest.mark.parametrize("name", ["mlp", "norm", "glu"])
def test_branches_that_are_not_linear_have_no_affine_map(name):
    assert affine_map(new_branch(name, SlotShape("features", 4), [0])) is None


@pytest.mark.parametrize(
    ("plants", "message"),
    [
        ([], "no seed to write"),
        ([("first", "adapter", 1.0)], "'first' .adapter, operator add. is no LoRA"),
    ],
)
def test_what_is_no_lora_is_not_written_for_peft(plants, message, tmp_path):
    x = torch.randn(4, 5, dtype=torch.double)
    model = grown(TwoLayers(), plants, x) if plants else GrowableModel(TwoLayers(), ["first"], example_input=x.float())
    with pytest.raises(ValueError, match=message):
        write_peft(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_loaded_frozen_model_trains_what_was_trained(tmp_path):
    x = torch.randn(4, 5)
    model = GrowableModel(TwoLayers(), ["first"], example_input=x, freeze_host=True)
    model.host.head.requires_grad_(True)
    model.plant("first", "lora_2")
    simic.save(model, tmp_path / "model.safetensors")
    again = simic.load(tmp_path / "model.safetensors", TwoLayers())
    assert again.freeze_host
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in model.named_parameters() if p.requires_grad
    ]

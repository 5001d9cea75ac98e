"""Chains of convolutions, norms and activations of N networks say what each network says, gradients included."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from simic.growth.blueprints import Scale
from simic.stacked import conv_chain
from simic.stacked.conv_chain import is_chain, run_chain
from simic.stacked.parameters import part_of

CHAINS = {
    "host segment": lambda conv: [conv(2, 3, 3, 2, 1, bias=False), nn.GroupNorm(1, 3), nn.ReLU()],
    "bottleneck": lambda conv: [conv(2, 3, 1), nn.GroupNorm(1, 3), nn.GELU(), conv(3, 3, 5, padding=2), nn.ReLU()],
    "norm first": lambda conv: [nn.GroupNorm(1, 2), nn.ReLU(), conv(2, 3, 3, padding=1), nn.Tanh()],
    "norm behind tanh": lambda conv: [conv(2, 3, 3, padding=1), nn.Tanh(), nn.GroupNorm(1, 3)],
    "norm only": lambda conv: [nn.GroupNorm(1, 2), Scale()],
    "no affine": lambda conv: [conv(2, 3, 3, padding=1), nn.GroupNorm(1, 3, affine=False)],
}


@pytest.mark.parametrize("part_bytes", [1, 1 << 11, 1 << 22])  # one sample, some samples and networks, all at once
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_equal_those_of_each_network(name, dims, part_bytes, monkeypatch):
    monkeypatch.setattr(conv_chain, "PART_BYTES", part_bytes)
    torch.manual_seed(0)
    module = nn.Sequential(*CHAINS[name](nn.Conv1d if dims == 1 else nn.Conv2d)).double()
    x = torch.randn(3, 4, 2, *(7, 6)[:dims], dtype=torch.double, requires_grad=True)
    assert is_chain(module, x)
    parameters = {
        key: torch.randn(3, *value.shape, dtype=torch.double, requires_grad=True)
        for key, value in module.named_parameters()
    }
    found = run_chain([(layer, part_of(parameters, key)) for key, layer in module.named_children()], x)
    rows = [{key: value[n] for key, value in parameters.items()} for n in range(3)]
    expected = torch.stack([functional_call(module, own, (a,)) for own, a in zip(rows, x, strict=True)])
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (x, *parameters.values())),
        torch.autograd.grad((expected * weights).sum(), (x, *parameters.values())),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.GroupNorm(1, 2), nn.ReLU()],  # no convolution
        [nn.Conv2d(2, 2, 3)],  # not padded to the same size
        [nn.Conv2d(2, 2, 3, padding=1, groups=2)],
        [nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(2, 2)],
        [nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")],
        [nn.Conv2d(2, 2, 3, padding=1), nn.Dropout()],
    ],
)
def test_other_layers_are_no_chain(layers):
    assert not is_chain(layers, torch.zeros(3, 4, 2, 5, 5))


def test_a_chain_runs_on_the_meta_device():
    module = nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1), nn.GroupNorm(1, 3), nn.ReLU()).to("meta")
    x = torch.zeros(3, 4, 2, 5, 5, device="meta", requires_grad=True)
    parameters = {key: value.expand(3, *value.shape) for key, value in module.named_parameters()}
    out = run_chain([(layer, part_of(parameters, key)) for key, layer in module.named_children()], x)
    assert out.shape == (3, 4, 3, 3, 3)
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_chain_under_autocast_takes_what_an_earlier_layer_puts_out(low):
    module = nn.Sequential(nn.ReLU(), nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3))
    parameters = {key: value.detach().expand(3, *value.shape).clone() for key, value in module.named_parameters()}
    x = torch.randn(3, 4, 2, 5, 5).to(low).requires_grad_()
    with torch.autocast("cpu", low):
        out = run_chain([(layer, part_of(parameters, key)) for key, layer in module.named_children()], x)
    torch.testing.assert_close(out, torch.stack([module(own.float()) for own in x]), rtol=0.02, atol=0.02)
    assert torch.autograd.grad(out.square().sum(), x)[0].dtype == low

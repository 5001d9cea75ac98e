"""Every way to run the convolutions of N networks gives what torch gives for each, gradients included."""

import pytest
import torch
from torch import nn

from simic.stacked import chain_steps, convolution
from simic.stacked.conv_chain import run_chain


def _in_a_chain(module, weight, x):
    return run_chain([(module, {"weight": weight})], x)


METHODS = {
    "one by one": convolution._one_by_one,
    "grouped": convolution._grouped,
    "unfolded": _in_a_chain,
    "bands": _in_a_chain,
    "chosen": convolution.convolve,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("dims", [1, 2])
def test_convolutions_equal_those_of_each_network(method, stride, kernel, dims, monkeypatch):
    monkeypatch.setattr(convolution, "COLUMNS_AT_ONCE", 1 << 13)  # so that the networks are unfolded in several parts
    monkeypatch.setattr(chain_steps, "prefers_bands", lambda x, weight: method == "bands")
    torch.manual_seed(0)
    kind = nn.Conv1d if dims == 1 else nn.Conv2d
    module = kind(2, 3, kernel, stride, kernel // 2, bias=False).double()
    x = torch.randn(9, 4, 2, *(7, 6)[:dims], dtype=torch.double, requires_grad=True)
    weight = torch.randn(9, *module.weight.shape, dtype=torch.double, requires_grad=True)
    call = torch.nn.functional.conv1d if dims == 1 else torch.nn.functional.conv2d
    expected = torch.stack([call(a, w, None, stride, kernel // 2) for a, w in zip(x, weight, strict=True)])
    found = METHODS[method](module, weight, x)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (x, weight)),
        torch.autograd.grad((expected * weights).sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)

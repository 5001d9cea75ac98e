"""Layers on features against torch's own, host by host; results lie samples last in memory."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional as F

from simic.stacked import feature_layers

N, B, IN, OUT = 3, 7, 5, 4


def draw(*shape):
    return torch.randn(*shape, dtype=torch.double).requires_grad_()


def samples_last(x):
    return x.transpose(1, 2).is_contiguous()


def check(found, expected, tensors):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(expected)
    gradients = (torch.autograd.grad((out * weights).sum(), tensors) for out in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lies", ["samples last", "features last"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(has_bias, lies):
    torch.manual_seed(0)
    x = draw(N, B, IN) if lies == "features last" else draw(N, IN, B).transpose(1, 2)
    tensors = [x, draw(N, OUT, IN), *([draw(N, OUT)] if has_bias else [])]
    found = feature_layers.linear(*tensors, *([] if has_bias else [None]))
    assert found.shape == (N, B, OUT)
    assert samples_last(found)
    check(found, torch.stack([F.linear(*own) for own in zip(*tensors, strict=True)]), tensors)


@pytest.mark.parametrize("lies", ["samples last", "features last"])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm(eps, lies):
    torch.manual_seed(0)
    x = draw(N, B, IN) if lies == "features last" else draw(N, IN, B).transpose(1, 2)
    found = feature_layers.layer_norm(x, eps)
    if lies == "samples last":
        assert samples_last(found)
    check(found, F.layer_norm(x, (IN,), eps=eps), [x])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layer_norm_of_low_precision_is_computed_in_float32(dtype):
    x = (1000 * torch.randn(N, B, IN)).to(dtype)  # squares beyond float16
    found = feature_layers.layer_norm(x, 1e-5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.layer_norm(x.float(), (IN,)))


def test_layer_norm_of_equal_features_is_zero():
    assert not feature_layers.layer_norm(torch.full((2, 3, 4), 7.0), 1e-5).any()


def test_the_gradient_of_layer_norm_is_that_of_small_differences():
    torch.manual_seed(0)
    assert gradcheck(lambda x: feature_layers.layer_norm(x, 1e-5), [draw(2, 3, 4)])

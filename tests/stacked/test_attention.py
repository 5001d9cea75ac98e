"""Attention of many small heads is torch's attention, gradients included."""

import pytest
import torch
from torch.nn import functional as F

from simic.stacked import attention
from simic.stacked.attention import attend


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [3, attention.SMALL_HEAD + 1])
def test_attention_equals_that_of_torch(size, causal, monkeypatch):
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 100)  # four heads at a time, then one
    torch.manual_seed(0)
    qkv = torch.randn(3, 9, size, 5, dtype=torch.double, requires_grad=True)
    found = attend(qkv, causal=causal)
    q, k, v = qkv.transpose(2, 3)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    one, other = (torch.autograd.grad((out * weights).sum(), qkv)[0] for out in (found, expected))
    torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(attend(qkv, causal=causal), expected)


def test_attention_runs_on_the_meta_device():
    qkv = torch.zeros(3, 9, 4, 5, device="meta", requires_grad=True)
    assert torch.autograd.grad(attend(qkv, causal=True).sum(), qkv)[0].shape == qkv.shape

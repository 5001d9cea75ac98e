"""Layer norm of short rows gives what torch gives, gradients included."""

import pytest
import torch
from torch.nn import functional as F

from simic.stacked.row_norm import SHORT_ROW, normalize_rows


@pytest.mark.parametrize("features", [1, 3, SHORT_ROW, SHORT_ROW + 1])
def test_rows_are_normalized_as_by_torch(features):
    torch.manual_seed(0)
    x = (2 + torch.randn(2, 3, 4, features, dtype=torch.double)).transpose(1, 2).requires_grad_()
    found, expected = normalize_rows(x, 1e-5), F.layer_norm(x, (features,), eps=1e-5)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    one, other = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (found, expected))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_rows_are_normalized_in_float32_under_autocast(low):
    x = (500 * torch.randn(2, 3, 8)).to(low)  # the square of 500 overflows in float16
    with torch.autocast("cpu", low):
        found = normalize_rows(x, 1e-5)
    torch.testing.assert_close(found, F.layer_norm(x.float(), (8,), eps=1e-5))

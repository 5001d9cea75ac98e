"""What compiled functions are made of: numbers against torch."""

import numba
import numpy as np
import pytest
import torch

from simic.stacked.compiled.elementwise import activate
from simic.stacked.compiled.instructions import GELU, RELU, SIGMOID, TANH

FUNCTIONS = {
    GELU: torch.nn.functional.gelu,
    RELU: torch.relu,
    SIGMOID: torch.sigmoid,
    TANH: torch.tanh,
}


@numba.njit
def run(op, x, y, slope):
    activate(op, x, y, slope)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_activations_and_their_slopes_are_those_of_torch(op, dtype):
    x = np.concatenate([np.linspace(-12, 12, 4801), [-200.0, -90.0, -1e-6, 1e-6, 90.0, 200.0]]).astype(dtype)
    y, slope = np.empty_like(x), np.empty_like(x)
    run(op, x, y, slope)
    exact = torch.from_numpy(x).double().requires_grad_()
    expected = FUNCTIONS[op](exact)
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    error = 3e-7 if dtype == np.float32 else 1e-14
    np.testing.assert_allclose(y, expected.detach().numpy(), atol=error, rtol=error)
    np.testing.assert_allclose(slope, expected_slope.numpy(), atol=error, rtol=error)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_nan_stays_nan_and_zero_gives_what_torch_gives(op):
    x = np.array([np.nan, 0.0], dtype=np.float32)
    y, slope = np.empty_like(x), np.empty_like(x)
    run(op, x, y, slope)
    assert np.isnan(y[0])
    assert y[1] == FUNCTIONS[op](torch.zeros(())).item()

"""Blending all seeds at once against growth.blend's operators one by one, values and gradients."""

import pytest
import torch
from torch.autograd import gradcheck

from simic.growth.blend import OPERATORS
from simic.stacked.blend import Blending, blend

ROWS = {"add": (4, 1), "multiply": (0, 3, 6), "gate": (5, 2)}
"""Operator -> rows of the activation, of seven; the seeds are numbered in this order."""
ALPHA = (0.3, 1.0, 0.7, 0.1, 1.0, 0.5, 0.9)
SHAPES = {"features": ((5, 3), (1, 3)), "images": ((3, 4, 5, 2), (3, 1, 1, 1)), "sequences": ((3, 4, 5), (3, 4, 1))}
"""Shape of an activation and of a gate without the first dimension; features are (C, B)."""


def example(shape, gate_shape, operators, dtype=torch.double):
    """h, y, gate and how they are blended; only seeds of these operators are there."""
    torch.manual_seed(0)
    rows = {operator: ROWS[operator] if operator in operators else () for operator in OPERATORS}
    at = [row for own in rows.values() for row in own]
    first, second = len(rows["add"]), len(rows["add"]) + len(rows["multiply"])
    blending = Blending(
        at=torch.tensor(at),
        alpha=torch.tensor(ALPHA[: len(at)], dtype=dtype).view(-1, *[1] * len(shape)),
        multiply=slice(first, second),
        gate=slice(second, len(at)),
    )
    h, y = torch.randn(7, *shape, dtype=dtype), torch.randn(len(at), *shape, dtype=dtype)
    gate = torch.rand(len(rows["gate"]), *gate_shape, dtype=dtype) if rows["gate"] else None
    tensors = [tensor.requires_grad_() for tensor in (h, y, gate) if tensor is not None]
    return tensors, blending, rows


def one_by_one(tensors, blending, rows):
    h, y, *gate = tensors
    out = list(h)
    number = 0
    for operator, own in rows.items():
        for index, row in enumerate(own):
            opened = gate[0][index] if operator == "gate" else None
            alpha = float(blending.alpha.flatten()[number])
            out[row] = OPERATORS[operator](h[row], y[number], alpha, opened)
            number += 1
    return torch.stack(out)


def blended(tensors, blending):
    h, y, *gate = tensors
    return blend(h, y, gate[0] if gate else None, blending)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("operators", [("add",), ("multiply",), ("gate",), ("add", "gate"), tuple(ROWS)])
def test_all_operators_equal_those_of_one_seed(kind, operators):
    shape, gate_shape = SHAPES[kind]
    tensors, blending, rows = example(shape, gate_shape, operators)
    found, expected = blended(tensors, blending), one_by_one(tensors, blending, rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((out * weights).sum(), tensors) for out in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_small_differences():
    tensors, blending, _ = example((2, 2), (1, 2), tuple(ROWS))
    assert gradcheck(lambda h, y, gate: blend(h, y, gate, blending), tensors)


def test_inputs_are_not_changed():
    tensors, blending, _ = example((2, 3), (1, 3), tuple(ROWS))
    before = [tensor.detach().clone() for tensor in tensors]
    blended(tensors, blending).sum().backward()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)


def test_seeds_of_lower_precision_leave_the_activation_in_its_own():
    tensors, blending, rows = example((5, 3), (1, 3), tuple(ROWS), torch.float32)
    expected = one_by_one(tensors, blending, rows)
    h, y, gate = tensors
    y, gate = (tensor.detach().bfloat16().requires_grad_() for tensor in (y, gate))
    found = blended([h, y, gate], blending)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad(found.sum(), [h, y, gate])
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16, torch.bfloat16]

"""Blend operators by hand: h + a(s - h), h(1 + a tanh(s - x)), a gate times a."""

import math

import pytest
import torch

from simic.growth.blend import OPERATORS, straight_through

H, BRANCH = torch.tensor([[2.0, -1.0]]), torch.tensor([[0.5, 3.0]])
GATE = torch.tensor([[0.25]])


@pytest.mark.parametrize(
    ("operator", "alpha", "expected"),
    [
        ("add", 0.5, [2.25, 0.5]),
        ("multiply", 0.5, [2 * (1 + 0.5 * math.tanh(0.5)), -1 * (1 + 0.5 * math.tanh(3.0))]),
        ("gate", 0.5, [2 + 0.125 * 0.5, -1 + 0.125 * 3.0]),
        *((operator, 0.0, [2.0, -1.0]) for operator in ("add", "multiply", "gate")),
    ],
)
def test_operators_by_hand(operator, alpha, expected):
    gate = GATE if operator == "gate" else None
    assert OPERATORS[operator](H, BRANCH, alpha, gate).tolist()[0] == pytest.approx(expected)


def test_a_branch_of_zeros_changes_nothing_bit_for_bit():
    for name, operator in OPERATORS.items():
        assert torch.equal(operator(H, torch.zeros_like(H), 0.7, GATE if name == "gate" else None), H)


def test_straight_through_leaves_the_value_and_passes_the_gradient():
    branch = BRANCH.clone().requires_grad_()
    out = straight_through(H, branch)
    assert torch.equal(out, H)
    out.sum().backward()
    assert branch.grad is not None
    assert branch.grad.tolist() == [[1.0, 1.0]]

"""Rows and leaves are two views of the same numbers; tied parameters, selection and joining."""

import pytest
import torch
from torch import nn

from simic.stacked.parameters import StackedParameters, part_of, row_of, take_rows


def layers(count: int) -> list[nn.Linear]:
    return [nn.Linear(2, 3) for _ in range(count)]


def stacked(modules) -> StackedParameters:
    return StackedParameters.of_modules(modules, next(modules[0].parameters()).detach())


def test_the_drawn_example():
    modules = layers(3)
    matrix = stacked(modules)
    assert matrix.rows.shape == (3, 9)
    assert {name: tuple(leaf.shape) for name, leaf in matrix.leaves.items()} == {"weight": (3, 3, 2), "bias": (3, 3)}
    for row, module in enumerate(modules):
        assert torch.equal(matrix.rows[row], row_of(module, matrix.rows))
        assert torch.equal(matrix.leaves["weight"][row], module.weight)
    matrix.rows[1, 6:] = 7.0
    assert matrix.leaves["bias"][1].tolist() == [7.0] * 3


def test_tied_parameters_are_one_leaf_under_two_names():
    def tied():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[1].weight = net[0].weight
        return net

    matrix = stacked([tied(), tied()])
    assert list(matrix.leaves) == ["0.weight", "0.bias", "1.bias"]
    assert matrix.by_name["1.weight"] is matrix.by_name["0.weight"]
    assert matrix.rows.shape == (2, 8)


def test_rows_keep_their_optimizer_state_when_selected_and_joined():
    one, other = stacked(layers(3)), stacked(layers(2))
    one.optimizer_state.mean[:] = torch.arange(3.0)[:, None]
    one.optimizer_state.steps[:] = torch.arange(3.0)
    joined = one.select(torch.tensor([2, 0])).append(other.rows)
    assert torch.equal(joined.rows, torch.cat([one.rows[[2, 0]], other.rows]))
    assert joined.optimizer_state.steps.tolist() == [2, 0, 0, 0]
    assert joined.optimizer_state.mean[:, 0].tolist() == [2, 0, 0, 0]
    joined.rows.zero_()
    assert one.rows.any(), "a copy"


def test_gradients_of_leaves_become_rows():
    matrix = stacked(layers(2))
    found = matrix.flatten_gradients([torch.arange(12.0).view(2, 3, 2), None])
    assert found.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 11, 0, 0, 0]]


@pytest.mark.parametrize("rows", [None, slice(1, 3), torch.tensor([2, 0])], ids=["all", "range", "indices"])
@pytest.mark.parametrize("constant", [True, False])
def test_some_rows_of_every_parameter(rows, constant):
    matrix = stacked(layers(3))
    taken = take_rows(matrix.by_name, rows, constant=constant)
    for name, leaf in matrix.leaves.items():
        assert torch.equal(taken[name], leaf if rows is None else leaf[rows])
        assert taken[name].requires_grad != constant


def test_parameters_of_a_child():
    x, y = torch.zeros(1), torch.ones(1)
    assert part_of({"a.weight": x, "ab.weight": y, "a.b.bias": y}, "a") == {"weight": x, "b.bias": y}

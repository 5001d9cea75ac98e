"""Seed groups against seeds blended one by one: the drawn example of the module, gradients included."""

import numpy as np
import pytest
import torch
from torch import nn

from simic.growth.blend import OPERATORS, straight_through
from simic.stacked.parameters import StackedParameters
from simic.stacked.seed_groups import SeedGroup, blend_seeds, plan_slot

ALPHA = np.array([0.3, 0.0, 1.0, 0.7, 0.0, 0.5])
NEVER = np.zeros(6, dtype=bool)


def group(hosts: list[int], operator: str = "add") -> tuple[SeedGroup, list[nn.Linear]]:
    torch.manual_seed(sum(hosts))
    seeds = [nn.Linear(3, 3).double() for _ in hosts]
    matrix = StackedParameters.of_modules(seeds, seeds[0].weight)
    return SeedGroup(0, operator, {"branch": seeds[0]}, np.array(hosts), {"branch": matrix}), seeds


def test_the_drawn_example():
    plan = plan_slot([group([0, 3])[0], group([2, 5])[0]], np.arange(6), ALPHA, NEVER, learns=True)
    assert plan.sorted_rows.tolist() == [1, 4, 0, 3, 2, 5]
    assert plan.restore.tolist() == [2, 0, 4, 3, 1, 5]
    assert plan.sizes == [2, 2, 2]
    assert not plan.already_sorted


@pytest.mark.parametrize("hosts", [[0, 1, 2, 3, 4, 5], [5, 0, 3], [1, 4]])
def test_groups_blend_as_seeds_one_by_one(hosts):
    groups = [group([0, 3]), group([5, 2], "multiply")]
    plan = plan_slot([own for own, _ in groups], np.array(hosts), ALPHA, NEVER, learns=True)
    h = torch.randn(len(hosts), 4, 3, dtype=torch.double, requires_grad=True)
    blended = blend_seeds(h, plan)
    expected = []
    for row, host in enumerate(hosts):
        own = h[row]
        for seed_group, seeds in groups:
            for seed in [seed for seed, owner in zip(seeds, seed_group.hosts, strict=True) if owner == host]:
                own = OPERATORS[seed_group.operator](own, seed(own), float(ALPHA[host]), None)
        expected.append(own)
    torch.testing.assert_close(blended, torch.stack(expected))
    weights = torch.randn_like(blended)
    one, other = (torch.autograd.grad((out * weights).sum(), h)[0] for out in (blended, torch.stack(expected)))
    torch.testing.assert_close(one, other)


def test_one_group_over_all_rows_is_not_rearranged():
    assert plan_slot([group([0, 1, 2])[0]], np.arange(3), np.ones(3), NEVER[:3], learns=True).already_sorted
    assert not plan_slot([group([0, 2, 1])[0]], np.arange(3), np.ones(3), NEVER[:3], learns=True).already_sorted


def test_seeds_that_do_not_learn_are_constant():
    own, _ = group([0, 1])
    h = torch.randn(2, 4, 3, dtype=torch.double)
    for learns in (True, False):
        plan = plan_slot([own], np.arange(2), np.ones(2), NEVER[:2], learns=learns)
        assert blend_seeds(h, plan).requires_grad == learns


def test_straight_through_seeds_learn_without_an_effect():
    own, seeds = group([1])
    h = torch.randn(2, 4, 3, dtype=torch.double, requires_grad=True)
    out = blend_seeds(h, plan_slot([own], np.arange(2), np.zeros(2), np.array([False, True]), learns=True))
    torch.testing.assert_close(out, h)
    expected = straight_through(h[1], seeds[0](h[1].detach()))
    found = torch.autograd.grad(out.square().sum(), own.matrices["branch"].leaves["weight"])[0][0]
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), seeds[0].weight)[0])

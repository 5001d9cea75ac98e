"""Seed groups against seeds blended one by one: the drawn example of the module, gradients included."""

import numpy as np
import pytest
import torch
from helpers.slot_example import Planted, SlotExample, gradients_of

from simic.growth.blend import straight_through
from simic.growth.blueprints import new_branch
from simic.growth.slot_shape import SlotShape
from simic.stacked.seed_groups import blend_seeds

ALPHA = (0.3, 0.0, 1.0, 0.7, 0.0, 0.5)
SEEDS = {0: ("mlp", "gate"), 2: ("norm", "add"), 3: ("glu", "add"), 5: ("mlp", "multiply")}
"""The drawn example: host -> blueprint and operator."""


def example(seeds=SEEDS, alpha=ALPHA, *, join=True):
    shape = SlotShape("features", 3)
    planted = {host: Planted(name, new_branch(name, shape, (host,)), how) for host, (name, how) in seeds.items()}
    return SlotExample(3, planted, alpha, join=join)


def test_the_drawn_example():
    plan = example().plan(range(6))
    assert plan.blending is not None
    assert plan.blending.at.tolist() == [3, 2, 5, 0]
    assert plan.blending.alpha.flatten().tolist() == [0.7, 1.0, 0.5, 0.3]
    assert (plan.blending.multiply, plan.blending.gate) == (slice(2, 3), slice(3, 4))
    (norm,) = plan.batches
    assert norm.number.tolist() == [1]
    (blocks,) = plan.blocks
    assert set(blocks.owner.tolist()) == {0, 2, 3}
    assert plan.gates is not None
    assert plan.gates.at.tolist() == [0]


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("hosts", [[0, 1, 2, 3, 4, 5], [5, 0, 3], [2], [1, 4]])
def test_groups_blend_as_seeds_one_by_one(hosts, join):
    slot = example(join=join)
    h = torch.randn(len(hosts), 4, 3, dtype=torch.double, requires_grad=True)
    blended, expected = blend_seeds(h, h, slot.plan(hosts)), slot.one_by_one(h, hosts)
    torch.testing.assert_close(blended, expected)
    weights = torch.randn_like(blended)
    one, other = (blended * weights).sum(), (expected * weights).sum()
    torch.testing.assert_close(gradients_of(one, [h]), gradients_of(other, [h]))
    torch.testing.assert_close(slot.gradients(one), slot.gradients_one_by_one(other))


def test_all_seeds_of_a_group_run_without_selecting_rows():
    slot = example(dict.fromkeys(range(3), ("norm", "add")), [1.0] * 3)
    (every,), (some,) = (slot.plan(hosts).batches for hosts in (range(3), [0, 2]))
    assert every.rows is None
    assert some.rows is not None
    assert some.rows.tolist() == [0, 2]


@pytest.mark.parametrize("join", [True, False])
def test_seeds_that_do_not_learn_are_constant(join):
    slot = example(join=join)
    h = torch.randn(6, 4, 3, dtype=torch.double)
    for learns in (True, False):
        assert blend_seeds(h, h, slot.plan(range(6), learns=learns)).requires_grad == learns


def test_straight_through_seeds_learn_without_an_effect():
    slot = example({1: ("mlp", "add")}, [0.0, 0.0], join=False)
    h = torch.randn(2, 4, 3, dtype=torch.double, requires_grad=True)
    out = blend_seeds(h, h, slot.plan([0, 1], straight=np.array([False, True])))
    torch.testing.assert_close(out, h)
    expected = straight_through(h[1], slot.branches[1](h[1].detach()))
    found, wanted = slot.gradients(out.square().sum()), slot.gradients_one_by_one(expected.square().sum())
    torch.testing.assert_close(found, wanted)
    assert wanted[1].any()

"""The scales of rewards and values, against numpy and against what must not change."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from simic.policy.network import make_critic
from simic.ppo.scales import ReturnScale, ValueScale


@given(seed=st.integers(0, 10**6), parts=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_the_return_scale_is_the_deviation_of_discounted_returns(seed, parts):
    """Rollouts one after the other; returns go on across them, start anew with episodes, and skip invalid steps."""
    rng, gamma = np.random.default_rng(seed), 0.8
    reward, first = rng.normal(5, 2, (sum(parts), 3)), rng.random((sum(parts), 3)) < 0.2
    first[0], valid = True, rng.random((sum(parts), 3)) < 0.8
    scale, start = ReturnScale(gamma), 0
    for size in parts:
        part = slice(start, start + size)
        scale.update(*(torch.from_numpy(array[part]) for array in (reward, first, valid)))
        start += size
    returns, seen = np.zeros(3), []
    for step in range(sum(parts)):
        returns = np.where(first[step], 0.0, gamma * returns) + reward[step] * valid[step]
        seen.extend(returns[valid[step]])
    if seen:
        assert scale.scale.item() == pytest.approx(np.sqrt(np.var(seen) + 1e-8), rel=1e-5)


def test_returns_of_episodes_that_begin_forget_the_old_ones():
    """Two episodes of one step each: returns 1 and 3, deviation 1."""
    scale = ReturnScale(0.9)
    scale.update(torch.tensor([[1.0], [3.0]]), torch.tensor([[True], [True]]), torch.ones(2, 1, dtype=torch.bool))
    assert scale.scale.item() == pytest.approx(1.0)


def test_rewards_are_never_centred():
    """A large mean stays: dividing by the scale keeps every sign and every ratio."""
    scale, ones = ReturnScale(0.0), torch.ones(50, 2, dtype=torch.bool)
    reward = torch.linspace(100, 102, 100).reshape(50, 2)
    scale.update(reward, ones, ones)
    scaled = reward / scale.scale
    assert (scaled > 100).all()
    assert torch.allclose(scaled / scaled[0, 0], reward / 100)


def test_a_scale_that_saw_nothing_is_1():
    assert ReturnScale(0.9).scale.item() == 1.0


def test_another_number_of_environments_starts_new_returns():
    scale = ReturnScale(1.0)
    scale.update(torch.full((1, 2), 9.0), torch.tensor([[True, True]]), torch.ones(1, 2, dtype=torch.bool))
    scale.update(torch.full((1, 3), 9.0), torch.tensor([[False] * 3]), torch.ones(1, 3, dtype=torch.bool))
    assert scale.moments.mean.item() == pytest.approx(9.0)


EVERY = torch.ones(2, dtype=torch.bool)


@given(seed=st.integers(0, 10**6), mean=st.sampled_from([0.0, -3.0, 50.0]), deviation=st.sampled_from([0.1, 1.0, 20.0]))
@settings(max_examples=25, deadline=None)
def test_a_new_scale_preserves_every_value(seed, mean, deviation):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head, scale, inputs = make_critic(6), ValueScale(), torch.randn(20, 6, generator=generator)
    for _ in range(3):
        before = scale.denormalize(head(inputs))
        returns = mean + deviation * torch.randn(30, generator=generator)
        scale.pop_art_update(returns, torch.ones(30, dtype=torch.bool), head)
        largest = before.abs().max().item() + abs(mean) + deviation
        assert torch.allclose(scale.denormalize(head(inputs)), before, atol=1e-5 * max(1.0, largest))
    mean_std = scale.mean_std()
    assert mean_std[0].item() == pytest.approx(mean, abs=deviation)
    assert mean_std[1].item() == pytest.approx(deviation, rel=0.5)


def test_the_first_returns_set_the_units_and_later_ones_move_them():
    scale, head = ValueScale(), nn.Sequential(nn.Linear(1, 1))
    scale.pop_art_update(torch.tensor([1.0, 3.0]), EVERY, head)
    assert [unit.item() for unit in scale.mean_std()] == pytest.approx([2.0, 1.0])
    scale.pop_art_update(torch.tensor([7.0, 7.0]), EVERY, head)
    assert scale.mean_std()[0].item() == pytest.approx(0.9 * 2 + 0.1 * 7)
    assert scale.mean_std()[1].item() == pytest.approx((0.9 * 1 + 0.09 * 25) ** 0.5)


def test_returns_of_padding_do_not_count():
    scale, head = ValueScale(), nn.Sequential(nn.Linear(1, 1))
    scale.pop_art_update(torch.tensor([1.0, 3.0, 1e6]), torch.tensor([True, True, False]), head)
    assert [unit.item() for unit in scale.mean_std()] == pytest.approx([2.0, 1.0])


def test_no_returns_change_nothing():
    scale, layer = ValueScale(), nn.Linear(1, 1)
    weight = layer.weight.clone()
    scale.pop_art_update(torch.zeros(0), EVERY[:0], nn.Sequential(layer))
    assert (layer.weight == weight).all()
    assert [unit.item() for unit in scale.mean_std()] == pytest.approx([0.0, 1.0])

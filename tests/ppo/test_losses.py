"""PPO's formulas against numbers worked by hand, and advantages against a slow float64 reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.ppo import losses

T, F = True, False


def advantages(reward, value, next_value, terminated, ended, gamma=0.5, gae_lambda=0.5):
    """Lists (T, N), or (T,) for one environment, in and out."""
    tensors = [torch.tensor(values, dtype=torch.float64) for values in (reward, value, next_value)]
    flags = [torch.tensor(values, dtype=torch.bool) for values in (terminated, ended)]
    tensors = [tensor if tensor.dim() == 2 else tensor[:, None] for tensor in (*tensors, *flags)]
    result = losses.generalized_advantages(*tensors, gamma=gamma, gae_lambda=gae_lambda)
    return result.tolist() if isinstance(reward[0], list) else result[:, 0].tolist()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (0.0, 2.0, -2.0),  # nothing changed
        (1.0, 1.0, -1.2),  # a good action made likelier: gain capped at 1 + clip_range
        (-1.0, 1.0, -math.exp(-1.0)),  # a good action made rarer: nothing is excused
        (1.0, -1.0, math.e),  # a bad action made likelier: full penalty
        (-1.0, -1.0, 0.8),  # a bad action made rarer: gain capped at 1 - clip_range
        (math.log(1.1), -3.0, 3.3),  # within the range: the plain ratio
    ],
)
def test_clipped_surrogate_by_hand(log_ratio, advantage, expected):
    loss = losses.clipped_surrogate(torch.tensor([log_ratio]), torch.tensor([advantage]), clip_range=0.2)
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(("log_ratio", "advantage", "moves"), [(1.0, 1.0, F), (-1.0, 1.0, T), (-1.0, -1.0, F)])
def test_a_capped_gain_has_no_gradient(log_ratio, advantage, moves):
    variable = torch.tensor([log_ratio], requires_grad=True)
    losses.clipped_surrogate(variable, torch.tensor([advantage]), clip_range=0.2).sum().backward()
    assert variable.grad is not None
    assert (variable.grad.item() != 0) is moves


@pytest.mark.parametrize(
    ("value", "target", "old", "clip_range", "expected"),
    [
        (3.0, 1.0, 0.0, None, 2.0),  # half of 2 squared
        (3.0, 1.0, 0.0, 0.5, 2.0),  # held at 0.5, which is nearer to 1: the worse counts
        (1.0, 1.0, 0.0, 0.5, 0.125),  # right, but further from the old value than allowed: 0.5 off
        (0.2, 1.0, 0.0, 0.5, 0.32),  # within the range: the plain error
    ],
)
def test_value_loss_by_hand(value, target, old, clip_range, expected):
    numbers = (torch.tensor([number]) for number in (value, target, old))
    assert losses.value_loss(*numbers, clip_range=clip_range).item() == pytest.approx(expected)


def test_value_clipping_is_off_by_default():
    assert losses.value_loss(*(torch.tensor([x]) for x in (1.0, 1.0, -9.0))).item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "expected"), [(1.0, 0.0), (2.0, 1 - math.log(2)), (0.5, math.log(2) - 0.5), (math.e, math.e - 2)]
)
def test_kl_estimate_by_hand(ratio, expected):
    assert losses.kl_estimate(torch.tensor([math.log(ratio)])).item() == pytest.approx(expected, abs=1e-7)


def test_kl_estimate_is_unbiased_for_kl_of_old_and_new():
    """Averaged over actions of the old policy it is KL(old || new), not the other way round."""
    old, new = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    exact = (old * (old / new).log()).sum()
    assert (old * losses.kl_estimate((new / old).log())).sum().item() == pytest.approx(exact.item(), rel=1e-5)


def test_contribution_loss_by_hand():
    """In points of 100; Huber: half the square below 1 point, linear beyond; 0 where nothing is known."""
    predicted = torch.tensor([5.0, 5.5, 8.0, 3.0, 100.0])
    target = torch.tensor([0.05, 0.05, 0.05, float("nan"), 7.0])
    assert losses.contribution_loss(predicted, target).tolist() == pytest.approx([0.0, 0.125, 2.5, 0.0, 0.0], abs=1e-5)


def test_an_unknown_contribution_has_no_gradient_and_no_nan():
    predicted = torch.tensor([3.0, 3.0], requires_grad=True)
    losses.contribution_loss(predicted, torch.tensor([float("nan"), float("inf")])).sum().backward()
    assert predicted.grad is not None
    assert predicted.grad.tolist() == [0.0, 0.0]


def test_mean_weights():
    mask = torch.tensor([[T, F], [T, T]])
    assert losses.mean_weights(mask).tolist() == [[pytest.approx(1 / 3), 0.0], [pytest.approx(1 / 3)] * 2]
    assert losses.mean_weights(torch.zeros(2, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_each_head_has_its_own_mean():
    """One head matters twice, the other once, the last never: each sums to 1, or to 0."""
    mask = torch.tensor([[[T, T, F]], [[T, F, F]]])
    assert losses.head_mean_weights(mask).tolist() == [[[0.5, 1.0, 0.0]], [[0.5, 0.0, 0.0]]]


def test_normalized_by_hand():
    """Mean and deviation over the mask alone: (1, 5) has mean 3 and deviation 2."""
    values, mask = torch.tensor([[1.0, 5.0], [9.0, 100.0]]), torch.tensor([[T, T], [F, F]])
    normal, mean, deviation = losses.standardize(values, mask)
    assert (mean.item(), deviation.item()) == (3.0, 2.0)
    assert normal.tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_normalized_has_a_floor_and_survives_an_empty_mask():
    equal = torch.full((3, 1), 7.0)
    normal, mean, deviation = losses.standardize(equal, torch.ones(3, 1, dtype=torch.bool))
    assert (normal.abs().max().item(), mean.item(), deviation.item()) == (0.0, 7.0, 0.0)
    tiny = torch.tensor([[0.0], [1e-4]])
    assert losses.standardize(tiny, torch.ones(2, 1, dtype=torch.bool), min_std=1e-3)[0].abs().max().item() < 0.06
    normal, mean, deviation = losses.standardize(equal, torch.zeros(3, 1, dtype=torch.bool))
    assert (normal.abs().max().item(), mean.item(), deviation.item()) == (0.0, 0.0, 0.0)


# Advantages


def test_advantages_by_hand():
    """Three steps, gamma = lambda = 1/2, cut off at the end with a value of 8.

    Errors: 1 + 2/2 - 0 = 2, 1 + 4/2 - 2 = 1, 1 + 8/2 - 4 = 1. Each adds a quarter of the next.
    """
    found = advantages([1, 1, 1], [0, 2, 4], [2, 4, 8], [F, F, F], [F, F, T])
    assert found == [2 + 0.25 * 1.25, 1 + 0.25 * 1, 1]


def test_a_terminal_in_the_middle():
    """After it nothing counts: neither the value that follows nor the advantages of the next episode."""
    found = advantages([1, 1, 1], [0, 2, 4], [2, 99, 8], [F, T, F], [F, T, T])
    assert found == [2 + 0.25 * -1, 1 - 2, 1]


def test_a_truncation_in_the_middle():
    """The value of the state that was cut off counts, the next episode does not: 1 + 6/2 - 2 = 2."""
    found = advantages([1, 1, 1], [0, 2, 4], [2, 6, 8], [F, F, F], [F, T, T])
    assert found == [2 + 0.25 * 2, 2, 1]


def test_lambda_0_is_the_one_step_error():
    assert advantages([1, 1, 1], [0, 2, 4], [2, 4, 8], [F, F, F], [F, F, T], gae_lambda=0) == [2, 1, 1]


def test_lambda_1_is_the_return_minus_the_value():
    """Returns from the end: 1 + 8/2 = 5, 1 + 5/2 = 3.5, 1 + 3.5/2 = 2.75."""
    assert advantages([1, 1, 1], [0, 2, 4], [2, 4, 8], [F, F, F], [F, F, T], gae_lambda=1) == [2.75, 1.5, 1.0]


def test_two_environments_do_not_mix():
    one = ([1, 1, 1], [0, 2, 4], [2, 4, 8], [F, F, F], [F, F, T])
    other = ([-3, 7, 2], [1, 1, 5], [1, 5, 0], [F, T, T], [F, T, T])
    columns: list[Any] = [[[a, b] for a, b in zip(x, y, strict=True)] for x, y in zip(one, other, strict=True)]
    both = advantages(*columns)
    assert [row[0] for row in both] == advantages(*one)
    assert [row[1] for row in both] == advantages(*other)


def slow_advantages(reward, value, next_value, terminated, ended, gamma, gae_lambda):
    """The definition: the sum of (gamma lambda)^k times the error k steps later, as long as the episode lasts."""
    steps, envs = reward.shape
    result = np.zeros((steps, envs))
    for env in range(envs):
        for start in range(steps):
            weight = 1.0
            for step in range(start, steps):
                following = 0.0 if terminated[step, env] else next_value[step, env]
                result[start, env] += weight * (reward[step, env] + gamma * following - value[step, env])
                weight *= gamma * gae_lambda
                if ended[step, env]:
                    break
    return result


@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 12),
    envs=st.integers(1, 4),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_advantages_against_the_definition(seed, steps, envs, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    reward, value, next_value = rng.normal(size=(3, steps, envs))
    terminated, truncated = rng.random((2, steps, envs)) < 0.2
    expected = slow_advantages(reward, value, next_value, terminated, terminated | truncated, gamma, gae_lambda)
    arguments = (reward, value, next_value, terminated, terminated | truncated)
    tensors = [torch.from_numpy(array) for array in arguments]
    found = losses.generalized_advantages(*tensors, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(found, expected, atol=1e-6)  # carries are float32
    single = [tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors]
    np.testing.assert_allclose(
        losses.generalized_advantages(*single, gamma=gamma, gae_lambda=gae_lambda), expected, atol=1e-4
    )
    assert (tensors[0].numpy() == reward).all()
    assert (tensors[1].numpy() == value).all()

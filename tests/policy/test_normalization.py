"""Running moments against numpy in float64, however the rows are cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.policy.normalization import Normalizer, RunningMoments


@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    shift=st.sampled_from([0.0, 3.0, 1e6]),
)
@settings(max_examples=50, deadline=None)
def test_any_partition_gives_the_moments_of_all_rows(seed, sizes, shift):
    rows = shift + np.random.default_rng(seed).standard_normal((sum(sizes), 3)) * [0.1, 1.0, 50.0]
    moments, start = RunningMoments(3), 0
    for size in sizes:
        moments.update(torch.from_numpy(rows[start : start + size]))
        start += size
    assert moments.count.item() == len(rows)
    if len(rows):
        np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(moments.variance, rows.var(0), rtol=1e-7, atol=1e-12)


def test_nothing_seen_is_mean_0_and_variance_1():
    moments = RunningMoments(2)
    moments.update(torch.zeros(0, 2))
    assert (moments.mean.tolist(), moments.variance.tolist(), moments.count.item()) == ([0, 0], [1, 1], 0)


def test_float32_rows_are_summed_in_float64():
    """A million and small differences: float32 sums would lose them."""
    rows = torch.tensor([[1e6], [1e6 + 1], [1e6 + 2]])
    moments = RunningMoments(1)
    for row in rows:
        moments.update(row[None])
    assert moments.variance.item() == pytest.approx(2 / 3)
    assert moments.mean.dtype == torch.float64


def test_exponential_mode_by_hand():
    """The first rows replace the start; then a mixture of 3 parts old and 1 part new."""
    moments = RunningMoments(1, decay=0.75)
    moments.update(torch.tensor([[1.0], [3.0]]))  # mean 2, variance 1
    assert (moments.mean.item(), moments.variance.item()) == (2.0, 1.0)
    moments.update(torch.tensor([[6.0]]))  # mean 6, variance 0
    assert moments.mean.item() == pytest.approx(0.75 * 2 + 0.25 * 6)
    # Variance of the mixture: within 3/4 * 1 + 1/4 * 0, between 3/4 * 1/4 * 4^2.
    assert moments.variance.item() == pytest.approx(0.75 + 3.0)


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 2.0])
def test_a_decay_that_forgets_all_or_nothing_is_refused(decay):
    with pytest.raises(ValueError, match=f"decay must be between 0 and 1.*{decay}"):
        RunningMoments(1, decay=decay)


def test_a_normalizer_passes_values_until_it_saw_some_then_standardises_and_cuts():
    normalizer = Normalizer(2, limit=3.0)
    values = torch.tensor([[10.0, -4.0], [14.0, -4.0]])
    assert (normalizer(values) == values).all()
    normalizer.update(values)  # means 12 and -4, variances 4 and 0
    by_hand = 2 / (4 + 1e-4) ** 0.5
    assert torch.allclose(normalizer(values), torch.tensor([[-by_hand, 0.0], [by_hand, 0.0]]))
    assert normalizer(torch.tensor([[1e9, -1e9]])).tolist() == [[3.0, 0.0]]  # what never varied says nothing
    assert normalizer(values).dtype == torch.float32


def test_a_normalizer_that_is_off_changes_nothing():
    normalizer = Normalizer(1, enabled=False)
    normalizer.update(torch.tensor([[5.0], [9.0]]))
    assert normalizer(torch.tensor([[100.0]])).item() == 100.0


def test_moments_are_saved_with_the_weights():
    first, second = RunningMoments(2), RunningMoments(2)
    first.update(torch.randn(5, 2))
    second.load_state_dict(first.state_dict())
    assert (second.mean == first.mean).all()
    assert second.count == 5


def test_rows_that_count_several_times_are_repeated_rows():
    rows, times = torch.randn(5, 2, dtype=torch.float64), torch.tensor([3, 0, 1, 2, 7])
    counted, repeated = RunningMoments(2), RunningMoments(2)
    counted.update(rows, times)
    repeated.update(rows.repeat_interleave(times, 0))
    for name in ("mean", "variance", "count"):
        torch.testing.assert_close(getattr(counted, name), getattr(repeated, name))
    before = counted.mean.clone()
    counted.update(rows, torch.zeros(5))
    assert torch.equal(counted.mean, before)

"""Masked categoricals: illegal choices do not exist, and the rest is a plain categorical."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.policy.masked_categorical import MaskedCategorical, check_masks

LN2, LN3 = math.log(2), math.log(3)


def masked(logits, mask) -> MaskedCategorical:
    return MaskedCategorical(torch.tensor(logits, dtype=torch.float32), torch.tensor(mask, dtype=torch.bool))


def test_probabilities_by_hand():
    """e^ln2 : e^ln6 = 1 : 3, whatever stands at the illegal choice."""
    row = masked([LN2, 50.0, math.log(6)], [True, False, True])
    assert row.probs.tolist() == pytest.approx([0.25, 0.0, 0.75])
    assert row.log_prob(torch.tensor(2)).item() == pytest.approx(math.log(0.75))
    assert row.entropy().item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    assert row.normalized_entropy().item() == pytest.approx((0.25 * math.log(4) + 0.75 * math.log(4 / 3)) / LN2)
    assert row.mode().item() == 2


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 30.0, 300.0]))
@settings(max_examples=30, deadline=None)
def test_what_is_illegal_does_not_exist(seed, scale):
    """The same as a softmax over the legal choices alone, in float64; exactly 0 elsewhere, also in the gradient."""
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((5, 7))).astype(np.float32)
    mask = rng.random((5, 7)) < 0.5
    mask[:, 3] = True
    variable = torch.tensor(logits, requires_grad=True)
    rows = MaskedCategorical(variable, torch.from_numpy(mask))
    (rows.entropy().sum() + rows.log_prob(torch.full((5,), 3)).sum()).backward()
    assert (rows.probs[~torch.from_numpy(mask)] == 0.0).all()
    assert variable.grad is not None
    assert variable.grad.isfinite().all()
    assert (variable.grad[~torch.from_numpy(mask)] == 0.0).all()
    for row, legal in enumerate(mask):
        chosen = logits[row, legal].astype(np.float64)
        expected = np.exp(chosen - chosen.max()) / np.exp(chosen - chosen.max()).sum()
        np.testing.assert_allclose(rows.probs[row, legal].detach(), expected, atol=1e-5)
        entropy = -sum(p * math.log(p) for p in expected if p > 0)
        assert rows.entropy()[row].item() == pytest.approx(entropy, abs=1e-4)
        most = math.log(legal.sum()) if legal.sum() > 1 else 1.0
        assert rows.normalized_entropy()[row].item() == pytest.approx(entropy / most, abs=1e-4)


def test_normalized_entropy_is_one_when_uniform_and_zero_where_nothing_is_left_to_choose():
    rows = masked(
        [[1.0, 1.0, 1.0, 9.0], [1.0, 2.0, 3.0, 4.0]], [[True, True, True, False], [False, True, False, False]]
    )
    assert rows.normalized_entropy().tolist() == pytest.approx([1.0, 0.0])
    assert rows.normalized_entropy()[1].item() == 0.0


def test_float16_logits_are_computed_in_float32():
    row = MaskedCategorical(torch.zeros(3, dtype=torch.float16), torch.tensor([True, True, False]))
    assert row.log_probs.dtype == torch.float32
    assert row.probs[2].item() == 0.0


def test_sampling_frequencies():
    """60,000 draws: each count within 5 deviations of its expectation, and what is illegal never comes."""
    draws = 60_000
    logits, mask = torch.tensor([0.0, LN2, LN3, 40.0, -2.0]), torch.tensor([True, True, True, False, True])
    rows = MaskedCategorical(logits.expand(draws, 5), mask.expand(draws, 5))
    counts = torch.bincount(rows.sample(torch.Generator().manual_seed(1)), minlength=5).double()
    weights = torch.tensor([1.0, 2.0, 3.0, 0.0, math.exp(-2)], dtype=torch.float64)
    probs = weights / weights.sum()
    assert counts[3] == 0
    deviation = (draws * probs * (1 - probs)).sqrt().clamp(min=1)
    assert ((counts - draws * probs).abs() < 5 * deviation).all(), counts


def test_illegal_is_never_sampled_even_if_the_legal_ones_are_absurdly_unlikely():
    rows = masked([[-3000.0, 3000.0, -3001.0]] * 1000, [[True, False, True]] * 1000)
    assert not (rows.sample(torch.Generator().manual_seed(0)) == 1).any()
    assert not (rows.mode() == 1).any()


def test_sampling_is_the_generators_alone():
    rows = masked(np.zeros((64, 6)).tolist(), np.ones((64, 6)).tolist())
    first = rows.sample(torch.Generator().manual_seed(3))
    torch.rand(100)
    assert (rows.sample(torch.Generator().manual_seed(3)) == first).all()
    assert (rows.sample(torch.Generator().manual_seed(4)) != first).any()


def test_an_empty_mask_names_environment_and_head():
    mask = np.ones((4, 3, 2), dtype=bool)
    check_masks(mask, ["op", "slot", "style"])
    mask[2, 1] = False
    with pytest.raises(ValueError, match="environment 2 has no legal choice for head slot"):
        check_masks(mask, ["op", "slot", "style"])

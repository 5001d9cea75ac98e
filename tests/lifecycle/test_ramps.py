"""Ramps: monotone, bounded by their ends, and exactly at the target when they land."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simic.lifecycle.ramps import CURVES, ramp_alpha

ALPHAS = st.floats(0, 1)
EVERY_CURVE = pytest.mark.parametrize("curve", range(len(CURVES)), ids=CURVES)


def walk(start: float, target: float, length: int, curve: int) -> np.ndarray:
    """Alpha after each of `length + 2` decisions."""
    steps = np.arange(length + 2)
    return ramp_alpha(np.array(start), np.array(target), steps, np.array(length), np.array(curve))


@EVERY_CURVE
@given(start=ALPHAS, target=ALPHAS, length=st.integers(1, 200))
def test_every_ramp_is_monotone_bounded_and_lands_exactly(curve, start, target, length):
    alphas = walk(start, target, length, curve)
    assert alphas[0] == start
    assert (alphas[length:] == target).all()
    assert (np.diff(alphas) * np.sign(target - start) >= -1e-12).all()
    assert (alphas >= 0).all()
    assert (alphas <= 1).all()


@EVERY_CURVE
@pytest.mark.parametrize("length", [3, 5, 8])
def test_ramps_that_controllers_can_choose_rise_strictly(curve, length):
    assert (np.diff(walk(0.0, 0.7, length, curve)[: length + 1]) > 0).all()


@EVERY_CURVE
def test_a_ramp_of_length_zero_jumps(curve):
    assert walk(0.25, 0.7, 0, curve)[0] == 0.7


@EVERY_CURVE
@given(length=st.integers(1, 50), start=ALPHAS, target=ALPHAS)
def test_ramps_are_point_symmetric(curve, length, start, target):
    up, down = walk(start, target, length, curve), walk(target, start, length, curve)
    np.testing.assert_allclose(up[: length + 1] + down[: length + 1], start + target, atol=1e-12)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ("linear", [0.0, 0.25, 0.5, 0.75, 1.0]),
        ("cosine", [0.0, 0.5 - 0.5**1.5, 0.5, 0.5 + 0.5**1.5, 1.0]),  # (1 - cos 45 degrees) / 2
        # The logistic function, stretched so that its ends reach 0 and 1: sigma(6 p - 3) at p = 1/4 is 0.18243,
        # its ends are 0.04743 and 0.95257, and (0.18243 - 0.04743) / 0.90515 = 0.14915.
        ("sigmoid-6", [0.0, 0.14915, 0.5, 0.85085, 1.0]),
        ("sigmoid-12", [0.0, (0.047426 - 0.002473) / 0.995055, 0.5, 1 - (0.047426 - 0.002473) / 0.995055, 1.0]),
    ],
)
def test_four_decisions_by_hand(curve, expected):
    np.testing.assert_allclose(walk(0.0, 1.0, 4, CURVES.index(curve))[:5], expected, atol=2e-5)


def test_steeper_sigmoids_start_slower():
    quarter = [walk(0.0, 1.0, 4, CURVES.index(f"sigmoid-{k}"))[1] for k in (6, 12, 24)]
    assert quarter == sorted(quarter, reverse=True)


def test_arrays_of_ramps_are_independent():
    start, target = np.array([[0.0, 1.0], [0.5, 0.0]]), np.array([[1.0, 0.0], [0.7, 0.5]])
    step, length, curve = np.array([[1, 2], [0, 3]]), np.array([[4, 4], [0, 3]]), np.array([[0, 1], [2, 3]])
    np.testing.assert_allclose(ramp_alpha(start, target, step, length, curve), [[0.25, 0.5], [0.7, 0.5]])

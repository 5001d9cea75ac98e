"""Seeds that game are found, ordinary growth is left alone: one host with two slots per story, numbers by hand."""

import numpy as np
import pytest

from simic.rewards.gaming import detect

NAN = float("nan")


def found(contribution: list[float], gain: list[float], judged: bool | list[bool] = True) -> dict[str, list[bool]]:
    """Flags of the seed in the second slot after each decision."""
    told = np.full((len(gain), 1, 2), NAN)
    told[:, 0, 1] = contribution
    which = np.zeros(told.shape, dtype=bool)
    which[:, 0, 1] = judged
    flags = detect(told, np.array(gain)[:, None], which)
    assert all(not flag[:, 0, 0].any() for flag in flags.values()), "the empty slot is never flagged"
    return {reason: flag[:, 0, 1].tolist() for reason, flag in flags.items()}


QUIET = {reason: [False] * 5 for reason in ("overclaiming", "indispensable")}


@pytest.mark.parametrize(
    ("contribution", "gain"),
    [
        ([0.05, 0.12, 0.2, 0.2, 0.2], [0.0, 0.03, 0.05, 0.05, 0.05]),  # four times the gain
        ([0.1, 0.1, 0.1, 0.1, 0.1], [0.0, 0.0, -0.3, -0.3, -0.3]),  # too little to be of interest
        ([0.5, 0.5, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0]),  # never three times in a row
        ([NAN, NAN, NAN, NAN, NAN], [0.0, 0.0, 0.0, 0.0, 0.0]),  # not measured
        ([0.5, 0.5, 0.5, 0.5, 0.5], [NAN, NAN, NAN, NAN, NAN]),  # no metric to compare
        ([-0.5, -0.5, -0.5, -0.5, -0.5], [-0.1, -0.1, -0.1, -0.1, -0.1]),  # harmful, and said to be
    ],
)
def test_ordinary_growth_is_not_flagged(contribution, gain):
    assert found(contribution, gain) == QUIET


def test_a_contribution_far_above_the_gain_over_the_twin_is_flagged_when_it_lasts():
    # 0.21 is more than five times 0.04, 0.20 is not.
    flags = found([0.21, 0.20, 0.21, 0.21, 0.21], [0.04] * 5)
    assert flags == {"overclaiming": [False, False, False, False, True], "indispensable": [False] * 5}


def test_no_gain_is_no_excuse():
    flags = found([0.11] * 5, [0.0, -0.002, 0.0, 0.0, 0.0])
    assert flags == {"overclaiming": [False, False, True, True, True], "indispensable": [False] * 5}


def test_a_host_that_needs_its_seed_and_is_worse_than_its_twin_is_flagged():
    flags = found([0.11] * 5, [0.0, -0.0021, -0.0021, -0.0021, -0.5])
    # While it is not clear that the host is worse, the claim itself is suspect; a seed has one reason at a time.
    assert flags == {
        "overclaiming": [False, False, True, False, False],
        "indispensable": [False, False, False, True, True],
    }


def test_decisions_that_are_not_judged_are_not_flagged_and_break_the_row():
    flags = found([0.5] * 5, [-0.1] * 5, judged=[True, True, False, True, True])
    assert flags == QUIET


def test_hosts_and_slots_are_judged_on_their_own():
    contribution = np.full((3, 2, 2), 0.5)
    contribution[:, 0, 0] = 0.0
    gain = np.array([[0.0, 0.2]] * 3)  # the second host gains enough
    flags = detect(contribution, gain, np.ones((3, 2, 2), dtype=bool))
    assert flags["overclaiming"][2].tolist() == [[False, True], [False, False]]

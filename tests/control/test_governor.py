"""The governor ignores ordinary learning, detects every kind of failure soon, and reports it once."""

import numpy as np
import pytest

from simic.control.governor import Governor, Verdict
from simic.environment.config import GovernorConfig

DECISIONS = 40


def learning_curves(num_hosts: int, rng_seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Validation and training losses (T, N) of hosts that learn, and their random-guess loss (N,)."""
    rng = np.random.default_rng(rng_seed)
    guess = rng.uniform(0.7, 5.0, num_hosts)
    speed, floor = rng.uniform(1, 20, num_hosts), rng.uniform(0.02, 0.9, num_hosts)
    start, noise = rng.uniform(0.9, 1.2, num_hosts), rng.uniform(0, 0.15, num_hosts)
    time = np.arange(DECISIONS)[:, None]
    curve = guess * (floor + (start - floor) * np.exp(-time / speed))
    spikes = np.where(rng.random(curve.shape) < 0.1, 1.5, 1.0)
    val = curve * spikes * np.exp(noise * rng.normal(size=curve.shape))
    train = (curve - 0.5 * guess * floor * time / DECISIONS) * spikes * np.exp(noise * rng.normal(size=curve.shape))
    # Half of them overfit: validation climbs by up to 40 % per decision from somewhere on.
    onset, growth = rng.integers(5, 2 * DECISIONS, num_hosts), rng.uniform(1.05, 1.4, num_hosts)
    return val * growth ** np.clip(time - onset, 0, 8), train, guess


def judge_all(governor: Governor, val: np.ndarray, train: np.ndarray, guess: np.ndarray) -> np.ndarray:
    return np.stack([governor.judge(v, t, guess) for v, t in zip(val, train, strict=True)])


def test_ordinary_learning_is_left_alone():
    verdicts = judge_all(Governor(5000), *learning_curves(5000))
    assert (verdicts == Verdict.OK).all(), np.argwhere(verdicts)[:5]


def not_finite(losses, since, guess):
    losses[since] = np.nan


def infinite(losses, since, guess):
    losses[since] = np.inf


def jump(losses, since, guess):
    losses[since:] = 10 * np.maximum(losses[since - 1], 0.2 * guess)


def doubling(losses, since, guess):
    losses[since:] = losses[since - 1] * 2.0 ** np.arange(1, DECISIONS - since + 1)[:, None]


def growth(losses, since, guess):
    losses[since:] = losses[since - 1] * 1.6 ** np.arange(1, DECISIONS - since + 1)[:, None]


def back_to_guessing(losses, since, guess):
    losses[since:] = guess * np.array([0.97, 1.0, 1.03])[np.arange(DECISIONS - since) % 3, None]


@pytest.mark.parametrize(
    ("plant", "expected", "decisions"),
    [
        (not_finite, {Verdict.NOT_FINITE}, 1),
        (infinite, {Verdict.NOT_FINITE}, 1),
        (jump, {Verdict.DIVERGED, Verdict.COLLAPSED}, 2),
        (doubling, {Verdict.DIVERGED, Verdict.COLLAPSED}, 3),
        (growth, {Verdict.DIVERGED, Verdict.COLLAPSED}, 3),
        (back_to_guessing, {Verdict.COLLAPSED}, 2),
    ],
)
def test_what_is_planted_is_caught_there_once_and_soon(plant, expected, decisions):
    val, train, guess = learning_curves(1000)
    rng, time = np.random.default_rng(1), np.arange(DECISIONS)[:, None]
    level = guess * (0.1 + 0.9 * np.exp(-time / 3))
    val[:, :500] = (level * np.exp(0.05 * rng.normal(size=level.shape)))[:, :500]
    train[:, :500] = (level * np.exp(0.05 * rng.normal(size=level.shape)))[:, :500]
    for losses in (val, train):
        planted = losses[:, :500]
        plant(planted, 20, guess[:500])
    verdicts = judge_all(Governor(1000), val, train, guess)
    assert (verdicts[:, 500:] == Verdict.OK).all()
    assert (np.count_nonzero(verdicts[:, :500], axis=0) == 1).all()
    assert set(verdicts[:, :500].sum(0).tolist()) <= expected
    assert set(verdicts.argmax(0)[:500].tolist()) <= set(range(20, 20 + decisions))


def losses_of(*values: float) -> np.ndarray:
    """The losses (T, 1) of one host whose task has the random-guess loss 1."""
    return np.array(values)[:, None]


@pytest.mark.parametrize(
    ("val", "train", "expected"),
    [
        ((1.0,) * 10, (1.0,) * 10, {}),  # never learned anything: nothing to fall back from
        ((1.9,) * 10, (1.9,) * 10, {}),  # a bad start is no divergence
        ((2.1, 2.1), (2.1, 2.1), {1: "diverged"}),  # twice as bad as guessing is one
        ((0.3,) * 5 + (0.95, 0.95), (0.3,) * 5 + (0.95, 0.95), {6: "collapsed"}),
        ((0.3,) * 5 + (0.95, 0.3, 0.95), (0.3,) * 5 + (0.95, 0.3, 0.95), {}),  # a blip, twice
        ((0.3,) * 5 + (0.95, 0.95), (0.3,) * 5 + (0.2, 0.1), {}),  # overfitting
        ((0.3,) * 5 + (0.3, 0.3), (0.3,) * 5 + (3.0, 3.0), {}),  # it trained badly and came out well
        ((0.3,) * 5 + (0.59, 0.59), (0.3,) * 5 + (0.59, 0.59), {}),  # below twice the median
        ((0.3,) * 5 + (0.61, 0.61), (0.3,) * 5 + (0.61, 0.61), {6: "diverged"}),  # above it
        ((0.3,) * 5 + (0.61, 3.0), (0.3,) * 5 + (0.61, 3.0), {6: "diverged"}),  # far beyond guessing
        ((0.01,) * 5 + (0.1, 0.1), (0.01,) * 5 + (0.1, 0.1), {}),  # tenfold, and still next to nothing
        ((0.3,) * 2 + (np.nan, 0.3, np.nan), (0.3,) * 5, {2: "not_finite"}),
        ((0.3,) * 5, (0.3,) * 2 + (np.inf,) * 3, {2: "not_finite"}),
    ],
)
def test_verdicts_by_hand(val, train, expected):
    verdicts = judge_all(Governor(1), losses_of(*val), losses_of(*train), np.ones(1))[:, 0]
    assert {int(t): str(Verdict(verdicts[t])) for t in np.flatnonzero(verdicts)} == expected


def test_a_noisy_past_buys_more_room():
    # Median 0.3; deviations 0.15, 0, 0.15, 0.15, 0: their median 0.15, five of them 0.75, so the limit is 1.05.
    past = (0.15, 0.3, 0.45, 0.45, 0.3)
    config = GovernorConfig(collapsed_share=1.0, patience=1)
    for value, verdict in ((0.99, Verdict.OK), (1.06, Verdict.DIVERGED)):
        governor, losses = Governor(1, config), losses_of(*past, value)
        verdicts = judge_all(governor, losses, losses, np.full(1, 1.2))
        assert verdicts[-1] == verdict


def test_what_is_under_suspicion_does_not_become_the_norm():
    losses = losses_of(*(0.3,) * 5, *(0.7,) * 5)
    verdicts = judge_all(Governor(1, GovernorConfig(patience=5)), losses, losses, np.ones(1))[:, 0]
    assert np.flatnonzero(verdicts).tolist() == [9]


def test_a_suspect_is_not_trusted_and_a_new_episode_forgets():
    governor, guess = Governor(3), np.ones(3)
    for _ in range(5):
        governor.judge(np.full(3, 0.3), np.full(3, 0.3), guess)
    worse = np.array([0.3, 1.0, 1.0])
    assert not governor.judge(worse, worse, guess).any()
    assert governor.trusted.tolist() == [True, False, False]
    governor.reset(np.array([2]))
    assert governor.trusted.tolist() == [True, False, True]
    assert governor.judge(worse, worse, guess).tolist() == [0, Verdict.COLLAPSED, 0]
    assert not governor.judge(worse, worse, guess).any(), "reported once"
    assert governor.trusted.tolist() == [True, False, True]


def test_a_saved_governor_goes_on_as_if_nothing_had_happened():
    val, train, guess = learning_curves(50)
    back_to_guessing(val[:, :9], 21, guess[:9])
    back_to_guessing(train[:, :9], 21, guess[:9])
    whole, first, second = Governor(50), Governor(50), Governor(50)
    expected = judge_all(whole, val, train, guess)
    judge_all(first, val[:22], train[:22], guess)
    state = first.state_dict()
    first.reset(np.arange(50))  # what was saved is a copy
    second.load_state_dict(state)
    assert np.array_equal(judge_all(second, val[22:], train[22:], guess), expected[22:])
    assert expected[22:].any()
    with pytest.raises(ValueError, match="same num_hosts"):
        Governor(49).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("field", "value"),
    [("window", 2), ("patience", 0), ("deviations", 0.0), ("absolute_rise", -1.0), ("learned_share", 0.95)],
)
def test_a_config_without_sense_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        GovernorConfig(**{field: value})


def test_losses_of_other_hosts_are_refused():
    with pytest.raises(ValueError, match="each of 2 hosts"):
        Governor(2).judge(np.ones(2), np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match="random_guess_loss"):
        Governor(2).judge(np.ones(2), np.ones(2), np.array([1.0, np.nan]))

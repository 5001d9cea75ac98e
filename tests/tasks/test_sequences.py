"""Problems of sequences: labels by hand, causality, and what one token tells."""

import numpy as np
import pytest

from simic.tasks.sequences import Counting, Delay, PairTable, load_sequences

EVERY = pytest.mark.parametrize("problem", [Delay(distance=(3,)), Counting(modulus=(3,)), PairTable(lag=(2,))])


def generated(problem, *, num_samples: int = 400, length: int = 9, num_tokens: int = 4, rng_seed: int = 0):
    """Tokens, labels and traits."""
    rng = np.random.default_rng(rng_seed)
    (x, y), traits = problem.generate(rng, num_samples=num_samples, shape=(length,), num_classes=num_tokens)
    return x, y, traits


@EVERY
def test_labels_are_tokens_and_balanced_inputs(problem):
    x, y, _ = generated(problem)
    assert x.shape == y.shape == (400, 9)
    assert set(np.unique(x)) == {0, 1, 2, 3} >= set(np.unique(y))
    np.testing.assert_allclose(np.bincount(x.ravel()) / x.size, 0.25, atol=0.03)


@EVERY
def test_sequences_that_begin_alike_are_labelled_alike(problem):
    x, y, _ = generated(problem, num_samples=4_000, length=5, num_tokens=3)
    labels = {}
    for tokens, own in zip(x, y, strict=True):
        for end in range(1, 6):
            assert labels.setdefault(tuple(tokens[:end]), own[end - 1]) == own[end - 1]


def test_a_delay_repeats_tokens():
    x, y, traits = generated(Delay(distance=(3,)))
    assert traits == {"problem": "delay", "distance": 3}
    for tokens, own in zip(x.tolist(), y.tolist(), strict=True):
        assert own == [0, 0, 0, *tokens[:-3]]
    x, y, _ = generated(Delay(distance=(0,)))
    np.testing.assert_array_equal(x, y)


def test_counting_starts_again_at_the_modulus():
    x, y, traits = generated(Counting(modulus=(3,)))
    assert traits == {"problem": "counting", "modulus": 3}
    for tokens, own in zip(x.tolist(), y.tolist(), strict=True):
        assert own == [tokens[: end + 1].count(0) % 3 for end in range(9)]


def test_a_table_needs_both_tokens():
    x, y, traits = generated(PairTable(lag=(2,)), num_samples=3_000)
    assert traits == {"problem": "pair_table", "lag": 2}
    now, before, label = x[:, 2:].ravel(), x[:, :-2].ravel(), y[:, 2:].ravel()
    for one in range(4):
        assert {len(set(label[(now == one) & (before == other)])) for other in range(4)} == {1}
        # Given one of the tokens alone every label is as likely.
        for known in (now, before):
            np.testing.assert_allclose(np.bincount(label[known == one]) / (known == one).sum(), 0.25, atol=0.03)


def test_tables_differ_from_host_to_host():
    tables = set()
    for rng_seed in range(10):
        x, y, _ = generated(PairTable(lag=(1,)), rng_seed=rng_seed)
        cells = {
            (now, before): own for now, before, own in zip(x[:, 1:].flat, x[:, :-1].flat, y[:, 1:].flat, strict=True)
        }
        tables.add(tuple(cells[key] for key in sorted(cells)))
    assert len(tables) == 10


def test_preset_data():
    data = load_sequences(length=8, num_tokens=6)
    assert [tuple(data.split(split)[0].shape) for split in ("train", "validation", "test")] == [
        (384, 8),
        (64, 8),
        (128, 8),
    ]
    assert data.num_classes == 6
    assert len(load_sequences(train_size=20).train_y) == 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Delay(distance=()), r"distance must list at least one number, none negative, got \(\)"),
        (lambda: PairTable(lag=(-1,)), r"lag must list .* got \(-1,\)"),
        (lambda: Counting(modulus=()), "modulus must list"),
        (lambda: Counting(modulus=(1, 2)), r"a modulus of at least 2, got \(1, 2\)"),
        (lambda: generated(Counting(modulus=(5,))), "counts modulo 5 need as many tokens, got 4"),
        (
            lambda: Delay(distance=(1,)).generate(np.random.default_rng(0), num_samples=9, shape=(1, 4), num_classes=2),
            r"has sequences of tokens, not inputs of shape \(1, 4\)",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

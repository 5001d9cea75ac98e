"""Generated problems: their geometry, what a linear model makes of them, and their difficulty."""

import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from simic.tasks.data import Data, as_data, load_digits
from simic.tasks.problems import (
    Motifs,
    Spirals,
    Subset,
    Teacher,
    generate_data,
    load_motifs,
    load_spirals,
    load_subset,
    load_teacher,
)

MOTIFS = Motifs(extent=(4,), noise=(0.1,))


def linear_accuracy(problem, *, in_features: int, num_classes: int) -> float:
    """How well a linear model fits 1,000 samples, the mean of three draws."""
    scores = []
    for rng_seed in range(3):
        rng = np.random.default_rng(rng_seed)
        (x, y), _ = problem.generate(rng, num_samples=1_000, shape=(in_features,), num_classes=num_classes)
        scores.append(LogisticRegression(C=100).fit(x, y).score(x, y))
    return float(np.mean(scores))


def test_spirals_without_noise_lie_on_their_arms():
    (x, y), traits = Spirals(turns=(1.5,), noise=(0.0,)).generate(
        np.random.default_rng(0), num_samples=300, shape=(2,), num_classes=3
    )
    assert traits == {"problem": "spirals", "turns": 1.5, "noise": 0.0}
    radius = np.hypot(*x.T) / 2  # inputs of unit variance: the disc has radius 2
    assert radius.max() <= 1
    # Unwound and turned back by its arm, every point has the same angle: that of the random plane, perhaps mirrored.
    for sign in (1, -1):
        unwound = np.exp(1j * (sign * np.arctan2(x[:, 1], x[:, 0]) - 2 * math.pi * (1.5 * radius + y / 3)))
        if abs(unwound.mean()) > 0.5:
            np.testing.assert_allclose(unwound, unwound[0], atol=1e-6)
            return
    pytest.fail("the points lie on no spiral")


def test_noise_confuses_as_many_as_stated():
    (x, y), _ = Spirals(turns=(0.0,), noise=(0.25,)).generate(
        np.random.default_rng(0), num_samples=20_000, shape=(2,), num_classes=2
    )
    # Wrong beyond half the angle between arms, two deviations: 4.55 %, but for those who come round to the right side.
    assert 1 - LogisticRegression().fit(x, y).score(x, y) == pytest.approx(0.0455, abs=0.006)


@pytest.mark.parametrize("in_features", [2, 3, 16])
def test_spirals_lie_in_a_plane_and_have_unit_variance(in_features):
    (x, y), _ = Spirals(turns=(1.0,)).generate(
        np.random.default_rng(0), num_samples=5_000, shape=(in_features,), num_classes=5
    )
    assert np.linalg.matrix_rank(x, tol=1e-6) == 2
    assert (x**2).mean() == pytest.approx(1, rel=0.05)
    assert np.bincount(y).tolist() == [1000] * 5


def test_more_turns_leave_less_to_a_linear_model():
    scores = [linear_accuracy(Spirals(turns=(turns,)), in_features=4, num_classes=3) for turns in (0.0, 0.25, 0.5, 1.0)]
    assert scores[0] > 0.99
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.6


def test_hidden_units_leave_less_to_a_linear_model():
    linear, hidden = (linear_accuracy(Teacher(hidden=(size,)), in_features=4, num_classes=3) for size in (0, 16))
    assert linear > 0.98
    assert hidden < 0.9


def test_a_teacher_uses_every_class():
    for rng_seed in range(5):
        rng = np.random.default_rng(rng_seed)
        (x, y), traits = Teacher(hidden=(4,)).generate(rng, num_samples=2_000, shape=(8,), num_classes=5)
        assert traits == {"problem": "teacher", "hidden": 4}
        assert np.bincount(y, minlength=5).min() > 0
        assert x.std() == pytest.approx(1, abs=0.05)


def test_splits_have_the_sizes_asked_for():
    data, _ = generate_data(Teacher(hidden=(0,)), np.random.default_rng(0), sizes=(5, 3, 2), shape=(4,), num_classes=3)
    assert [len(data.split(split)[0]) for split in ("train", "validation", "test")] == [5, 3, 2]


@pytest.mark.parametrize("shape", [(1, 9), (3, 9), (1, 7, 9), (2, 7, 9)])
def test_a_motif_lies_whole_somewhere_in_its_picture(shape):
    (x, y), traits = Motifs(extent=(4,), noise=(0.0,)).generate(
        np.random.default_rng(0), num_samples=300, shape=shape, num_classes=3
    )
    assert traits == {"problem": "motifs", "extent": 4, "noise": 0.0}
    assert (x.shape, np.bincount(y).tolist()) == ((300, *shape), [100] * 3)
    cut, places = [], set()
    for picture in x:
        first = [lines.min() for lines in np.nonzero(picture.any(0))]
        part = picture[:, *(slice(start, start + 4) for start in first)]
        assert part.shape == (shape[0], *[4] * (len(shape) - 1))
        assert np.count_nonzero(picture) == part.size
        cut.append(part)
        places.add(tuple(first))
    for label in range(3):
        same = [part for part, own in zip(cut, y, strict=True) if own == label]
        np.testing.assert_array_equal(same, [same[0]] * len(same))
    assert np.unique([part.ravel() for part in cut], axis=0).shape[0] == 3
    assert len(places) == np.prod([side - 3 for side in shape[1:]])


def test_motifs_of_all_classes_are_equally_strong():
    (x, y), _ = Motifs(extent=(4,), noise=(0.0,)).generate(
        np.random.default_rng(0), num_samples=60, shape=(1, 9), num_classes=5
    )
    norms = np.linalg.norm(x[:, 0], axis=1)
    np.testing.assert_allclose(norms, norms[0])
    assert len({tuple(np.trim_zeros(x[y == label][0, 0])) for label in range(5)}) == 5


def small_set(labels) -> Data:
    """Inputs that tell which sample they are; the last two are for testing."""
    labels = np.array(labels)
    x = np.arange(len(labels), dtype=np.float32)[:, None, None]
    parts = [(x[part], labels[part]) for part in (slice(0, -6), slice(-6, -2), slice(-2, None))]
    return as_data(train=parts[0], validation=parts[1], test=parts[2], num_classes=3)


def test_an_excerpt_has_samples_of_some_classes_none_twice():
    labels = np.arange(32) % 3
    problem = Subset(name="thirds", load=lambda: small_set(labels))
    seen = set()
    for rng_seed in range(20):
        (x, y), traits = problem.generate(np.random.default_rng(rng_seed), num_samples=18, shape=(1, 1), num_classes=2)
        chosen = x.reshape(-1).astype(int)
        assert traits == {"problem": "thirds", "classes": 2}
        assert (len(set(chosen)), chosen.max() < 30) == (18, True)
        own = [set(labels[chosen[y == label]]) for label in range(2)]
        assert [len(classes) for classes in own] == [1, 1]
        seen.add((*own[0], *own[1]))
    assert len(seen) == 6


def test_an_excerpt_has_no_more_than_its_data_set():
    problem = Subset(name="thirds", load=lambda: small_set(np.arange(32) % 3))
    for asked, message in (
        ({"num_samples": 21, "shape": (1, 1), "num_classes": 2}, "thirds has 20 samples of 2 classes, asked for 21"),
        ({"num_samples": 4, "shape": (1, 1), "num_classes": 4}, "has 3 classes .* asked for 4"),
        ({"num_samples": 4, "shape": (1, 2), "num_classes": 2}, r"of shape \(1, 1\), asked for 2 of shape \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            problem.generate(np.random.default_rng(0), **asked)


def test_excerpts_of_digits_leave_its_test_samples_alone():
    digits = load_digits()
    data = load_subset(problem=Subset(name="digits", load=load_digits))
    assert [len(data.split(split)[0]) for split in ("train", "validation", "test")] == [1024, 256, 128]
    seen = {tuple(x.flatten().tolist()) for split in ("train", "validation", "test") for x in data.split(split)[0]}
    assert not seen & {tuple(x.flatten().tolist()) for x in digits.test_x}


def test_motifs_have_unit_variance_and_drown_in_noise():
    shares = []
    for noise in (0.1, 1.0):
        (pictures, y), _ = Motifs(extent=(6,), noise=(noise,)).generate(
            np.random.default_rng(0), num_samples=2_000, shape=(1, 6, 6), num_classes=2
        )
        assert pictures.std() == pytest.approx(1)
        means = np.stack([pictures[y == label].mean(0) for label in (0, 1)])
        shares.append((pictures - means[y]).std() / means.std())
    assert shares == [pytest.approx(0.1, abs=0.01), pytest.approx(1.0, abs=0.1)]


@pytest.mark.parametrize(
    ("load", "shape", "train_size"),
    [(load_spirals, (2,), 512), (load_teacher, (8,), 512), (load_motifs, (1, 6, 6), 256)],
)
def test_preset_data(load, shape, train_size):
    data = load()
    assert data.train_x.shape == (train_size, *shape)
    assert (len(data.validation_x), len(data.test_x)) == (256, 512)
    assert load(train_size=20).train_y.tolist() == data.train_y[:20].tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Spirals(turns=()), r"turns must list at least one number, none negative, got \(\)"),
        (lambda: Spirals(turns=(1.0,), noise=(-0.1,)), r"noise must list .* got \(-0.1,\)"),
        (lambda: Teacher(hidden=(-1,)), r"hidden must list .* got \(-1,\)"),
        (
            lambda: Spirals(turns=(1.0,)).generate(np.random.default_rng(0), num_samples=9, shape=(1,), num_classes=2),
            "spirals need at least two input features, got 1",
        ),
        (
            lambda: Teacher(hidden=(2,)).generate(np.random.default_rng(0), num_samples=9, shape=(1, 4), num_classes=2),
            r"has plain features, not inputs of shape \(1, 4\)",
        ),
        (lambda: Motifs(extent=(0,), noise=(0.1,)), r"at least one point wide, got extent \(0,\)"),
        (lambda: Motifs(extent=(3,), noise=()), "noise must list at least one number"),
        (
            lambda: MOTIFS.generate(np.random.default_rng(0), num_samples=9, shape=(1, 9, 3), num_classes=2),
            r"a motif 4 points wide does not fit inputs of shape \(1, 9, 3\)",
        ),
        (
            lambda: MOTIFS.generate(np.random.default_rng(0), num_samples=9, shape=(8,), num_classes=2),
            r"a motif 4 points wide does not fit inputs of shape \(8,\)",
        ),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

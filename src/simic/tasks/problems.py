"""Generated problems of adjustable difficulty: spirals, random teacher networks, motifs in noise, subsets of data sets.

Shapes: M samples of D features, or of C channels and the sides of an image; K classes. All random numbers come from
the generator that is passed in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simic.tasks.data import Data, Samples, as_data, deal

Traits = dict[str, float | str]
"""Properties that were drawn, by name."""
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 512, 256, 512
"""Sizes of the splits of built-in tasks."""
REFERENCE_RNG_SEED = 3
"""Rng seed of the samples of built-in tasks."""


class Problem(Protocol):
    """A kind of problem, and the difficulties that it is drawn with."""

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Inputs (M, *shape) of about unit variance, labels (M,), and the drawn difficulty."""
        ...


@dataclass(frozen=True, kw_only=True)
class Spirals:
    """One spiral arm per class on a disc, which lies in a random plane of the inputs."""

    turns: tuple[float, ...]
    """Turns of an arm, drawn from these: 0 gives wedges, which a linear model can separate."""
    noise: tuple[float, ...] = (0.1,)
    """Standard deviation of the angle as a share of the angle between arms, drawn from these: 0.2 mislabels 1 %."""

    def __post_init__(self) -> None:
        check_choices(turns=self.turns, noise=self.noise)

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Points along the arms, uniform over the disc's area."""
        in_features = _features(shape)
        if in_features < 2:
            raise ValueError(f"spirals need at least two input features, got {in_features}")
        turns, noise = float(rng.choice(self.turns)), float(rng.choice(self.noise))
        labels = _balanced_labels(rng, num_samples, num_classes)
        radius = np.sqrt(rng.uniform(size=num_samples))
        arm = labels + noise * rng.standard_normal(num_samples)
        angle = 2 * math.pi * (turns * radius + arm / num_classes)
        in_plane = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)  # (M, 2), variance 1/4 each
        plane, _ = np.linalg.qr(rng.standard_normal((in_features, 2)))
        points = math.sqrt(2 * in_features) * in_plane @ plane.T
        return (points, labels), {"problem": "spirals", "turns": turns, "noise": noise}


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Labels of normally distributed inputs, given by a random network."""

    hidden: tuple[int, ...]
    """Hidden units of the teacher, drawn from these; 0 is a linear teacher."""
    gain: float = 2.0
    """Slope of the hidden units."""

    def __post_init__(self) -> None:
        check_choices(hidden=self.hidden)

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Logits are standardised per class, so that classes are about balanced."""
        in_features, hidden = _features(shape), int(rng.choice(self.hidden))
        inputs = rng.standard_normal((num_samples, in_features))
        labels = _standardised(_teach(rng, inputs, hidden, self.gain, num_classes)).argmax(axis=1)
        return (inputs, labels), {"problem": "teacher", "hidden": hidden}


@dataclass(frozen=True, kw_only=True)
class TeacherNumbers:
    """Numbers to predict from normally distributed inputs: the standardised outputs of a random network, with noise."""

    hidden: tuple[int, ...]
    """Hidden units of the teacher, drawn from these; 0 is a linear teacher."""
    noise: tuple[float, ...] = (0.0,)
    """Standard deviation of the noise relative to the outputs, drawn from these."""
    gain: float = 2.0
    """Slope of the hidden units."""

    def __post_init__(self) -> None:
        check_choices(hidden=self.hidden, noise=self.noise)

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """`num_classes` outputs for every sample."""
        hidden, noise = int(rng.choice(self.hidden)), float(rng.choice(self.noise))
        inputs = rng.standard_normal((num_samples, _features(shape)))
        outputs = _teach(rng, inputs, hidden, self.gain, num_classes)
        numbers = _standardised(_standardised(outputs) + noise * rng.standard_normal(outputs.shape))
        return (inputs, numbers), {"problem": "teacher_numbers", "hidden": hidden, "noise": noise}


@dataclass(frozen=True, kw_only=True)
class Motifs:
    """One pattern per class at a random position in noise."""

    extent: tuple[int, ...]
    """Side length of a pattern, drawn from these; one 3x3 layer covers three points."""
    noise: tuple[float, ...]
    """Standard deviation of the noise relative to the pattern, drawn from these."""

    def __post_init__(self) -> None:
        check_choices(extent=self.extent, noise=self.noise)
        if min(self.extent) < 1:
            raise ValueError(f"a motif must be at least one point wide, got extent {self.extent}")

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Patterns of normally distributed points and equal norm, placed fully inside the image."""
        extent, noise = int(rng.choice(self.extent)), float(rng.choice(self.noise))
        channels, *sides = shape
        if not sides or extent > min(sides):
            raise ValueError(f"a motif {extent} points wide does not fit inputs of shape {shape}")
        labels = _balanced_labels(rng, num_samples, num_classes)
        motifs = rng.standard_normal((num_classes, *[extent] * len(sides), channels))
        motifs /= np.sqrt((motifs**2).mean(axis=tuple(range(1, motifs.ndim)), keepdims=True))
        inputs = noise * rng.standard_normal((num_samples, *sides, channels))
        places = [rng.integers(0, side - extent, (num_samples, 1), endpoint=True) for side in sides] + np.arange(extent)
        # Indices of one axis vary along that axis only: (M, extent, 1) and (M, 1, extent) for images.
        axes = [np.expand_dims(own, [1 + j for j in range(len(sides)) if j != i]) for i, own in enumerate(places)]
        samples = np.arange(num_samples).reshape(-1, *[1] * len(sides))
        inputs[samples, *axes] += motifs[labels]
        pictures = np.moveaxis(inputs / inputs.std(), -1, 1)
        return (pictures, labels), {"problem": "motifs", "extent": extent, "noise": noise}


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Random samples of random classes of a data set, different for every host."""

    name: str
    load: Callable[[], Data]

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Training and validation samples without repetition; classes are renumbered in the order they were drawn."""
        data = self.load()
        inputs = np.concatenate([data.train_x.numpy(), data.validation_x.numpy()])
        labels = np.concatenate([data.train_y.numpy(), data.validation_y.numpy()])
        if inputs.shape[1:] != shape or num_classes > data.num_classes:
            raise ValueError(
                f"{self.name} has {data.num_classes} classes of inputs of shape {inputs.shape[1:]}, "
                f"asked for {num_classes} of shape {shape}"
            )
        place = np.full(data.num_classes, -1)
        place[rng.permutation(data.num_classes)[:num_classes]] = np.arange(num_classes)
        found = np.flatnonzero(place[labels] >= 0)
        if len(found) < num_samples:
            raise ValueError(f"{self.name} has {len(found)} samples of {num_classes} classes, asked for {num_samples}")
        chosen = rng.choice(found, num_samples, replace=False)
        return (inputs[chosen], place[labels[chosen]]), {"problem": self.name, "classes": num_classes}


def generate_data(
    problem: Problem, rng: np.random.Generator, *, sizes: tuple[int, int, int], shape: tuple[int, ...], num_classes: int
) -> tuple[Data, Traits]:
    """A data set of one problem; `sizes` are those of train, validation and test."""
    (x, y), traits = problem.generate(rng, num_samples=sum(sizes), shape=shape, num_classes=num_classes)
    ends = np.cumsum(sizes)
    train, validation, test = zip(np.split(x, ends[:-1]), np.split(y, ends[:-1]), strict=True)
    return as_data(train=train, validation=validation, test=test, num_classes=num_classes), traits


@cache
def load_spirals(*, train_size: int | None = None) -> Data:
    """Three arms of one turn in the plane, 512/256/512 inputs (M, 2)."""
    return _reference(Spirals(turns=(1.0,)), (2,), 3, train_size)


@cache
def load_teacher(*, in_features: int = 8, num_classes: int = 3, train_size: int | None = None) -> Data:
    """A teacher of 8 hidden units, 512/256/512 inputs (M, in_features)."""
    return _reference(Teacher(hidden=(8,)), (in_features,), num_classes, train_size)


@cache
def load_motifs(*, shape: tuple[int, ...] = (1, 6, 6), num_classes: int = 4, train_size: int | None = 256) -> Data:
    """Patterns with sides of four points in noise, 256/256/512 inputs (M, *shape)."""
    return _reference(Motifs(extent=(4,), noise=(0.3,)), shape, num_classes, train_size)


@cache
def load_subset(
    *,
    problem: Subset,
    num_classes: int = 10,
    train_size: int | None = None,
    sizes: tuple[int, int, int] = (1_024, NUM_VALIDATION, 128),
) -> Data:
    """A subset of a data set, with `sizes` samples to train, validate and test with."""
    shape = tuple(problem.load().train_x.shape[1:])
    return _reference(problem, shape, num_classes, train_size, sizes=sizes)


@cache
def load_numbers(*, in_features: int = 8, num_outputs: int = 1, train_size: int | None = None) -> Data:
    """Outputs of a teacher of 8 hidden units, 512/256/512 inputs (M, in_features)."""
    return _reference(TeacherNumbers(hidden=(8,)), (in_features,), num_outputs, train_size)


def _reference(
    problem: Problem,
    shape: tuple[int, ...],
    num_classes: int,
    train_size: int | None,
    sizes: tuple[int, int, int] = (NUM_TRAIN, NUM_VALIDATION, NUM_TEST),
) -> Data:
    rng = np.random.default_rng(REFERENCE_RNG_SEED)
    samples, _ = problem.generate(rng, num_samples=sum(sizes), shape=shape, num_classes=num_classes)
    test, validation, train = deal(samples, sizes[:0:-1], train_size=train_size)
    return as_data(train=train, validation=validation, test=test, num_classes=num_classes)


def _teach(
    rng: np.random.Generator, inputs: NDArray[np.float64], hidden: int, gain: float, num_outputs: int
) -> NDArray[np.float64]:
    """Outputs (M, num_outputs) of a random network with `hidden` units; 0 is a linear one."""
    features = inputs
    if hidden:
        directions = rng.standard_normal((inputs.shape[1], hidden)) / math.sqrt(inputs.shape[1])
        features = np.tanh(gain * (inputs @ directions + rng.standard_normal(hidden)))
    return features @ rng.standard_normal((features.shape[1], num_outputs))


def _standardised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return (values - values.mean(axis=0)) / values.std(axis=0)


def _features(shape: tuple[int, ...]) -> int:
    if len(shape) != 1:
        raise ValueError(f"this problem has plain features, not inputs of shape {shape}")
    return shape[0]


def _balanced_labels(rng: np.random.Generator, num_samples: int, num_classes: int) -> NDArray[np.int64]:
    return rng.permutation(np.arange(num_samples) % num_classes)


def check_choices(**choices: tuple[float, ...]) -> None:
    """Raise unless every named difficulty lists numbers to draw from, none negative."""
    for name, values in choices.items():
        if not values or min(values) < 0:
            raise ValueError(f"{name} must list at least one number, none negative, got {values}")

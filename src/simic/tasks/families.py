"""Families: tasks drawn at random, so that hosts differ in how much growth pays: some need none, some a lot.

A family draws an architecture, which makes a task; the task draws the data of each of its hosts. Splits share nothing:
widths, difficulties and random streams differ, and held_out goes beyond what train contains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product

import numpy as np

from simic.tasks.data import Data, load_digits, load_mnist1d
from simic.tasks.hosts import plain_mlp_host
from simic.tasks.problems import Motifs, Problem, Spirals, Subset, Teacher, load_motifs, load_subset, load_teacher
from simic.tasks.recipe import DIGITS_CNN, DIGITS_MLP, Recipe, conv_for, mlp_for, transformer_for
from simic.tasks.registry import SPLITS, Split
from simic.tasks.sequences import Counting, Delay, PairTable, load_sequences
from simic.tasks.task import Task
from simic.tasks.training_ranges import TrainingRanges
from simic.tasks.variation import HostVariation


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What the tasks of one split are drawn from, each field independently and uniformly."""

    recipes: tuple[Recipe, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    """Segments before the head; the first `min_slots` have a slot, and a random number of those that follow."""
    min_slots: int = 1
    variation: HostVariation
    """What differs between the hosts of a task."""
    training: TrainingRanges | None = None
    """How hosts are trained; None for all alike."""


@dataclass(frozen=True, kw_only=True)
class TaskFamily:
    """Draws tasks from ranges."""

    ranges: Mapping[Split, tuple[Ranges, ...]]
    """One of a split's ranges is drawn for every task; one that is listed twice is drawn twice as often."""

    def __post_init__(self) -> None:
        if set(self.ranges) != set(SPLITS):
            raise ValueError(f"a family needs ranges for {', '.join(SPLITS)}, got {', '.join(self.ranges)}")
        for one, other in combinations(SPLITS, 2):
            if shared := self._widths(one) & self._widths(other):
                raise ValueError(f"splits must not share widths, got {sorted(shared)} in {one} and {other}")

    def draw(self, rng_seed: int, split: Split) -> Task:
        """A task with an architecture of its own, determined by family, split and rng seed."""
        stream = (SPLITS.index(split), rng_seed)
        rng = np.random.default_rng(stream)
        ranges = self.ranges[split][rng.integers(len(self.ranges[split]))]
        recipe = ranges.recipes[rng.integers(len(ranges.recipes))]
        width, depth = int(rng.choice(ranges.widths)), int(rng.choice(ranges.depths))
        num_slots = int(rng.integers(ranges.min_slots, depth, endpoint=True))
        task = replace(
            recipe.build(width=width, depth=depth, num_slots=num_slots),
            variation=replace(ranges.variation, stream=stream),
            traits={"width": width, "depth": depth, "num_slots": num_slots},
        )
        if ranges.training is not None:
            task = ranges.training.apply(task, rng)
        if not ranges.variation.problems:
            return task
        # The task's own data come from a stream that none of its hosts uses.
        own = replace(task.variation, stream=(*stream, 0)).host(task.data, task.learning_rate, rng_seed)
        return replace(task, data=own.data)

    def _widths(self, split: Split) -> set[int]:
        return {width for ranges in self.ranges[split] for width in ranges.widths}


GENERATED = tuple(
    Recipe(
        load=partial(load_teacher, in_features=in_features, num_classes=num_classes),
        host=partial(mlp_for, host=plain_mlp_host),
        batch_size=64,
        learning_rate=2e-2,
    )
    for in_features, num_classes in product((2, 4, 8), (2, 3, 4))
)
"""Input features and classes of the mlp family; the problems replace the data."""


def _pictures(load: Callable[..., Data], learning_rate: float) -> Recipe:
    return Recipe(load=load, host=conv_for, batch_size=32, learning_rate=learning_rate)


PICTURES = tuple(
    _pictures(partial(load_motifs, shape=shape, num_classes=num_classes), 2e-2)
    for shape, num_classes in product(((1, 20), (1, 6, 6)), (2, 4, 8))
)
"""Shapes and classes of the cnn family."""

TOKENS = tuple(
    Recipe(
        load=partial(load_sequences, length=length, num_tokens=num_tokens),
        host=transformer_for,
        batch_size=32,
        learning_rate=1e-2,
    )
    for length, num_tokens in product((8, 12), (4, 6))
)
"""Lengths and numbers of tokens of the sequences family."""


def _variation(*problems: Problem) -> HostVariation:
    return HostVariation(
        problems=problems,
        data_share=(1.0, 0.5, 0.25),
        label_noise=(0.0, 0.0, 0.1, 0.2),
        rate_factor=(0.5, 1.5),
    )


def _digits_variation(data_share: tuple[float, ...]) -> HostVariation:
    return HostVariation(data_share=data_share, label_noise=(0.0, 0.0, 0.15, 0.4), rate_factor=(0.5, 2.0))


_MLP: dict[Split, Ranges] = {
    "train": Ranges(
        recipes=GENERATED,
        widths=(6, 6, 8, 12, 16),
        depths=(1, 2, 2),
        variation=_variation(
            Spirals(turns=(0.0, 0.5, 1.0, 1.5, 2.0), noise=(0.05, 0.1)), Teacher(hidden=(0, 0, 4, 16))
        ),
    ),
    "validation": Ranges(
        recipes=GENERATED,
        widths=(7, 10, 20),
        depths=(1, 2, 2),
        variation=_variation(Spirals(turns=(0.1, 0.75, 1.25, 1.75), noise=(0.05, 0.1)), Teacher(hidden=(2, 8))),
    ),
    "held_out": Ranges(
        recipes=GENERATED,
        widths=(5, 9, 14, 24),
        depths=(1, 2, 3),
        variation=_variation(Spirals(turns=(0.05, 0.6, 1.1, 1.6, 1.9), noise=(0.05, 0.1)), Teacher(hidden=(3, 6, 32))),
    ),
}
_CNN: dict[Split, Ranges] = {
    "train": Ranges(
        recipes=PICTURES,
        widths=(4, 6, 8),
        depths=(1, 2, 2),
        variation=_variation(Motifs(extent=(2, 4, 6), noise=(0.1, 0.3, 0.6))),
    ),
    "validation": Ranges(
        recipes=PICTURES, widths=(7, 10), depths=(1, 2, 2), variation=_variation(Motifs(extent=(5,), noise=(0.2, 0.5)))
    ),
    "held_out": Ranges(
        recipes=PICTURES,
        widths=(5, 9, 14),
        depths=(1, 2, 3),
        variation=_variation(Motifs(extent=(3,), noise=(0.15, 0.4, 0.5))),
    ),
}
_SUBSET_DIGITS = Subset(name="digits", load=load_digits)
_SUBSET_MNIST1D = Subset(name="mnist1d", load=load_mnist1d)


def _sequences(problems: tuple[Problem, ...], widths: tuple[int, ...], depths: tuple[int, ...]) -> Ranges:
    """Transformers of even width: with an odd one there would be a single head."""
    # No seed can grow beside the embedding, so every host has a block with a slot too.
    return Ranges(recipes=TOKENS, widths=widths, depths=depths, min_slots=2, variation=_variation(*problems))


def _subsets(
    problems: tuple[tuple[Subset, int], ...], widths: tuple[int, ...], depths: tuple[int, ...]
) -> tuple[Ranges, ...]:
    """Convolutional hosts on some classes of data sets, with many clean samples."""
    return tuple(
        Ranges(
            recipes=(_pictures(partial(load_subset, problem=problem, num_classes=num_classes), 1e-2),),
            widths=widths,
            depths=depths,
            variation=HostVariation(problems=(problem,), rate_factor=(0.5, 1.5)),
        )
        for problem, num_classes in problems
    )


_DIGITS: dict[Split, Ranges] = {
    "train": Ranges(
        recipes=(DIGITS_MLP, DIGITS_CNN),
        widths=(4, 6, 10, 16),
        depths=(1, 2, 3),
        variation=_digits_variation((1.0, 0.3, 0.1)),
    ),
    "validation": Ranges(
        recipes=(DIGITS_MLP, DIGITS_CNN), widths=(5, 8, 12), depths=(1, 2, 3), variation=_digits_variation((0.6, 0.2))
    ),
    "held_out": Ranges(
        recipes=(DIGITS_MLP, DIGITS_CNN),
        widths=(7, 14, 20),
        depths=(2, 4),
        variation=_digits_variation((0.8, 0.15, 0.05)),
    ),
}

# Small MLPs on spirals and random teachers of 2 to 8 inputs and 2 to 4 classes.
MLP = TaskFamily(ranges={split: (_MLP[split],) for split in SPLITS})
# Small convolutional networks on motifs in noisy curves and images, 2 to 8 classes.
CNN = TaskFamily(ranges={split: (_CNN[split],) for split in SPLITS})
# Four tasks like those of MLP for each one like those of CNN.
MIXED = TaskFamily(ranges={split: (_MLP[split],) * 4 + (_CNN[split],) for split in SPLITS})
# Convolutional networks on a thousand clean samples of digits or mnist1d: they lack parameters.
SUBSETS = TaskFamily(
    ranges={
        "train": _subsets(
            ((_SUBSET_DIGITS, 10), (_SUBSET_MNIST1D, 10), (_SUBSET_MNIST1D, 5)), (4, 6, 8, 12), (1, 2, 2)
        ),
        "validation": _subsets(((_SUBSET_MNIST1D, 8),), (7, 10), (1, 2, 2)),
        "held_out": _subsets(((_SUBSET_MNIST1D, 9), (_SUBSET_MNIST1D, 6)), (5, 9, 14), (1, 2, 3)),
    }
)
# Small transformers that tag sequences: tokens at a distance, counts, tables of token pairs.
SEQUENCES = TaskFamily(
    ranges={
        "train": (
            _sequences(
                (Delay(distance=(0, 2, 5)), Counting(modulus=(2,)), PairTable(lag=(0, 2))), (8, 8, 16), (2, 2, 3)
            ),
        ),
        "validation": (
            _sequences((Delay(distance=(1, 4)), Counting(modulus=(3,)), PairTable(lag=(1, 3))), (12, 20), (2, 2, 3)),
        ),
        "held_out": (
            _sequences((Delay(distance=(3, 6)), Counting(modulus=(4,)), PairTable(lag=(4, 5))), (10, 24), (2, 3, 4)),
        ),
    }
)
# MLPs and convolutional networks on scikit-learn's digits, with fewer samples and wrong labels.
DIGITS = TaskFamily(ranges={split: (_DIGITS[split],) for split in SPLITS})

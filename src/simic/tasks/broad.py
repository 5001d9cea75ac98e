"""Family broad: hosts of many kinds, sizes and ways of training, for controllers that should work anywhere.

MLPs of up to twelve slots on generated problems, real tables and numbers to predict; convolutions in one and two
dimensions, with norms of samples or of batches; small transformers. Training differs in length and in what is known
about its end, in optimizer, learning rate, batch size, initial weights, number and balance of samples, and label noise.
Data sets are of one split only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np

from simic.tasks.data import Data, as_data, deal, load_digits
from simic.tasks.families import CNN, GENERATED, MLP, PICTURES, SEQUENCES, SUBSETS, Ranges, TaskFamily
from simic.tasks.hosts import plain_mlp_host
from simic.tasks.problems import Subset, TeacherNumbers, load_numbers, load_subset
from simic.tasks.recipe import Recipe, mlp_for, resnet_for
from simic.tasks.registry import SPLITS, Split
from simic.tasks.training_ranges import TrainingRanges
from simic.tasks.variation import HostVariation

HOST_EPOCHS: dict[Split, tuple[int, ...]] = {
    "train": (8, 12, 16, 24, 24, 32, 48),
    "validation": (10, 20, 28, 40),
    "held_out": (9, 14, 22, 36, 56, 96),
}
_COSTLY: dict[Split, TrainingRanges] = {
    "train": TrainingRanges(host_epochs=(8, 12, 16), batch_factors=(1.0, 2.0)),
    "validation": TrainingRanges(host_epochs=(10, 20), batch_factors=(1.0, 2.0)),
    "held_out": TrainingRanges(host_epochs=(9, 14, 22, 36), batch_factors=(1.0, 2.0)),
}
"""Of subsets, sequences and residual networks, which cost several times as much as the others."""
RATE_FACTOR = (0.3, 3.0)
BALANCE = (1.0, 1.0, 0.3, 0.1)


@cache
def load_sklearn_table(name: str) -> Data:
    """A table of scikit-learn, a tenth each for validation and test, with standardised columns."""
    from sklearn import datasets  # slow to import

    columns, labels = map(np.asarray, getattr(datasets, f"load_{name}")(return_X_y=True))
    held_out = len(labels) // 10
    test, validation, train = deal((columns, labels), (held_out, held_out), train_size=None)
    mean, std = train[0].mean(0), np.maximum(train[0].std(0), 1e-12)
    test, validation, train = (((x - mean) / std, y) for x, y in (test, validation, train))
    return as_data(train=train, validation=validation, test=test, num_classes=int(labels.max()) + 1)


def _tables(problem: Subset, num_classes: Sequence[int], sizes: tuple[int, int, int]) -> tuple[Recipe, ...]:
    return tuple(
        Recipe(
            load=partial(load_subset, problem=problem, num_classes=number, sizes=sizes),
            host=mlp_for,
            batch_size=32,
            learning_rate=1e-2,
            problems=(problem,),
        )
        for number in num_classes
    )


_TABLES: dict[Split, tuple[tuple[Subset, tuple[int, ...], tuple[int, int, int]], ...]] = {
    "train": (
        (Subset(name="digits", load=partial(load_digits, flat=True)), (4, 10), (320, 128, 64)),
        (Subset(name="breast_cancer", load=partial(load_sklearn_table, "breast_cancer")), (2,), (288, 96, 96)),
    ),
    "validation": ((Subset(name="iris", load=partial(load_sklearn_table, "iris")), (3,), (64, 36, 34)),),
    "held_out": ((Subset(name="wine", load=partial(load_sklearn_table, "wine")), (3,), (80, 40, 40)),),
}
"""Data sets of each split: their numbers of classes, and of samples to train, validate and test with."""
_NUMBERS = tuple(
    Recipe(
        load=partial(load_numbers, in_features=in_features, num_outputs=num_outputs),
        host=partial(mlp_for, host=plain_mlp_host),
        batch_size=64,
        learning_rate=1e-2,
    )
    for in_features, num_outputs in product((2, 4, 8), (1, 2))
)
_DEEP = tuple(replace(recipe, host=mlp_for, learning_rate=1e-2) for recipe in GENERATED)
"""Deep networks need the norms that those of family mlp do without."""
_NORMED = tuple(replace(recipe, host=resnet_for) for recipe in PICTURES)
"""Residual networks with batch norm."""
_RESNET_WIDTHS: dict[Split, tuple[int, ...]] = {"train": (4, 8), "validation": (7,), "held_out": (5, 9)}
_TEACHERS: dict[Split, tuple[int, ...]] = {"train": (0, 4, 16), "validation": (2, 8), "held_out": (3, 6, 32)}
_DEPTHS: dict[Split, tuple[int, ...]] = {"train": (3, 4, 6, 12), "validation": (3, 5, 8), "held_out": (4, 7, 10)}
_MLP_WIDTHS: dict[Split, tuple[int, ...]] = {
    "train": (6, 8, 16, 32),
    "validation": (10, 20),
    "held_out": (9, 14, 24, 40),
}
_TOKEN_WIDTHS: dict[Split, tuple[int, ...]] = {"train": (8, 8, 16), "validation": (20,), "held_out": (24,)}


def _ranges(split: Split) -> tuple[Ranges, ...]:
    """What tasks of a split are drawn from: nine of 26 are plain MLPs."""
    (mlp,), (cnn,), (sequences,) = (family.ranges[split] for family in (MLP, CNN, SEQUENCES))
    widths, teachers = _MLP_WIDTHS[split], _TEACHERS[split]
    deep = replace(mlp, recipes=_DEEP, widths=widths, depths=_DEPTHS[split], min_slots=3)
    numbers = replace(
        mlp,
        recipes=_NUMBERS,
        variation=replace(mlp.variation, problems=(TeacherNumbers(hidden=teachers, noise=(0.0, 0.2, 0.5)),)),
    )
    normed = replace(cnn, recipes=_NORMED, widths=_RESNET_WIDTHS[split], depths=_DEPTHS[split][:2])
    tables = tuple(
        Ranges(
            recipes=_tables(problem, num_classes, sizes),
            widths=widths,
            depths=(1, 2, 3, 4),
            variation=HostVariation(problems=(problem,), data_share=(1.0, 0.5), label_noise=(0.0, 0.0, 0.1, 0.2)),
        )
        for problem, num_classes, sizes in _TABLES[split]
    )
    sequences = replace(sequences, widths=_TOKEN_WIDTHS[split])
    subsets = SUBSETS.ranges[split]
    cheap, costly = TrainingRanges(host_epochs=HOST_EPOCHS[split]), _COSTLY[split]
    return tuple(
        replace(own, variation=replace(own.variation, rate_factor=RATE_FACTOR, balance=BALANCE), training=training)
        for own, training in (
            *[(mlp, cheap)] * 9,
            *[(own, cheap) for own in (deep, deep, numbers, numbers, tables[0], tables[-1], *[cnn] * 6)],
            *[(own, costly) for own in (*(subsets * 3)[1:4], sequences, normed)],
        )
    )


BROAD = TaskFamily(ranges={split: _ranges(split) for split in SPLITS})

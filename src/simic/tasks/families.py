"""Task families: tasks drawn at random, so that hosts differ in how much growth pays: some need none, some a lot.

A family draws an architecture, which makes a task; the task draws what each of its hosts learns. What one split draws
no other does: widths, difficulties and random streams differ, and held_out goes beyond what train has seen.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product

import numpy as np

from simic.tasks import DEFAULT_FAMILY, SPLITS, Split
from simic.tasks.data import Data, load_digits, load_mnist1d
from simic.tasks.hosts import plain_mlp_host, slot_names
from simic.tasks.problems import Motifs, Problem, Spirals, Subset, Teacher, load_motifs, load_subset, load_teacher
from simic.tasks.task import PRESETS, Preset, Task, at_width, conv_for, mlp_for
from simic.tasks.variation import HostVariation


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """What the tasks of one split are drawn from, each field on its own and uniformly."""

    presets: tuple[Preset, ...]
    """Data, kind of host, batch size and learning rate."""
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    """Segments before the head; the first has a slot, and perhaps those that follow it."""
    draws: HostVariation
    """What differs between the hosts of a task."""


@dataclass(frozen=True, kw_only=True)
class TaskFamily:
    """Tasks that one controller should master."""

    name: str
    description: str
    ranges: Mapping[Split, tuple[Ranges, ...]]
    """Several in a split take turns at random; what is listed twice comes twice as often."""

    def __post_init__(self) -> None:
        if set(self.ranges) != set(SPLITS):
            raise ValueError(f"family {self.name} needs ranges for {', '.join(SPLITS)}, got {', '.join(self.ranges)}")
        for one, other in combinations(SPLITS, 2):
            shared = self._widths(one) & self._widths(other)
            if shared:
                raise ValueError(
                    f"family {self.name}: splits must not share widths, got {sorted(shared)} in {one} and {other}"
                )

    def draw_task(self, rng_seed: int, split: Split = "train") -> Task:
        """A task of its own architecture, determined by family, split and rng seed."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        if rng_seed < 0:
            raise ValueError(f"rng_seed must not be negative, got {rng_seed}")
        stream = (SPLITS.index(split), rng_seed)
        rng = np.random.default_rng(stream)
        ranges = self.ranges[split][rng.integers(len(self.ranges[split]))]
        preset = ranges.presets[rng.integers(len(ranges.presets))]
        width, depth = int(rng.choice(ranges.widths)), int(rng.choice(ranges.depths))
        num_slots = int(rng.integers(1, depth, endpoint=True))
        data = preset.load()
        task = Task(
            name=f"{self.name}-{split}-{rng_seed}",
            data=data,
            make_host=preset.host(data, width, depth),
            host_of_width=partial(at_width, preset.host, data, depth),
            slots=slot_names(num_slots),
            batch_size=preset.batch_size,
            learning_rate=preset.learning_rate,
            draws=replace(ranges.draws, stream=stream),
            traits={"width": width, "depth": depth, "num_slots": num_slots},
        )
        if not ranges.draws.problems:
            return task
        # A problem of the task's own, from a stream that no host draws from.
        own = replace(task.draws, stream=(*stream, 0)).host(data, task.learning_rate, rng_seed)
        return replace(task, data=own.data)

    def _widths(self, split: Split) -> set[int]:
        return {width for ranges in self.ranges[split] for width in ranges.widths}


def find_family(name: str = DEFAULT_FAMILY) -> TaskFamily:
    """The family of that name; an unknown one raises with close matches."""
    if name in FAMILIES:
        return FAMILIES[name]
    hint = " or ".join(difflib.get_close_matches(name, FAMILIES)) or ", ".join(FAMILIES)
    raise ValueError(f"no task family is named {name!r}; did you mean {hint}?")


GENERATED = tuple(
    Preset(
        load=partial(load_teacher, in_features=in_features, num_classes=num_classes),
        host=partial(mlp_for, host=plain_mlp_host),
        width=8,
        batch_size=64,
        learning_rate=2e-2,
    )
    for in_features, num_classes in product((2, 4, 8), (2, 3, 4))
)
"""Input features and classes of the mlp family; draws replace the data."""


def _pictures(load: Callable[..., Data], learning_rate: float) -> Preset:
    return Preset(load=load, host=conv_for, width=8, batch_size=32, learning_rate=learning_rate)


PICTURES = tuple(
    _pictures(partial(load_motifs, shape=shape, num_classes=num_classes), 2e-2)
    for shape, num_classes in product(((1, 20), (1, 6, 6)), (2, 4, 8))
)
"""Shapes and classes of the cnn family."""
DIGITS = (PRESETS["digits-mlp"], PRESETS["digits-cnn"])


def _draws(*problems: Problem) -> HostVariation:
    return HostVariation(
        problems=problems,
        data_share=(1.0, 0.5, 0.25),
        label_noise=(0.0, 0.0, 0.1, 0.2),
        rate_factor=(0.5, 1.5),
    )


def _digits_draws(data_share: tuple[float, ...]) -> HostVariation:
    return HostVariation(data_share=data_share, label_noise=(0.0, 0.0, 0.15, 0.4), rate_factor=(0.5, 2.0))


_MLP: dict[Split, Ranges] = {
    "train": Ranges(
        presets=GENERATED,
        widths=(6, 6, 8, 12, 16),
        depths=(1, 2, 2),
        draws=_draws(Spirals(turns=(0.0, 0.5, 1.0, 1.5, 2.0), noise=(0.05, 0.1)), Teacher(hidden=(0, 0, 4, 16))),
    ),
    "validation": Ranges(
        presets=GENERATED,
        widths=(7, 10, 20),
        depths=(1, 2, 2),
        draws=_draws(Spirals(turns=(0.1, 0.75, 1.25, 1.75), noise=(0.05, 0.1)), Teacher(hidden=(2, 8))),
    ),
    "held_out": Ranges(
        presets=GENERATED,
        widths=(5, 9, 14, 24),
        depths=(1, 2, 3),
        draws=_draws(Spirals(turns=(0.05, 0.6, 1.1, 1.6, 1.9), noise=(0.05, 0.1)), Teacher(hidden=(3, 6, 32))),
    ),
}
_CNN: dict[Split, Ranges] = {
    "train": Ranges(
        presets=PICTURES,
        widths=(4, 6, 8),
        depths=(1, 2, 2),
        draws=_draws(Motifs(extent=(2, 4, 6), noise=(0.1, 0.3, 0.6))),
    ),
    "validation": Ranges(
        presets=PICTURES, widths=(7, 10), depths=(1, 2, 2), draws=_draws(Motifs(extent=(5,), noise=(0.2, 0.5)))
    ),
    "held_out": Ranges(
        presets=PICTURES,
        widths=(5, 9, 14),
        depths=(1, 2, 3),
        draws=_draws(Motifs(extent=(3,), noise=(0.15, 0.4, 0.5))),
    ),
}
_SUBSET_DIGITS = Subset(name="digits", load=load_digits)
_SUBSET_MNIST1D = Subset(name="mnist1d", load=load_mnist1d)


def _subsets(
    problems: tuple[tuple[Subset, int], ...], widths: tuple[int, ...], depths: tuple[int, ...]
) -> tuple[Ranges, ...]:
    """Convolutional hosts on so many classes of data sets, with clean samples in plenty."""
    return tuple(
        Ranges(
            presets=(_pictures(partial(load_subset, problem=problem, num_classes=num_classes), 1e-2),),
            widths=widths,
            depths=depths,
            draws=HostVariation(problems=(problem,), rate_factor=(0.5, 1.5)),
        )
        for problem, num_classes in problems
    )


_DIGITS: dict[Split, Ranges] = {
    "train": Ranges(presets=DIGITS, widths=(4, 6, 10, 16), depths=(1, 2, 3), draws=_digits_draws((1.0, 0.3, 0.1))),
    "validation": Ranges(presets=DIGITS, widths=(5, 8, 12), depths=(1, 2, 3), draws=_digits_draws((0.6, 0.2))),
    "held_out": Ranges(presets=DIGITS, widths=(7, 14, 20), depths=(2, 4), draws=_digits_draws((0.8, 0.15, 0.05))),
}

FAMILIES: dict[str, TaskFamily] = {
    "mlp": TaskFamily(
        name="mlp",
        description="Small MLPs on spirals and random teachers of 2 to 8 inputs and 2 to 4 classes.",
        ranges={split: (_MLP[split],) for split in SPLITS},
    ),
    "cnn": TaskFamily(
        name="cnn",
        description="Small convolutional networks on motifs in noisy curves and pictures, 2 to 8 classes.",
        ranges={split: (_CNN[split],) for split in SPLITS},
    ),
    "mixed": TaskFamily(
        name="mixed",
        description="Four tasks like those of mlp for one like those of cnn.",
        ranges={split: (_MLP[split],) * 4 + (_CNN[split],) for split in SPLITS},
    ),
    "subsets": TaskFamily(
        name="subsets",
        description="Convolutional networks on a thousand clean samples of digits or mnist1d: they lack parameters.",
        ranges={
            "train": _subsets(
                ((_SUBSET_DIGITS, 10), (_SUBSET_MNIST1D, 10), (_SUBSET_MNIST1D, 5)), (4, 6, 8, 12), (1, 2, 2)
            ),
            "validation": _subsets(((_SUBSET_MNIST1D, 8),), (7, 10), (1, 2, 2)),
            "held_out": _subsets(((_SUBSET_MNIST1D, 9), (_SUBSET_MNIST1D, 6)), (5, 9, 14), (1, 2, 3)),
        },
    ),
    "digits": TaskFamily(
        name="digits",
        description="MLPs and convolutional networks on scikit-learn's digits, with fewer samples and wrong labels.",
        ranges={split: (_DIGITS[split],) for split in SPLITS},
    ),
}
"""A new family is one row."""

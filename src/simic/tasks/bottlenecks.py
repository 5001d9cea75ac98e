"""Family bottlenecks: hosts whose first layer has two flaws, so that growth of the right kind pays much or nothing.

It squeezes most inputs into two features and makes waves of the last two inputs, which nothing combines:

    x[:-2] -> narrow, 2 features --------+-> linear layers -> head
    x[-2:] -> sin(frequency x), 2 waves -+

What the narrow layer throws away only a seed beside the stem can keep (width). What the waves tell together only a seed
behind the stem can see (depth). Until one of them grows, such a host guesses.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from simic.tasks.data import Data, Samples
from simic.tasks.families import Ranges, TaskFamily
from simic.tasks.hosts import check_positive, slot_names
from simic.tasks.problems import Traits, load_teacher
from simic.tasks.recipe import Recipe
from simic.tasks.registry import Split
from simic.tasks.variation import HostVariation

NARROW, WAVES = 2, 2
"""Features that the squeezed inputs become, and inputs that become waves."""
Need = Literal["nothing", "width", "depth", "both"]


@dataclass(frozen=True, kw_only=True)
class Flawed:
    """Labels of normally distributed inputs that the host tells only with seeds of some kind."""

    needs: tuple[Need, ...]
    """What a host needs, drawn from these: `nothing` beyond the host alone, a seed beside the stem (`width`), behind it
    (`depth`), or, with four classes, `both`."""
    frequency: float
    """That of the host's waves."""

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Classes are balanced."""
        need = self.needs[rng.integers(len(self.needs))]
        inputs = rng.standard_normal((num_samples, *shape))
        squeezed, waves = inputs[:, :-WAVES], np.sin(self.frequency * inputs[:, -WAVES:])
        length = (squeezed**2).sum(1)
        is_long, same_sign = length > np.median(length), waves.prod(1) > 0
        labels = {
            "nothing": squeezed @ rng.standard_normal(squeezed.shape[1]) > 0,
            "width": is_long,
            "depth": same_sign,
            "both": 2 * is_long + same_sign,
        }[need]
        return (inputs, labels.astype(np.int64)), {"problem": f"flawed-{need}", "frequency": self.frequency}


class FlawedStem(nn.Module):
    """The layer with two flaws."""

    def __init__(self, in_features: int, frequency: float) -> None:
        super().__init__()
        self.frequency = frequency
        self.narrow = nn.Linear(in_features - WAVES, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.narrow(x[..., :-WAVES]), torch.sin(self.frequency * x[..., -WAVES:])), -1)


def flawed_host(in_features: int, width: int, depth: int, num_classes: int, frequency: float) -> nn.Sequential:
    """The flawed stem and linear layers: without seeds the whole network is linear in the stem's output."""
    check_positive(in_features=in_features, width=width, depth=depth, num_classes=num_classes)
    segments, features = OrderedDict[str, nn.Module](), in_features
    for name in slot_names(depth):
        segments[name] = nn.Linear(features, width) if segments else FlawedStem(in_features, frequency)
        features = width if len(segments) > 1 else NARROW + WAVES
    segments["head"] = nn.Linear(features, num_classes)
    return nn.Sequential(segments)


def _host_for(data: Data, depth: int, width: int, *, frequency: float) -> partial[nn.Sequential]:
    return partial(flawed_host, data.train_x.shape[1], width, depth, data.num_classes, frequency)


def _ranges(
    frequencies: tuple[float, ...],
    in_features: tuple[int, ...],
    widths: tuple[int, ...],
    depths: tuple[int, ...] = (2, 2, 3),
) -> tuple[Ranges, ...]:
    """Three of four tasks have two classes."""
    two_classes: tuple[Need, ...] = ("nothing", "width", "depth")
    return tuple(
        Ranges(
            recipes=tuple(
                Recipe(
                    load=partial(load_teacher, in_features=features, num_classes=num_classes),
                    host=partial(_host_for, frequency=frequency),
                    batch_size=32,
                    learning_rate=2e-2,
                )
                for features in in_features
            ),
            widths=widths,
            depths=depths,
            variation=HostVariation(
                problems=(Flawed(needs=needs, frequency=frequency),),
                data_share=(1.0, 0.5, 0.25),
                label_noise=(0.0, 0.0, 0.1, 0.2),
                rate_factor=(0.5, 1.5),
            ),
        )
        for frequency, (needs, num_classes) in product(frequencies, [(two_classes, 2)] * 3 + [(("both",), 4)])
    )


_RANGES: dict[Split, tuple[Ranges, ...]] = {
    "train": _ranges((7.0, 13.0), (8, 9, 12), (12, 16, 32)),
    "validation": _ranges((8.5,), (8, 11), (20,)),
    "held_out": _ranges((11.0,), (7, 13), (28, 40), (2, 3, 4)),
}
BOTTLENECKS = TaskFamily(ranges=_RANGES)

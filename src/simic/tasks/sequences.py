"""Generated problems of tagging sequences: tokens at a distance, counts of a token, tables of two tokens.

Every position has a label that follows from the tokens up to it. The problems need different things: an earlier
position has to be found, many positions have to be summed up, or many pairs have to be told apart.

Shapes: M sequences of L tokens, each one of K; labels (M, L) are of the same K. All random numbers come from the
generator that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from simic.tasks.data import Data, Samples
from simic.tasks.problems import REFERENCE_RNG_SEED, Traits, check_choices, generate_data

SIZES = (384, 64, 128)
"""Sequences to train, validate and test with; each has as many labels as tokens."""


@dataclass(frozen=True, kw_only=True)
class Delay:
    """The label is the token some positions earlier."""

    distance: tuple[int, ...]
    """Positions back, drawn from these; 0 is the token itself, which no other position is needed for."""

    def __post_init__(self) -> None:
        check_choices(distance=self.distance)

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Uniform tokens; before the start of a sequence there are zeros."""
        distance = int(rng.choice(self.distance))
        tokens = _uniform_tokens(rng, num_samples, shape, num_classes)
        return (tokens, _earlier(tokens, distance)), {"problem": "delay", "distance": distance}


@dataclass(frozen=True, kw_only=True)
class Counting:
    """The label is how often token 0 has occurred, modulo a number."""

    modulus: tuple[int, ...]
    """Drawn from these; at most as many as there are tokens."""

    def __post_init__(self) -> None:
        check_choices(modulus=self.modulus)
        if min(self.modulus) < 2:
            raise ValueError(f"counts need a modulus of at least 2, got {self.modulus}")

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Uniform tokens."""
        modulus = int(rng.choice(self.modulus))
        if modulus > num_classes:
            raise ValueError(f"counts modulo {modulus} need as many tokens, got {num_classes}")
        tokens = _uniform_tokens(rng, num_samples, shape, num_classes)
        return (tokens, (tokens == 0).cumsum(1) % modulus), {"problem": "counting", "modulus": modulus}


@dataclass(frozen=True, kw_only=True)
class PairTable:
    """The label is looked up in a random table, by the token and the one some positions earlier."""

    lag: tuple[int, ...]
    """Positions back, drawn from these; 0 is a table of single tokens."""

    def __post_init__(self) -> None:
        check_choices(lag=self.lag)

    def generate(
        self, rng: np.random.Generator, *, num_samples: int, shape: tuple[int, ...], num_classes: int
    ) -> tuple[Samples, Traits]:
        """Uniform tokens; every row and column of the table holds every label, so that one token tells nothing."""
        lag = int(rng.choice(self.lag))
        tokens = _uniform_tokens(rng, num_samples, shape, num_classes)
        rows, columns, names = (rng.permutation(num_classes) for _ in range(3))
        table = names[(rows[:, None] + columns) % num_classes]
        return (tokens, table[tokens, _earlier(tokens, lag)]), {"problem": "pair_table", "lag": lag}


@cache
def load_sequences(*, length: int = 12, num_tokens: int = 4, train_size: int | None = None) -> Data:
    """Tokens three positions earlier, 384/64/128 sequences (M, length)."""
    sizes = (SIZES[0] if train_size is None else train_size, *SIZES[1:])
    rng = np.random.default_rng(REFERENCE_RNG_SEED)
    return generate_data(Delay(distance=(3,)), rng, sizes=sizes, shape=(length,), num_classes=num_tokens)[0]


def _uniform_tokens(
    rng: np.random.Generator, num_samples: int, shape: tuple[int, ...], num_tokens: int
) -> NDArray[np.int64]:
    if len(shape) != 1:
        raise ValueError(f"this problem has sequences of tokens, not inputs of shape {shape}")
    return rng.integers(num_tokens, size=(num_samples, *shape))


def _earlier(tokens: NDArray[np.int64], distance: int) -> NDArray[np.int64]:
    """The tokens `distance` positions earlier, zeros before the start."""
    length = tokens.shape[1]
    return np.pad(tokens, ((0, 0), (distance, 0)))[:, :length]

"""Rng seeds of hosts and tasks, derived from the run's rng seed."""

from __future__ import annotations

import numpy as np

UNTOLD_EVERY = 4
"""One host in so many tells neither its number of samples nor the noise of its figures."""


def host_rng_seed(rng_seed: int, episode: int, env: int) -> int:
    """Rng seed of the host of an episode: its data, initial weights, batches and seeds."""
    return _derive(rng_seed, episode, env)


def task_rng_seed(rng_seed: int, task: int) -> int:
    """Rng seed of the task of a group of hosts."""
    return _derive(rng_seed, task)


def tells_data(rng_seed: int) -> bool:
    """Whether controllers are told of this host what a user's own training loop may leave out, as it often does."""
    return _derive(rng_seed, 0) % UNTOLD_EVERY != 0


def _derive(rng_seed: int, *key: int) -> int:
    sequence = np.random.SeedSequence(rng_seed, spawn_key=key)
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))  # torch and numpy both accept 63 bits

"""Rng seeds of hosts and tasks, derived from the run's rng seed."""

from __future__ import annotations

import numpy as np


def host_rng_seed(rng_seed: int, episode: int, env: int) -> int:
    """Rng seed of the host of an episode: its data, initial weights, batches and seeds."""
    return _derive(rng_seed, episode, env)


def task_rng_seed(rng_seed: int, task: int) -> int:
    """Rng seed of the task of a group of hosts."""
    return _derive(rng_seed, task)


def _derive(rng_seed: int, *key: int) -> int:
    sequence = np.random.SeedSequence(rng_seed, spawn_key=key)
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))  # torch and numpy both accept 63 bits

"""Passes through a network that leave it as it was: its buffers, its modes and torch's random streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(module: nn.Module, exempt: nn.Module | None = None) -> Iterator[None]:
    """Run passes whose changes to buffers (normalisation statistics) and random streams are forgotten.

    The buffers of `exempt` do change.
    """
    spared = set(exempt.modules()) if exempt is not None else set()
    owners = [(owner, name) for owner in module.modules() if owner not in spared for name in owner._buffers]
    originals = [owner._buffers[name] for owner, name in owners]
    # Clones are swapped in, rather than values copied back, so that a graph that holds the originals stays valid.
    for (owner, name), buffer in zip(owners, originals, strict=True):
        owner._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with preserved_rng():
            yield
    finally:
        for (owner, name), buffer in zip(owners, originals, strict=True):
            owner._buffers[name] = buffer


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put torch's random streams back where they were, on the CPU and on every CUDA device in use."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> list[Tensor]:
    """Where torch's random streams stand: the CPU's, then one per CUDA device."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def set_rng_state(state: list[Tensor]) -> None:
    """Put torch's random streams where `rng_state` found them."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule is in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training

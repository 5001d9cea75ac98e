"""Passes through a network that leave it as it was: its buffers, its modes and the global random streams.

Modes and buffers belong to the network, not to a thread: another thread that uses the network during such a pass finds
it in evaluation mode, and what it writes into buffers is lost.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def preserve_state(module: nn.Module, exempt: nn.Module | None = None) -> Iterator[None]:
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


class RngState(NamedTuple):
    """Where the global random streams stand."""

    cpu: Tensor
    cuda: list[Tensor]  # one per device
    numpy: dict[str, Any]
    python: tuple[Any, ...]


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the global random streams back where they were: torch's, on the CPU and on every CUDA device in use,
    numpy's and Python's.
    """
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> RngState:
    """Where the global random streams stand."""
    return RngState(
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        np.random.get_state(legacy=False),  # noqa: NPY002 - the stream of users who draw from it
        random.getstate(),
    )


def set_rng_state(state: RngState) -> None:
    """Put the global random streams where `rng_state` found them."""
    torch.set_rng_state(state.cpu)
    if state.cuda:
        torch.cuda.set_rng_state_all(state.cuda)
    np.random.set_state(state.numpy)  # noqa: NPY002
    random.setstate(state.python)


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


@contextmanager
def evaluating_others(known: nn.Module) -> Iterator[None]:
    """Evaluation mode for whatever modules this thread calls that are not part of `known`; afterwards as it was.

    Which modules those are shows only when they are called: a network around `known`, a frozen encoder, a metric.
    """
    own, thread, changed = set(known.modules()), get_ident(), []

    def calm(module: nn.Module, args: Any) -> None:
        if module.training and module not in own and get_ident() == thread:
            changed.extend(part for part in module.modules() if part.training and part not in own)
            for part in changed:
                part.training = False

    handle = register_module_forward_pre_hook(calm)
    try:
        with _without_hook_warning():
            yield
    finally:
        handle.remove()
        for part in changed:
            part.training = True


@contextmanager
def _without_hook_warning() -> Iterator[None]:
    """A compiled module warns that hooks on all modules see it twice, which is harmless here."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        yield

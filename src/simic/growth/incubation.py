"""How a seed learns before it is blended in, and passes through a network that leave it undisturbed.

- `direct`: no stage of its own; the seed is blended in from birth and the ramp limits its voice.
- `shadow`: a second pass with the seed switched in, in which everything but the seed is a constant.
- `straight_through`: the host's own pass; the seed hears the gradient of a loss that it does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from simic.growth.seed import Seed


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


@contextmanager
def constant_but(module: nn.Module, exempt: nn.Module) -> Iterator[None]:
    """Treat every parameter as a constant, except those of `exempt`."""
    learning = set(exempt.parameters())
    frozen = [p for p in module.parameters() if p.requires_grad and p not in learning]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def speaking_with(seed: Seed, alpha: float) -> Iterator[None]:
    """Let the seed speak with this alpha for a while."""
    previous, seed.override = seed.override, alpha
    try:
        yield
    finally:
        seed.override = previous


def shadow_loss(module: nn.Module, seeds: Sequence[tuple[Seed, float]], closure: Callable[[], Tensor]) -> Tensor:
    """The loss of `closure`, whose backward pass also teaches each seed as if it spoke with the alpha given.

    Each seed's own pass sees the same dropout masks as the host's, and leaves no trace but the seed's gradient.
    """
    before = rng_state()
    loss = closure()
    for seed, alpha in seeds:
        with undisturbed(module, seed), constant_but(module, seed), speaking_with(seed, alpha):
            set_rng_state(before)
            shadow = closure()
        loss = loss + (shadow - shadow.detach())
    return loss

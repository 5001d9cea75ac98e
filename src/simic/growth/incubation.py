"""How a seed learns before it is blended in.

- `direct`: no stage of its own; the seed is blended in from birth and the ramp limits its voice.
- `shadow`: a second pass with the seed switched in, in which everything but the seed is a constant.
- `straight_through`: the host's own pass; the seed hears the gradient of a loss that it does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from simic.growth.isolation import preserve_state, rng_state, set_rng_state
from simic.growth.seed import Seed


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
def override_alpha(seed: Seed, alpha: float) -> Iterator[None]:
    """Let the seed speak with this alpha for a while, in this thread."""
    previous, seed.override = seed.override, alpha
    seed.met_override = None
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
        with preserve_state(module, seed), constant_but(module, seed), override_alpha(seed, alpha):
            set_rng_state(before)
            shadow = closure()
        # A seed that overflows must not reach the host's loss: what is not finite counts as nothing.
        loss = loss + torch.nan_to_num(shadow - shadow.detach(), nan=0.0)
    return loss

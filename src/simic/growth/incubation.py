"""How a seed in stage *training* learns before it is blended in.

- `direct`: there is no such stage; the seed is blended in from birth and its alpha ramp limits its effect.
- `shadow`: a second forward pass with the seed switched in and every other parameter frozen.
- `straight_through`: the host's own pass; the seed gets the gradient of a loss that does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from simic.growth.data_parallel import further_pass
from simic.growth.isolation import freeze_all_but, preserve_state, rng_state, set_rng_state
from simic.growth.seed import Seed

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel


@contextmanager
def override_alpha(seed: Seed, alpha: float) -> Iterator[None]:
    """Use this alpha instead of the seed's own, in this thread only."""
    previous, seed.override = seed.override, alpha
    seed.override_used = None
    try:
        yield
    finally:
        seed.override = previous


def shadow_loss(model: GrowableModel, seeds: Sequence[tuple[Seed, float]], closure: Callable[[], Tensor]) -> Tensor:
    """The loss of `closure`, with the value unchanged but gradients for each seed as if it ran at the alpha given.

    Each seed's pass uses the same dropout masks as the host's pass and leaves no trace but the seed's gradient.
    """
    before = rng_state()
    loss = closure()
    for seed, alpha in seeds:
        with further_pass(model), preserve_state(model, seed), freeze_all_but(model, seed), override_alpha(seed, alpha):
            set_rng_state(before)
            shadow = closure()
        # shadow - shadow.detach() is 0 with the seed's gradient. If the seed overflows it is NaN, which must not reach
        # the host's loss.
        loss = loss + torch.nan_to_num(shadow - shadow.detach(), nan=0.0)
    return loss

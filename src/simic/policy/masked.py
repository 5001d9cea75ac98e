"""A categorical distribution in which some choices are not legal: float32, over the last axis.

Checks read values, which a compiled region must not: call `check_masks` where masks are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ILLEGAL = -1e4
"""Logit of an illegal choice: its probability underflows to exactly 0, and no product with it is NaN."""
SMALLEST = 1e-38


class MaskedCategorical:
    """One choice of W for each row of logits (..., W); illegal ones have probability 0 and are never sampled."""

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        self.mask = mask
        self.log_probs = torch.log_softmax(torch.where(mask, logits.float(), ILLEGAL), -1)

    @property
    def probs(self) -> Tensor:
        """Probabilities (..., W)."""
        return self.log_probs.exp()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One choice per row (...), by the Gumbel trick: every row in one operation.

        Noise is drawn where the generator lives, by default on the CPU, so that all devices draw alike.
        """
        noise = torch.empty(self.log_probs.shape, device=generator.device if generator else "cpu")
        noise.exponential_(generator=generator).clamp_(min=SMALLEST)
        return (self.log_probs - noise.log_().to(self.log_probs.device)).argmax(-1)

    def mode(self) -> Tensor:
        """The likeliest choice per row (...)."""
        return self.log_probs.argmax(-1)

    def log_prob(self, choice: Tensor) -> Tensor:
        """Log-probability of one choice per row (...)."""
        return self.log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats (...)."""
        return -(self.probs * self.log_probs).sum(-1)

    def normalized_entropy(self) -> Tensor:
        """Entropy over its maximum, ln(number legal), so within [0, 1]; 0 where one choice is legal (...)."""
        legal = self.mask.sum(-1)
        return torch.where(legal > 1, self.entropy() / legal.clamp(min=2).float().log(), 0.0)


def check_masks(mask: np.ndarray, names: Sequence[str]) -> None:
    """Raise if a row of masks (N, R, W), or (T, N, R, W), has no legal choice; rows have `names`."""
    empty = ~mask.any(-1)
    if empty.any():
        *step, env, row = np.argwhere(empty)[0].tolist()
        when = f" at step {step[0]}" if step else ""
        raise ValueError(
            f"environment {env}{when} has no legal choice for head {names[row]}: at least one entry of a mask must be "
            f"True"
        )

"""A categorical distribution over legal choices only: float32, over the last axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ILLEGAL = -1e4
"""Logit of an illegal choice: its probability underflows to exactly 0, and no product with it is NaN."""
SMALLEST = 1e-38


class MaskedCategorical:
    """One of W choices for each row of logits (..., W); illegal choices have probability 0 and are never sampled."""

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        self.mask = mask
        self.log_probs = torch.log_softmax(torch.where(mask, logits.float(), ILLEGAL), -1)

    @property
    def probs(self) -> Tensor:
        """Probabilities (..., W)."""
        return self.log_probs.exp()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One choice per row (...) by the Gumbel-max trick, all rows in one operation.

        The noise is drawn on the generator's device, by default the CPU, so that every device samples the same.
        """
        noise = torch.empty(self.log_probs.shape, device=generator.device if generator else "cpu")
        noise.exponential_(generator=generator).clamp_(min=SMALLEST)
        return (self.log_probs - noise.log_().to(self.log_probs.device)).argmax(-1)

    def mode(self) -> Tensor:
        """The most likely choice of each row (...)."""
        return self.log_probs.argmax(-1)

    def log_prob(self, choice: Tensor) -> Tensor:
        """Log-probability of one choice per row (...)."""
        return self.log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats (...)."""
        return -(self.probs * self.log_probs).sum(-1)

    def normalized_entropy(self) -> Tensor:
        """Entropy divided by its maximum, ln(number of legal choices), so in [0, 1]; 0 if only one is legal (...)."""
        legal = self.mask.sum(-1)
        return torch.where(legal > 1, self.entropy() / legal.clamp(min=2).float().log(), 0.0)


def check_masks(mask: np.ndarray, names: Sequence[str]) -> None:
    """Raise if a row of the masks (N, R, W) or (T, N, R, W) has no legal choice. `names` are the heads of the R rows.

    Apart from the distribution because it reads values, which a compiled region must not do.
    """
    empty = ~mask.any(-1)
    if empty.any():
        *step, env, row = np.argwhere(empty)[0].tolist()
        when = f" at step {step[0]}" if step else ""
        raise ValueError(
            f"environment {env}{when} has no legal choice for head {names[row]}: at least one entry of each mask row "
            "must be True"
        )

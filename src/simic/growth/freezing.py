"""Frozen hosts: only their seeds train, and before the first of these there may be nothing that does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from simic.growth.example import tensors
from simic.lifecycle.stages import LifecycleConfig

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

FROZEN_LIFECYCLE = LifecycleConfig(ramp_factor=0.0, seeds_per_slot=2)
"""The default for frozen hosts. Their seeds are the whole training, so a ramp would only slow it down; a small seed may
be followed by a larger one where it pays."""


def allow_backward(model: GrowableModel, output: Any) -> None:
    """Let a loss of the model's output go backward although nothing may be trainable yet.

    A controller may wait before it plants the first seed; the user's `loss.backward()` must not fail until then.
    """
    if model.freeze_host and model.host.training and not model.seeds and torch.is_grad_enabled():
        for tensor in tensors(output):
            if tensor.is_floating_point() and not tensor.requires_grad:
                tensor.requires_grad_(True)

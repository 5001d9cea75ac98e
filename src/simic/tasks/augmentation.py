"""Augmentation: random changes of training inputs that keep their labels, drawn anew for every batch.

Shapes: B samples, C channels, images (B, C, H, W).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""(inputs of a training batch, the host's generator on the CPU) -> inputs of the same shape and dtype, a new tensor."""


def augmented(augment: Augment, inputs: Tensor, generator: torch.Generator) -> Tensor:
    """The inputs of one host's training batch, changed by a task's `augment`."""
    out = augment(inputs, generator)
    if not isinstance(out, Tensor) or (out.shape, out.dtype) != (inputs.shape, inputs.dtype):
        got = f"{tuple(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else repr(out)[:80]
        raise ValueError(
            f"augment must return inputs like those it gets, {tuple(inputs.shape)} of {inputs.dtype}, got {got}"
        )
    return out


@dataclass(frozen=True)
class CropAndFlip:
    """Shifts every image by up to `padding` pixels, with zeros where nothing is left, and mirrors half of them.

    Args:
        padding: Largest shift in each direction, in pixels.
        flip: Whether half of the images are mirrored left to right.

    Example:
        >>> augment = simic.CropAndFlip(padding=2)
        >>> augment(torch.zeros(4, 3, 8, 8), torch.Generator()).shape
        torch.Size([4, 3, 8, 8])
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding must not be negative, got {self.padding}: 0 shifts nothing")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if images.dim() != 4:
            raise ValueError(f"CropAndFlip is for images (B, C, H, W), got inputs {tuple(images.shape)}")
        samples, _, height, width = images.shape
        # Drawn on the CPU, so that results do not depend on the device.
        shift = torch.randint(2 * self.padding + 1, (2, samples, 1), generator=generator)
        mirrored = torch.rand(samples, 1, generator=generator) < 0.5 * self.flip
        columns = torch.arange(width)
        rows = torch.arange(height) + shift[0]  # (B, H) of the padded image
        columns = torch.where(mirrored, columns.flip(0), columns) + shift[1]  # (B, W)
        rows, columns = rows.to(images.device), columns.to(images.device)
        padded = F.pad(images, [self.padding] * 4)
        which = torch.arange(samples, device=images.device).view(-1, 1, 1)
        return padded[which, :, rows.unsqueeze(2), columns.unsqueeze(1)].movedim(3, 1).contiguous()

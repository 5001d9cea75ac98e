"""Layers of N networks on features, with samples last in memory.

Shapes: N networks, B samples, C features. Activations are (N, B, C) like everywhere, but lie in memory as (N, C, B), as
`channels_last` does for images: with few features, products and sums over long rows of samples are several times
faster than over short rows of features. Layers that know nothing of it still work, only slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, B, in) and weights (N, out, in) -> (N, B, out)."""
    columns = x.transpose(1, 2)
    out = torch.bmm(weight, columns) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, columns)
    return out.transpose(1, 2)


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """Features with mean 0 and variance 1, without affine parameters."""
    # Squares overflow in float16 above 256; torch's autocast normalizes in float32, too.
    x = x.float() if x.element_size() < 4 else x
    out = _LayerNorm.apply(x.transpose(1, 2), eps)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


class _LayerNorm(torch.autograd.Function):
    """Normalization over dimension 1 of (N, C, B); torch's own wants the features last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        inverse = (centred * centred).mean(1, keepdim=True).add_(eps).rsqrt_()
        out = centred.mul_(inverse)
        ctx.save_for_backward(out, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        out, inverse = ctx.saved_tensors
        along = (grad * out).mean(1, keepdim=True)
        return (grad - grad.mean(1, keepdim=True)).sub_(out * along).mul_(inverse), None

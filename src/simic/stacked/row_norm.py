"""Layer norm of short rows: torch's forward pass handles row by row, which is slow if a row has few features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SHORT_ROW = 32
"""Features up to which sums by matrix products beat torch's forward pass on a CPU."""


def normalize_rows(x: Tensor, eps: float) -> Tensor:
    """The last dimension of x with mean 0 and variance 1, without affine parameters."""
    if x.shape[-1] > SHORT_ROW or x.device.type != "cpu":
        return F.layer_norm(x, x.shape[-1:], eps=eps)
    # Squares overflow in float16 above 256; torch's autocast normalizes in float32, too.
    out = _RowNorm.apply(x.float() if x.element_size() < 4 else x, eps)
    assert isinstance(out, Tensor)
    return out


class _RowNorm(torch.autograd.Function):
    """Means as products with a vector; torch's own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        share, mean = rows.new_full((rows.shape[1], 1), 1 / rows.shape[1]), rows.new_empty(len(rows), 1)
        torch.mm(rows, share, out=mean)  # with `out`, autocast does not apply
        centred, inverse_std = rows - mean, torch.empty_like(mean)
        torch.mm(centred.square(), share, out=inverse_std).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, mean, inverse_std)
        return centred.mul_(inverse_std).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, mean, inverse_std = ctx.saved_tensors
        found = torch.ops.aten.native_layer_norm_backward(
            grad.reshape(rows.shape), rows, rows.shape[1:], mean, inverse_std, None, None, [True, False, False]
        )
        return found[0].view(grad.shape), None

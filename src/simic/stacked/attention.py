"""Self-attention of many small heads at once: torch's kernels are made for few heads that are wide.

Shapes: M heads (of all samples of all networks), D features each, L positions. Queries, keys and values are (M, D, L),
with positions innermost: the matrix products have D rows of L values then, several times faster than L rows of D.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SMALL_HEAD = 16
"""Features of a head up to which the products below beat torch's attention on a CPU."""
SCORES_AT_ONCE = 1 << 18
"""Scores (of position by position) that exist at the same time: more leave the cache."""


def attend(qkv: Tensor, *, causal: bool) -> Tensor:
    """Mix the values of every head (3, M, D, L) -> (M, D, L); a causal head sees no later positions."""
    if qkv.device.type in ("cpu", "meta") and qkv.shape[2] <= SMALL_HEAD:
        out = _Attention.apply(qkv, causal)
        assert isinstance(out, Tensor)
        return out
    q, k, v = qkv.transpose(2, 3).unbind()
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


class _Attention(torch.autograd.Function):
    """Softmax attention, computed part by part within the cache; the backward pass reads the weights again."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, causal: bool) -> Tensor:
        _, heads, size, length = qkv.shape
        out, learns = torch.empty_like(qkv[2]), ctx.needs_input_grad[0]
        kept = qkv.new_empty(heads, length, length) if learns else None
        mask = _future(qkv) if causal else qkv.new_zeros(1, 1)
        for part in _parts(qkv):
            q, k, v = qkv[:, part]
            scores = torch.baddbmm(mask, q.transpose(1, 2), k, alpha=1 / math.sqrt(size))
            weights = torch.softmax(scores, -1) if kept is None else torch.softmax(scores, -1, out=kept[part])
            torch.bmm(v, weights.transpose(1, 2), out=out[part])
        if kept is not None:
            ctx.save_for_backward(qkv, kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        qkv, kept = ctx.saved_tensors
        grad_qkv = torch.empty_like(qkv)
        for part in _parts(qkv):
            q, k, v = qkv[:, part]
            g, weights = grad[part], kept[part]
            torch.bmm(g, weights, out=grad_qkv[2, part])
            grad_weights = torch.bmm((g / math.sqrt(qkv.shape[2])).transpose(1, 2), v)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            torch.bmm(k, grad_scores.transpose(1, 2), out=grad_qkv[0, part])
            torch.bmm(q, grad_scores, out=grad_qkv[1, part])
        return grad_qkv, None


def _parts(qkv: Tensor) -> list[slice]:
    _, heads, _, length = qkv.shape
    step = max(1, SCORES_AT_ONCE // length**2)
    return [slice(start, start + step) for start in range(0, heads, step)]


def _future(qkv: Tensor) -> Tensor:
    """What to add to the scores (L, L): positions do not see later ones."""
    return qkv.new_full((qkv.shape[3], qkv.shape[3]), -math.inf).triu_(1)

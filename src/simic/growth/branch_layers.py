"""Layers that branches of seeds are made of, and the gate of a seed."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simic.growth.slot_shape import SlotShape

Layer = TypeVar("Layer", bound=nn.Module)


def zeroed(layer: Layer) -> Layer:
    """Set all parameters of a layer to zero: a branch that ends with it outputs zeros, and still learns.

    Args:
        layer: Any module.

    Returns:
        The same layer.

    Example:
        >>> simic.zeroed(nn.Linear(2, 2)).weight.count_nonzero().item()
        0
    """
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class Gate(nn.Module):
    """A learned gate in (0, 1) per sample, or per position of a sequence."""

    def __init__(self, shape: SlotShape) -> None:
        super().__init__()
        self.spatial_dims = tuple(range(2, shape.rank)) if shape.topology == "conv" else ()
        self.linear = zeroed(nn.Linear(shape.features, 1))
        nn.init.constant_(self.linear.bias, 2.0)  # sigmoid(2) = 0.88: nearly open, with enough gradient left to close

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean(self.spatial_dims) if self.spatial_dims else x
        gate = torch.sigmoid(self.linear(pooled))
        for _ in self.spatial_dims:
            gate = gate.unsqueeze(-1)
        return gate


class Scale(nn.Module):
    """Multiplies by one learned number, zero at birth."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class SqueezeExcite(nn.Module):
    """Rescales each channel by a function of its global average (squeeze-and-excitation, Hu et al. 2018)."""

    def __init__(self, shape: SlotShape) -> None:
        super().__init__()
        hidden = max(2, shape.features // 4)
        self.spatial_dims = tuple(range(2, shape.rank))
        self.squeeze = nn.Linear(shape.features, hidden)
        self.excite = zeroed(nn.Linear(hidden, shape.features))

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.tanh(self.excite(F.relu(self.squeeze(x.mean(self.spatial_dims)))))
        for _ in self.spatial_dims:
            factor = factor.unsqueeze(-1)
        return x * factor


class GatedLinear(nn.Module):
    """Gated linear unit with output projection (Dauphin et al. 2017)."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.value = nn.Linear(features, hidden)
        self.gate = nn.Linear(features, hidden)
        self.out = zeroed(nn.Linear(hidden, features))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.value(x) * torch.sigmoid(self.gate(x)))


class CausalConvolution(nn.Module):
    """Depthwise convolution over each position and the three before it, then a linear layer across channels."""

    reach = (3, 0)

    def __init__(self, features: int) -> None:
        super().__init__()
        self.keep: Tensor | None = None
        self.norm = nn.LayerNorm(features)
        self.mix = nn.Conv1d(features, features, 1 + sum(self.reach), groups=features)
        self.out = zeroed(nn.Linear(features, features))

    def forward(self, x: Tensor) -> Tensor:
        # Padded positions are zeros, like positions beyond the ends of the sequence.
        x = _without_padding(self.norm(_without_padding(x, self.keep)), self.keep)
        around = F.pad(x.transpose(1, 2), self.reach)
        return self.out(F.gelu(self.mix(around).transpose(1, 2)))


class CentredConvolution(CausalConvolution):
    """The same over each position, the two before and the two after it."""

    reach = (2, 2)


class CausalAttention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017)."""

    causal = True

    def __init__(self, features: int, in_features: int | None = None) -> None:
        """`in_features` are those of the input, by default as many as those of the output."""
        super().__init__()
        self.keep: Tensor | None = None
        self.heads = math.gcd(features, 4)
        self.head_size = features // self.heads
        self.norm = nn.LayerNorm(in_features or features)
        self.qkv = nn.Linear(in_features or features, 3 * features)
        self.out = zeroed(nn.Linear(features, features))

    def forward(self, x: Tensor) -> Tensor:
        x = _without_padding(x, self.keep)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.head_size)).transpose(1, 3)
        q, k, v = qkv.select(2, 0), qkv.select(2, 1), qkv.select(2, 2)  # each (N, heads, L, head size)
        if self.keep is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=_visible(self.keep, self.causal))
        return self.out(mixed.transpose(1, 2).flatten(2))


class FullAttention(CausalAttention):
    """Bidirectional multi-head self-attention."""

    causal = False


def _without_padding(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x.masked_fill(~keep.unsqueeze(-1), 0.0)


def _visible(keep: Tensor, causal: bool) -> Tensor:
    """Attention mask (N, 1, L, L): each position attends to real positions and to itself."""
    length = keep.shape[1]
    every = torch.ones(length, length, dtype=torch.bool, device=keep.device)
    seen = keep[:, None, None, :] & (every.tril() if causal else every)
    # Some of torch's attention kernels return NaN for a position that attends to nothing.
    return seen | torch.eye(length, dtype=torch.bool, device=keep.device)

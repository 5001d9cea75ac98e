"""Blueprints build the branch f of a seed that computes x + f(x); a newborn branch outputs zeros.

Every branch keeps the shape of its input: conv (N, C, *space), features (N, C), sequence (N, L, C). Sequence branches
are causal, or bidirectional where `SlotShape.causal` is False. Before each pass, submodules of a branch that have an
attribute `keep` get the padding mask there: bool (N, L), True for real positions, or None if the host has no mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simic.growth.isolation import preserved_rng
from simic.registry import Registry

TOPOLOGIES = ("conv", "features", "sequence")
_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@dataclass(frozen=True)
class SlotShape:
    """What a blueprint needs to know about its slot."""

    topology: str
    features: int
    """C: channels (conv) or size of the last dimension (features, sequence)."""
    dims: int = 0
    """Spatial dimensions of a conv slot."""
    causal: bool = True
    """Whether positions of a sequence may depend on earlier ones only."""

    @property
    def feature_dim(self) -> int:
        """The dimension of an activation that holds the features."""
        return 1 if self.topology == "conv" else -1

    @property
    def rank(self) -> int:
        """Number of dimensions of an activation, including the batch."""
        return {"features": 2, "sequence": 3, "conv": 2 + self.dims}[self.topology]

    @property
    def kind(self) -> str:
        """The topology, with a suffix for bidirectional sequences."""
        return self.topology if self.causal else f"{self.topology}-bidirectional"

    def __str__(self) -> str:
        spatial = f" {self.dims}-D" if self.topology == "conv" else ""
        return f"{self.kind}{spatial}, {self.features} features"


Layer = TypeVar("Layer", bound=nn.Module)
Builder = Callable[[SlotShape], nn.Module]


@dataclass(frozen=True)
class Blueprint:
    """A named recipe and the topologies it fits."""

    name: str
    topologies: tuple[str, ...]
    build: Builder


BLUEPRINTS: Registry[Blueprint] = Registry("blueprint")


def blueprint(name: str, *, topology: str | tuple[str, ...]) -> Callable[[Builder], Builder]:
    """Register a function that builds a branch from a SlotShape; the branch's last layer must be zero at birth."""
    topologies = (topology,) if isinstance(topology, str) else topology
    for unknown in sorted(set(topologies) - set(TOPOLOGIES)):
        raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {unknown!r}")

    BLUEPRINTS.check_new(name)

    def register(build: Builder) -> Builder:
        BLUEPRINTS.add(name, Blueprint(name, topologies, build), build)
        return build

    return register


def blueprints_for(topologies: set[str]) -> tuple[str, ...]:
    """Names of the blueprints that fit any of these topologies, in order of registration."""
    return tuple(name for name, entry in BLUEPRINTS.items() if topologies & set(entry.topologies))


def fits(name: str, shape: SlotShape) -> bool:
    """Whether a blueprint can grow in a slot of this shape."""
    return shape.topology in BLUEPRINTS[name].topologies


def new_branch(name: str, shape: SlotShape, entropy: Sequence[int]) -> nn.Module:
    """A newborn branch whose weights depend on `entropy` alone; the global random state is not changed."""
    with preserved_rng():
        torch.default_generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
        return _build(BLUEPRINTS[name], shape)


def _build(entry: Blueprint, shape: SlotShape) -> nn.Module:
    with BLUEPRINTS.running(entry.name):
        branch = entry.build(shape)
    if not isinstance(branch, nn.Module):
        raise ValueError(f"blueprint {entry.name!r} must return an nn.Module, got {branch!r:.80}")
    return branch


def count_parameters(name: str, shape: SlotShape) -> int:
    """Number of parameters of a seed of this blueprint, without gate."""
    return _count(BLUEPRINTS[name], shape)


@lru_cache(maxsize=4096)
def _count(entry: Blueprint, shape: SlotShape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _build(entry, shape).parameters())


def parameter_table(names: Sequence[str], shapes: Iterable[SlotShape]) -> np.ndarray:
    """Parameters of every blueprint in every slot (S, B); -1 where it does not fit."""
    return np.array(
        [[count_parameters(name, shape) if fits(name, shape) else -1 for name in names] for shape in shapes]
    )


def zeroed(layer: Layer) -> Layer:
    """Set all parameters of a layer to zero and return it: a branch that ends with it outputs zeros."""
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

    def __init__(self, features: int) -> None:
        super().__init__()
        self.keep: Tensor | None = None
        self.heads = math.gcd(features, 4)
        self.head_size = features // self.heads
        self.norm = nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features)
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


@blueprint("norm", topology=TOPOLOGIES)
def norm(shape: SlotShape) -> nn.Module:
    """A normalisation layer times a learned scalar: 2C + 1 parameters."""
    layer = nn.GroupNorm(1, shape.features) if shape.topology == "conv" else nn.LayerNorm(shape.features)
    return nn.Sequential(layer, Scale())


@blueprint("low_rank", topology=TOPOLOGIES)
def low_rank(shape: SlotShape) -> nn.Module:
    """A linear map of rank C/8 (Hu et al. 2021)."""
    rank = max(1, shape.features // 8)
    if shape.topology == "conv":
        conv = _CONV[shape.dims]
        return nn.Sequential(conv(shape.features, rank, 1, bias=False), zeroed(conv(rank, shape.features, 1)))
    return nn.Sequential(nn.Linear(shape.features, rank, bias=False), zeroed(nn.Linear(rank, shape.features)))


def _mlp(shape: SlotShape, hidden: int) -> nn.Module:
    # The residual stream of sequence models is not normalised; feature hosts may be too narrow to lose their mean.
    first = [nn.LayerNorm(shape.features)] if shape.topology == "sequence" else []
    layers = [nn.Linear(shape.features, hidden), nn.GELU(), zeroed(nn.Linear(hidden, shape.features))]
    return nn.Sequential(*first, *layers)


@blueprint("mlp_small", topology=("features", "sequence"))
def mlp_small(shape: SlotShape) -> nn.Module:
    """One hidden layer of half the features, at least 4."""
    return _mlp(shape, max(4, shape.features // 2))


@blueprint("mlp", topology=("features", "sequence"))
def mlp(shape: SlotShape) -> nn.Module:
    """One hidden layer as wide as the slot, at least 16."""
    return _mlp(shape, max(16, shape.features))


@blueprint("mlp_large", topology=("features", "sequence"))
def mlp_large(shape: SlotShape) -> nn.Module:
    """One hidden layer four times as wide as the slot, at least 64."""
    return _mlp(shape, max(64, 4 * shape.features))


@blueprint("glu", topology=("features", "sequence"))
def glu(shape: SlotShape) -> nn.Module:
    """A gated hidden layer as wide as the slot, at least 16."""
    return GatedLinear(shape.features, max(16, shape.features))


@blueprint("causal_conv", topology="sequence")
def causal_conv(shape: SlotShape) -> nn.Module:
    """Local mixing over three earlier positions; in a bidirectional slot over two on either side."""
    return CausalConvolution(shape.features) if shape.causal else CentredConvolution(shape.features)


@blueprint("attention", topology="sequence")
def attention(shape: SlotShape) -> nn.Module:
    """Attention over earlier positions; in a bidirectional slot over all positions."""
    return CausalAttention(shape.features) if shape.causal else FullAttention(shape.features)


@blueprint("squeeze_excite", topology="conv")
def squeeze_excite(shape: SlotShape) -> nn.Module:
    """Channel attention."""
    return SqueezeExcite(shape)


@blueprint("pointwise", topology="conv")
def pointwise(shape: SlotShape) -> nn.Module:
    """Two 1x1 convolutions: mixes channels only."""
    conv, c = _CONV[shape.dims], shape.features
    return nn.Sequential(conv(c, 2 * c, 1), nn.ReLU(), zeroed(conv(2 * c, c, 1)))


@blueprint("depthwise", topology="conv")
def depthwise(shape: SlotShape) -> nn.Module:
    """A depthwise separable 3x3 convolution."""
    conv, c = _CONV[shape.dims], shape.features
    return nn.Sequential(
        conv(c, c, 3, padding=1, groups=c, bias=False), nn.GroupNorm(1, c), nn.ReLU(), zeroed(conv(c, c, 1))
    )


@blueprint("bottleneck", topology="conv")
def bottleneck(shape: SlotShape) -> nn.Module:
    """A residual bottleneck at half the channels: 1x1, 3x3, 1x1 (He et al. 2016)."""
    conv, c = _CONV[shape.dims], shape.features
    inner = max(2, c // 2)
    return nn.Sequential(
        *(conv(c, inner, 1, bias=False), nn.GroupNorm(1, inner), nn.ReLU()),
        *(conv(inner, inner, 3, padding=1, bias=False), nn.GroupNorm(1, inner), nn.ReLU()),
        zeroed(conv(inner, c, 1)),
    )


@blueprint("conv", topology="conv")
def conv(shape: SlotShape) -> nn.Module:
    """One 3x3 convolution."""
    return nn.Sequential(
        nn.GroupNorm(1, shape.features),
        nn.ReLU(),
        zeroed(_CONV[shape.dims](shape.features, shape.features, 3, padding=1)),
    )


@blueprint("conv_double", topology="conv")
def conv_double(shape: SlotShape) -> nn.Module:
    """Two 3x3 convolutions, as in a residual block."""
    conv, c = _CONV[shape.dims], shape.features
    return nn.Sequential(
        conv(c, c, 3, padding=1, bias=False), nn.GroupNorm(1, c), nn.ReLU(), zeroed(conv(c, c, 3, padding=1))
    )

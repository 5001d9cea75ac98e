"""Blueprints build the branch g of a seed; a newborn branch outputs zeros.

A seed behind its slot's submodule reads what the submodule puts out, h, and makes it h + g(h): depth. A seed beside it
(`reads="input"`) reads what goes into the submodule, x, and makes its output h + g(x): width.

    reads="output"   x -> submodule -> h -+-----------+-> h + g(h)
                                          +-> branch -+
    reads="input"    x -+-> submodule -> h -+-> h + g(x)
                        +-----> branch -----+

A branch puts out the shape of h: conv (N, C, *space), features (N, C), sequence (N, L, C). What it reads has the same
shape or, beside, `SlotShape.in_features` features and `SlotShape.stride` times the space. Sequence branches are causal,
or bidirectional where `SlotShape.causal` is False. Before each pass, submodules of a branch that have an attribute
`keep` get the padding mask there: bool (N, L), True for real positions, or None if the host has no mask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import numpy as np
import torch
from torch import nn

from simic.growth.branch_layers import (
    CausalAttention,
    CausalConvolution,
    CentredConvolution,
    FullAttention,
    GatedLinear,
    Scale,
    SqueezeExcite,
    zeroed,
)
from simic.growth.isolation import preserved_rng
from simic.growth.slot_shape import TOPOLOGIES, Hosts, Reads, SlotShape
from simic.registry import Registry

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
Builder = Callable[[SlotShape], nn.Module]


@dataclass(frozen=True)
class Blueprint:
    """A named recipe, the topologies it fits, and what its branch reads."""

    name: str
    topologies: tuple[str, ...]
    build: Builder
    reads: Reads = "output"
    hosts: Hosts = "trained"


BLUEPRINTS: Registry[Blueprint] = Registry("blueprint")


def blueprint(
    name: str, *, topology: str | tuple[str, ...], reads: Reads = "output", hosts: Hosts = "trained"
) -> Callable[[Builder], Builder]:
    """Register a function that builds the branch of a seed from a `SlotShape`.

    Args:
        name: For `GrowableModel(blueprints=[...])`, actions and files.
        topology: Where it fits: "conv", "features", "sequence" or a tuple of these.
        reads: "output": behind the slot's submodule, the branch keeps the shape. "input": beside it, the branch maps
            the input of the submodule to the shape of its output.
        hosts: Who is offered it unasked: hosts that train along ("trained"), "frozen" ones, or "any".

    Returns:
        A decorator. The branch must output zeros at birth, which is checked when a seed is built: end it with
        `simic.zeroed(...)`.

    Raises:
        ValueError: The name is taken.

    Example:
        >>> @simic.blueprint("doc_linear", topology="features")
        ... def doc_linear(shape):
        ...     return simic.zeroed(nn.Linear(shape.features, shape.features))
    """
    topologies = (topology,) if isinstance(topology, str) else topology
    for unknown in sorted(set(topologies) - set(TOPOLOGIES)):
        raise ValueError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {unknown!r}")
    if reads not in get_args(Reads):
        raise ValueError(f"reads must be one of {', '.join(get_args(Reads))}, got {reads!r}")
    if hosts not in get_args(Hosts):
        raise ValueError(f"hosts must be one of {', '.join(get_args(Hosts))}, got {hosts!r}")

    BLUEPRINTS.check_new(name)

    def register(build: Builder) -> Builder:
        BLUEPRINTS.add(name, Blueprint(name, topologies, build, reads, hosts), build)
        return build

    return register


def blueprints_for(shapes: Iterable[SlotShape], *, frozen: bool = False) -> tuple[str, ...]:
    """Names of the blueprints that a host with slots of these shapes is offered, in order of registration."""
    shapes, own = list(shapes), ("frozen" if frozen else "trained", "any")
    names = (name for name, entry in BLUEPRINTS.items() if entry.hosts in own)
    return tuple(name for name in names if any(fits(name, shape) for shape in shapes))


def menu(names: Sequence[str] | None, shapes: Sequence[SlotShape], *, frozen: bool = False) -> tuple[str, ...]:
    """The blueprints that a model may grow: of `names`, or of those for such hosts, those that fit one of its slots."""
    if names is None:
        return blueprints_for(shapes, frozen=frozen)
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f'blueprints must be a list of names such as ["mlp", "low_rank"], got {names!r}')
    for name in names:
        BLUEPRINTS.check("blueprints", name)
    fitting = tuple(name for name in BLUEPRINTS if any(fits(name, shape) for shape in shapes))
    chosen = tuple(name for name in fitting if name in names)
    if not chosen:
        raise ValueError(
            f"none of blueprints={list(names)} fits a slot of this model ({', '.join(sorted(set(map(str, shapes))))}); "
            f"these do: {', '.join(fitting)}"
        )
    if idle := [name for name in names if name not in chosen]:
        logging.getLogger("simic").warning("blueprints that fit no slot of this model: %s", ", ".join(idle))
    return chosen


def fits(name: str, shape: SlotShape) -> bool:
    """Whether a blueprint can grow in a slot of this shape."""
    entry = BLUEPRINTS[name]
    return shape.topology in entry.topologies and (entry.reads == "output" or shape.in_features is not None)


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


def _two_layers(shape: SlotShape, hidden: int) -> nn.Module:
    """A hidden layer between a submodule's input and its output."""
    assert shape.in_features is not None
    first = [nn.LayerNorm(shape.in_features)] if shape.topology == "sequence" else []
    return nn.Sequential(
        *first, nn.Linear(shape.in_features, hidden), nn.GELU(), zeroed(nn.Linear(hidden, shape.features))
    )


@blueprint("widen_small", topology="features", reads="input")
def widen_small(shape: SlotShape) -> nn.Module:
    """A hidden layer beside the slot's submodule, of half its features, at least 4."""
    return _two_layers(shape, max(4, shape.features // 2))


@blueprint("widen", topology=TOPOLOGIES, reads="input")
def widen(shape: SlotShape) -> nn.Module:
    """A hidden layer beside the submodule, as wide as its output, at least 16; conv: two 3x3 convolutions."""
    if shape.topology != "conv":
        return _two_layers(shape, max(16, shape.features))
    assert shape.in_features is not None
    conv, c = _CONV[shape.dims], shape.features
    return nn.Sequential(
        conv(shape.in_features, c, 3, stride=shape.stride, padding=1, bias=False),
        *(nn.GroupNorm(1, c), nn.ReLU(), zeroed(conv(c, c, 3, padding=1))),
    )


@blueprint("widen_large", topology="features", reads="input")
def widen_large(shape: SlotShape) -> nn.Module:
    """A hidden layer beside the submodule, four times as wide as its output, at least 64."""
    return _two_layers(shape, max(64, 4 * shape.features))


@blueprint("widen_pointwise", topology="conv", reads="input")
def widen_pointwise(shape: SlotShape) -> nn.Module:
    """Two 1x1 convolutions beside the submodule."""
    assert shape.in_features is not None
    conv, c = _CONV[shape.dims], shape.features
    return nn.Sequential(conv(shape.in_features, 2 * c, 1, stride=shape.stride), nn.ReLU(), zeroed(conv(2 * c, c, 1)))


@blueprint("widen_attention", topology="sequence", reads="input")
def widen_attention(shape: SlotShape) -> nn.Module:
    """Attention heads beside the submodule."""
    kind = CausalAttention if shape.causal else FullAttention
    return kind(shape.features, shape.in_features)


def _lora(shape: SlotShape, rank: int) -> nn.Module:
    """A linear map of this rank beside a linear layer, without biases (Hu et al. 2021)."""
    assert shape.in_features is not None
    return nn.Sequential(
        nn.Linear(shape.in_features, rank, bias=False), zeroed(nn.Linear(rank, shape.features, bias=False))
    )


@blueprint("lora_2", topology=("features", "sequence"), reads="input", hosts="frozen")
def lora_2(shape: SlotShape) -> nn.Module:
    """LoRA of rank 2 beside the submodule."""
    return _lora(shape, 2)


@blueprint("lora_8", topology=("features", "sequence"), reads="input", hosts="frozen")
def lora_8(shape: SlotShape) -> nn.Module:
    """LoRA of rank 8 beside the submodule."""
    return _lora(shape, 8)


@blueprint("lora_32", topology=("features", "sequence"), reads="input", hosts="frozen")
def lora_32(shape: SlotShape) -> nn.Module:
    """LoRA of rank 32 beside the submodule."""
    return _lora(shape, 32)


@blueprint("adapter", topology=("features", "sequence"), hosts="frozen")
def adapter(shape: SlotShape) -> nn.Module:
    """A bottleneck of an eighth of the features, at least 4, behind the submodule (Houlsby et al. 2019)."""
    return _mlp(shape, max(4, shape.features // 8))

"""Modules as instructions.

A module takes the activation it reads, adds its instructions and returns the activation that it puts out. Hosts with
modules that are not in MODULES run by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from simic.growth.branch_layers import (
    CausalAttention,
    CausalConvolution,
    CentredConvolution,
    FullAttention,
    Gate,
    GatedLinear,
    Scale,
    SqueezeExcite,
)
from simic.stacked.compiled import instructions as m
from simic.stacked.compiled.builder import Activation, Builder
from simic.stacked.layers import is_customized
from simic.tasks.hosts import ResidualBlock, TokenEmbedding, TransformerBlock


def is_known(module: nn.Module) -> bool:
    """Whether a module can be part of a program."""
    if type(module) not in MODULES or is_customized(module):
        return False
    whole = type(module) in _WHOLE or all(is_known(child) for child in module.children())
    return _KNOWN.get(type(module), lambda _: True)(module) and whole


def put_module(builder: Builder, module: nn.Module, name: str, x: Activation) -> Activation:
    """Add the instructions of a module whose parameters have names below `name` in the present unit."""
    return MODULES[type(module)](builder, module, f"{name}." if name else "", x)


def _sequential(builder: Builder, module: nn.Sequential, prefix: str, x: Activation) -> Activation:
    for name, child in module.named_children():
        x = put_module(builder, child, prefix + name, x)
    return x


def _linear(builder: Builder, module: nn.Linear, prefix: str, x: Activation) -> Activation:
    y = builder.allocate(module.out_features, x.space)
    columns = {"IN": module.in_features, "OUT": module.out_features, "SPACE": x.positions}
    builder.add(m.LINEAR, x, y, **columns, **_affine(builder, prefix))
    return y


def _affine(builder: Builder, prefix: str) -> dict[str, int]:
    return {"WEIGHT": builder.offset(prefix + "weight"), "BIAS": builder.offset(prefix + "bias")}


def _convolution(builder: Builder, module: nn.Conv1d | nn.Conv2d, prefix: str, x: Activation) -> Activation:
    kernel, stride, pad = (_plane(tuple(each), fill) for each, fill in _geometry(module))
    height, width = _plane(x.space, 1)
    out = [(size + 2 * p - k) // s + 1 for size, k, s, p in zip((height, width), kernel, stride, pad, strict=True)]
    y = builder.allocate(module.out_channels, tuple(out[-len(x.space) :]))
    shared = {"IN": module.in_channels, "OUT": module.out_channels, **_affine(builder, prefix)}
    if kernel == stride == (1, 1) and pad == (0, 0) and module.groups == 1:
        builder.add(m.LINEAR, x, y, SPACE=x.positions, **shared)
        return y
    sizes = {"HEIGHT": height, "WIDTH": width, "OUT_HEIGHT": out[0], "OUT_WIDTH": out[1], "GROUPS": module.groups}
    for name, (high, wide) in {"KERNEL": kernel, "STRIDE": stride, "PAD": pad}.items():
        sizes |= {f"{name}_H": high, f"{name}_W": wide}
    builder.add(m.CONV, x, y, **shared, **sizes)
    return y


def _geometry(module: nn.Conv1d | nn.Conv2d) -> tuple[tuple[Any, int], ...]:
    """Kernel, stride and padding, and what they are in a dimension that is missing."""
    return (module.kernel_size, 1), (module.stride, 1), (module.padding, 0)


def _plane(sizes: tuple[int, ...], fill: int) -> tuple[int, int]:
    """Sizes of one or two dimensions as those of two."""
    return (fill, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _norm(builder: Builder, module: nn.LayerNorm | nn.GroupNorm, prefix: str, x: Activation) -> Activation:
    # A layer norm of a sequence normalizes each position by itself, a group norm all positions together.
    apart = x.positions if isinstance(module, nn.LayerNorm) else 1
    rows = x.rows // apart
    y, aux = builder.like(x), builder.allocate((rows + 2) * apart)
    columns = {"AUX": aux.row, "ROWS": rows, "SPACE": x.positions // apart, "GROUPS": apart}
    builder.add_norm(m.NORM, x, y, module.eps, **columns, **_affine(builder, prefix))
    return y


def _batch_norm(builder: Builder, module: nn.BatchNorm1d | nn.BatchNorm2d, prefix: str, x: Activation) -> Activation:
    y, aux, inverse = builder.like(x), builder.like(x), builder.allocate(x.channels)
    assert inverse.row == aux.row + aux.rows
    assert module.momentum is not None
    kept = {"MEAN": builder.offset(prefix + "running_mean"), "VARIANCE": builder.offset(prefix + "running_var")}
    sizes = {"AUX": aux.row, "OUT": x.channels, "SPACE": x.positions}
    builder.add_norm(m.BATCH_NORM, x, y, module.eps, module.momentum, **sizes, **kept, **_affine(builder, prefix))
    return y


def _activation(op: int) -> Callable[[Builder, nn.Module, str, Activation], Activation]:
    def put(builder: Builder, module: nn.Module, prefix: str, x: Activation) -> Activation:
        y, aux = builder.like(x), builder.like(x)
        builder.add(op, x, y, AUX=aux.row)
        return y

    return put


_sigmoid, _tanh, _relu, _gelu = (_activation(op) for op in (m.SIGMOID, m.TANH, m.RELU, m.GELU))


def _pool(builder: Builder, module: nn.Module, prefix: str, x: Activation) -> Activation:
    y = builder.allocate(x.channels)
    builder.add(m.POOL, x, y, OUT=x.channels, SPACE=x.positions)
    return y


def _flatten(builder: Builder, module: nn.Flatten, prefix: str, x: Activation) -> Activation:
    return Activation(x.row, x.rows)


def _same(builder: Builder, module: nn.Module, prefix: str, x: Activation) -> Activation:
    return x


def _scale(builder: Builder, module: Scale, prefix: str, x: Activation) -> Activation:
    y = builder.like(x)
    builder.add(m.SCALE, x, y, WEIGHT=builder.offset(prefix + "factor"))
    return y


def _gate(builder: Builder, module: Gate, prefix: str, x: Activation) -> Activation:
    pooled = _pool(builder, module, prefix, x) if module.spatial_dims else x
    return _sigmoid(builder, module, prefix, _linear(builder, module.linear, prefix + "linear.", pooled))


def _gated_linear(builder: Builder, module: GatedLinear, prefix: str, x: Activation) -> Activation:
    value = _linear(builder, module.value, prefix + "value.", x)
    opened = _sigmoid(builder, module, prefix, _linear(builder, module.gate, prefix + "gate.", x))
    product = builder.like(value)
    builder.add(m.PRODUCT, value, product, AUX=opened.row)
    return _linear(builder, module.out, prefix + "out.", product)


def _squeeze_excite(builder: Builder, module: SqueezeExcite, prefix: str, x: Activation) -> Activation:
    h = _linear(builder, module.squeeze, prefix + "squeeze.", _pool(builder, module, prefix, x))
    h = _linear(builder, module.excite, prefix + "excite.", _relu(builder, module, prefix, h))
    y = builder.like(x)
    builder.add(m.CHANNEL_SCALE, x, y, AUX=_tanh(builder, module, prefix, h).row, SPACE=x.positions)
    return y


def _embedding(builder: Builder, module: TokenEmbedding, prefix: str, x: Activation) -> Activation:
    y = builder.allocate(module.token.embedding_dim, (x.rows,))
    tables = {"WEIGHT": builder.offset(prefix + "token.weight"), "BIAS": builder.offset(prefix + "position")}
    builder.add(m.EMBED, x, y, OUT=y.channels, SPACE=x.rows, **tables)
    return y


def _attention(builder: Builder, qkv: Activation, heads: int, *, causal: bool) -> Activation:
    y = builder.allocate(qkv.channels // 3, qkv.space)
    weights = builder.allocate(heads * qkv.positions**2 + 2)
    columns = {"OUT": y.channels, "SPACE": qkv.positions, "HEADS": heads, "CAUSAL": int(causal)}
    builder.add(m.ATTEND, qkv, y, AUX=weights.row, **columns)
    return y


def _sum(builder: Builder, x: Activation, other: Activation) -> Activation:
    y = builder.like(x)
    builder.add(m.ADD, x, y, AUX=other.row)
    return y


def _transformer_block(builder: Builder, module: TransformerBlock, prefix: str, x: Activation) -> Activation:
    h = _norm(builder, module.attention_norm, prefix + "attention_norm.", x)
    h = _attention(builder, _linear(builder, module.qkv, prefix + "qkv.", h), module.num_heads, causal=True)
    x = _sum(builder, x, _linear(builder, module.out, prefix + "out.", h))
    h = _norm(builder, module.mlp_norm, prefix + "mlp_norm.", x)
    return _sum(builder, x, put_module(builder, module.mlp, prefix + "mlp", h))


def _residual_block(builder: Builder, module: ResidualBlock, prefix: str, x: Activation) -> Activation:
    inner = put_module(builder, module.inner, prefix + "inner", x)
    both = _sum(builder, put_module(builder, module.shortcut, prefix + "shortcut", x), inner)
    return _relu(builder, module, prefix, both)


def _attention_seed(builder: Builder, module: CausalAttention, prefix: str, x: Activation) -> Activation:
    h = _linear(builder, module.qkv, prefix + "qkv.", _norm(builder, module.norm, prefix + "norm.", x))
    h = _attention(builder, h, module.heads, causal=module.causal)
    return _linear(builder, module.out, prefix + "out.", h)


def _convolution_seed(builder: Builder, module: CausalConvolution, prefix: str, x: Activation) -> Activation:
    h, mixed = _norm(builder, module.norm, prefix + "norm.", x), builder.like(x)
    plane = {"HEIGHT": 1, "WIDTH": x.positions, "OUT_HEIGHT": 1, "OUT_WIDTH": x.positions, "GROUPS": x.channels}
    kernel = {"KERNEL_H": 1, "KERNEL_W": 1 + sum(module.reach), "STRIDE_H": 1, "STRIDE_W": 1, "PAD_W": module.reach[0]}
    sizes = {"IN": x.channels, "OUT": x.channels} | plane | kernel
    builder.add(m.CONV, h, mixed, **sizes, **_affine(builder, prefix + "mix."))
    return _linear(builder, module.out, prefix + "out.", _gelu(builder, module, prefix, mixed))


def _knows_convolution(module: Any) -> bool:
    numbers = isinstance(module.padding, tuple)
    return numbers and module.padding_mode == "zeros" and set(module.dilation) == {1}


def _knows_batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d) -> bool:
    return module.running_mean is not None and module.momentum is not None


MODULES: dict[type[nn.Module], Callable[[Builder, Any, str, Activation], Activation]] = {
    nn.Sequential: _sequential,
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.LayerNorm: _norm,
    nn.GroupNorm: _norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GELU: _gelu,
    nn.ReLU: _relu,
    nn.Tanh: _tanh,
    nn.Sigmoid: _sigmoid,
    nn.Identity: _same,
    nn.AdaptiveAvgPool1d: _pool,
    nn.AdaptiveAvgPool2d: _pool,
    nn.Flatten: _flatten,
    Gate: _gate,
    GatedLinear: _gated_linear,
    Scale: _scale,
    SqueezeExcite: _squeeze_excite,
    TokenEmbedding: _embedding,
    TransformerBlock: _transformer_block,
    ResidualBlock: _residual_block,
    CausalAttention: _attention_seed,
    FullAttention: _attention_seed,
    CausalConvolution: _convolution_seed,
    CentredConvolution: _convolution_seed,
}
_KNOWN: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.BatchNorm1d: _knows_batch_norm,
    nn.BatchNorm2d: _knows_batch_norm,
    nn.Conv1d: _knows_convolution,
    nn.Conv2d: _knows_convolution,
    nn.LayerNorm: lambda module: len(module.normalized_shape) == 1,
    nn.GroupNorm: lambda module: module.num_groups == 1,
    nn.GELU: lambda module: module.approximate == "none",
    nn.AdaptiveAvgPool1d: lambda module: module.output_size in (1, (1,)),
    nn.AdaptiveAvgPool2d: lambda module: module.output_size in (1, (1, 1)),
    nn.Flatten: lambda module: (module.start_dim, module.end_dim) == (1, -1),
}
"""Which modules of a type are known; all where nothing is said."""
_WHOLE = (TokenEmbedding, TransformerBlock, CausalAttention, FullAttention, CausalConvolution, CentredConvolution)
"""Modules whose parts are not looked at: simic's own, which run as they are made."""

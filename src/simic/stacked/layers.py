"""Layers of N networks run as one: each function takes stacked parameters and stacked activations.

Shapes: N networks, B samples; a parameter is (N, *its own shape), an activation (N, B, *its own shape). A linear layer
of N networks is one batched matrix product: (N, B, in) x (N, in, out) -> (N, B, out).

Modules that are not in the table `LAYERS` run under vmap, which is slower; `check` refuses those that vmap cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from simic.growth.branch_layers import (
    CausalAttention,
    CausalConvolution,
    FullAttention,
    Gate,
    GatedLinear,
    Scale,
    SqueezeExcite,
)
from simic.stacked import feature_layers
from simic.stacked.attention import attend
from simic.stacked.batch_norm import batch_norm
from simic.stacked.conv_chain import is_chain, run_chain
from simic.stacked.convolution import convolve
from simic.stacked.parameters import Parameters, part_of
from simic.stacked.row_norm import normalize_rows
from simic.tasks.hosts import ResidualBlock, TokenEmbedding, TransformerBlock

LARGE = 1 << 14
"""Input values above which a single network runs by `functional_call`; below, that call costs more than its layers."""


Run = Callable[[nn.Module, Parameters, Tensor], Tensor]
"""(structure, stacked parameters, inputs) -> outputs of N networks."""


def run_stacked(module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    """The outputs of N networks with the structure of `module`, each with its own parameters and inputs."""
    if len(x) == 1 and x.numel() > LARGE:
        return _run_single(module, parameters, x)
    run = _vmapped if is_customized(module) else LAYERS.get(type(module), _vmapped)
    return run(module, parameters, x)


def run_segments(
    segments: Sequence[nn.Module],
    parameters_of: Callable[[int], Parameters],
    x: Tensor,
    after_segment: Callable[[int, Tensor, Tensor], Tensor],
    *,
    start: int = 0,
    overwriting: Collection[int] = (),
    run: Run = run_stacked,
) -> Tensor:
    """Run N hosts segment by segment; `after_segment(index, output, input)` returns the input of the next.

    Segments in `overwriting` change their input in place, so they get a copy of what may be data or a kept activation.
    `run` may be a compiled `run_stacked`.
    """
    for index in range(start, len(segments)):
        h = run(segments[index], parameters_of(index), x.clone() if index in overwriting else x)
        x = after_segment(index, h, x)
    return x


def compile_run() -> Run:
    """`run_stacked` compiled by torch.compile for any number of hosts and samples; it compiles on first use."""
    return torch.compile(run_stacked, dynamic=True)


def is_customized(module: nn.Module) -> bool:
    """Whether a call does more than the class's forward: hooks, or a `forward` set on the instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _sequential(module: nn.Sequential, parameters: Parameters, x: Tensor) -> Tensor:
    children = {name: child for name, child in module._modules.items() if child is not None}
    if is_chain(children.values(), x) and not any(map(is_customized, children.values())):
        return run_chain([(child, part_of(parameters, name)) for name, child in children.items()], x)
    for name, child in children.items():
        x = run_stacked(child, part_of(parameters, name) if parameters else parameters, x)
    return x


def _linear(module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    if x.dim() == 3:
        return feature_layers.linear(x, parameters["weight"], parameters.get("bias"))
    weight, bias = parameters["weight"].transpose(1, 2), parameters.get("bias")
    flat = x.flatten(1, -2)
    out = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, weight)
    return out.view(*x.shape[:-1], -1)


def _conv(module: nn.Conv1d | nn.Conv2d, parameters: Parameters, x: Tensor) -> Tensor:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return _vmapped(module, parameters, x)
    if is_chain([module], x):
        return run_chain([(module, parameters)], x)
    weight, bias = parameters["weight"], parameters.get("bias")
    out = convolve(module, weight, x)
    return out if bias is None else out + bias.view(x.shape[0], 1, -1, *[1] * (x.dim() - 3))


def _group_norm(module: nn.GroupNorm, parameters: Parameters, x: Tensor) -> Tensor:
    out = F.group_norm(x.flatten(0, 1), module.num_groups, eps=module.eps).view(x.shape)
    return _affine(parameters, out, (x.shape[0], 1, x.shape[2], *[1] * (x.dim() - 3)))


def _layer_norm(module: nn.LayerNorm, parameters: Parameters, x: Tensor) -> Tensor:
    normalized = module.normalized_shape
    if x.dim() == 3 and len(normalized) == 1:
        out = feature_layers.layer_norm(x, module.eps)
    elif len(normalized) == 1:
        out = normalize_rows(x, module.eps)
    else:
        out = F.layer_norm(x, normalized, eps=module.eps)
    return _affine(parameters, out, (x.shape[0], *[1] * (x.dim() - 1 - len(normalized)), *normalized))


def _affine(parameters: Parameters, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if "weight" not in parameters:
        return x
    weight, bias = parameters["weight"].view(shape), parameters.get("bias")
    return x * weight if bias is None else torch.addcmul(bias.view(shape), x, weight)


def _elementwise(module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    return module(x)


def _flatten(module: nn.Flatten, parameters: Parameters, x: Tensor) -> Tensor:
    return x.flatten(2) if (module.start_dim, module.end_dim) == (1, -1) else _vmapped(module, parameters, x)


def _global_pool(module: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d, parameters: Parameters, x: Tensor) -> Tensor:
    if module.output_size not in (1, (1,), (1, 1)):
        return _vmapped(module, parameters, x)
    return x.mean(tuple(range(3, x.dim())), keepdim=True)


def _scale(module: Scale, parameters: Parameters, x: Tensor) -> Tensor:
    return x * parameters["factor"].view(-1, *[1] * (x.dim() - 1))


def _gated_linear(module: GatedLinear, parameters: Parameters, x: Tensor) -> Tensor:
    value, gate, out = (part_of(parameters, name) for name in ("value", "gate", "out"))
    return _linear(module.out, out, _linear(module.value, value, x) * _linear(module.gate, gate, x).sigmoid())


def _gate(module: Gate, parameters: Parameters, x: Tensor) -> Tensor:
    space = [dim + 1 for dim in module.spatial_dims]
    openness = _linear(module.linear, part_of(parameters, "linear"), x.mean(space) if space else x).sigmoid()
    return openness.view(*openness.shape, *[1] * len(space))


def _squeeze_excite(module: SqueezeExcite, parameters: Parameters, x: Tensor) -> Tensor:
    squeeze, excite = (part_of(parameters, name) for name in ("squeeze", "excite"))
    hidden = _linear(module.squeeze, squeeze, x.mean([dim + 1 for dim in module.spatial_dims])).relu()
    factor = _linear(module.excite, excite, hidden).tanh()
    return x * factor.view(*factor.shape, *[1] * len(module.spatial_dims))


def _causal_convolution(module: CausalConvolution, parameters: Parameters, x: Tensor) -> Tensor:
    norm, mix, out = (part_of(parameters, name) for name in ("norm", "mix", "out"))
    past = F.pad(_layer_norm(module.norm, norm, x).transpose(2, 3), (3, 0))
    return _linear(module.out, out, F.gelu(_conv(module.mix, mix, past).transpose(2, 3)))


def _attention(module: CausalAttention, parameters: Parameters, x: Tensor) -> Tensor:
    norm, qkv, out = (part_of(parameters, name) for name in ("norm", "qkv", "out"))
    normed = _layer_norm(module.norm, {}, x)
    return _self_attention(normed, _after_affine(norm, qkv), out, module.heads, causal=module.causal)


def _after_affine(norm: Parameters, linear: Parameters) -> Parameters:
    """The linear layer that also does the affine part of the norm before it: a pass less over the activation."""
    weight, bias = linear["weight"] * norm["weight"].unsqueeze(1), linear["bias"]
    return {
        "weight": weight,
        "bias": torch.baddbmm(bias.unsqueeze(2), linear["weight"], norm["bias"].unsqueeze(2))[..., 0],
    }


def _self_attention(x: Tensor, qkv: Parameters, out: Parameters, heads: int, *, causal: bool = True) -> Tensor:
    """Attention between two linear layers; x is (N, B, L, C)."""
    n, samples, length, _ = x.shape
    # The linear layers also swap positions and features, (N, B L, C) <-> (N, C, B L), at no cost.
    mixed = torch.baddbmm(qkv["bias"].unsqueeze(2), qkv["weight"], x.flatten(1, 2).transpose(1, 2))
    mixed = mixed.view(n, 3, heads, -1, samples, length).permute(1, 0, 2, 4, 3, 5)
    seen = attend(mixed.reshape(3, n * heads * samples, -1, length), causal=causal)
    seen = seen.view(n, heads, samples, -1, length).transpose(2, 3).reshape(n, -1, samples * length)
    mixed = torch.baddbmm(out["bias"].unsqueeze(1), seen.transpose(1, 2), out["weight"].transpose(1, 2))
    return mixed.view(n, samples, length, -1)


def _embedding(module: nn.Embedding, parameters: Parameters, x: Tensor) -> Tensor:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse or module.padding_idx is not None:
        return _vmapped(module, parameters, x)
    # The tables of all networks are one table; network n's tokens are those from n * num_embeddings on.
    first = torch.arange(0, len(x) * module.num_embeddings, module.num_embeddings, device=x.device)
    return F.embedding(x + first.view(-1, *[1] * (x.dim() - 1)), parameters["weight"].flatten(0, 1))


def _token_embedding(module: TokenEmbedding, parameters: Parameters, x: Tensor) -> Tensor:
    tokens = _embedding(module.token, part_of(parameters, "token"), x)
    return tokens + parameters["position"][:, None, : x.shape[-1]]


def _transformer_block(module: TransformerBlock, parameters: Parameters, x: Tensor) -> Tensor:
    names = ("attention_norm", "qkv", "out", "mlp_norm", "mlp.0", "mlp.2")
    attention_norm, qkv, out, mlp_norm, hidden, last = (part_of(parameters, name) for name in names)
    normed = _layer_norm(module.attention_norm, {}, x)
    x = x + _self_attention(normed, _after_affine(attention_norm, qkv), out, module.num_heads)
    normed = _layer_norm(module.mlp_norm, {}, x)
    return x + _linear(module.mlp[2], last, F.gelu(_linear(module.mlp[0], _after_affine(mlp_norm, hidden), normed)))


def _residual_block(module: ResidualBlock, parameters: Parameters, x: Tensor) -> Tensor:
    inner, shortcut = (part_of(parameters, name) for name in ("inner", "shortcut"))
    return (run_stacked(module.inner, inner, x) + run_stacked(module.shortcut, shortcut, x)).relu()


def _run_single(module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    own = {name: value.squeeze(0) for name, value in _own(module, parameters).items()}
    x = x.squeeze(0)
    if x.dim() == 4 and x.device.type == "cpu":
        # Images: convolutions of few channels are faster channels last. But torch's group norm crashes in the backward
        # pass if such an input needs no gradient, so it must not reach one.
        safe = x.requires_grad or not torch.is_grad_enabled() or _starts_with_convolution(module)
        x = x.to(memory_format=torch.channels_last if safe else torch.contiguous_format)
    return functional_call(module, own, (x,)).unsqueeze(0)


def _starts_with_convolution(module: nn.Module) -> bool:
    return type(module) is nn.Sequential and isinstance(next(iter(module), None), nn.Conv2d)


def _vmapped(module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    if len(x) == 1:
        return _run_single(module, parameters, x)
    own = _own(module, parameters)
    return vmap(lambda own, samples: functional_call(module, own, (samples,)))(own, x)


def _own(module: nn.Module, parameters: Parameters) -> dict[str, Tensor]:
    """Parameters and statistics of a module, tied ones once: `functional_call` ties their other names itself."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: parameters[name] for name, _ in tensors if name in parameters}  # other buffers are shared


LAYERS: dict[type[nn.Module], Callable[[Any, Parameters, Tensor], Tensor]] = {
    nn.Sequential: _sequential,
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.ReLU: _elementwise,
    nn.GELU: _elementwise,
    nn.Tanh: _elementwise,
    nn.Identity: _elementwise,
    nn.Flatten: _flatten,
    nn.AdaptiveAvgPool1d: _global_pool,
    nn.AdaptiveAvgPool2d: _global_pool,
    CausalAttention: _attention,
    FullAttention: _attention,
    CausalConvolution: _causal_convolution,
    Gate: _gate,
    GatedLinear: _gated_linear,
    ResidualBlock: _residual_block,
    Scale: _scale,
    SqueezeExcite: _squeeze_excite,
    TokenEmbedding: _token_embedding,
    TransformerBlock: _transformer_block,
}

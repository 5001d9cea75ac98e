"""Layers of N networks run as one: each function takes stacked parameters and stacked activations.

Shapes: N networks, B samples; a parameter is (N, *its own shape), an activation (N, B, *its own shape).
A module that is not in the table runs under vmap: slower, and refused by `stacked_check` where vmap cannot do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from simic.growth.blueprints import CausalAttention, CausalConvolution, Gate, GatedLinear, Scale, SqueezeExcite

Parameters = Mapping[str, Tensor]

COLUMNS_LIMIT = 1 << 20
"""Bytes of unfolded input per network up to which a convolution runs as a matrix product: they then stay in cache."""
NETWORKS_AT_ONCE = 8
"""Networks whose unfolded inputs exist at the same time."""

LARGE = 1 << 14
"""Values from which a lone network runs fastest as it is; below, the call itself costs more than its layers."""


def run_stacked(module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    """The outputs of N networks that share the structure of `module` and have parameters of their own."""
    if len(x) == 1 and x.numel() > LARGE:
        return _alone(module, parameters, x)
    run = _vmapped if is_customized(module) else LAYERS.get(type(module), _vmapped)
    return run(module, parameters, x)


def run_segments(
    segments: Sequence[nn.Module],
    leaves_of: Callable[[int], Parameters],
    x: Tensor,
    behind: Callable[[int, Tensor], Tensor],
    *,
    start: int = 0,
    in_place: Collection[int] = (),
) -> Tensor:
    """N hosts, segment by segment; `behind` turns a segment's output into the next one's input.

    Segments in `in_place` overwrite their input, so they get a copy: the original may be kept or belong to the data.
    """
    for index in range(start, len(segments)):
        x = x.clone() if index in in_place else x
        x = behind(index, run_stacked(segments[index], leaves_of(index), x))
    return x


def is_customized(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says: hooks, or a `forward` of this one instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def part_of(parameters: Parameters, name: str) -> Parameters:
    """The parameters of a child, under the names it knows them by."""
    return {key[len(name) + 1 :]: value for key, value in parameters.items() if key.startswith(name + ".")}


def _sequential(module: nn.Sequential, parameters: Parameters, x: Tensor) -> Tensor:
    for name, child in module._modules.items():
        assert child is not None
        x = run_stacked(child, part_of(parameters, name) if parameters else parameters, x)
    return x


def _linear(module: nn.Linear, parameters: Parameters, x: Tensor) -> Tensor:
    weight, bias = parameters["weight"].transpose(1, 2), parameters.get("bias")
    flat = x.flatten(1, -2)
    out = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, weight)
    return out.view(*x.shape[:-1], -1)


def _conv(module: nn.Conv1d | nn.Conv2d, parameters: Parameters, x: Tensor) -> Tensor:
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return _vmapped(module, parameters, x)
    weight, bias = parameters["weight"], parameters.get("bias")
    out = _CONVOLUTIONS[_choose_convolution(module, x)](module, weight, x)
    return out if bias is None else out + bias.view(x.shape[0], 1, -1, *[1] * (x.dim() - 3))


def _choose_convolution(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> str:
    """Small inputs fit in cache unfolded; else strided convolutions gain from being grouped, others do not."""
    if len(x) == 1:
        return "one by one"
    if x.device.type != "cpu" or module.groups > 1 or module.kernel_size == (1,) * len(module.kernel_size):
        return "grouped"
    if _plain(module) and x[0].numel() * x.element_size() * math.prod(module.kernel_size) <= COLUMNS_LIMIT:
        return "unfolded"
    return "grouped" if max(module.stride) > 1 else "one by one"


def _plain(module: nn.Conv1d | nn.Conv2d) -> bool:
    odd_and_same = all(k % 2 and p == k // 2 for k, p in zip(module.kernel_size, module.padding, strict=True))
    return odd_and_same and len(set(module.stride)) == 1 and max(module.dilation) == 1


def _grouped(module: nn.Conv1d | nn.Conv2d, weight: Tensor, x: Tensor) -> Tensor:
    together = x.transpose(0, 1).flatten(1, 2)  # (B, N C, *space)
    convolve = F.conv1d if x.dim() == 4 else F.conv2d
    groups = x.shape[0] * module.groups
    out = convolve(together, weight.flatten(0, 1), None, module.stride, module.padding, module.dilation, groups)
    return out.unflatten(1, (x.shape[0], -1)).transpose(0, 1)


def _one_by_one(module: nn.Conv1d | nn.Conv2d, weight: Tensor, x: Tensor) -> Tensor:
    convolve = F.conv1d if x.dim() == 4 else F.conv2d
    pairs = zip(x.unbind(), weight.unbind(), strict=True)
    stride, padding, dilation, groups = module.stride, module.padding, module.dilation, module.groups
    return torch.stack([convolve(a, w, None, stride, padding, dilation, groups) for a, w in pairs])


def _unfolded(module: nn.Conv1d | nn.Conv2d, weight: Tensor, x: Tensor) -> Tensor:
    if x.dim() == 5:
        return _UnfoldedConvolution.apply(x, weight, module.stride[0])  # pyright: ignore[reportReturnType]
    flat = _UnfoldedConvolution.apply(x.unsqueeze(3), weight.unsqueeze(3), module.stride[0])
    return flat.squeeze(3)  # pyright: ignore[reportOptionalMemberAccess]


class _UnfoldedConvolution(torch.autograd.Function):
    """Convolution with odd kernel and same padding as a matrix product per network, samples innermost.

    Columns are made again in the backward pass: making them from cache is cheaper than keeping them in memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        n, samples, _, *space = x.shape
        out_space = [(size - 1) // stride + 1 for size in space]
        out = x.new_empty(n, samples, weight.shape[1], *out_space)
        for part in _parts(n):
            product = torch.bmm(weight[part].flatten(2), _columns(_samples_last(x[part]), weight, stride, out_space))
            out[part] = product.view(-1, weight.shape[1], *out_space, samples).movedim(-1, 1)
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight)
        for part in _parts(x.shape[0]):
            g = _samples_last(grad[part])  # (n, out, *out space, B)
            columns = _columns(_samples_last(x[part]), weight, ctx.stride, list(grad.shape[3:]))
            grad_weight[part] = torch.bmm(g.flatten(2), columns.transpose(1, 2)).view_as(grad_weight[part])
            if grad_x is not None:
                grad_x[part] = _input_gradient(g, weight[part], ctx.stride, list(x.shape[3:])).movedim(-1, 1)
        return grad_x, grad_weight, None


def _parts(n: int) -> list[slice]:
    return [slice(start, start + NETWORKS_AT_ONCE) for start in range(0, n, NETWORKS_AT_ONCE)]


def _samples_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous()


def _columns(x: Tensor, weight: Tensor, stride: int, out_space: list[int]) -> Tensor:
    """(n, C, H, W, B) -> (n, C kh kw, Ho Wo B): what each output sees."""
    kh, kw = weight.shape[3:]
    padded = F.pad(x, (0, 0, kw // 2, kw // 2, kh // 2, kh // 2))
    s = padded.stride()
    size = (*padded.shape[:2], kh, kw, *out_space, padded.shape[4])
    windows = padded.as_strided(size, (s[0], s[1], s[2], s[3], s[2] * stride, s[3] * stride, s[4]))
    return windows.reshape(x.shape[0], x.shape[1] * kh * kw, -1)


def _input_gradient(g: Tensor, weight: Tensor, stride: int, space: list[int]) -> Tensor:
    """(n, C, H, W, B): each input receives from every output that saw it."""
    n, _, channels, kh, kw = weight.shape
    if stride == 1:
        mirrored = weight.flip(3, 4).transpose(1, 2)
        return torch.bmm(mirrored.flatten(2), _columns(g, weight, 1, space)).view(n, channels, *space, -1)
    columns = torch.bmm(weight.flatten(2).transpose(1, 2), g.flatten(2))
    columns = columns.view(n, channels, kh, kw, *g.shape[2:])
    padded = g.new_zeros(n, channels, space[0] + 2 * (kh // 2), space[1] + 2 * (kw // 2), g.shape[4])
    rows, cols = (stride * (size - 1) + 1 for size in g.shape[2:4])
    for i in range(kh):
        for j in range(kw):
            padded[:, :, i : i + rows : stride, j : j + cols : stride] += columns[:, :, i, j]
    return padded[:, :, kh // 2 : kh // 2 + space[0], kw // 2 : kw // 2 + space[1]]


def _group_norm(module: nn.GroupNorm, parameters: Parameters, x: Tensor) -> Tensor:
    out = F.group_norm(x.flatten(0, 1), module.num_groups, eps=module.eps).view(x.shape)
    return _affine(parameters, out, (x.shape[0], 1, x.shape[2], *[1] * (x.dim() - 3)))


def _layer_norm(module: nn.LayerNorm, parameters: Parameters, x: Tensor) -> Tensor:
    out = F.layer_norm(x, module.normalized_shape, eps=module.eps)
    normalized = module.normalized_shape
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


def _causal_attention(module: CausalAttention, parameters: Parameters, x: Tensor) -> Tensor:
    norm, qkv, out = (part_of(parameters, name) for name in ("norm", "qkv", "out"))
    mixed = _linear(module.qkv, qkv, _layer_norm(module.norm, norm, x))
    q, k, v = mixed.flatten(0, 1).unflatten(-1, (3, module.heads, module.head_size)).transpose(1, 3).unbind(2)
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return _linear(module.out, out, seen.view(x.shape))


def _alone(module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    own = {name: parameter.squeeze(0) for name, parameter in _each_once(module, parameters).items()}
    return functional_call(module, own, (x.squeeze(0),)).unsqueeze(0)


def _vmapped(module: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    if len(x) == 1:
        return _alone(module, parameters, x)
    own = _each_once(module, parameters)
    return vmap(lambda own, samples: functional_call(module, own, (samples,)))(own, x)


def _each_once(module: nn.Module, parameters: Parameters) -> dict[str, Tensor]:
    """Parameters under one name each: `functional_call` ties the other names of a shared one itself."""
    return {name: parameters[name] for name, _ in module.named_parameters()}


_CONVOLUTIONS = {"grouped": _grouped, "one by one": _one_by_one, "unfolded": _unfolded}
LAYERS: dict[type[nn.Module], Callable[[Any, Parameters, Tensor], Tensor]] = {
    nn.Sequential: _sequential,
    nn.Linear: _linear,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.ReLU: _elementwise,
    nn.GELU: _elementwise,
    nn.Tanh: _elementwise,
    nn.Flatten: _flatten,
    nn.AdaptiveAvgPool1d: _global_pool,
    nn.AdaptiveAvgPool2d: _global_pool,
    CausalAttention: _causal_attention,
    CausalConvolution: _causal_convolution,
    Gate: _gate,
    GatedLinear: _gated_linear,
    Scale: _scale,
    SqueezeExcite: _squeeze_excite,
}

"""Convolutions of N networks at once, by whichever of three methods is fastest for their size.

Shapes: N networks, B samples, C input and O output channels. Inputs are (N, B, C, *space), weights (N, O, C, *kernel).

    one by one   N calls of F.conv                          large inputs: a call costs little compared to its work
    grouped      one call on (B, N C, *space), N groups     1x1 kernels, strided or grouped convolutions
    unfolded     one matrix product per network             small inputs: the windows of all samples fit into the cache
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COLUMNS_LIMIT = 1 << 20
"""Bytes of unfolded input per network up to which a convolution runs as a matrix product: more leave the cache."""
NETWORKS_AT_ONCE = 8
"""Networks whose unfolded inputs exist at the same time."""

Conv = nn.Conv1d | nn.Conv2d


def convolve(module: Conv, weight: Tensor, x: Tensor) -> Tensor:
    """The convolutions of N networks without bias, with stride, padding, dilation and groups of `module`."""
    if len(x) == 1:
        return _one_by_one(module, weight, x)
    if x.device.type != "cpu" or module.groups > 1 or module.kernel_size == (1,) * len(module.kernel_size):
        return _grouped(module, weight, x)
    if _unfoldable(module) and x[0].numel() * x.element_size() * math.prod(module.kernel_size) <= COLUMNS_LIMIT:
        return _unfolded(module, weight, x)
    return _grouped(module, weight, x) if max(module.stride) > 1 else _one_by_one(module, weight, x)


def _grouped(module: Conv, weight: Tensor, x: Tensor) -> Tensor:
    together = x.transpose(0, 1).flatten(1, 2)  # (B, N C, *space)
    conv = F.conv1d if x.dim() == 4 else F.conv2d
    groups = x.shape[0] * module.groups
    out = conv(together, weight.flatten(0, 1), None, module.stride, module.padding, module.dilation, groups)
    return out.unflatten(1, (x.shape[0], -1)).transpose(0, 1)


def _one_by_one(module: Conv, weight: Tensor, x: Tensor) -> Tensor:
    conv = F.conv1d if x.dim() == 4 else F.conv2d
    stride, padding, dilation, groups = module.stride, module.padding, module.dilation, module.groups
    pairs = zip(x.unbind(), weight.unbind(), strict=True)
    return torch.stack([conv(a, w, None, stride, padding, dilation, groups) for a, w in pairs])


def _unfoldable(module: Conv) -> bool:
    odd_and_same = all(k % 2 and p == k // 2 for k, p in zip(module.kernel_size, module.padding, strict=True))
    return odd_and_same and len(set(module.stride)) == 1 and max(module.dilation) == 1


def _unfolded(module: Conv, weight: Tensor, x: Tensor) -> Tensor:
    flat = x.dim() == 4
    if flat:  # a second space dimension of size 1
        x, weight = x.unsqueeze(3), weight.unsqueeze(3)
    out = _UnfoldedConvolution.apply(x, weight, module.stride[0])
    assert isinstance(out, Tensor)
    return out.squeeze(3) if flat else out


class _UnfoldedConvolution(torch.autograd.Function):
    """2D convolution with an odd kernel and same padding, as one matrix product per network:

        weight (O, C kh kw)  @  columns (C kh kw, Ho Wo B)  ->  (O, Ho Wo B)

    Column i holds the window that output i sees. Samples are innermost, so that windows are copied in long runs. The
    backward pass unfolds again: that happens within the cache and is cheaper than reading stored columns from memory.
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
            g = _samples_last(grad[part])  # (n, O, Ho, Wo, B)
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
    """(n, C, H, W, B) -> (n, C kh kw, Ho Wo B): the window of every output."""
    kh, kw = weight.shape[3:]
    padded = F.pad(x, (0, 0, kw // 2, kw // 2, kh // 2, kh // 2))
    s = padded.stride()
    size = (*padded.shape[:2], kh, kw, *out_space, padded.shape[4])
    windows = padded.as_strided(size, (s[0], s[1], s[2], s[3], s[2] * stride, s[3] * stride, s[4]))
    return windows.reshape(x.shape[0], x.shape[1] * kh * kw, -1)


def _input_gradient(g: Tensor, weight: Tensor, stride: int, space: list[int]) -> Tensor:
    """(n, O, Ho, Wo, B) -> (n, C, H, W, B): every input sums over the outputs whose window it is in."""
    n, _, channels, kh, kw = weight.shape
    if stride == 1:  # again a convolution, with the kernel mirrored
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

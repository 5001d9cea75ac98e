"""Convolutions of N networks at once, by whichever method suits them.

Shapes: N networks, B samples, C input and O output channels. Inputs are (N, B, C, *space), weights (N, O, C, *kernel).

    bands        one product per column of the kernel       samples innermost, see `conv_chain` and `band_convolution`;
                                                            small images, same padding, one group
    unfolded     one matrix product per network             the same on larger or 1-D images, and 1x1 kernels
    grouped      one call on (B, N C, *space), N groups     1x1 kernels, strided or grouped convolutions
    one by one   N calls of F.conv                          other large ones: a call costs little compared to its work
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COLUMNS_AT_ONCE = 1 << 22
"""Bytes of unfolded input that exist at the same time: more leave the cache."""

Conv = nn.Conv1d | nn.Conv2d


def convolve(module: Conv, weight: Tensor, x: Tensor) -> Tensor:
    """The convolutions of N networks without bias, with stride, padding, dilation and groups of `module`."""
    pointwise = module.kernel_size == (1,) * len(module.kernel_size)
    if len(x) > 1 and (x.device.type != "cpu" or module.groups > 1 or pointwise or max(module.stride) > 1):
        return _grouped(module, weight, x)
    return _one_by_one(module, weight, x)


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


def runs_samples_last(module: Conv) -> bool:
    """Whether it can run in a chain."""
    if module.padding_mode != "zeros" or isinstance(module.padding, str) or module.groups > 1:
        return False
    odd_and_same = all(k % 2 and p == k // 2 for k, p in zip(module.kernel_size, module.padding, strict=True))
    return odd_and_same and len(set(module.stride)) == 1 and max(module.dilation) == 1


def unfolded_forward(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """2D convolutions with odd kernels and same padding of (N, C, H, W, B), as one matrix product per network:

        weight (O, C kh kw)  @  columns (C kh kw, Ho Wo B)  ->  (O, Ho Wo B)

    Column i holds the window that output i sees. Samples are innermost, so that windows are copied in long runs. The
    backward pass unfolds again: that happens within the cache and is cheaper than reading stored columns from memory.
    """
    n, _, *space, samples = x.shape
    out_space = [(size - 1) // stride + 1 for size in space]
    out = x.new_empty(n, weight.shape[1], math.prod(out_space) * samples)
    for part in _parts(x, weight):
        torch.bmm(weight[part].flatten(2), _columns(x[part], weight, stride, out_space), out=out[part])
    return out.view(n, -1, *out_space, samples), ()


def unfolded_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    saved: tuple[Tensor, ...],
    stride: int,
    *,
    wants_input: bool,
    wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight."""
    space = list(x.shape[2:4])
    grad_x, grad_weight = [], weight.new_empty(weight.flatten(2).shape) if wants_weight else None
    for part in _parts(x, weight):
        g = grad[part]
        if grad_weight is not None:
            columns = _columns(x[part], weight, stride, list(g.shape[2:4]))
            torch.bmm(g.flatten(2), columns.transpose(1, 2), out=grad_weight[part])
        if wants_input:
            grad_x.append(_input_gradient(g, weight[part], stride, space))
    whole = None if not grad_x else grad_x[0] if len(grad_x) == 1 else torch.cat(grad_x)
    return whole, None if grad_weight is None else grad_weight.view_as(weight)


def _parts(x: Tensor, weight: Tensor) -> list[slice]:
    """Networks whose columns exist at the same time."""
    step = max(1, COLUMNS_AT_ONCE // (x[0].numel() * x.element_size() * math.prod(weight.shape[3:])))
    return [slice(start, start + step) for start in range(0, len(x), step)]


def _columns(x: Tensor, weight: Tensor, stride: int, out_space: list[int]) -> Tensor:
    """(n, C, H, W, B) -> (n, C kh kw, Ho Wo B): the window of every output."""
    kh, kw = weight.shape[3:]
    if kh == kw == stride == 1:
        return x.flatten(2, 4)
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

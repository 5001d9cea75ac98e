"""Convolutions of N networks on small images, as products with band matrices: nothing is unfolded.

Shapes: N networks, B samples, C input and O output channels; inputs are (N, C, H, W, B). For each column k of the
kernel, the rows of all channels are mixed by one matrix per network, and columns of the image are shifted views:

    band k (O Ho, C H)  @  x (C H, W columns from k on, B)  ->  (O Ho, Wo B), added up over k

Band k holds `weight[o, c, i, k]` in row (o, r) and column (c, r + i - 1), here for a 3x3 kernel, stride 1 and H = 4:

    [ w1 w2  .  . ]
    [ w0 w1 w2  . ]      w_i = weight[o, c, i, k]
    [  . w0 w1 w2 ]
    [  .  . w0 w1 ]

The zeros cost H / 3 times the multiplications, but the products are square enough to run several times faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_HEIGHT = 8
"""Height of images up to which band matrices beat unfolding."""
MIN_ROWS = 12
"""Rows of all channels from which on they do: products with fewer are slow."""


def prefers_bands(x: Tensor, weight: Tensor) -> bool:
    """Whether `band_convolution` is the faster way for inputs (N, C, H, W, B)."""
    channels, height = x.shape[1:3]
    return 1 < height <= MAX_HEIGHT and channels * height >= MIN_ROWS and max(weight.shape[3:]) > 1


def band_forward(x: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(N, C, H, W, B), odd kernels (N, O, C, kh, kw), same padding -> (N, O, Ho, Wo, B); and what backward needs."""
    n, _, height, width, samples = x.shape
    rows, columns = (height - 1) // stride + 1, (width - 1) // stride + 1
    bands, phases = _bands(weight, stride, height, rows), _phases(x, stride, weight.shape[4] // 2)
    out = x.new_empty(n, bands.shape[2], columns * samples)
    for k in range(len(bands)):
        _multiply(bands[k], _window(phases, k, stride, columns), out, add=k > 0)
    return out.view(n, -1, rows, columns, samples), (bands, phases)


def band_backward(
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
    bands, phases = saved
    grad_x = _input_gradient(grad, bands, stride, x.shape[3]).view(x.shape) if wants_input else None
    return grad_x, _weight_gradient(grad, phases, weight, stride, x.shape[2]) if wants_weight else None


def _bands(weight: Tensor, stride: int, height: int, rows: int) -> Tensor:
    """(N, O, C, kh, kw) -> (kw, N, O Ho, C H)."""
    n, out_channels, channels, kernel, kw = weight.shape
    padded = weight.new_zeros(kw, n, out_channels, rows, channels, height + kernel - 1)
    _diagonals(padded, kernel, stride).copy_(weight.permute(4, 0, 1, 2, 3).unsqueeze(3))
    inner = padded[..., kernel // 2 : kernel // 2 + height]
    return inner.reshape(kw, n, out_channels * rows, channels * height)


def _diagonals(padded: Tensor, kernel: int, stride: int) -> Tensor:
    """Where the kernel's rows are in bands of padded images (kw, N, O, Ho, C, H + kh - 1): (kw, N, O, Ho, C, kh)."""
    strides = padded.stride()
    step = (*strides[:3], strides[3] + stride, *strides[4:])
    return padded.as_strided((*padded.shape[:5], kernel), step)


def _phases(x: Tensor, stride: int, padding: int) -> Tensor:
    """(N, C, H, W, B) -> (N, C H, stride, columns, B): every stride-th column of the padded image, from each start."""
    if stride == 1:
        return F.pad(x, (0, 0, padding, padding)).flatten(1, 2).unsqueeze(2)
    columns = -(-(x.shape[3] + 2 * padding) // stride)
    phases = x.new_zeros(*x.shape[:3], stride, columns, x.shape[4])
    for phase in range(stride):
        first, start = _first_column(phase, stride, padding)
        own = x[:, :, :, first::stride]
        phases[:, :, :, phase, start : start + own.shape[3]] = own
    return phases.flatten(1, 2)


def _first_column(phase: int, stride: int, padding: int) -> tuple[int, int]:
    """The first column of the image in a phase of the padded image, and its place there."""
    first = (phase - padding) % stride
    return first, (first + padding) // stride


def _window(phases: Tensor, k: int, stride: int, columns: int) -> Tensor:
    """What column k of the kernel sees, (N, C H, Wo B): a view."""
    return phases[:, :, k % stride, k // stride : k // stride + columns].flatten(2)


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    # Neither call is subject to autocast.
    if add:
        out.baddbmm_(a, b)
    else:
        torch.bmm(a, b, out=out)


def _weight_gradient(grad: Tensor, phases: Tensor, weight: Tensor, stride: int, height: int) -> Tensor:
    n, out_channels, rows, columns, _ = grad.shape
    kernel, kw = weight.shape[3:]
    products = grad.new_empty(kw, n, out_channels * rows, phases.shape[1])
    for k in range(kw):
        window = _window(phases, k, stride, columns)
        torch.bmm(grad.view(n, out_channels * rows, -1), window.transpose(1, 2), out=products[k])
    padded = F.pad(products.view(kw, n, out_channels, rows, -1, height), (kernel // 2, kernel // 2))
    return _diagonals(padded, kernel, stride).sum(3).permute(1, 2, 3, 4, 0)


def _input_gradient(grad: Tensor, bands: Tensor, stride: int, width: int) -> Tensor:
    """(N, O, Ho, Wo, B) -> (N, C H, W, B): phase by phase, every column sums over the kernel columns that see it."""
    kw, n, _, rows = bands.shape
    reach, padding = (kw - 1) // stride + 1, kw // 2
    padded = F.pad(grad, (0, 0, reach, reach)).flatten(1, 2)
    new = grad.new_empty if stride <= kw else grad.new_zeros  # no kernel column sees the other columns of the image
    grad_x = new(n, rows, width, grad.shape[4])
    for phase in range(min(stride, kw)):
        first, start = _first_column(phase, stride, padding)
        columns = len(range(first, width, stride))
        own = grad.new_empty(n, rows, columns * grad.shape[4])
        for k in range(phase, kw, stride):
            begin = reach + start - k // stride
            window = padded[:, :, begin : begin + columns].flatten(2)
            _multiply(bands[k].transpose(1, 2), window, own, add=k > phase)
        if stride == 1:
            return own.view(grad_x.shape)
        grad_x[:, :, first::stride] = own.view(n, rows, columns, -1)
    return grad_x

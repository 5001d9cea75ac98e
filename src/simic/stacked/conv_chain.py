"""Convolutions, norms and activations in a row, of N small networks, with samples innermost.

Shapes: N networks, B samples, C channels. Inputs and outputs are (N, B, C, *space); in between, parts of some networks
(and, if one alone is large, of some samples) are (n, C, H, W, B). Windows of a convolution are copied in long runs that
way, a norm adds up whole rows, and outputs stay in that order in memory, so that the next chain need not copy them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.blueprints import Scale
from simic.stacked.convolution import convolve_samples_last, runs_samples_last
from simic.stacked.parameters import Parameters

PART_BYTES = 1 << 22
"""Size of a part's largest activation: more leave the cache, less is dominated by the cost of a call."""
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.Tanh)

Link = tuple[nn.Module, Parameters]
"""A layer of the chain and its parameters."""


def is_chain(modules: Iterable[nn.Module], x: Tensor) -> bool:
    """Whether `run_chain` runs these layers, and faster than one by one."""
    found = False
    for module in modules:
        if isinstance(module, nn.Conv1d | nn.Conv2d) and type(module) in (nn.Conv1d, nn.Conv2d):
            if not runs_samples_last(module) or len(module.kernel_size) != x.dim() - 3:
                return False
            found = True
        elif type(module) is Scale:
            found |= x.dim() > 3
        elif not ((type(module) is nn.GroupNorm and module.num_groups == 1) or type(module) in ELEMENTWISE):
            return False
    return found and len(x) > 1 and x.device.type in ("cpu", "meta")


def run_chain(links: Sequence[Link], x: Tensor) -> Tensor:
    """The outputs (N, B, C, *space) of a chain."""
    flat = x.dim() == 4
    x = x.unsqueeze(3) if flat else x
    # Under autocast, too, a chain runs in the precision of its parameters: a lower one is not faster on CPUs.
    x = x.to(next(value.dtype for _, parameters in links for value in parameters.values()))
    channels = max([x.shape[2], *(m.out_channels for m, _ in links if isinstance(m, nn.Conv1d | nn.Conv2d))])
    size = channels * math.prod(x.shape[3:]) * x.element_size()  # of one sample
    networks = max(1, PART_BYTES // (size * x.shape[1]))
    samples = max(1, min(x.shape[1], PART_BYTES // size))
    if networks >= len(x) and samples >= x.shape[1]:
        out = _run_part(links, x)
        return out.squeeze(3) if flat else out
    names = [list(parameters) for _, parameters in links]
    # `split` rather than slices: its backward pass is one concatenation.
    values = [list(zip(*(p.split(networks) for p in parameters.values()), strict=True)) for _, parameters in links]
    outs = []
    for index, part in enumerate(x.split(networks)):
        own = [dict(zip(n, v[index], strict=True)) if v else {} for n, v in zip(names, values, strict=True)]
        mine = [(module, parameters) for (module, _), parameters in zip(links, own, strict=True)]
        outs.append(_join([_run_part(mine, some) for some in part.split(samples, 1)], 1))
    out = _join(outs, 0)
    return out.squeeze(3) if flat else out


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _run_part(links: Sequence[Link], x: Tensor) -> Tensor:
    x = x.movedim(1, -1).contiguous()
    skip = False
    for index, (module, parameters) in enumerate(links):
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if skip:
            skip = False
        elif isinstance(module, nn.Conv1d | nn.Conv2d):
            assert weight is not None
            x = convolve_samples_last(module, weight, bias, x)
        elif isinstance(module, nn.GroupNorm):
            skip = index + 1 < len(links) and type(links[index + 1][0]) is nn.ReLU
            x = _normalize(x, weight, bias, module.eps, relu=skip)
        elif isinstance(module, Scale):
            x = x * parameters["factor"].view(-1, *[1] * (x.dim() - 1))
        else:
            x = module(x)
    return x.movedim(-1, 1)


def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, relu: bool) -> Tensor:
    """Group norm with one group, and a ReLU after it."""
    weight = x.new_ones(x.shape[:2]) if weight is None else weight
    bias = torch.zeros_like(weight) if bias is None else bias
    out = _Norm.apply(x.flatten(2, 3), weight, bias, eps, relu)
    assert isinstance(out, Tensor)
    return out.view(x.shape)


class _Norm(torch.autograd.Function):
    """Every sample (n, C, P, B) with mean 0 and variance 1, times `weight` (n, C) plus `bias` (n, C), then ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, relu: bool) -> Tensor:
        normed = x - x.mean((1, 2), keepdim=True)
        inverse_std = normed.square().mean((1, 2), keepdim=True).add_(eps).rsqrt_()
        normed.mul_(inverse_std)
        # Not addcmul: it is slow if two of its inputs are broadcast.
        out = (normed * weight[..., None, None]).add_(bias[..., None, None])
        out = out.relu_() if relu else out
        ctx.relu = relu
        ctx.save_for_backward(normed, inverse_std, weight, *([out] if relu else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        normed, inverse_std, weight, *out = ctx.saved_tensors
        grad = grad.contiguous()
        if ctx.relu:
            grad = torch.ops.aten.threshold_backward(grad, out[0], 0)
        sums, products = grad.sum(2), (grad * normed).sum(2)  # (n, C, B)
        # The gradient of the normalized values without its mean and without its part along them.
        count = grad.shape[1] * grad.shape[2]
        mean, along = (torch.bmm(weight.unsqueeze(1), term).div_(count).unsqueeze(2) for term in (sums, products))
        grad_x = (grad * weight[..., None, None]).sub_(normed * along).sub_(mean).mul_(inverse_std)
        return grad_x, products.sum(2), sums.sum(2), None, None

"""The layers of a chain of N networks with samples innermost: forward and backward pass of each, written out.

Shapes: n networks, B samples, C channels; activations are (n, C, H, W, B). A step's `forward` returns its output and
what its `backward` needs besides its parameters; `backward` returns the gradients of its input and of its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from simic.growth.blueprints import Scale
from simic.stacked.band_convolution import band_backward, band_forward, prefers_bands
from simic.stacked.convolution import unfolded_backward, unfolded_forward

Names = tuple[tuple[int, str], ...]
"""Parameters: the index of their layer in the chain, and their name there."""
Saved = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


class Wanted(NamedTuple):
    """Which gradients a backward pass needs."""

    input: bool
    parameters: bool


class Step(Protocol):
    """A layer, or two that are faster together. `overwrite` allows it to use the memory of its input."""

    @property
    def names(self) -> Names: ...

    def forward(self, x: Tensor, parameters: Saved, *, overwrite: bool) -> tuple[Tensor, Saved]: ...

    def backward(
        self, grad: Tensor, parameters: Saved, saved: Saved, wanted: Wanted
    ) -> tuple[Tensor | None, Gradients]: ...


@dataclass(frozen=True)
class Convolution:
    """A convolution with an odd kernel and same padding; its output is read by the next step alone."""

    names: Names
    stride: int

    def forward(self, x: Tensor, parameters: Saved, *, overwrite: bool) -> tuple[Tensor, Saved]:
        weight, *bias = parameters
        weight = _as_2d(weight)
        forward = band_forward if prefers_bands(x, weight) else unfolded_forward
        out, saved = forward(x, weight, self.stride)
        if bias:
            out += bias[0][..., None, None, None]
        return out, (x, *saved)

    def backward(
        self, grad: Tensor, parameters: Saved, saved: Saved, wanted: Wanted
    ) -> tuple[Tensor | None, Gradients]:
        weight, *bias = parameters
        (x, *kept), full = saved, _as_2d(weight)
        backward = band_backward if prefers_bands(x, full) else unfolded_backward
        grad_x, grad_weight = backward(
            grad, x, full, (*kept,), self.stride, wants_input=wanted.input, wants_weight=wanted.parameters
        )
        if grad_weight is None:
            return grad_x, (None,) * len(parameters)
        return grad_x, (grad_weight.view_as(weight), *(grad.flatten(2).sum(2) for _ in bias))


def _as_2d(weight: Tensor) -> Tensor:
    return weight.unsqueeze(3) if weight.dim() == 4 else weight


@dataclass(frozen=True)
class Norm:
    """Every sample with mean 0 and variance 1, times a weight (n, C) plus a bias (n, C), then perhaps ReLU."""

    names: Names
    eps: float
    relu: bool

    def forward(self, x: Tensor, parameters: Saved, *, overwrite: bool) -> tuple[Tensor, Saved]:
        mean = x.mean((1, 2, 3), keepdim=True)
        centred = x.sub_(mean) if overwrite else x - mean
        out = centred.square()
        scale = inverse_std = out.mean((1, 2, 3), keepdim=True).add_(self.eps).rsqrt_()
        if parameters:
            scale = inverse_std * parameters[0][..., None, None, None]
        # Not addcmul: it is slow if two of its inputs are broadcast.
        torch.mul(centred, scale, out=out)
        if len(parameters) > 1:
            out += parameters[1][..., None, None, None]
        return (out.relu_(), (centred, inverse_std, scale, out)) if self.relu else (out, (centred, inverse_std, scale))

    def backward(
        self, grad: Tensor, parameters: Saved, saved: Saved, wanted: Wanted
    ) -> tuple[Tensor | None, Gradients]:
        centred, inverse_std, scale, *out = (each.flatten(2, 3) for each in saved)
        grad, inverse = grad.flatten(2, 3), inverse_std.squeeze(2)  # (n, 1, B)
        if self.relu:
            grad = torch.ops.aten.threshold_backward(grad, out[0], 0)
        grad_x = grad * centred
        sums, products = grad.sum(2), grad_x.sum(2).mul_(inverse)  # (n, C, B)
        # The gradient of the normalized values without its mean and without its part along them.
        count = grad.shape[1] * grad.shape[2]
        weight = parameters[0].unsqueeze(1) if parameters else grad.new_ones(len(grad), 1, grad.shape[1])
        mean, along = (torch.bmm(weight, term).mul_(inverse).div_(count) for term in (sums, products))
        torch.mul(grad, scale, out=grad_x)
        grad_x.addcmul_(centred, (along * inverse).unsqueeze(2), value=-1).sub_(mean.unsqueeze(2))
        return grad_x.view(saved[0].shape), tuple(each.sum(2) for each in (products, sums)[: len(parameters)])


@dataclass(frozen=True)
class Activation:
    """An elementwise function without parameters."""

    module: nn.Module
    names: Names = ()

    def forward(self, x: Tensor, parameters: Saved, *, overwrite: bool) -> tuple[Tensor, Saved]:
        if isinstance(self.module, nn.GELU):
            return self.module(x), (x,)
        out = x.tanh() if isinstance(self.module, nn.Tanh) else x.relu()
        return out, (out,)

    def backward(
        self, grad: Tensor, parameters: Saved, saved: Saved, wanted: Wanted
    ) -> tuple[Tensor | None, Gradients]:
        if isinstance(self.module, nn.GELU):
            return torch.ops.aten.gelu_backward(grad, saved[0], approximate=self.module.approximate), ()
        if isinstance(self.module, nn.Tanh):
            return torch.ops.aten.tanh_backward(grad, saved[0]), ()
        return torch.ops.aten.threshold_backward(grad, saved[0], 0), ()


@dataclass(frozen=True)
class Factor:
    """A product with one number per network."""

    names: Names

    def forward(self, x: Tensor, parameters: Saved, *, overwrite: bool) -> tuple[Tensor, Saved]:
        return x * parameters[0].view(-1, 1, 1, 1, 1), (x,)

    def backward(
        self, grad: Tensor, parameters: Saved, saved: Saved, wanted: Wanted
    ) -> tuple[Tensor | None, Gradients]:
        product = (grad * saved[0]).flatten(1).sum(1).view_as(parameters[0])
        return grad * parameters[0].view(-1, 1, 1, 1, 1), (product,)


def steps_of(layers: Sequence[nn.Module]) -> list[Step]:
    """The steps of a chain; a norm and the ReLU behind it are one."""
    steps: list[Step] = []
    for index, module in enumerate(layers):
        names = tuple((index, key) for key, value in module._parameters.items() if value is not None)
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            steps.append(Convolution(names, module.stride[0]))
        elif isinstance(module, nn.GroupNorm):
            steps.append(Norm(names, module.eps, relu=False))
        elif isinstance(module, Scale):
            steps.append(Factor(names))
        elif isinstance(module, nn.ReLU) and steps and isinstance(norm := steps[-1], Norm) and not norm.relu:
            steps[-1] = replace(norm, relu=True)
        else:
            steps.append(Activation(module))
    return steps

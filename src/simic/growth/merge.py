"""Folds linear seeds into the weights of the layers that they grew at, so that they cost nothing at run time.

    beside   h + alpha (M x + c)   with h = W x + b      W + alpha M          b + alpha c
    behind   h + alpha (M h + c)                         W + alpha M W        b + alpha (M b + c)

M and c are the branch's matrix and bias. Layers that can take them: nn.Linear, transformers' Conv1D (which stores the
transposed matrix) and, for seeds behind, convolutions without groups. A layer whose weight other modules share (tied
embeddings), or that is parametrized, keeps its seed as a layer of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from simic.growth.seed import Seed
from simic.growth.slot_discovery import Site

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Affine(NamedTuple):
    """x -> matrix x + bias, in double precision."""

    matrix: Tensor  # (out, in)
    bias: Tensor  # (out,)


def affine_map(branch: nn.Module) -> Affine | None:
    """What a branch of linear layers and 1x1 convolutions computes; None if it is anything else."""
    layers = list(branch) if isinstance(branch, nn.Sequential) else [branch]
    total: Affine | None = None
    for layer in layers:
        if isinstance(layer, (nn.Identity, nn.Dropout)):
            continue
        own = _affine_layer(layer)
        if own is None:
            return None
        total = own if total is None else Affine(own.matrix @ total.matrix, own.matrix @ total.bias + own.bias)
    return total


def _affine_layer(layer: nn.Module) -> Affine | None:
    if not isinstance(layer, (nn.Linear, *_CONVOLUTIONS)) or is_parametrized(layer):
        return None
    weight = layer.weight.detach().double()
    if not isinstance(layer, nn.Linear):
        pointwise = set(layer.kernel_size) == {1} and set(layer.stride) == {1} and layer.groups == 1
        if not pointwise or any(layer.padding):
            return None
        weight = weight.flatten(1)
    bias = layer.bias.detach().double() if layer.bias is not None else weight.new_zeros(len(weight))
    return Affine(weight, bias)


def by_submodule(seeds: Iterable[tuple[Site, Seed]]) -> dict[str, list[tuple[Site, Seed]]]:
    """Seeds with their sites by the name of their submodule, in order."""
    found: dict[str, list[tuple[Site, Seed]]] = {}
    for site, seed in seeds:
        found.setdefault(site.submodule, []).append((site, seed))
    return found


def merge_seeds(host: nn.Module, seeds: Iterable[tuple[Site, Seed]]) -> list[tuple[Site, Seed]]:
    """Fold seeds into the weights of their submodules, in place; returns those that remain.

    The seeds of a submodule apply one after the other, so those behind one that cannot be folded remain too.
    """
    remaining: list[tuple[Site, Seed]] = []
    for name, own in by_submodule(seeds).items():
        submodule = host.get_submodule(name)
        folds = _can_take_seeds(host, submodule)
        for site, seed in own:
            folds = folds and site.container == "tensor" and _fold(submodule, seed)
            if not folds:
                remaining.append((site, seed))
    return remaining


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is transformers' Conv1D, a linear layer whose weight is (in, out)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _can_take_seeds(plain: nn.Module, layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, *_CONVOLUTIONS) and not is_transposed(layer):
        return False
    if is_parametrized(layer) or layer._forward_pre_hooks or layer._forward_hooks:
        return False
    owners = [part for part in plain.modules() for own in part._parameters.values() if own is layer.weight]
    return len(owners) == 1


def _fold(layer: nn.Module, seed: Seed) -> bool:
    """Add what a seed computes to a layer's weights; False, with nothing changed, if that is impossible."""
    found = affine_map(seed.branch)
    is_convolution = isinstance(layer, _CONVOLUTIONS)
    if found is None or seed.operator != "add" or (is_convolution and (seed.reads == "input" or layer.groups != 1)):
        return False
    transposed = is_transposed(layer)
    assert isinstance(layer.weight, Tensor)
    weight = layer.weight.detach().double()
    weight = weight.T if transposed else weight
    own = layer.bias.detach().double() if isinstance(layer.bias, Tensor) else torch.zeros_like(found.bias)
    if seed.reads == "input":
        weight, bias = weight + seed.alpha * found.matrix, own + seed.alpha * found.bias
    else:
        weight = weight + seed.alpha * torch.einsum("oi,i...->o...", found.matrix, weight)
        bias = own + seed.alpha * (found.matrix @ own + found.bias)
    with torch.no_grad():
        layer.weight.copy_(weight.T if transposed else weight)
        if isinstance(layer.bias, Tensor):
            layer.bias.copy_(bias)
        elif bias.any():
            layer.bias = nn.Parameter(bias.to(layer.weight), requires_grad=layer.weight.requires_grad)
    return True

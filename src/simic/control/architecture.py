"""Reading a host's architecture from its modules: what stacked hosts and a user's own network tell about themselves."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from simic.control.facts import LAYER_KINDS, Architecture
from simic.growth.slot_discovery import Site

# Torch has no common class of modules that attend, so they are known by name, their own or that of their class.
_ATTENTION_NAME = re.compile(r"attention|attn|qkv|(^|[._])[qkv]_?proj|(^|\.)(query|key|value|to_[qkv])($|\.)")
_ATTENTION_CLASS = re.compile(r"(attention|attn)\d*$")


class _Layer(NamedTuple):
    """A module with parameters of its own."""

    module: nn.Module
    kind: str | None
    size: int
    shape: tuple[int, ...]
    """Of its largest parameter."""


def architecture_of(host: nn.Module, sites: Sequence[Site], left_out: Collection[nn.Parameter] = ()) -> Architecture:
    """The architecture of a host with these slots; parameters `left_out`, of seeds, do not count."""
    layers = list(_layers(host, set(left_out)))
    total = max(1, sum(layer.size for layer in layers))
    shares = [sum(layer.size for layer in layers if layer.kind == kind) / total for kind in LAYER_KINDS]
    matrices = [layer for layer in layers if len(layer.shape) > 1 and layer.kind != "norm"]
    return Architecture(
        inputs=_inputs(matrices[0]) if matrices else 0,
        outputs=matrices[-1].shape[0] if matrices else 0,
        depth=len(matrices),
        shares=np.array(shares),
        batch_norm=float(any(isinstance(layer.module, _BatchNorm) for layer in layers)),
        features=np.array([site.shape.features for site in sites]),
        in_features=np.array([site.shape.in_features or 0 for site in sites]),
        positions=np.array([_positions(site) for site in sites]),
    )


def _layers(host: nn.Module, left_out: Collection[nn.Parameter]) -> Iterator[_Layer]:
    """Modules in the order in which the host registers them, which is nearly always that of the forward pass."""
    counted, attending = set(left_out), set[str]()
    for name, module in host.named_modules():
        parent, label = name.rpartition(".")[0], type(module).__name__.lower()
        if name and (parent in attending or _ATTENTION_CLASS.search(label) or _ATTENTION_NAME.search(name.lower())):
            attending.add(name)
        own = [parameter for parameter in module.parameters(recurse=False) if parameter not in counted]
        if own:
            counted.update(own)  # tied parameters count once
            largest = max(own, key=lambda parameter: (parameter.dim(), parameter.numel()))
            kind = _kind(label, largest.dim(), attends=name in attending)
            yield _Layer(module, kind, sum(parameter.numel() for parameter in own), tuple(largest.shape))


def _kind(label: str, dim: int, *, attends: bool) -> str | None:
    """One of LAYER_KINDS, by a module's class and the dimensions of its largest parameter; None if it is no layer."""
    if "norm" in label:
        return "norm"
    if "embedding" in label:
        return "embedding"
    if dim > 2:
        return "convolution"
    if attends:
        return "attention"
    return "linear" if dim == 2 else None


def _inputs(first: _Layer) -> int:
    return first.shape[0] if first.kind == "embedding" else first.shape[1]


def _positions(site: Site) -> int:
    _, *rest = site.example_shape
    places = {"features": [], "sequence": rest[:-1], "conv": rest[1:]}[site.shape.topology]
    return int(np.prod(places, dtype=np.int64))

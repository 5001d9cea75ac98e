"""Padding masks and key-value caches of a running host, for seeds that mix positions.

A padding mask is read from the arguments of the slot's submodule, or of the nearest module around it that takes one:

    host(input_ids, attention_mask)          depth 0: mask (N, L), used unless a deeper module gets its own
      encoder(x, src_key_padding_mask)       depth 1
        encoder.layers.0(x)                  depth 2, 3: the slot's submodule, without a mask of its own
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.isolation import preserved_rng
from simic.growth.notices import warn_user
from simic.growth.slot_discovery import Site
from simic.growth.slot_shape import Reads, SlotShape

_KEEP = "attention_mask"
"""Nonzero for real positions, as in transformers."""
_IGNORE = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")
"""True or minus infinity for padding, as in torch."""
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class PositionTracker:
    """Reads the arguments of every module from the host down to the slot's submodule."""

    def __init__(self, host: nn.Module, site: Site) -> None:
        self.site = site
        self.ignored = False
        """Whether padding masks are ignored for now."""
        self._warned = False
        parts = site.submodule.split(".")
        self._levels = [host.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
        is_list = [isinstance(level, (nn.ModuleList, nn.ModuleDict)) for level in self._levels]
        # Modules above the first list of layers are whole networks; masks and caches of layers may have any form.
        self._num_networks = is_list.index(True) if True in is_list else max(1, len(self._levels) - 1)
        self._parameters = [_parameter_names(level) for level in self._levels]
        self.takes_mask = [bool({_KEEP, *_IGNORE} & set(names)) for names in self._parameters]
        self._masks: list[Tensor | None] = [None] * len(self._levels)
        self._without_mask = [False] * len(self._levels)
        """Whether a network that takes a mask was called without one."""
        self._cached = [0] * len(self._levels)

    def install(self) -> list[Any]:
        """Register the hooks; returns their handles."""
        return [
            level.register_forward_pre_hook(partial(self._before_call, depth), with_kwargs=True)
            for depth, level in enumerate(self._levels)
        ]

    def _before_call(self, depth: int, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self._parameters[depth], args, strict=False)) | kwargs
        for value in list(arguments.values()):
            if isinstance(value, Mapping):  # a whole batch as one argument
                arguments = {**value, **arguments}
        for deeper in range(depth, len(self._levels)):  # what was read further in belongs to an earlier call
            self._masks[deeper], self._cached[deeper] = None, 0
        self._masks[depth] = _real_positions(arguments)
        given = any(arguments.get(name) is not None for name in (_KEEP, *_IGNORE))
        is_network = depth < self._num_networks
        self._without_mask[depth] = is_network and self.takes_mask[depth] and not given
        if is_network:  # a layer may find in the cache what another layer has added in the same pass
            self._cached[depth] = max(_cached_positions(arguments.get(name)) for name in _CACHES)

    def check_cache(self) -> None:
        """Raise if this pass continues from a key-value cache: the seed would not see earlier positions."""
        if any(self._cached):
            raise ValueError(
                f"slot {self.site.name!r} holds a seed that mixes positions, and a key-value cache hides the earlier "
                "ones from it; run without a cache: generate(..., use_cache=False)"
            )

    def keep(self, h: Tensor) -> Tensor | None:
        """Mask (N, L) of the real positions of an activation (N, L, C) or (N, C, L), or None if none was passed."""
        if self.ignored:
            return None
        for mask, without_mask in zip(reversed(self._masks), reversed(self._without_mask), strict=True):
            if mask is not None:
                return self._fitting(mask, h)
            if without_mask:  # a mask further out belongs to another network, for instance the encoder's
                return None
        return None

    def _fitting(self, mask: Tensor, h: Tensor) -> Tensor | None:
        if tuple(mask.shape) == (h.shape[0], h.shape[_position_dim(self.site.shape)]):
            return mask
        self.warn(f"the host's padding mask has shape {tuple(mask.shape)}, its activation {tuple(h.shape)}")
        return None

    def warn(self, reason: str) -> None:
        """Warn once that the seed uses padded positions."""
        if not self._warned:
            self._warned = True
            warn_user(f"the seed in slot {self.site.name!r} mixes padded positions with real ones: {reason}")


def _position_dim(shape: SlotShape) -> int:
    return 2 if shape.topology == "conv" else 1


def _parameter_names(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []


def _real_positions(arguments: Mapping[str, Any]) -> Tensor | None:
    """The mask of real positions (N, L), if the arguments hold exactly one padding mask."""
    mask = arguments.get(_KEEP)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.detach() != 0
    found = [arguments.get(name) for name in _IGNORE]
    masks = [mask for mask in found if isinstance(mask, Tensor) and mask.dim() == 2]
    if len(masks) != 1:  # of a source and a target mask, modules further in get the one that applies
        return None
    (mask,) = masks
    return ~mask if mask.dtype == torch.bool else mask.detach() == 0


def _cached_positions(cache: Any) -> int:
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    if isinstance(cache, (tuple, list)) and cache and isinstance(cache[0], (tuple, list)):
        return int(cache[0][0].shape[-2])
    return 0


def mixes_positions(branch: nn.Module, shape: SlotShape, reads: Reads, reference: Tensor) -> bool:
    """Whether an output position of a branch depends on other positions, measured by gradients at random weights."""
    if shape.topology == "features" or shape.rank != 3:
        return False
    if reference.device.type == "meta" or (reads == "input" and set(shape.stride) - {1}):
        return True
    twin = copy.deepcopy(branch).eval()
    features = shape.in_features if reads == "input" else shape.features
    assert features is not None
    with preserved_rng(), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        for parameter in twin.parameters():  # a newborn branch is all zeros, and so would be its gradients
            nn.init.normal_(parameter.requires_grad_(False), std=0.5)
        position = _position_dim(shape)
        x = torch.randn([1, features, 3] if position == 2 else [1, 3, features]).to(reference).requires_grad_()
        (gradient,) = torch.autograd.grad(twin(x).select(position, 1).pow(2).sum(), x, allow_unused=True)
    if gradient is None:
        return False
    return bool(gradient.index_select(position, torch.tensor([0, 2], device=gradient.device)).count_nonzero())


def set_keep(branch: nn.Module, keep: Tensor | None) -> bool:
    """Set the mask of real positions in every part of a branch that has `keep`; False if none has."""
    parts = [part for part in branch.modules() if hasattr(part, "keep")]
    for part in parts:
        setattr(part, "keep", keep)  # noqa: B010
    return bool(parts)

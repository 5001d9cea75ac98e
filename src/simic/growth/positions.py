"""What a running host tells of its positions: which are padding, and whether a key-value cache hides earlier ones.

A padding mask is read where the host passes it: in the arguments of the slot's submodule, or of the nearest one around
it that takes such a mask.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.isolation import preserved_rng
from simic.growth.notices import warn_user
from simic.growth.slot_discovery import Site

_KEEP = "attention_mask"
"""Not zero where a position counts, as in transformers."""
_IGNORE = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")
"""True, or minus infinity, where a position is padding, as in torch."""
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class PositionWatch:
    """Watches the calls around one slot, from the host itself down to the slot's submodule."""

    def __init__(self, host: nn.Module, site: Site) -> None:
        self.site = site
        self.ignored = False
        """Whether padding masks are ignored for now."""
        self._warned = False
        parts = site.name.split(".")
        self._levels = [host.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
        is_list = [isinstance(level, (nn.ModuleList, nn.ModuleDict)) for level in self._levels]
        # Above the first list of layers are whole networks; a layer's own mask and cache may be in any form.
        self._networks = is_list.index(True) if True in is_list else max(1, len(self._levels) - 1)
        self._masks: list[Tensor | None] = [None] * len(self._levels)
        self._given_none = [False] * len(self._levels)
        """Whether a network that takes a mask was given none."""
        self._cached = [0] * len(self._levels)
        self.takes_mask = [_takes_mask(level) for level in self._levels]

    def install(self) -> list[Any]:
        """Register the hooks; returns their handles."""
        return [
            level.register_forward_pre_hook(_Listener(self, depth, level), with_kwargs=True)
            for depth, level in enumerate(self._levels)
        ]

    def note(self, depth: int, arguments: Mapping[str, Any]) -> None:
        """A call at this depth begins; whatever was noted further in belongs to an earlier call."""
        for deeper in range(depth, len(self._levels)):
            self._masks[deeper], self._cached[deeper] = None, 0
        self._masks[depth] = _real_positions(arguments)
        given = any(arguments.get(name) is not None for name in (_KEEP, *_IGNORE))
        self._given_none[depth] = depth < self._networks and self.takes_mask[depth] and not given
        if depth < self._networks:  # a layer may find in the cache what another has added in this very pass
            self._cached[depth] = max(_cached_positions(arguments.get(name)) for name in _CACHES)

    def check_cache(self) -> None:
        """Raise if this pass continues from a key-value cache: the seed would not see earlier positions."""
        if any(self._cached):
            raise ValueError(
                f"slot {self.site.name!r} holds a seed that mixes positions, and a key-value cache hides the earlier "
                "ones from it; run without a cache: generate(..., use_cache=False)"
            )

    def keep(self, h: Tensor) -> Tensor | None:
        """Positions of the activation (N, L, C) or (N, C, L) that are no padding, or None if no mask was passed."""
        if self.ignored:
            return None
        for depth in reversed(range(len(self._levels))):
            mask = self._masks[depth]
            if mask is not None:
                return self._fitting(mask, h)
            # A mask further out belongs to another network, as an encoder's beside a decoder.
            if self._given_none[depth]:
                return None
        return None

    def _fitting(self, mask: Tensor, h: Tensor) -> Tensor | None:
        expected = (h.shape[0], h.shape[2 if self.site.shape.topology == "conv" else 1])
        if tuple(mask.shape) == expected:
            return mask
        self.warn(f"the host's padding mask has shape {tuple(mask.shape)}, its activation {tuple(h.shape)}")
        return None

    def warn(self, reason: str) -> None:
        """Say once that the seed sees padding."""
        if not self._warned:
            self._warned = True
            warn_user(f"the seed in slot {self.site.name!r} mixes padded positions with real ones: {reason}")


class _Listener:
    """A forward pre-hook that tells a watch with what arguments a submodule is called."""

    def __init__(self, watch: PositionWatch, depth: int, module: nn.Module) -> None:
        self.watch, self.depth, self.names = watch, depth, _parameter_names(module)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        for value in list(arguments.values()):
            if isinstance(value, Mapping):  # a whole batch as one argument
                arguments = {**value, **arguments}
        self.watch.note(self.depth, arguments)


def _parameter_names(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []


def _takes_mask(module: nn.Module) -> bool:
    return bool({_KEEP, *_IGNORE} & set(_parameter_names(module)))


def _real_positions(arguments: Mapping[str, Any]) -> Tensor | None:
    """Which positions are no padding (N, L), if the arguments hold one mask that tells."""
    mask = arguments.get(_KEEP)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.detach() != 0
    found = [arguments.get(name) for name in _IGNORE]
    masks = [mask for mask in found if isinstance(mask, Tensor) and mask.dim() == 2]
    if len(masks) != 1:  # with a source and a target, those further in say which is meant
        return None
    (mask,) = masks
    return ~mask if mask.dtype == torch.bool else mask.detach() == 0


def _cached_positions(cache: Any) -> int:
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    if isinstance(cache, (tuple, list)) and cache and isinstance(cache[0], (tuple, list)):
        return int(cache[0][0].shape[-2])
    return 0


def mixes_positions(branch: nn.Module, site: Site, reference: Tensor) -> bool:
    """Whether an output position depends on other positions, once the branch has learned something."""
    if site.shape.topology == "features" or site.shape.rank != 3:
        return False
    if reference.device.type == "meta":
        return True
    twin = copy.deepcopy(branch).eval()
    with preserved_rng(), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        for parameter in twin.parameters():
            nn.init.normal_(parameter.requires_grad_(False), std=0.5)
        position = 2 if site.shape.topology == "conv" else 1
        sizes = [1, site.shape.features, 3] if position == 2 else [1, 3, site.shape.features]
        x = torch.randn(sizes).to(reference).requires_grad_()
        (gradient,) = torch.autograd.grad(twin(x).select(position, 1).pow(2).sum(), x, allow_unused=True)
    if gradient is None:
        return False
    return bool(gradient.index_select(position, torch.tensor([0, 2], device=gradient.device)).count_nonzero())


def set_keep(branch: nn.Module, keep: Tensor | None) -> bool:
    """Tell every part of a branch that asks for it which positions are no padding; False if none asks."""
    parts = [part for part in branch.modules() if hasattr(part, "keep")]
    for part in parts:
        setattr(part, "keep", keep)  # noqa: B010
    return bool(parts)

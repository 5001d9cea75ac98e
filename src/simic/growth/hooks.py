"""The forward hooks that let a seed act behind its slot's submodule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.example import first_tensor, with_first_tensor
from simic.growth.positions import PositionWatch, mixes_positions, set_keep
from simic.growth.seed import Seed
from simic.growth.slot_discovery import Site, check_activation


def attach_seed(host: nn.Module, site: Site, seed: Seed) -> list[Any]:
    """Register a seed's hooks; returns their handles."""
    mixes = mixes_positions(seed.branch, site, next(seed.branch.parameters()))
    watch = PositionWatch(host, site) if mixes else None
    handle = host.get_submodule(site.name).register_forward_hook(SlotHook(site, seed, watch))
    return [handle, *(watch.install() if watch is not None else ())]


def seeds_within(host: nn.Module) -> list[str]:
    """Slots whose seeds some wrapper has attached to a host, or to the host that it is a copy of."""
    hooks = [hook for part in host.modules() for hook in part._forward_hooks.values()]
    return [hook.site.name for hook in hooks if isinstance(hook, SlotHook)]


def check_attached(host: nn.Module, site: Site) -> None:
    """Raise if a slot's submodule was replaced while it had a seed, which then is no longer part of the network."""
    if site.name not in seeds_within(host.get_submodule(site.name)):
        raise ValueError(
            f"the submodule {site.name!r} was replaced while a seed grew behind it, so the seed is cut off: prune the "
            "seed before the submodule is replaced, or build the GrowableModel after that"
        )


class SlotHook:
    """Replaces the submodule's output by the blended one, as a forward hook."""

    def __init__(self, site: Site, seed: Seed, watch: PositionWatch | None) -> None:
        self.site, self.seed, self.watch = site, seed, watch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        h = first_tensor(output)
        if h is None:
            raise ValueError(f"slot {self.site.name!r} must output a tensor, got {type(output).__name__}")
        if h.is_nested:
            return with_first_tensor(output, self._blend_nested(h))
        h = self.site.arranged(h)
        check_activation(self.site, h)
        return with_first_tensor(output, self.site.restored(self._blend(h)))

    def _blend(self, h: Tensor, keep: Tensor | None = None) -> Tensor:
        if self.watch is None or self.seed.is_silent:
            return self.seed(h)
        self.watch.check_cache()
        keep = self.watch.keep(h) if keep is None else keep
        asks = set_keep(self.seed.branch, keep)
        if keep is not None and not asks and not keep.all():
            self.watch.warn(f"blueprint {self.seed.blueprint!r} has no part with an attribute `keep`")
        try:
            return self.seed(h)
        finally:
            set_keep(self.seed.branch, None)

    def _blend_nested(self, nested: Tensor) -> Tensor:
        """Samples of different lengths, as torch's encoders make of padded ones in evaluation mode."""
        samples = nested.unbind()
        h = torch.nested.to_padded_tensor(nested, 0.0)
        lengths = torch.tensor([len(sample) for sample in samples], device=h.device)
        check_activation(self.site, h)
        blended = self._blend(h, torch.arange(h.shape[1], device=h.device) < lengths[:, None])
        return torch.nested.as_nested_tensor([row[: len(sample)] for row, sample in zip(blended, samples, strict=True)])


def slots_with_masks(host: nn.Module) -> list[str]:
    """Slots whose seeds mix positions in a host that may be given a padding mask."""
    return [watch.site.name for watch in _watches(host) if any(watch.takes_mask)]


@contextmanager
def ignoring_padding(host: nn.Module) -> Iterator[None]:
    """Let seeds see padded positions too, as they do where nothing tells them of a mask."""
    watches = list(_watches(host))
    for watch in watches:
        watch.ignored = True
    try:
        yield
    finally:
        for watch in watches:
            watch.ignored = False


def _watches(host: nn.Module) -> Iterator[PositionWatch]:
    for module in host.modules():
        for hook in module._forward_hooks.values():
            if isinstance(hook, SlotHook) and hook.watch is not None:
                yield hook.watch

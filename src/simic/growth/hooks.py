"""The forward hooks that blend a seed into the output of its slot's submodule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.example import first_tensor, with_first_tensor
from simic.growth.positions import PositionTracker, mixes_positions, set_keep
from simic.growth.seed import Seed
from simic.growth.slot_discovery import Site, check_activation


def attach_seed(host: nn.Module, site: Site, seed: Seed) -> list[Any]:
    """Register a seed's hooks; returns their handles."""
    mixes = mixes_positions(seed.branch, site.shape, seed.reads, next(seed.branch.parameters()))
    tracker = PositionTracker(host, site) if mixes else None
    submodule = host.get_submodule(site.submodule)
    handle = submodule.register_forward_hook(SlotHook(site, seed, tracker), with_kwargs=True)
    return [handle, *(tracker.install() if tracker is not None else ())]


def slots_with_seeds(host: nn.Module) -> list[str]:
    """Slots whose seeds some wrapper has attached to a host, or to the host that it is a copy of."""
    return [hook.site.name for hook in _slot_hooks(host)]


def check_attached(host: nn.Module, sites: Iterable[Site]) -> None:
    """Raise if the submodule of one of these slots was replaced while it had a seed, which then no longer runs."""
    for site in sites:
        if site.name not in slots_with_seeds(host.get_submodule(site.submodule)):
            raise ValueError(
                f"the submodule {site.submodule!r} was replaced while a seed grew there, so the seed is cut off: prune "
                "the seed before the submodule is replaced, or build the GrowableModel after that"
            )


class SlotHook:
    """Forward hook that replaces the first tensor of a submodule's output by the blended one.

    Hooks of one submodule run in the order in which they were registered, each on what the one before it returned.
    """

    def __init__(self, site: Site, seed: Seed, tracker: PositionTracker | None) -> None:
        self.site, self.seed, self.tracker = site, seed, tracker

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        h = first_tensor(output)
        if h is None:
            raise ValueError(f"slot {self.site.name!r} must output a tensor, got {type(output).__name__}")
        x = self._input(args, kwargs) if self.seed.reads == "input" else None
        if h.is_nested:
            return with_first_tensor(output, self._blend_nested(h, x))
        h = self.site.to_seed(h)
        check_activation(self.site, h)
        x = None if x is None else self.site.to_seed(x)
        return with_first_tensor(output, self.site.from_seed(self._blend(h, x)))

    def _input(self, args: Any, kwargs: Any) -> Tensor:
        """The argument that a seed beside the submodule reads."""
        assert self.site.input is not None
        x = self.site.input.of_call(args, kwargs)
        if x is None:
            raise ValueError(
                f"the seed in slot {self.site.name!r} reads argument {self.site.input.key!r} of its submodule, which "
                "this call does not pass as in the traced pass"
            )
        return x

    def _blend(self, h: Tensor, x: Tensor | None, keep: Tensor | None = None) -> Tensor:
        if self.tracker is None or self.seed.is_inactive:
            return self.seed(h, x)
        self.tracker.check_cache()
        keep = self.tracker.keep(h if x is None else x) if keep is None else keep
        reads_mask = set_keep(self.seed.branch, keep)
        if keep is not None and not reads_mask and not keep.all():
            self.tracker.warn(f"blueprint {self.seed.blueprint!r} has no part with an attribute `keep`")
        try:
            return self.seed(h, x)
        finally:
            set_keep(self.seed.branch, None)

    def _blend_nested(self, nested: Tensor, x: Tensor | None) -> Tensor:
        """Blend samples of different lengths: torch's encoders turn padded input into these in evaluation mode."""
        samples = nested.unbind()
        h = torch.nested.to_padded_tensor(nested, 0.0)
        x = torch.nested.to_padded_tensor(x, 0.0) if x is not None and x.is_nested else x
        lengths = torch.tensor([len(sample) for sample in samples], device=h.device)
        check_activation(self.site, h)
        blended = self._blend(h, x, torch.arange(h.shape[1], device=h.device) < lengths[:, None])
        return torch.nested.as_nested_tensor([row[: len(sample)] for row, sample in zip(blended, samples, strict=True)])


def slots_with_masks(host: nn.Module) -> list[str]:
    """Slots whose seeds mix positions in a host that accepts a padding mask."""
    return [tracker.site.name for tracker in _trackers(host) if any(tracker.takes_mask)]


@contextmanager
def ignoring_padding(host: nn.Module) -> Iterator[None]:
    """Run without padding masks, as an exported model does."""
    trackers = _trackers(host)
    for tracker in trackers:
        tracker.ignored = True
    try:
        yield
    finally:
        for tracker in trackers:
            tracker.ignored = False


def _slot_hooks(host: nn.Module) -> list[SlotHook]:
    hooks = [hook for part in host.modules() for hook in part._forward_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, SlotHook)]


def _trackers(host: nn.Module) -> list[PositionTracker]:
    return [hook.tracker for hook in _slot_hooks(host) if hook.tracker is not None]

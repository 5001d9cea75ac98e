"""Hooks that give a host its seeds in its own state dict: for growth in place, where the host is what is saved."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from simic.growth import state_dict as growth_state
from simic.growth.copies import check_copy
from simic.growth.data_parallel import in_process_group, watch_output
from simic.growth.freezing import allow_backward

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

_LOG = logging.getLogger("simic")


class _HostHook:
    """A hook that knows the model around the host; a deep copy of the host so gets a copy of that model too."""

    def __init__(self, model: GrowableModel) -> None:
        self.model = model


class _Publish(_HostHook):
    """State-dict post-hook: adds the growth record as soon as something has grown."""

    def __call__(self, host: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        check_copy(self.model)
        if growth_state.has_grown(self.model):
            state_dict[prefix + growth_state.GROWTH_KEY] = growth_state.growth_record(self.model)


class _Restore(_HostHook):
    """Load pre-hook: the seeds become those of the state dict; torch then copies the weights.

    Without a record, a state dict with every tensor of the host is that of a model before growth, so the seeds are
    removed; one with a part of them keeps the seeds. Torch does not tell a hook whether the load is strict.
    """

    def __call__(self, host: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
        key = prefix + growth_state.GROWTH_KEY
        tensors = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        if key not in state_dict:
            _check_seeds_known(self.model, tensors)
            if self.model.grown_slots and _is_whole_host(self.model, tensors):
                slots = ", ".join(self.model.grown_slots)
                _LOG.warning(
                    "the loaded weights are of a model before growth: the seeds in slots %s are removed", slots
                )
                tensors[growth_state.GROWTH_KEY] = growth_state.as_tensor(growth_state.dormant_record(self.model))
        growth_state.rebuild_seeds(self.model, tensors, {})
        state_dict.pop(key, None)


def _check_seeds_known(model: GrowableModel, tensors: dict[str, Any]) -> None:
    """Raise if there are tensors of seeds that the model does not hold: torch would drop them."""
    unknown = {name for name in tensors if name.startswith(growth_state.SEEDS)} - model.host.state_dict().keys()
    if unknown:
        raise ValueError(
            f"the state dict has tensors of seeds, such as {min(unknown)}, but not the growth record that says which "
            "seeds these are; load all parts of a checkpoint in one state dict"
        )


def _is_whole_host(model: GrowableModel, tensors: dict[str, Any]) -> bool:
    """Whether a state dict has every tensor of the host, one with several names (tied weights) under any of them."""
    names: dict[int, list[str]] = {}
    for name, value in model.host.state_dict(keep_vars=True).items():
        if not name.startswith(growth_state.SEEDS) and name != growth_state.GROWTH_KEY:
            names.setdefault(id(value), []).append(name)
    seeds = any(name.startswith(growth_state.SEEDS) for name in tensors)
    return not seeds and all(any(name in tensors for name in own) for own in names.values())


class _Watch(_HostHook):
    """Forward hook for what the model around the host does where it is called itself."""

    def __call__(self, host: nn.Module, args: Any, output: Any) -> None:
        if in_process_group():
            watch_output(self.model, output)
        allow_backward(self.model, output)


def hook_host(model: GrowableModel) -> None:
    """Give the host of a model that grows in place its hooks."""
    host: Any = model.host
    if in_process_group() or model.freeze_host:
        host.register_forward_hook(_Watch(model))
    host.register_state_dict_post_hook(_Publish(model))
    host.register_load_state_dict_pre_hook(_Restore(model))


def release_host(model: GrowableModel) -> None:
    """Make the host of a model without seeds a plain module again."""
    host: Any = model.host
    for hooks in (host._forward_hooks, host._state_dict_hooks, host._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), _HostHook)]:
            del hooks[key]
    del host.seeds

"""Saves that would hold the host without its seeds: refused through the wrapper, warned about at the host itself."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from simic.growth.hooks import seeds_within

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel


def guarded(model: GrowableModel, name: str, value: Any) -> Any:
    """An attribute of the host, reached through the wrapper; a method that saves is refused while seeds are held.

    Such a method (`save_pretrained` of transformers and PEFT, a user's own `save`) knows the host's tensors only.
    """
    if not (name in ("save", "push_to_hub") or name.startswith("save_")) or not inspect.isroutine(value):
        return value

    @functools.wraps(value)
    def save(*args: Any, **kwargs: Any) -> Any:
        held = [slot for slot in model.slot_names if model.seed(slot) is not None]
        if held:
            raise ValueError(
                f"{type(model.host).__name__}.{name} would write the host without its seeds in slots "
                f"{', '.join(held)}; to train on later use GrowthScheduler.save(path) or "
                "torch.save(model.state_dict(), path), for a finished network torch.save(model.export(), path), "
                f"for the host alone model.host.{name}(...)"
            )
        return value(*args, **kwargs)

    return save


def watch_state_dict(host: nn.Module, *, has_seeds: bool) -> None:
    """Let the host's own `state_dict` warn while it has seeds; a host without any is left as it came."""
    hooks = host._state_dict_pre_hooks
    present = [key for key, hook in hooks.items() if hook is _warn_of_missing_seeds]
    if has_seeds and not present:
        host.register_state_dict_pre_hook(_warn_of_missing_seeds)
    elif not has_seeds:
        for key in present:
            del hooks[key]


def _warn_of_missing_seeds(host: nn.Module, prefix: str, keep_vars: bool) -> None:
    if prefix.endswith("host."):  # the wrapper asks, and adds the seeds
        return
    slots = seeds_within(host)
    warnings.warn(
        f"the state dict of the host alone lacks the seeds in slots {', '.join(slots)}; that of the GrowableModel "
        "around it has them, and so has the network that export() makes",
        stacklevel=3,
    )

"""Methods that save the host without its seeds: refused through the wrapper, warned about on the host itself."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from simic.growth.hooks import slots_with_seeds

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel


def guard_save(model: GrowableModel, name: str, value: Any) -> Any:
    """An attribute of the host; a method that saves (`save_pretrained`, a user's `save`) raises while there are seeds.

    Such a method only knows the host's own tensors.
    """
    if not (name in ("save", "push_to_hub") or name.startswith("save_")) or not inspect.isroutine(value):
        return value

    @functools.wraps(value)
    def save(*args: Any, **kwargs: Any) -> Any:
        if model.grown_slots and not model.in_place:
            raise ValueError(
                f"{type(model.host).__name__}.{name} would write the host without its seeds in slots "
                f"{', '.join(model.grown_slots)}; to train on later use GrowthScheduler.save(path) or "
                "torch.save(model.state_dict(), path), for a finished network torch.save(model.export(), path), "
                f"for the host alone model.host.{name}(...)"
            )
        return value(*args, **kwargs)

    return save


def warn_on_state_dict(host: nn.Module, *, has_seeds: bool) -> None:
    """Make the host's own `state_dict` warn while it has seeds; without seeds the host has no hook of ours."""
    hooks = host._state_dict_pre_hooks
    present = [key for key, hook in hooks.items() if hook is _warn_about_missing_seeds]
    if has_seeds and not present:
        host.register_state_dict_pre_hook(_warn_about_missing_seeds)
    elif not has_seeds:
        for key in present:
            del hooks[key]


def _warn_about_missing_seeds(host: nn.Module, prefix: str, keep_vars: bool) -> None:
    if prefix.endswith("host."):  # called by the wrapper, which adds the seeds
        return
    warnings.warn(
        f"the state dict of the host alone lacks the seeds in slots {', '.join(slots_with_seeds(host))}; that of the "
        "GrowableModel around it has them, and so has the network that export() makes",
        stacklevel=3,
    )

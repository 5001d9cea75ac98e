"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel


def warn_user(message: str) -> None:
    """Warn at the line of the first caller outside simic and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("simic", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def warn_of_shared_names(model: GrowableModel) -> None:
    """Say which public names of the host are hidden behind the wrapper's own."""
    own = {name for name in (*vars(type(model)), *vars(model), *model._modules) if not name.startswith("_")}
    shared = sorted((own - set(dir(nn.Module()))) & set(dir(model.host)))
    if shared:
        warn_user(
            f"the host has its own {', '.join(shared)}: on the wrapper these names are simic's; "
            f"reach the host's as model.host.{shared[0]}"
        )

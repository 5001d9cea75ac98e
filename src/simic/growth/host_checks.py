"""Checks of a host when it is wrapped: whether it can be, and which of its names the wrapper hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from simic.growth.hooks import slots_with_seeds
from simic.growth.notices import warn_user
from simic.growth.state_dict import GROWTH_KEY

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel


def check_host(model: nn.Module) -> None:
    """Raise unless a module can be wrapped."""
    if grown := slots_with_seeds(model):
        raise ValueError(
            f"the host has seeds of another GrowableModel in slots {', '.join(grown)}, as a copy of `model.host` "
            "does; build the host anew, wrap model.export(), or copy the GrowableModel as a whole"
        )
    names = {name.split(".")[1] for name in model.state_dict(prefix="host.")}
    if reserved := {GROWTH_KEY, "seeds"} & names:
        raise ValueError(f"the host's own {sorted(reserved)} would clash with the names of grown parts; rename it")


def warn_about_hidden_names(model: GrowableModel) -> None:
    """Warn about attributes that both the host and the wrapper around it have."""
    own = {name for name in (*vars(type(model)), *vars(model), *model._modules) if not name.startswith("_")}
    same = {*dir(nn.Module()), "print_trainable_parameters"}  # a PEFT model's says the same as the wrapper's
    shared = sorted((own - same) & set(dir(model.host)))
    if shared:
        warn_user(
            f"the host has its own {', '.join(shared)}: on the wrapper these names are simic's; "
            f"reach the host's as model.host.{shared[0]}"
        )

"""Growth in place: the host itself holds its seeds, so that code which knows only the host trains and saves them.

A GrowableModel is a module around the host. Some training libraries need the host itself: transformers' Trainer reads
the signature of its `forward`, its tied weights and its config, and saves it by `save_pretrained`. In place

    host.seeds           the seeds, a submodule like any other: parameters(), to(), state_dict() and DDP see them
    host.state_dict()    also has the growth record once something has grown; names are those of GrowableModel
    host.load_state_dict rebuilds the seeds of the record before torch copies the weights (see `host_hooks.py`)

and the GrowableModel that `grow_in_place` returns manages them; it need not be called.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from simic.growth.example import ExampleInput
from simic.growth.host_hooks import hook_host
from simic.growth.model import GrowableModel
from simic.growth.slot_patterns import Slots


def grow_in_place(
    host: nn.Module, slots: Slots = "auto", *, example_input: ExampleInput, **settings: Any
) -> GrowableModel:
    """A GrowableModel whose seeds are registered in the host, under `host.seeds`; arguments are GrowableModel's."""
    if hasattr(host, "seeds"):
        raise ValueError(
            f"{type(host).__name__} has an attribute `seeds` already: a host that grows in place keeps its seeds under "
            "that name; rename it, and let a host grow once"
        )
    model = GrowableModel(host, slots, example_input=example_input, **settings)
    # What the wrapper does not have it reads, sets and deletes in the host, so from here on its seeds are the host's.
    own: Any = host
    own.seeds = model._modules.pop("seeds")
    hook_host(model)
    return model

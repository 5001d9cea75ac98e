"""Upgrade of saved agents whose observations had fewer features.

New features stand at the end of their table, so a network learns to read them by new columns of the weights that read
that table. The columns are zero: until it is trained further, the network computes what it did.

    version 2     slots: whether the seed reads the input of its submodule, the seat; blueprints: reads the input

                                   columns before        columns now
    encode_blueprint.0.weight      9 blueprint           9 blueprint | 1 new
    encode_slot.0.weight           55 slot | D offer     55 slot | 2 new | D offer
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NETWORK = "FactoredRecurrentActorCritic"
SIZES = {"base": 41, "slots": 55, "blueprints": 9}
"""Features of version 1."""
ADDED = {"slots": 2, "blueprints": 1}
"""Features that version 2 added."""
NEW_SIZES = {part: size + ADDED.get(part, 0) for part, size in SIZES.items()}
READERS = {"encode_slot.0.weight": "slots", "encode_blueprint.0.weight": "blueprints"}
"""Weights (outputs, features of the table first) and the table that they read."""
_NEW_MOMENTS = {"mean": 0.0, "variance": 1.0}


def has_old_features(about: dict[str, Any]) -> bool:
    """Whether a description is that of a growth controller of version 1."""
    return about.get("network") == NETWORK and about.get("sizes") == SIZES


def add_features(state: dict[str, Any]) -> dict[str, Any]:
    """A saved agent of version 1 with weights for the features of version 2; other networks are left as they are."""
    if not has_old_features(state["about"]):
        return state
    weights = state["network"]
    upgraded = state | {"network": {name: _grown(name, value) for name, value in weights.items()}}
    if isinstance(state.get("optimizer"), dict):
        upgraded["optimizer"] = _grow_moments(state["optimizer"], list(weights))
    return upgraded


def _grown(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value  # refused later, with the names of all tensors
    if name in READERS and value.dim() == 2:
        return _with_columns(value, READERS[name])
    kind, _, rest = name.partition(".")
    part, _, moment = rest.partition(".")
    if kind == "normalize" and part in ADDED and moment in _NEW_MOMENTS:
        return torch.cat([value, value.new_full((ADDED[part],), _NEW_MOMENTS[moment])])
    return value


def _with_columns(value: Tensor, part: str) -> Tensor:
    before, behind = value[:, : SIZES[part]], value[:, SIZES[part] :]
    return torch.cat([before, value.new_zeros(len(value), ADDED[part]), behind], 1)


def _grow_moments(optimizer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The optimizer's state by number of the parameter; only the critic's, behind all READERS, are numbered anew."""
    parameters = [name for name in names if not name.startswith("normalize.")]
    moments = {}
    for number, own in optimizer["state"].items():
        part = READERS.get(parameters[int(number)])
        moments[number] = (
            own
            if part is None
            else {
                name: _with_columns(value, part) if isinstance(value, Tensor) and value.dim() == 2 else value
                for name, value in own.items()
            }
        )
    return optimizer | {"state": moments}

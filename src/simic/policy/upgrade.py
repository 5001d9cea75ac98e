"""Upgrade of saved agents whose observations had fewer features.

New features stand at the end of their table, so a network learns to read them by new columns of the weights that read
that table. The columns are zero: until it is trained further, the network computes what it did.

    version 2     slots: whether the seed reads the input of its submodule, the seat; blueprints: reads the input
    version 3     base: data, layers, optimizer, noise; slots: features, their ratio to those that go in, positions

From version 1 to 3:

                                   columns before        columns now
    encode_base.0.weight           41 base               41 base | 22 new
    encode_blueprint.0.weight      9 blueprint           9 blueprint | 1 new
    encode_slot.0.weight           55 slot | D offer     55 slot | 5 new | D offer
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NETWORK = "FactoredRecurrentActorCritic"
VERSIONS = {
    1: {"base": 41, "slots": 55, "blueprints": 9},
    2: {"base": 41, "slots": 57, "blueprints": 10},
    3: {"base": 63, "slots": 60, "blueprints": 10},
}
"""Features of each version."""
NEWEST = max(VERSIONS)
READERS = {
    "encode_base.0.weight": "base",
    "encode_slot.0.weight": "slots",
    "encode_blueprint.0.weight": "blueprints",
}
"""Weights (outputs, features of the table first) and the table that they read."""
_NEW_MOMENTS = {"mean": 0.0, "variance": 1.0}


def features_since(version: int) -> dict[str, int]:
    """Number of features that each part of an observation gained since a version."""
    return {part: size - VERSIONS[version][part] for part, size in VERSIONS[NEWEST].items()}


def version_of(about: dict[str, Any]) -> int | None:
    """The version of the features of a growth controller, from its description; None for other networks."""
    if about.get("network") != NETWORK:
        return None
    return next((version for version, sizes in VERSIONS.items() if about.get("sizes") == sizes), None)


def upgrade_sizes(about: dict[str, Any]) -> dict[str, Any]:
    """The description of a growth controller with the newest features; others are left as they are."""
    return about if version_of(about) is None else about | {"sizes": VERSIONS[NEWEST]}


def add_features(state: dict[str, Any]) -> dict[str, Any]:
    """A saved agent with weights for all features that came later; other networks are left as they are."""
    version = version_of(state["about"])
    if version is None or version == NEWEST:
        return state
    weights = state["network"]
    upgraded = state | {"network": {name: _grown(name, value, version) for name, value in weights.items()}}
    if isinstance(state.get("optimizer"), dict):
        upgraded["optimizer"] = _grow_moments(state["optimizer"], list(weights), version)
    return upgraded


def _grown(name: str, value: Any, version: int) -> Any:
    if not isinstance(value, Tensor):
        return value  # refused later, with the names of all tensors
    if name in READERS and value.dim() == 2:
        return _with_columns(value, READERS[name], version)
    kind, _, rest = name.partition(".")
    part, _, moment = rest.partition(".")
    if kind == "normalize" and part in VERSIONS[version] and moment in _NEW_MOMENTS:
        return torch.cat([value, value.new_full((features_since(version)[part],), _NEW_MOMENTS[moment])])
    return value


def _with_columns(value: Tensor, part: str, version: int) -> Tensor:
    size = VERSIONS[version][part]
    before, behind = value[:, :size], value[:, size:]
    return torch.cat([before, value.new_zeros(len(value), features_since(version)[part]), behind], 1)


def _grow_moments(optimizer: dict[str, Any], names: list[str], version: int) -> dict[str, Any]:
    """The optimizer's state by number of the parameter; only the critic's, behind all READERS, are numbered anew."""
    parameters = [name for name in names if not name.startswith("normalize.")]
    moments = {}
    for number, own in optimizer["state"].items():
        part = READERS.get(parameters[int(number)])
        moments[number] = (
            own
            if part is None
            else {
                name: _with_columns(value, part, version) if isinstance(value, Tensor) and value.dim() == 2 else value
                for name, value in own.items()
            }
        )
    return optimizer | {"state": moments}

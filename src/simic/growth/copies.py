"""Deep copies of a model that must follow its growth, such as averaged weights.

`torch.optim.swa_utils.AveragedModel` copies a model and later pairs the parameters of both by position, up to the end
of the shorter list. A copy therefore remembers its source: if the source has grown or pruned since, and weights were
then written into the copy without training it, the average is cut short or mixed up, and the copy raises.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from simic.growth.data_parallel import unwrap_model

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel


@dataclass
class _Link:
    source: weakref.ref[GrowableModel]
    writes: int | None = None
    """In-place writes to the copy's parameters when the source's structure first differed; None until then."""


# Outside the models, so that pickling and copying them is not affected.
_LINKS: weakref.WeakKeyDictionary[GrowableModel, _Link] = weakref.WeakKeyDictionary()


def copy_with_link(model: GrowableModel, memo: dict[int, Any]) -> GrowableModel:
    """A deep copy that remembers its source."""
    twin = model.__class__.__new__(model.__class__)
    memo[id(model)] = twin
    twin.__setstate__(copy.deepcopy(model.__dict__, memo))
    _LINKS[twin] = _Link(weakref.ref(model))
    return twin


def note_growth(model: GrowableModel) -> None:
    """Called when a model's structure changes: its copies are watched from now on, and it is no mere copy itself."""
    _LINKS.pop(model, None)
    for twin, link in list(_LINKS.items()):
        if link.source() is model and link.writes is None:
            link.writes = _writes(twin)


def check_copy(model: GrowableModel, *_: Any, runs: bool = False) -> None:
    """Raise if averages were written into a copy whose source has grown since it was made."""
    link = _LINKS.get(model)
    if link is None:
        return
    source = link.source()
    if source is None or link.writes is None or _structure(source) == _structure(model):
        link.writes = None
    elif _writes(model) != link.writes:
        raise RuntimeError(
            "weights were averaged into a copy of a model that has grown or pruned since the copy was made, so their "
            "parameters no longer match; call averaged.module.follow(model) before averaged.update_parameters(model), "
            "or make the copy anew after growth"
        )
    if runs and model.training and torch.is_grad_enabled():  # trained itself, so it is independent
        del _LINKS[model]


def follow_growth(model: GrowableModel, source: Any) -> None:
    """Give a copy the seeds of its source: new ones with the source's weights; those that are gone are removed."""
    source, _ = unwrap_model(source)
    if not isinstance(source, type(model)):
        raise TypeError(f"a copy follows the GrowableModel that it was made of, got a {type(source).__name__}")
    if model.slot_names != source.slot_names:
        raise ValueError(f"a copy has the slots of its source: {source.slot_names}, got {model.slot_names}")
    seeds = {}
    for slot in source.grown_slots:
        mine, theirs = model.seed(slot), source.seed(slot)
        same = mine is not None and _kind(mine) == _kind(theirs)
        seeds[slot] = mine if same else copy.deepcopy(theirs)
    model.set_seeds(seeds, copy.deepcopy(source.slot_state), source.germinations)
    _LINKS[model] = _Link(weakref.ref(source))


def _kind(seed: Any) -> tuple[str, str, list]:
    return seed.blueprint, seed.operator, [(name, value.shape) for name, value in seed.named_parameters()]


def _structure(model: GrowableModel) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in model.named_parameters()]


def _writes(model: GrowableModel) -> int:
    return sum(parameter._version for parameter in model.host_parameters())

"""Which seed grows where, inside a state dict: the host's names stay its own, and loading rebuilds seeds first.

A grown model's state dict holds the host's tensors under their own names, the seeds' under `seeds.<slot>.`, and
under `growth` a JSON text as bytes that says which slot holds what. All values are tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from simic.actions import STYLES
from simic.growth.seed import Seed
from simic.lifecycle import Stage
from simic.slots import Slots

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

GROWTH_KEY = "growth"
VERSION = 1
_HOST = "host."
_SEEDS = "seeds."


def seed_key(slot: str) -> str:
    """A slot's name as a key of a ModuleDict, which allows no dots."""
    key = slot.replace(".", "/")
    return key + "/" if hasattr(nn.ModuleDict, key) else key


def publish_names(model: GrowableModel, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """State-dict hook: give the host's tensors their own names and add the growth record."""
    _rename(state_dict, {key: prefix + key.removeprefix(prefix + _HOST) for key in _under(state_dict, prefix + _HOST)})
    if (model.life.stage != Stage.DORMANT).any() or model.germinations:
        state_dict[prefix + GROWTH_KEY] = growth_record(model)


def growth_record(model: GrowableModel) -> Tensor:
    """Which slot holds what, as the bytes of a JSON text."""
    text = json.dumps(_describe(model), allow_nan=False).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def restore(
    model: GrowableModel, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *_: Any
) -> None:
    """Load hook: check everything, then rebuild the seeds; torch then copies the weights. A refusal changes nothing."""
    public = {key.removeprefix(prefix): key for key in _under(state_dict, prefix)}
    record = _read_record(model, state_dict.pop(public.pop(GROWTH_KEY))) if GROWTH_KEY in public else None
    seeds = _planned_seeds(model, record) if record else {site.name: model.seed(site.name) for site in model.sites}
    expected = _expected_tensors(model.host, seeds)
    _check_tensors(expected, {name: state_dict[key] for name, key in public.items()}, strict)
    own = {key: prefix + _HOST + name for name, key in public.items() if not name.startswith(_SEEDS)}
    _rename(state_dict, own)
    if record:
        _commit(model, record, seeds)


def _under(state_dict: dict[str, Any], prefix: str) -> list[str]:
    return [key for key in state_dict if key.startswith(prefix)]


def _rename(state_dict: dict[str, Any], names: dict[str, str]) -> None:
    # All are taken out before any is put back: an old name may be another's new one.
    values = {new: state_dict.pop(old) for old, new in names.items()}
    state_dict.update(values)


def _describe(model: GrowableModel) -> dict[str, Any]:
    return {
        "version": VERSION,
        "incubation": model.lifecycle.incubation,
        "slots": _slot_table(model),
        "blueprints": list(model.blueprint_names),
        "germinations": model.germinations,
        "life": model.life.state_dict(),
    }


def _slot_table(model: GrowableModel) -> list[list]:
    return [[s.name, s.shape.kind, s.shape.features, s.shape.dims] for s in model.sites]


def _read_record(model: GrowableModel, value: Any) -> dict[str, Any]:
    try:
        record = json.loads(bytes(value.cpu().numpy().tobytes()))
        found = record["version"]
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the growth record of this state dict is damaged ({error}); use another checkpoint") from None
    if found != VERSION:
        raise ValueError(f"the growth record has format version {found}, this simic reads version {VERSION}")
    for name, here in (("slots", _slot_table(model)), ("incubation", model.lifecycle.incubation)):
        if record[name] != here:
            raise ValueError(
                f"the checkpoint's {name} are {record[name]}, this model's are {here}; build it the same way"
            )
    return record


def _planned_seeds(model: GrowableModel, record: dict[str, Any]) -> dict[str, Seed | None]:
    """The seeds that the record asks for; one that is there already is kept, so that optimizers still know it."""
    life = Slots.from_state_dict(record["life"])
    planned: dict[str, Seed | None] = {}
    for index, site in enumerate(model.sites):
        planned[site.name] = None
        if life.occupied[0, index]:
            blueprint = record["blueprints"][life.blueprint[0, index]]
            if blueprint not in model.blueprint_names:
                raise ValueError(f"the checkpoint holds a seed of blueprint {blueprint!r}; register it before loading")
            operator = STYLES[life.style[0, index]].operator
            present = model.seed(site.name)
            same = present is not None and (present.blueprint, present.operator) == (blueprint, operator)
            seed = present if same else model._build_seed(site, model.blueprint_names.index(blueprint))
            assert seed is not None
            if not same:
                seed.set_operator(operator)
            planned[site.name] = seed
    return planned


def _expected_tensors(host: nn.Module, seeds: dict[str, Seed | None]) -> dict[str, Any]:
    tensors = dict(host.state_dict())
    for slot, seed in seeds.items():
        if seed is not None:
            tensors |= {f"{_SEEDS}{seed_key(slot)}.{name}": value for name, value in seed.state_dict().items()}
    return tensors


def _check_tensors(expected: dict[str, Any], found: dict[str, Any], strict: bool) -> None:
    problems: list[str] = []
    if strict:
        problems += [f"missing {name}" for name in _first(expected.keys() - found.keys())]
        problems += [f"unexpected {name}" for name in _first(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {tuple(found[name].shape)}, the model's is {tuple(expected[name].shape)}"
        for name in _first(
            name
            for name in expected.keys() & found.keys()
            if isinstance(expected[name], Tensor) and getattr(found[name], "shape", None) != expected[name].shape
        )
    ]
    if problems:
        raise ValueError("the state dict does not fit this model: " + "; ".join(problems))


def _first(names: Iterable[str], most: int = 5) -> list[str]:
    return sorted(names)[:most]


def _commit(model: GrowableModel, record: dict[str, Any], seeds: dict[str, Seed | None]) -> None:
    for site in model.sites:
        present, wanted = model.seed(site.name), seeds[site.name]
        if present is not None and present is not wanted:
            model._detach(site)
        if wanted is not None and present is not wanted:
            model._attach(site, wanted)
    model.life = Slots.from_state_dict(record["life"])
    here = [model.blueprint_names.index(name) if name in model.blueprint_names else -1 for name in record["blueprints"]]
    occupied = model.life.occupied
    model.life.blueprint[occupied] = [here[index] for index in model.life.blueprint[occupied]]
    model.germinations = int(record["germinations"])
    model._follow_life()

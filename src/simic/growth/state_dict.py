"""The state dict of a GrowableModel: the host's own names, the seeds, and a record from which loading rebuilds them.

    features.0.weight          a tensor of the host, under its own name
    seeds.features/0.branch.*  tensors of the seed in slot "features.0"
    growth                     the growth record: which slot holds what, as the bytes of a JSON text

As long as nothing has grown the keys are the host's alone, and the record is in the state dict's metadata, where torch
keeps version numbers; `copy.deepcopy`, `torch.save` and `torch.load` preserve it.

Loading makes the model hold the seeds of the record, whatever it held before:

| the state dict                           | `strict=True`                               | `strict=False`     |
|------------------------------------------|---------------------------------------------|--------------------|
| has a record                             | seeds are added, changed and removed        | likewise           |
| has none (a host's own, or a plain copy  | all seeds are removed; if there were any, a | the seeds are kept |
| of an ungrown model's)                   | warning names them                          |                    |

A GrowableModel inside another module cannot see `strict`: there a state dict without a record keeps the seeds, and
torch reports their tensors as missing.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import is_tensor_like

from simic.growth.blueprints import BLUEPRINTS
from simic.growth.seed import Seed
from simic.growth.settings import settings_of
from simic.lifecycle.actions import STYLES
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage
from simic.storage.json_files import parse_json

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

GROWTH_KEY = "growth"
VERSION = 2
_HOST = "host."
SEEDS = "seeds."


def seed_key(slot: str) -> str:
    """A slot's name as a key of a ModuleDict, which allows no dots and no names of its own methods."""
    key = slot.replace(".", "/")
    return key + "/" if hasattr(nn.ModuleDict, key) else key


# Hooks of torch.


def publish_names(model: GrowableModel, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """State-dict post-hook: give the host's tensors their own names and add the growth record."""
    _rename(state_dict, {key: prefix + key.removeprefix(prefix + _HOST) for key in _under(state_dict, prefix + _HOST)})
    if has_grown(model):
        state_dict[prefix + GROWTH_KEY] = growth_record(model)
    else:
        local_metadata[GROWTH_KEY] = json.dumps(_record(model), allow_nan=False)


def restore(model: GrowableModel, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    """Load pre-hook: check, then rebuild the seeds; torch then copies the weights. A refused load changes nothing."""
    public = {key.removeprefix(prefix): key for key in _under(state_dict, prefix)}
    model.loaded_prefix = prefix
    if model.in_place:  # the host's own hook reads the record and rebuilds the seeds
        _rename(state_dict, {key: prefix + _HOST + name for name, key in public.items()})
        return
    rebuild_seeds(model, {name: state_dict[key] for name, key in public.items()}, local_metadata)
    if GROWTH_KEY in public:
        del state_dict[public.pop(GROWTH_KEY)]
    own = {key: prefix + _HOST + name for name, key in public.items() if not name.startswith(SEEDS)}
    _rename(state_dict, own)


def rebuild_seeds(model: GrowableModel, tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Make a model hold the seeds of a state dict, whose names are without prefix; one that does not fit is refused."""
    record, seeds = _read(model, tensors, metadata)
    _check_shapes(_expected_tensors(model, seeds), tensors)
    if record is not None:
        model.set_seeds(seeds, _slot_state(model, record), int(record["germinations"]))


def publish_incompatible(model: GrowableModel, incompatible: Any) -> None:
    """Load post-hook: report missing and unexpected keys under the host's own names."""
    inner = model.loaded_prefix + _HOST
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [model.loaded_prefix + key.removeprefix(inner) if key.startswith(inner) else key for key in keys]


def prepare(model: GrowableModel, state_dict: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    """What `load_state_dict` passes on to torch, checked before anything changes.

    Torch's hooks do not get `strict`, so what depends on it is done here, before they run.
    """
    metadata = {name: dict(entry) for name, entry in (getattr(state_dict, "_metadata", None) or {}).items()}
    prepared = OrderedDict(state_dict)
    if metadata:  # a copy, because torch writes `assign` into it
        prepared._metadata = metadata  # pyright: ignore[reportAttributeAccessIssue]
    if not strict:
        return prepared
    has_record = GROWTH_KEY in prepared or GROWTH_KEY in metadata.get("", {})
    if not has_record and has_grown(model):
        prepared[GROWTH_KEY] = as_tensor(dormant_record(model))
    expected = _expected_tensors(model, _read(model, prepared, metadata.get("", {}))[1])
    _check_names(expected, prepared)
    _check_shapes(expected, prepared)
    if not has_record and model.grown_slots:
        warnings.warn(
            f"the state dict has no growth record, so the seeds in slots {', '.join(model.grown_slots)} are removed; "
            "to load host weights and keep the seeds, use strict=False",
            stacklevel=3,
        )
    return prepared


def has_grown(model: GrowableModel) -> bool:
    """Whether a model has ever had a seed."""
    return bool((model.slot_state.stage != Stage.DORMANT).any() or model.germinations)


def _under(state_dict: dict[str, Any], prefix: str) -> list[str]:
    return [key for key in state_dict if key.startswith(prefix)]


def _rename(state_dict: dict[str, Any], names: dict[str, str]) -> None:
    # All are removed before any is added: an old name may be another's new one.
    values = {new: state_dict.pop(old) for old, new in names.items()}
    state_dict.update(values)


# The growth record.


def growth_record(model: GrowableModel) -> Tensor:
    """The growth record of a model, as the bytes of a JSON text."""
    return as_tensor(_record(model))


def as_tensor(record: dict[str, Any]) -> Tensor:
    """A growth record as the bytes of a JSON text."""
    return torch.frombuffer(bytearray(json.dumps(record, allow_nan=False).encode()), dtype=torch.uint8)


def _record(model: GrowableModel) -> dict[str, Any]:
    return {
        "version": VERSION,
        "incubation": model.lifecycle.incubation,
        "slots": _slot_table(model),
        "blueprints": list(model.blueprint_names),
        "germinations": model.germinations,
        "slot_state": model.slot_state.state_dict(),
        "settings": settings_of(model),
    }


def dormant_record(model: GrowableModel) -> dict[str, Any]:
    """The record of this model before any growth."""
    return _record(model) | {"germinations": 0, "slot_state": SlotState.dormant(1, len(model.sites)).state_dict()}


def _slot_table(model: GrowableModel) -> list[list]:
    return [[s.name, s.shape.kind, s.shape.features, s.shape.dims] for s in model.sites]


def _upgrade(record: dict[str, Any]) -> dict[str, Any]:
    """A record in the present format: version 1 had the slot state under "life"."""
    if record["version"] != 1:
        return record
    rest = {name: value for name, value in record.items() if name != "life"}
    return rest | {"version": VERSION, "slot_state": record["life"]}


def _read(
    model: GrowableModel, tensors: Mapping[str, Any], metadata: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Seed]]:
    """The growth record, or None, and the seeds that the model will hold."""
    if GROWTH_KEY in tensors:
        record = _read_record(model, tensors[GROWTH_KEY])
    elif GROWTH_KEY in metadata:
        # The record of a model that never grew: for other slots than these it holds nothing of interest.
        record = _upgrade(json.loads(metadata[GROWTH_KEY]))
        if record["version"] != VERSION or record["slots"] != _slot_table(model):
            record = dormant_record(model)
    else:
        return None, {slot: seed for slot in model.slot_names if (seed := model.seed(slot)) is not None}
    return record, _seeds_of(model, record)


def open_record(value: Any) -> dict[str, Any]:
    """A growth record from its bytes, in the present format and checked by itself."""
    try:
        record = _upgrade(parse_json(bytes(value.cpu().numpy().tobytes()), "its text"))
        found = record["version"]
        if found == VERSION:
            _check_record(record)
    except (AttributeError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the growth record of this state dict is damaged ({error}); use another checkpoint") from None
    if found != VERSION:
        raise ValueError(f"the growth record has format version {found}, this simic reads version {VERSION}")
    return record


def _read_record(model: GrowableModel, value: Any) -> dict[str, Any]:
    record = open_record(value)
    for name, here in (("slots", _slot_table(model)), ("incubation", model.lifecycle.incubation)):
        if record[name] != here:
            raise ValueError(
                f"the checkpoint's {name} are {record[name]}, this model's are {here}; build it the same way"
            )
    return record


def _check_record(record: dict[str, Any]) -> None:
    """Raise one of several errors unless every value that is used later is there and valid."""
    state = SlotState.from_state_dict(record["slot_state"])
    if any(values.shape != (1, len(record["slots"])) for values in vars(state).values()):
        raise ValueError("not one value per slot")
    _ = [Stage(stage) for stage in state.stage[0]], [STYLES[style] for style in state.style[0]]
    _ = [record["blueprints"][index] for index in state.blueprint[0]], int(record["germinations"]), record["incubation"]


def _slot_state(model: GrowableModel, record: dict[str, Any]) -> SlotState:
    """The recorded state with indices into this model's blueprint names, whose order may differ."""
    state, names = SlotState.from_state_dict(record["slot_state"]), model.blueprint_names
    here = [names.index(name) if name in names else -1 for name in record["blueprints"]]
    state.blueprint[state.occupied] = [here[index] for index in state.blueprint[state.occupied]]
    return state


def _seeds_of(model: GrowableModel, record: dict[str, Any]) -> dict[str, Seed]:
    """The seeds of the record; one that is there already is kept, so that optimizers still know it."""
    state, seeds = SlotState.from_state_dict(record["slot_state"]), {}
    for index, slot in enumerate(model.slot_names):
        if not state.occupied[0, index]:
            continue
        blueprint = record["blueprints"][state.blueprint[0, index]]
        if blueprint not in model.blueprint_names:
            remedy = "build the model with it in blueprints=..." if blueprint in BLUEPRINTS else "register it first"
            raise ValueError(f"the checkpoint holds a seed of blueprint {blueprint!r}; {remedy}")
        operator = STYLES[state.style[0, index]].operator
        seed = model.seed(slot)
        if seed is None or (seed.blueprint, seed.operator) != (blueprint, operator):
            seed = model.build_seed(index, model.blueprint_names.index(blueprint))
            seed.set_operator(operator)
        seeds[slot] = seed
    return seeds


# Checks.


def _expected_tensors(model: GrowableModel, seeds: Mapping[str, Seed]) -> dict[str, Any]:
    host = {key.removeprefix(_HOST): value for key, value in model.host.state_dict(prefix=_HOST).items()}
    tensors = {name: value for name, value in host.items() if not name.startswith(SEEDS) and name != GROWTH_KEY}
    for slot, seed in seeds.items():
        tensors |= {f"{SEEDS}{seed_key(slot)}.{name}": value for name, value in seed.state_dict().items()}
    return tensors


def _check_names(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys() - {GROWTH_KEY}
    _refuse([f"missing {name}" for name in _first(missing)] + [f"unexpected {name}" for name in _first(unexpected)])


def _check_shapes(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    common = {name for name in expected.keys() & found.keys() if isinstance(expected[name], Tensor)}
    foreign = {name for name in common if not is_tensor_like(found[name])}
    unlike = {name for name in common - foreign if found[name].shape != expected[name].shape}
    _refuse(
        [f"{name} is a {type(found[name]).__name__}, not a tensor" for name in _first(foreign)]
        + [
            f"{name} has shape {tuple(found[name].shape)}, the model's is {tuple(expected[name].shape)}"
            for name in _first(unlike)
        ]
    )


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("the state dict does not fit this model: " + "; ".join(problems))


def _first(names: Iterable[str], most: int = 5) -> list[str]:
    return sorted(names)[:most]

"""Which seed grows where, inside a state dict: the host's names stay its own, and loading rebuilds seeds first.

A grown model's state dict holds the host's tensors under their own names, the seeds' under `seeds.<slot>.`, and
under `growth` a JSON text as bytes that says which slot holds what. All values are tensors. As long as nothing has
grown the keys are the host's alone, and the same text stands in the state dict's metadata, where torch keeps version
numbers; `copy.deepcopy`, `torch.save` and `torch.load` preserve it.

Loading makes the model hold what the state dict says, older topologies included:

| the state dict                              | `strict=True`                           | `strict=False`     |
|---------------------------------------------|-----------------------------------------|--------------------|
| says what grows                             | seeds are added, changed and removed    | likewise           |
| says nothing (a host's own, or a plain copy | a model without seeds; if some are      | the seeds are kept |
| of an ungrown model's)                      | removed by that, a warning names them   |                    |

A GrowableModel inside another module cannot see `strict`: there a state dict that says nothing keeps the seeds, and
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

from simic.growth.seed import Seed
from simic.lifecycle.actions import STYLES
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage
from simic.storage.json_files import parse_json

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
    if _has_grown(model):
        state_dict[prefix + GROWTH_KEY] = growth_record(model)
    else:
        local_metadata[GROWTH_KEY] = json.dumps(_describe(model), allow_nan=False)


def growth_record(model: GrowableModel) -> Tensor:
    """Which slot holds what, as the bytes of a JSON text."""
    return _as_tensor(_describe(model))


def prepare(model: GrowableModel, state_dict: Mapping[str, Any], strict: bool) -> Mapping[str, Any]:
    """What `load_state_dict` is to load, checked before anything changes.

    Torch's hooks are not told whether a load is strict, so this is decided before they run.
    """
    metadata = {name: dict(entry) for name, entry in (getattr(state_dict, "_metadata", None) or {}).items()}
    prepared = OrderedDict(state_dict)
    if metadata:  # a copy: torch notes `assign` in it
        prepared._metadata = metadata  # pyright: ignore[reportAttributeAccessIssue]
    if not strict:
        return prepared
    says_nothing = GROWTH_KEY not in prepared and GROWTH_KEY not in metadata.get("", {})
    if says_nothing and _has_grown(model):
        prepared[GROWTH_KEY] = _as_tensor(_dormant(model))
    expected = _expected_tensors(model, _plan(model, prepared, metadata.get("", {}))[1])
    _check_names(expected, prepared)
    _check_shapes(expected, prepared)
    removed = [slot for slot in model.slot_names if model.seed(slot) is not None]
    if says_nothing and removed:
        warnings.warn(
            f"the state dict says nothing of growth, so the seeds in slots {', '.join(removed)} are removed; "
            "to load host weights and keep the seeds, use strict=False",
            stacklevel=3,
        )
    return prepared


def restore(model: GrowableModel, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    """Load hook: check, then rebuild the seeds; torch then copies the weights. A refusal changes nothing."""
    public = {key.removeprefix(prefix): key for key in _under(state_dict, prefix)}
    tensors = {name: state_dict[key] for name, key in public.items()}
    record, seeds = _plan(model, tensors, local_metadata)
    _check_shapes(_expected_tensors(model, seeds), tensors)
    if GROWTH_KEY in public:
        del state_dict[public.pop(GROWTH_KEY)]
    own = {key: prefix + _HOST + name for name, key in public.items() if not name.startswith(_SEEDS)}
    _rename(state_dict, own)
    if record is not None:
        _commit(model, record, seeds)
    model._loaded_under = prefix


def publish_incompatible(model: GrowableModel, incompatible: Any) -> None:
    """Load hook, called last: name what is missing or unexpected as the state dict does."""
    inner = model._loaded_under + _HOST
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [model._loaded_under + key.removeprefix(inner) if key.startswith(inner) else key for key in keys]


def _has_grown(model: GrowableModel) -> bool:
    return bool((model.slot_state.stage != Stage.DORMANT).any() or model.germinations)


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
        "life": model.slot_state.state_dict(),
    }


def _dormant(model: GrowableModel) -> dict[str, Any]:
    """The record of this model before any growth."""
    return _describe(model) | {"germinations": 0, "life": SlotState.dormant(1, len(model.sites)).state_dict()}


def _as_tensor(record: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(record, allow_nan=False).encode()), dtype=torch.uint8)


def _slot_table(model: GrowableModel) -> list[list]:
    return [[s.name, s.shape.kind, s.shape.features, s.shape.dims] for s in model.sites]


def _plan(
    model: GrowableModel, tensors: Mapping[str, Any], metadata: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Seed | None]]:
    """The growth record, None where there is none, and the seeds that the model is then to hold."""
    if GROWTH_KEY in tensors:
        record = _read_record(model, tensors[GROWTH_KEY])
    elif GROWTH_KEY in metadata:
        record = _read_dormant(model, metadata[GROWTH_KEY])
    else:
        return None, {site.name: model.seed(site.name) for site in model.sites}
    return record, _planned_seeds(model, record)


def _read_record(model: GrowableModel, value: Any) -> dict[str, Any]:
    try:
        record = parse_json(bytes(value.cpu().numpy().tobytes()), "its text")
        found = record["version"]
        if found == VERSION:
            _check_life(record)
    except (AttributeError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the growth record of this state dict is damaged ({error}); use another checkpoint") from None
    if found != VERSION:
        raise ValueError(f"the growth record has format version {found}, this simic reads version {VERSION}")
    for name, here in (("slots", _slot_table(model)), ("incubation", model.lifecycle.incubation)):
        if record[name] != here:
            raise ValueError(
                f"the checkpoint's {name} are {record[name]}, this model's are {here}; build it the same way"
            )
    return record


def _check_life(record: dict[str, Any]) -> None:
    """Raise one of several errors unless the slots make sense; what can be read can be committed."""
    slot_state = SlotState.from_state_dict(record["life"])
    if any(values.shape != (1, len(record["slots"])) for values in vars(slot_state).values()):
        raise ValueError("not one value per slot")
    _ = [Stage(stage) for stage in slot_state.stage[0]], [STYLES[style] for style in slot_state.style[0]]
    _ = (
        [record["blueprints"][index] for index in slot_state.blueprint[0]],
        int(record["germinations"]),
        record["incubation"],
    )


def _read_dormant(model: GrowableModel, text: str) -> dict[str, Any]:
    """The record of a model that never grew: it fits any slots, and those it knows keep their age."""
    record = json.loads(text)
    same = all(record.get(name) == value for name, value in (("version", VERSION), ("slots", _slot_table(model))))
    return record if same else _dormant(model)


def _planned_seeds(model: GrowableModel, record: dict[str, Any]) -> dict[str, Seed | None]:
    """The seeds that the record asks for; one that is there already is kept, so that optimizers still know it."""
    slot_state = SlotState.from_state_dict(record["life"])
    planned: dict[str, Seed | None] = {}
    for index, site in enumerate(model.sites):
        planned[site.name] = None
        if slot_state.occupied[0, index]:
            blueprint = record["blueprints"][slot_state.blueprint[0, index]]
            if blueprint not in model.blueprint_names:
                raise ValueError(f"the checkpoint holds a seed of blueprint {blueprint!r}; register it before loading")
            operator = STYLES[slot_state.style[0, index]].operator
            present = model.seed(site.name)
            same = present is not None and (present.blueprint, present.operator) == (blueprint, operator)
            seed = present if same else model._build_seed(site, model.blueprint_names.index(blueprint))
            assert seed is not None
            if not same:
                seed.set_operator(operator)
            planned[site.name] = seed
    return planned


def _expected_tensors(model: GrowableModel, seeds: dict[str, Seed | None]) -> dict[str, Any]:
    tensors = {key.removeprefix(_HOST): value for key, value in model.host.state_dict(prefix=_HOST).items()}
    for slot, seed in seeds.items():
        if seed is not None:
            tensors |= {f"{_SEEDS}{seed_key(slot)}.{name}": value for name, value in seed.state_dict().items()}
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


def _commit(model: GrowableModel, record: dict[str, Any], seeds: dict[str, Seed | None]) -> None:
    for site in model.sites:
        present, wanted = model.seed(site.name), seeds[site.name]
        if present is not None and present is not wanted:
            model._detach(site)
        if wanted is not None and present is not wanted:
            model._attach(site, wanted)
    model.slot_state = SlotState.from_state_dict(record["life"])
    here = [model.blueprint_names.index(name) if name in model.blueprint_names else -1 for name in record["blueprints"]]
    occupied = model.slot_state.occupied
    model.slot_state.blueprint[occupied] = [here[index] for index in model.slot_state.blueprint[occupied]]
    model.germinations = int(record["germinations"])
    model._follow_life()

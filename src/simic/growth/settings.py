"""What builds a GrowableModel again around its host, as JSON values: slots, lifecycle, blueprints and budget.

It is part of the growth record (see `state_dict`), so that `simic.load` needs the host and the file alone. The sites of
slots are stored as they were found, and of the example input its structure: shapes, dtypes and the range of integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from simic.growth.example import map_tensors
from simic.growth.slot_discovery import KnownSites, Site
from simic.growth.slot_input import SlotInput
from simic.growth.slot_shape import TOPOLOGIES, SlotShape
from simic.lifecycle.stages import LifecycleConfig

if TYPE_CHECKING:
    from simic.growth.model import GrowableModel

MAX_SIZE = 2**28
"""Elements of an example tensor, and features of a slot, that a file may ask for."""
_AS_THEY_ARE = ("rng_seed", "blueprints", "max_parameters", "max_growth", "max_flops")
_SCALARS = (bool, int, float, str, type(None))


class _NotDescribableError(Exception):
    """An example input holds something that JSON cannot describe."""


def settings_of(model: GrowableModel) -> dict[str, Any]:
    """The arguments that build this model around its host."""
    return {
        "sites": [describe_site(site) for site in model.sites if not site.seat],
        "lifecycle": asdict(model.lifecycle),
        "rng_seed": int(model.rng_seed),
        "freeze_host": model.freeze_host,
        "trainable": trainable_names(model) if model.freeze_host else [],
        "blueprints": model.blueprint_choice,
        **asdict(model.budget),
        "example": model.example_description,
        "example_dtype": _dtype_name(model.example_dtype),
    }


def read_settings(settings: Any, host: nn.Module) -> dict[str, Any]:
    """The arguments of GrowableModel besides its host, from what `settings_of` returned; damaged values raise."""
    try:
        rest = {
            name: settings[name] for name in ("rng_seed", "blueprints", "max_parameters", "max_growth", "max_flops")
        }
        return rest | {
            "freeze_host": bool(settings.get("freeze_host", False)),
            "slots": KnownSites(tuple(read_site(site) for site in settings["sites"])),
            "lifecycle": LifecycleConfig(**settings["lifecycle"]),
            "example_input": fit_example(
                make_example(settings["example"]), getattr(torch, settings["example_dtype"]), host
            ),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the settings of the saved model cannot be read ({error}); use another file") from None


def trainable_names(model: GrowableModel) -> list[str]:
    """Parameters of the host, by name, that are trained."""
    own = set(model.host_parameters())
    return [name for name, parameter in model.host.named_parameters() if parameter.requires_grad and parameter in own]


def make_trainable(model: GrowableModel, settings: Mapping[str, Any]) -> None:
    """Train those parameters of a frozen host that were trained when its settings were saved, such as a new head."""
    names = settings.get("trainable", ())
    for name, parameter in model.host.named_parameters():
        if name in names:
            parameter.requires_grad_(True)


def describe_site(site: Site) -> dict[str, Any]:
    """A site, without its seat, as JSON values."""
    return {name: value for name, value in asdict(site).items() if name != "seat"}


def read_site(table: Mapping[str, Any]) -> Site:
    """The inverse of `describe_site`; values that cannot be raise one of several errors."""
    shape = SlotShape(**{**table["shape"], "stride": tuple(table["shape"]["stride"])})
    if shape.topology not in TOPOLOGIES or not 0 < shape.features <= MAX_SIZE:
        raise ValueError(f"slot {table['name']!r:.60} has no valid shape")
    if shape.in_features is not None and not 0 < shape.in_features <= MAX_SIZE:
        raise ValueError(f"slot {table['name']!r:.60} has no valid input")
    order, read = table["order"], table["input"]
    return Site(
        **{
            **table,
            "shape": shape,
            "example_shape": tuple(table["example_shape"]),
            "order": None if order is None else tuple(order),
            "input": None if read is None else SlotInput(read["key"], tuple(read["example_shape"])),
        }
    )


# The example input.


def describe_example(example: Any) -> Any:
    """An example input as JSON values; None if it holds objects that are neither tensors, containers nor scalars."""
    try:
        return {"example": _describe(example)}
    except _NotDescribableError:
        return None


def make_example(description: Any) -> Any:
    """An example input as described, with random numbers; None without a description."""
    if description is None:
        return None
    return _make("", description["example"], torch.Generator().manual_seed(0))


def weight_dtype(host: nn.Module) -> torch.dtype:
    """The dtype of a host's weights, those of its first layer if there are several."""
    return next((p.dtype for p in host.parameters() if p.is_floating_point()), torch.get_default_dtype())


def fit_example(example: Any, dtype: torch.dtype, host: nn.Module) -> Any:
    """The example on the host's device and, where it had the dtype of the host's weights, with their present one.

    `dtype` is that of the weights for which the example was given. A tensor without values gets some.
    """
    device = next((p.device for p in host.parameters()), None)

    def move(_: str, tensor: Tensor) -> Tensor:
        follows = tensor.is_floating_point() and tensor.dtype == dtype
        wanted = weight_dtype(host) if follows else tensor.dtype
        if device is not None and tensor.is_meta and device.type != "meta":
            return torch.ones(tensor.shape, dtype=wanted, device=device)
        return tensor.to(device, wanted)

    return map_tensors(example, move)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        counts = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        known = counts and not value.is_meta and value.numel() > 0
        low, high = (int(value.min()), int(value.max())) if known else (0, 0)
        return {"tensor": list(value.shape), "dtype": _dtype_name(value.dtype), "range": [low, high]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"table": {key: _describe(item) for key, item in value.items()}}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_describe(item) for item in value]}
    if isinstance(value, _SCALARS):
        return {"value": value}
    raise _NotDescribableError


def _make(name: str, description: Any, generator: torch.Generator) -> Any:
    match description:
        case {"tensor": shape, "dtype": dtype, "range": [low, high]}:
            return _make_tensor(name, shape, getattr(torch, dtype), low, high, generator)
        case {"table": items}:
            return {key: _make(key, item, generator) for key, item in items.items()}
        case {"tuple": items}:
            return tuple(_make(name, item, generator) for item in items)
        case {"list": items}:
            return [_make(name, item, generator) for item in items]
        case {"value": value}:
            return value
    raise ValueError(f"no example input: {description!r:.60}")


def _make_tensor(
    name: str, shape: list[int], dtype: torch.dtype, low: int, high: int, generator: torch.Generator
) -> Tensor:
    if not isinstance(dtype, torch.dtype) or torch.Size(shape).numel() > MAX_SIZE:
        raise ValueError(f"no tensor: {dtype} of shape {shape!r:.60}")
    if dtype == torch.bool or "mask" in name:  # every position counts
        return torch.full(shape, max(high, 1), dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)

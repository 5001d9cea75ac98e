"""`simic.save` and `simic.load`: a GrowableModel in one file, built again around its host without knowing its slots."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simic.growth.example import ExampleInput
from simic.growth.model import GrowableModel
from simic.growth.settings import make_trainable, read_settings
from simic.growth.slot_shape import AmbiguousShapeError
from simic.growth.state_dict import GROWTH_KEY, growth_record, open_record
from simic.lifecycle.stages import LifecycleConfig
from simic.storage.bundle import load_bundle, save_bundle

_KINDS = ("model", "growth")
"""Of files that hold a model: written by `save`, and by `GrowthScheduler.save`."""


def save(model: GrowableModel, path: str | Path) -> None:
    """Write a model, with what rebuilds it, to one safetensors file; `simic.load(path, host)` reads it.

    To train on with the same optimizer and controller, use `GrowthScheduler.save`.

    Args:
        model: The model, grown or not.
        path: The file; one that exists is replaced at once, never half.

    Raises:
        TypeError: `model` is no GrowableModel.

    Example:
        >>> simic.save(model, "grown.safetensors")
        >>> simic.load("grown.safetensors", make_net()).slot_names == model.slot_names
        True
    """
    if not isinstance(model, GrowableModel):
        raise TypeError(f"model must be a GrowableModel, got a {type(model).__name__}; save others with torch.save")
    save_bundle(path, {"kind": "model", "model": {GROWTH_KEY: growth_record(model), **model.state_dict()}})


def load(path: str | Path, host: nn.Module, *, example_input: ExampleInput | None = None) -> GrowableModel:
    """Rebuild a grown model around a freshly built host: its slots, settings, seeds and weights.

    Args:
        path: What `simic.save`, `GrowthScheduler.save` or `torch.save(model.state_dict(), path)` wrote.
        host: A network of the same class as the one that was saved. On the meta device it gets the tensors of the file.
        example_input: Needed for files of earlier versions only; without it the model's example is random numbers of
            the shapes that were saved.

    Returns:
        The model around `host`.

    Raises:
        ValueError: The file does not belong to the host, or a blueprint of your own is not registered. The host is left
            as it was.

    Example:
        >>> simic.save(model, "grown.safetensors")
        >>> again = simic.load("grown.safetensors", make_net())
    """
    if isinstance(host, GrowableModel):
        raise ValueError("host is a GrowableModel already: pass the network inside it, freshly built")
    weights = _read_weights(Path(path))
    metadata = (getattr(weights, "_metadata", None) or {}).get("", {})
    record = _record(path, weights, metadata)
    if "settings" in record:
        arguments = read_settings(record["settings"], host)
        if example_input is not None:
            arguments["example_input"] = example_input
        model = GrowableModel(host, **arguments)
        make_trainable(model, record["settings"])
    else:
        model = _build_from_names(path, host, record, example_input)
    # Weights cannot be copied into parameters without memory: there they take their place.
    model.load_state_dict(weights, assign=any(p.is_meta for p in host.parameters()))
    return model


def _read_weights(path: Path) -> Mapping[str, Any]:
    if path.is_file() and zipfile.is_zipfile(path):  # torch.save
        weights = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(weights, Mapping):
            raise ValueError(f"{path} holds a {type(weights).__name__}, not the state dict of a GrowableModel")
        return weights
    tree = load_bundle(path)
    if not isinstance(tree, dict) or tree.get("kind") not in _KINDS:
        raise ValueError(f"{path} does not hold a growing model; simic.save and GrowthScheduler.save write one")
    return tree["model"]


def _record(path: str | Path, weights: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    if GROWTH_KEY in weights:
        return open_record(weights[GROWTH_KEY])
    if GROWTH_KEY in metadata:  # a model that had not grown
        return json.loads(metadata[GROWTH_KEY])
    raise ValueError(
        f"{path} has no growth record, so it is not the state dict of a GrowableModel; load a plain one with "
        "host.load_state_dict(...)"
    )


def _build_from_names(
    path: str | Path, host: nn.Module, record: dict[str, Any], example_input: ExampleInput | None
) -> GrowableModel:
    """The model of a file that has only the names and shapes of its slots."""
    if example_input is None:
        raise ValueError(
            f"{path} was written by an earlier simic, which did not save how its slots were found: pass "
            "example_input=..., as when the model was built"
        )
    names = [name for name, *_ in record["slots"]]
    first_seats = {name: kind for name, kind, *_ in record["slots"] if "#" not in name}
    lifecycle = LifecycleConfig(incubation=record["incubation"], seeds_per_slot=len(names) // max(1, len(first_seats)))
    try:
        return GrowableModel(host, list(first_seats), example_input=example_input, lifecycle=lifecycle)
    except AmbiguousShapeError:  # the user had to state what the dimensions mean
        return GrowableModel(host, first_seats, example_input=example_input, lifecycle=lifecycle)

"""What must hold of an agent's saved state before anything is built from it: its format, settings and tensors.

A checksum says that a file is as it was written, not that whoever wrote it was right. So weights that are not finite,
of another type or of other shapes are refused here, for every command alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from simic.policy.config import PolicyConfig
from simic.policy.moments import RunningMoments
from simic.policy.registry import POLICIES
from simic.storage.bundle import BundleError

FORMAT, VERSION = "simic-agent", 1
ABOUT = ("network", "heads", "sizes", "policy", "gamma")
"""What an agent says of itself."""
MAX_SHOWN = 120
"""Characters of a foreign value that are worth showing."""


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Say in which file a fault was found."""
    try:
        yield
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from None


def check_format(state: Any) -> dict[str, Any]:
    """A saved agent's state, upgraded if it lacks what was added since; anything else is refused."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if not isinstance(found, str) or found != FORMAT:
        raise BundleError(f"not a saved agent: its format is {shown(found)}, not {FORMAT!r}")
    version = state.get("version")
    if type(version) is not int or version != VERSION:
        newer = type(version) is int and version > VERSION
        remedy = "use a newer simic" if newer else "train it anew"
        raise BundleError(f"the agent has format version {shown(version)}, this simic reads {VERSION}; {remedy}")
    for name in ("about", "network", "value_scale", "return_scale"):
        if not isinstance(state.get(name), dict):
            raise BundleError(f"the agent lacks {name!r}, or it is no table; use another file")
    try:
        json.dumps(state["about"])
    except TypeError:
        raise BundleError("what the agent tells of itself is not JSON; use another file") from None
    if state["about"].keys() != set(ABOUT):
        raise BundleError(f"the agent tells {shown(list(state['about']))} of itself, not {', '.join(ABOUT)}")
    gamma = state["about"]["gamma"]
    if type(gamma) not in (int, float) or not 0 <= gamma <= 1:
        raise BundleError(f"the agent's gamma must be a number from 0 to 1, got {shown(gamma)}")
    return state | {"about": upgrade_about(state["about"])}


def upgrade_about(about: dict[str, Any]) -> dict[str, Any]:
    """Agents saved before policies had names have the only network there was."""
    policy = about.get("policy")
    return about | {"policy": {"network": "factored"} | policy} if isinstance(policy, dict) else about


def read_policy_config(settings: Any, num_weights: int) -> PolicyConfig:
    """The settings of a saved network of so many weights; its sizes are checked before anybody builds it."""
    if not isinstance(settings, dict):
        raise BundleError(f"the policy's settings are no table, but {type(settings).__name__}; use another file")
    names = [field.name for field in fields(PolicyConfig)]
    if unknown := sorted(map(str, settings.keys() - set(names))):
        raise BundleError(f"the policy has settings that this simic does not know: {shown(unknown)}")
    if missing := [name for name in names if name not in settings]:
        raise BundleError(f"the policy lacks the settings {', '.join(missing)}; train it anew")
    for name, kind in get_type_hints(PolicyConfig).items():
        choices = get_args(kind)
        if settings[name] not in choices if choices else type(settings[name]) is not kind:
            wanted = " or ".join(map(repr, choices)) or kind.__name__
            raise BundleError(f"the policy's {name} must be {wanted}, got {shown(settings[name])}")
    if settings["network"] not in POLICIES:
        raise BundleError(
            f"its network is {shown(settings['network'])}, which is not registered here (there are "
            f"{', '.join(POLICIES)}): load the plugin that defines it with --plugin (simic.load_plugins)"
        )
    try:
        config = PolicyConfig(**settings)
    except ValueError as error:
        raise BundleError(f"the policy's settings are wrong: {error}") from None
    # The core alone has more than hidden_size squared weights, the encoders have encoding_size squared.
    needed = config.hidden_size**2 + config.encoding_size**2
    if config.network == "factored" and needed > num_weights:
        raise BundleError(
            f"the policy's hidden_size {config.hidden_size} and encoding_size {config.encoding_size} ask for more than "
            f"{needed} weights, the file holds {num_weights}"
        )
    return config


def check_tensors(saved: Mapping[str, Any], own: Mapping[str, Tensor], part: str = "network") -> None:
    """Raise unless `saved` has the names, shapes and types of `own`, and every number is finite.

    Moments may be of less than double precision: not every device has it.
    """
    for name in sorted(own.keys() | saved.keys(), key=str):
        theirs, mine = (_shape(tensors[name]) if name in tensors else "missing" for tensors in (saved, own))
        if theirs != mine:
            raise BundleError(f"the saved {part}'s {shown(name, plain=True)} has shape {theirs}, this one's {mine}")
        allowed = (own[name].dtype,) if own[name].dtype == torch.float32 else (torch.float32, torch.float64)
        check_numbers(f"{part}'s {name}", saved[name], allowed)


def check_numbers(name: str, values: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise unless all values are finite and of an allowed type; variances and counts must not be negative."""
    if values.dtype not in allowed:
        wanted = " or ".join(_named(dtype) for dtype in allowed)
        raise BundleError(f"the saved {name} is of type {_named(values.dtype)}, not {wanted}")
    if not bool(values.isfinite().all()):
        raise BundleError(f"the saved {name} has values that are not finite: training broke it; use another file")
    if name.endswith(("variance", "count")) and bool((values < 0).any()):
        raise BundleError(f"the saved {name} is negative; use another file")


def check_scales(state: Mapping[str, Any]) -> None:
    """Raise unless the units of rewards and values can be used."""
    own = RunningMoments(1).state_dict()
    check_tensors(state["value_scale"], own, "value_scale")
    returns = dict(state["return_scale"])
    running = returns.pop("_running", None)
    if not isinstance(running, Tensor) or running.dim() != 1:
        raise BundleError(f"the saved return_scale's _running has shape {_shape(running)}, not one axis")
    check_numbers("return_scale's _running", running, (torch.float32, torch.float64))
    check_tensors(returns, {f"moments.{name}": tensor for name, tensor in own.items()}, "return_scale")


def shown(value: Any, *, plain: bool = False) -> str:
    """A foreign value that fits in a line: escaped as Python writes it, and cut; `plain` leaves out the quotes."""
    text = repr(value)[1:-1] if plain and isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"none: it is {type(value).__name__}"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""The saved state of an agent: its format, and the checks before a network is built from it.

A checksum shows that a file is unchanged since it was written, not that its content was right. So weights that are not
finite, or have another type or shape, are refused here, for every command.
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
from simic.policy.normalization import RunningMoments
from simic.policy.registry import POLICIES
from simic.policy.upgrade import NEWEST, add_features, upgrade_sizes
from simic.storage.bundle import BundleError

FORMAT, VERSION = "simic-agent", NEWEST
ENSEMBLE_FORMAT, ENSEMBLE_VERSION = "simic-ensemble", 1
"""A file of several agents' states, under the key `members`: each has its own version and is upgraded by itself."""
ABOUT = ("network", "heads", "sizes", "policy", "gamma")
"""Keys of the agent's description."""
LEARNING = ("optimizer", "generator", "counts")
"""Parts that only training needs; a controller file omits them."""
MAX_MEMBERS = 64
"""Policies of an ensemble."""
MAX_SHOWN = 120
"""Characters of an unexpected value that a message shows."""


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Prefix a BundleError with the path of the file."""
    try:
        yield
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from None


def check_format(state: Any) -> dict[str, Any]:
    """A saved agent's state, upgraded if it lacks what was added since; anything else is refused."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found == ENSEMBLE_FORMAT:
        raise BundleError("it holds an ensemble, whose policies are trained one by one: name the file of one of them")
    if not isinstance(found, str) or found != FORMAT:
        raise BundleError(f"not a saved agent: its format is {shown(found)}, not {FORMAT!r}")
    version = state.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        newer = type(version) is int and version > VERSION
        remedy = "use a newer simic" if newer else "train it again"
        raise BundleError(f"the agent has format version {shown(version)}, this simic reads {VERSION}; {remedy}")
    for name in ("about", "network", "value_scale", "return_scale"):
        if not isinstance(state.get(name), dict):
            raise BundleError(f"the agent lacks the table {name!r}; use another file")
    try:
        json.dumps(state["about"])
    except TypeError:
        raise BundleError("the agent's description is not JSON; use another file") from None
    if state["about"].keys() != set(ABOUT):
        raise BundleError(f"the agent's description has the keys {shown(list(state['about']))}, not {', '.join(ABOUT)}")
    gamma = state["about"]["gamma"]
    if type(gamma) not in (int, float) or not 0 <= gamma <= 1:
        raise BundleError(f"the agent's gamma must be a number from 0 to 1, got {shown(gamma)}")
    state = state if version == VERSION else add_features(state)
    return state | {"about": upgrade_about(state["about"]), "version": VERSION}


def check_ensemble(state: dict[str, Any]) -> list[Any]:
    """The states of the agents in the file of an ensemble; they are checked one by one when they are built."""
    version, members = state.get("version"), state.get("members")
    if type(version) is not int or version != ENSEMBLE_VERSION:
        raise BundleError(
            f"the ensemble has format version {shown(version)}, this simic reads {ENSEMBLE_VERSION}; use a newer simic"
        )
    if not isinstance(members, list) or not 1 < len(members) <= MAX_MEMBERS:
        got = f"{len(members)} policies" if isinstance(members, list) else type(members).__name__
        raise BundleError(f"an ensemble must be a list of 2 to {MAX_MEMBERS} policies, got {got}; use another file")
    if any(isinstance(member, dict) and member.get("format") == ENSEMBLE_FORMAT for member in members):
        raise BundleError("the ensemble holds another ensemble; make it anew from single policies")
    return members


def upgrade_about(about: dict[str, Any]) -> dict[str, Any]:
    """Agents saved before policies had names have the only network there was; features are those of this version."""
    policy = about.get("policy")
    about = about | {"policy": {"network": "factored"} | policy} if isinstance(policy, dict) else about
    return upgrade_sizes(about)


def check_agent_state(state: Any, about: dict[str, Any]) -> dict[str, Any]:
    """A saved agent's state, upgraded; refused unless its description is `about`, with both values of a difference."""
    state = check_format(state)
    for name, own in about.items():
        saved = state["about"].get(name)
        if saved != own:
            raise BundleError(f"the saved agent has {name} = {saved}, this one {own}; build both from the same config")
    return state


def check_can_learn(state: dict[str, Any]) -> None:
    """Raise unless training can continue from `state`."""
    missing = [name for name in LEARNING if name not in state]
    if missing:
        raise BundleError(f"a controller without {', '.join(missing)} cannot continue training: resume a checkpoint")


def read_policy_config(settings: Any, num_weights: int) -> PolicyConfig:
    """The config of a saved network with `num_weights` weights; sizes are checked before a network is allocated."""
    if not isinstance(settings, dict):
        raise BundleError(f"the policy's settings must be a table, got {type(settings).__name__}; use another file")
    names = [field.name for field in fields(PolicyConfig)]
    if unknown := sorted(map(str, settings.keys() - set(names))):
        raise BundleError(f"the policy has settings that this simic does not know: {shown(unknown)}")
    if missing := [name for name in names if name not in settings]:
        raise BundleError(f"the policy lacks the settings {', '.join(missing)}; train it again")
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
        raise BundleError(f"the policy's settings are invalid: {error}") from None
    # A lower bound: the core has more than hidden_size squared weights, the encoders encoding_size squared.
    needed = config.hidden_size**2 + config.encoding_size**2
    if config.network == "factored" and needed > num_weights:
        raise BundleError(
            f"the policy's hidden_size {config.hidden_size} and encoding_size {config.encoding_size} need more than "
            f"{needed} weights, the file holds {num_weights}"
        )
    return config


def check_tensors(saved: Mapping[str, Any], own: Mapping[str, Tensor], part: str = "network") -> None:
    """Raise unless `saved` has the names, shapes and types of `own`, and every number is finite.

    Running moments may be float32 as well as float64: not every device has float64.
    """
    for name in sorted(own.keys() | saved.keys(), key=str):
        theirs, mine = (_shape(tensors[name]) if name in tensors else "missing" for tensors in (saved, own))
        if theirs != mine:
            raise BundleError(f"the saved {part}'s {shown(name, plain=True)} has shape {theirs}, this one's {mine}")
        allowed = (own[name].dtype,) if own[name].dtype == torch.float32 else (torch.float32, torch.float64)
        _check_numbers(f"{part}'s {name}", saved[name], allowed)


def check_scales(state: Mapping[str, Any]) -> None:
    """Raise unless the scales of rewards and values are usable."""
    own = RunningMoments(1).state_dict()
    check_tensors(state["value_scale"], own, "value_scale")
    returns = dict(state["return_scale"])
    running = returns.pop("_running", None)
    if not isinstance(running, Tensor) or running.dim() != 1:
        raise BundleError(f"the saved return_scale's _running has shape {_shape(running)}, not one axis")
    _check_numbers("return_scale's _running", running, (torch.float32, torch.float64))
    check_tensors(returns, {f"moments.{name}": tensor for name, tensor in own.items()}, "return_scale")


def shown(value: Any, *, plain: bool = False) -> str:
    """The repr of an unexpected value, shortened to fit in a line; `plain` omits the quotes of a string."""
    text = repr(value)[1:-1] if plain and isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _check_numbers(name: str, values: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if values.dtype not in allowed:
        found, *wanted = (str(dtype).removeprefix("torch.") for dtype in (values.dtype, *allowed))
        raise BundleError(f"the saved {name} is of type {found}, not {' or '.join(wanted)}")
    if not bool(values.isfinite().all()):
        raise BundleError(f"the saved {name} has values that are not finite: training diverged; use another file")
    if name.endswith(("variance", "count")) and bool((values < 0).any()):
        raise BundleError(f"the saved {name} is negative; use another file")


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"none: it is {type(value).__name__}"

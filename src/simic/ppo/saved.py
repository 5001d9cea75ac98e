"""The state of an agent as it is saved: its format, its parts, and what must fit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from simic.bundle import BundleError

FORMAT, VERSION = "simic-agent", 1
LEARNING = ("optimizer", "generator", "counts")
"""Parts that only learning needs: a controller does without."""


def check_agent_state(state: Any, about: dict[str, Any]) -> None:
    """Raise unless `state` is an agent of this kind; names both values of what differs."""
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise BundleError(f"not a saved agent: its format is {found!r}, not {FORMAT!r}")
    if state["version"] != VERSION:
        raise BundleError(f"the agent has format version {state['version']}, this simic reads {VERSION}")
    for name, mine in about.items():
        theirs = state["about"].get(name)
        if theirs != mine:
            raise BundleError(f"the saved agent has {name} = {theirs}, this one {mine}; build both from one config")


def check_learning(state: dict[str, Any]) -> None:
    """Raise unless learning can go on from `state`."""
    missing = [name for name in LEARNING if name not in state]
    if missing:
        raise BundleError(f"a controller without {', '.join(missing)} cannot learn on: resume from a checkpoint")


def check_shapes(saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Raise unless all weights have the same names and shapes: torch finds out after it has loaded some."""
    for name in sorted(own.keys() | saved.keys()):
        theirs, mine = (tuple(part[name].shape) if name in part else "missing" for part in (saved, own))
        if theirs != mine:
            raise BundleError(f"the saved network's {name} has shape {theirs}, this one's {mine}")

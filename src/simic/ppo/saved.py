"""The state of an agent as it is saved: what must fit, and what only learning needs."""

from __future__ import annotations

from typing import Any

from simic.policy.saved import check_format
from simic.storage.bundle import BundleError

LEARNING = ("optimizer", "generator", "counts")
"""Parts that only learning needs: a controller does without."""


def check_agent_state(state: Any, about: dict[str, Any]) -> None:
    """Raise unless `state` is an agent of this kind; names both values of what differs."""
    state = check_format(state)
    for name, mine in about.items():
        theirs = state["about"].get(name)
        if theirs != mine:
            raise BundleError(f"the saved agent has {name} = {theirs}, this one {mine}; build both from one config")


def check_learning(state: dict[str, Any]) -> None:
    """Raise unless learning can go on from `state`."""
    missing = [name for name in LEARNING if name not in state]
    if missing:
        raise BundleError(f"a controller without {', '.join(missing)} cannot learn on: resume from a checkpoint")

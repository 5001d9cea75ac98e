"""The format of a scheduler's saved state: its version, the upgrade of older ones, and the check before loading."""

from __future__ import annotations

from typing import Any

from simic.control.baselines import Controller

VERSION = 2


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """A saved state in the present format: in version 1 one controller had another name."""
    if state.get("version") != 1:
        return state
    name = {"ScheduleController": "ScriptedController"}.get(state["controller"], state["controller"])
    return state | {"version": VERSION, "controller": name}


def check_state(state: dict[str, Any], controller: Controller) -> None:
    """Raise unless an upgraded state is of this version and was written beside such a controller."""
    if state.get("version") != VERSION:
        raise ValueError(f"the saved scheduler has format version {state.get('version')}, this simic reads {VERSION}")
    if state["controller"] != type(controller).__name__:
        raise ValueError(
            f"the checkpoint was written with a {state['controller']}, this scheduler has a "
            f"{type(controller).__name__}; build it with the same controller"
        )

"""The format of a scheduler's saved state: its version, the upgrade of older ones, and the check before loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simic.control.baselines import Controller
from simic.scheduler.decision import Decision, decode_decision
from simic.scheduler.validation import CountedMetric

VERSION = 3


def upgrade(state: dict[str, Any]) -> dict[str, Any]:
    """A saved state in the present format.

    Version 1 had another name for one controller; version 2 had no decisions, and no metric but loss and accuracy.
    """
    if state.get("version") == 1:
        name = {"ScheduleController": "ScriptedController"}.get(state["controller"], state["controller"])
        state = state | {"version": 2, "controller": name}
    if state.get("version") == 2:
        state = state | {"version": 3, "decisions": [], "metric": CountedMetric().state_dict()}
    return state


def check_state(
    state: dict[str, Any], controller: Controller, metric: CountedMetric, slot_names: Sequence[str]
) -> None:
    """Raise unless an upgraded state is of this version, and was written beside such a controller, metric and slots.

    Weights of a model that never grew fit one with other slots, but what a scheduler remembers is of its slots.
    """
    if state.get("version") != VERSION:
        raise ValueError(f"the saved scheduler has format version {state.get('version')}, this simic reads {VERSION}")
    if state["controller"] != type(controller).__name__:
        raise ValueError(
            f"the checkpoint was written with a {state['controller']}, this scheduler has a "
            f"{type(controller).__name__}; build it with the same controller"
        )
    slots = state.get("slots", list(slot_names))  # older files do not tell
    if slots != list(slot_names):
        raise ValueError(
            f"the checkpoint's growth has the slots {slots}, here they are {list(slot_names)}; build the model with "
            "the same slots, or load the weights alone and let growth begin with them"
        )
    saved = CountedMetric(state["metric"]["name"], state["metric"]["mode"])
    if (saved.name, saved.mode) != (metric.name, metric.mode):
        raise ValueError(
            f"the checkpoint's metric is {saved!r}, here it is {metric!r}, so that histories and contributions would "
            "not agree; build the scheduler with the same metric and mode"
        )
    read_decisions(state)


def check_seeds(slots: Sequence[str], grown_slots: Sequence[str]) -> None:
    """Raise unless a model holds seeds in the slots for which a saved scheduler has parameter groups."""
    if set(grown_slots) != set(slots):
        raise ValueError(
            f"the saved scheduler trains seeds in slots {list(slots)}, the model holds some in {list(grown_slots)}; "
            "load the model first"
        )


def read_decisions(state: dict[str, Any]) -> list[Decision]:
    """The decisions in a saved state; damaged ones raise."""
    try:
        return [decode_decision(saved) for saved in state["decisions"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the saved decisions are damaged ({error!r}); use another checkpoint") from None

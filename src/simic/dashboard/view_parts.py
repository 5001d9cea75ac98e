"""The parts of a view as JSON values: a row of learning, a traced host. Numbers that are not finite are None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from simic.dashboard.state import FATES, Row, RunState
from simic.dashboard.story import host_id
from simic.storage.printable import printable
from simic.telemetry.events import EpisodeTrace, GrowthDecision, RunStarted
from simic.telemetry.series import Series

MAX_SLOTS = 64
"""Of a user's own model that are shown; those that held seeds come first."""


@lru_cache(maxsize=4096)
def name(text: str) -> str:
    """A name of the user's as a short line of visible characters."""
    return printable(text, 200)


def finite(value: float | None) -> float | None:
    """The number, or None if there is none."""
    return value if value is not None and math.isfinite(value) else None


def learning_row(row: Row) -> dict[str, Any]:
    """Metrics, spread over hosts, seeds and anomalies of an update."""
    return {
        "update": row.update,
        "first": row.first,
        "metrics": {name(key): finite(value) for key, value in (row.metrics or {}).items()},
        "spread": {key: [finite(value) for value in values] for key, values in row.spread.items()},
        "seeds": {name(key): dict(zip(FATES, counts, strict=True)) for key, counts in row.seeds.items()},
        "anomalies": [
            {
                "name": name(found.name),
                "where": name(found.where),
                "value": finite(found.value),
                "threshold": finite(found.threshold),
            }
            for found in row.anomalies
        ],
    }


def growth(traces: Sequence[EpisodeTrace]) -> dict[str, Any] | None:
    """The traced hosts of an update; None if there are none."""
    return {"update": traces[0].update, "hosts": [host(trace) for trace in traces]} if traces else None


def current_growth(state: RunState) -> dict[str, Any] | None:
    """The traced hosts of the newest update, or the one host of a user's own training."""
    if not state.decisions:
        return growth(state.traces)
    return {"update": state.decisions[-1].update, "hosts": [growing_host(state.decisions, state.started)]}


def host(trace: EpisodeTrace) -> dict[str, Any]:
    """A host: its slots over time, its decisions, its segments."""
    return {
        "id": host_id(trace),
        "group": trace.group,
        "env": trace.env,
        "task": name(trace.task),
        "score": finite(trace.score),
        "metric": finite(trace.metric),
        "host_parameters": trace.host_parameters,
        "parameters": trace.parameters,
        "rolled_back": trace.rolled_back,
        "slots": [
            {"name": name(slot), **trace.slots.get(slot, {}), "parameters": parameters}
            for slot, parameters in trace.seed_parameters
        ],
        "decisions": _decisions(trace),
        "segments": [{"name": name(segment), "parameters": parameters} for segment, parameters in trace.segments],
    }


def growing_host(decisions: Sequence[GrowthDecision], started: RunStarted | None) -> dict[str, Any]:
    """The host of a user's own training, over its last decisions: `first_state` came before all of them."""
    last, config = decisions[-1], started.config if started else {}
    slots = dict.fromkeys(slot for decision in decisions for slot in decision.slots)
    listed = config.get("slots")
    slots |= dict.fromkeys(str(slot) for slot in listed) if isinstance(listed, list) else {}
    segments = config.get("segments")
    size = config.get("host_parameters")
    return {
        "id": "g0-e0",
        "group": 0,
        "env": 0,
        "task": name(str(config.get("task", ""))),
        "score": None,
        "metric": finite(last.val_accuracy),
        "host_parameters": size if isinstance(size, int) else None,
        "parameters": last.parameters,
        "rolled_back": any(decision.verdict != "ok" for decision in decisions),
        "first_state": decisions[0].update,
        "slots": [_growing_slot(slot, decisions) for slot in list(slots)[:MAX_SLOTS]],
        "decisions": [_growth_decision(decision) for decision in decisions],
        "segments": [
            {"name": name(str(segment[0])), "parameters": segment[1]}
            for segment in (segments if isinstance(segments, list) else ())
            if isinstance(segment, list) and len(segment) == 2
        ],
    }


def _growing_slot(slot: str, decisions: Sequence[GrowthDecision]) -> dict[str, Any]:
    """A slot before the first decision, where it counts as dormant, and after each."""
    states = [{}, *(own if isinstance(own := each.slots.get(slot), dict) else {} for each in decisions)]
    sizes = [state.get("parameters") for state in states]
    return {
        "name": name(slot),
        "stage": [str(state.get("stage", "dormant")) for state in states],
        "alpha": [state.get("alpha", 0.0) for state in states],
        "contribution": [state.get("contribution") for state in states],
        "blueprint": [str(state.get("blueprint", "")) for state in states],
        "parameters": next((size for size in reversed(sizes) if size), 0),
    }


def _growth_decision(decision: GrowthDecision) -> dict[str, Any]:
    action = "; ".join(decision.actions) or "wait"
    return {
        "decision": decision.update,
        **_action(action),
        "probabilities": {},
        "legal_ops": [],
        "reward_terms": {},
        "value": None,
        "reward": None,
        "val_accuracy": finite(decision.val_accuracy),
        "val_loss": finite(decision.val_loss),
    }


def _action(action: str) -> dict[str, Any]:
    """What was done: as text, its operation and its slot."""
    op, *heads = action.split(" ")
    slot = next((head.removeprefix("slot=") for head in heads if head.startswith("slot=")), None)
    return {"action": printable(action), "op": name(op), "slot": None if slot is None else name(slot)}


def _decisions(trace: EpisodeTrace) -> list[dict[str, Any]]:
    found = []
    for index, action in enumerate(trace.steps.get("action", ())):
        numbers = {key: _at(trace.steps.get(key), index) for key in ("value", "reward", "val_accuracy", "val_loss")}
        probabilities = {name(key): _at(values, index) for key, values in trace.probabilities.items()}
        found.append(
            {
                "decision": index,
                **_action(str(action)),
                "probabilities": {key: value for key, value in probabilities.items() if value is not None},
                "legal_ops": str(_at(trace.steps.get("legal_ops"), index) or "").split(),
                "reward_terms": {name(key): _at(values, index) for key, values in trace.reward_terms.items()},
                **numbers,
            }
        )
    return found


def _at(values: Series | None, index: int) -> str | float | None:
    return values[index] if values is not None and index < len(values) else None

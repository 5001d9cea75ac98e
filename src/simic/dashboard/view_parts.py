"""The parts of a view as JSON values: a row of learning, a traced host. Numbers that are not finite are None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from simic.dashboard.state import FATES, Row
from simic.dashboard.story import host_id
from simic.storage.printable import printable
from simic.telemetry.events import EpisodeTrace
from simic.telemetry.series import Series


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


def _decisions(trace: EpisodeTrace) -> list[dict[str, Any]]:
    found = []
    for index, action in enumerate(trace.steps.get("action", ())):
        op, *heads = str(action).split(" ")
        slot = next((head.removeprefix("slot=") for head in heads if head.startswith("slot=")), None)
        numbers = {key: _at(trace.steps.get(key), index) for key in ("value", "reward", "val_accuracy", "val_loss")}
        probabilities = {name(key): _at(values, index) for key, values in trace.probabilities.items()}
        found.append(
            {
                "decision": index,
                "action": printable(action),
                "op": name(op),
                "slot": None if slot is None else name(slot),
                "probabilities": {key: value for key, value in probabilities.items() if value is not None},
                "legal_ops": str(_at(trace.steps.get("legal_ops"), index) or "").split(),
                "reward_terms": {name(key): _at(values, index) for key, values in trace.reward_terms.items()},
                **numbers,
            }
        )
    return found


def _at(values: Series | None, index: int) -> str | float | None:
    return values[index] if values is not None and index < len(values) else None

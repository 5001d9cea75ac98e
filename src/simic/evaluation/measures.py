"""Measures of episodes: one dict of JSON values per host, from an EpisodeRecord. Figures are in points (percent).

Shapes: T decisions, N hosts, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from simic.environment.episodes import EpisodeRecord
from simic.lifecycle.actions import STYLES, Column, Op
from simic.lifecycle.stages import Stage
from simic.rewards.score import POINTS, score


class Fossil(NamedTuple):
    """A seed that is part of the exported network."""

    slot: int
    blueprint: str
    style: str


def fossils(record: EpisodeRecord, host: int) -> list[Fossil]:
    """The fossils of a host at the end of its episode."""
    at = (int(record.decisions[host]), host)
    blueprint, style = record.slots.blueprint[at], record.slots.style[at]
    return [
        Fossil(slot, record.blueprint_names[blueprint[slot]], STYLES[style[slot]].name)
        for slot in np.flatnonzero(record.slots.stage[at] == Stage.FOSSILIZED).tolist()
    ]


def measure_episodes(
    record: EpisodeRecord, flops: np.ndarray, rng_seeds: Sequence[int], host_parameters: int
) -> list[dict[str, Any]]:
    """One dict per host of a record played with `evaluate`; rent is due for parameters beyond `host_parameters`."""
    assert record.test_quality is not None
    scores = score(record.test_quality, record.exported_parameters, host_parameters)
    results = []
    for host, rng_seed in enumerate(rng_seeds):
        # A host whose episode ended early keeps the figures of its last state.
        times = np.minimum(np.arange(len(record.quality)), record.decisions[host])
        curve = [POINTS * float(value) for value in record.quality[times, host]]
        metric, parameters = POINTS * float(record.test_quality[host]), int(record.exported_parameters[host])
        results.append(
            {
                "rng_seed": int(rng_seed),
                "metric": metric,
                "score": float(scores[host]),
                "area": math.fsum(curve[1:]) / len(curve[1:]),
                "parameters": parameters,
                "host_parameters": host_parameters,
                "flops": float(flops[host]),
                "accuracy_per_parameter": metric / parameters,
                "val_curve": curve,
                "parameter_curve": record.parameters[times, host].astype(int).tolist(),
                "seeds": seed_histories(record, host),
            }
        )
    return results


def seed_histories(record: EpisodeRecord, host: int) -> list[dict[str, Any]]:
    """All seeds of a host in order of germination; times are decisions, contributions points.

    The contribution of a seed that is present at the end is its Shapley value, otherwise the last one measured.
    """
    assert record.shapley is not None
    seeds: list[dict[str, Any]] = []
    slots, actions = record.slots, record.action[:, host]
    for slot, name in enumerate(record.slot_names):
        seed: dict[str, Any] | None = None
        # Time -1 stands for the initial state: fossils may be planted there.
        for time in range(-1, int(record.decisions[host])):
            after = (time + 1, host, slot)
            occupied = slots.blueprint[after] >= 0
            germinates = time >= 0 and actions[time, Column.OP] == Op.GERMINATE and actions[time, Column.SLOT] == slot
            if germinates or (time < 0 and occupied):
                blueprint = actions[time, Column.BLUEPRINT] if germinates else slots.blueprint[after]
                seed = {
                    "slot": name,
                    "blueprint": record.blueprint_names[blueprint],
                    "germinated": max(time, 0),
                    "ended": None,
                    "fate": "live",
                    "contribution": None,
                }
                seeds.append(seed)
            if seed is None or seed["fate"] == "pruned":
                continue
            if not occupied:
                seed |= {"fate": "pruned", "ended": time}
                continue
            if math.isfinite(slots.contribution[after]):
                seed["contribution"] = POINTS * float(slots.contribution[after])
            if slots.stage[after] == Stage.FOSSILIZED and seed["fate"] == "live":
                seed |= {"fate": "fossilized", "ended": max(time, 0)}
        worth = float(record.shapley[host, slot])
        if seed is not None and math.isfinite(worth):
            seed["contribution"] = POINTS * worth
    return sorted(seeds, key=lambda seed: seed["germinated"])

"""Test metric against training compute: the Pareto front, and what a controller gains over a wider host of equal cost.

Compute is log2 of the floating-point operations of a training relative to those of the host alone (same task, same rng
seed): 0 is the host alone, 1 twice its compute. The curve to beat joins the host alone and the hosts that are wider
from the start. Every episode is compared with the curve of its own host, read at its own compute:

    metric |                    o scaled_4x          gain at equal compute = x minus the line below it
           |           x
           |         o scaled_2x
           | o host alone
           +---0-----1----------2-- log2 compute     beyond its ends the curve is level

Reading it is linear in the metrics, so that the noise of single trainings averages out. Shapes are those of
`statistics`: (P, K, N) for P policies, K tasks and N runs of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simic.evaluation.groups import Groups
from simic.evaluation.parsing import HOST, SCALED
from simic.evaluation.statistics import (
    PAIRED_KEYS,
    Difference,
    paired_difference,
    resampled_means,
    score_table,
)

ROUNDING = 1e-9
"""Differences in compute that are none: sums of the same operations."""


def compute_curve(episodes: Sequence[Mapping[str, Any]], groups: Groups) -> dict[str, Any] | None:
    """The `compute_curve` of results.json; None without the host alone and wider hosts on a common task.

    Points are all controllers and groups that derive from no other, on the tasks that all of them played. Members of
    groups are points too, but the front is that of the rows.
    """
    played = dict.fromkeys(episode["controller"] for episode in episodes)
    labels = [label for label in played if groups.about(label)["of"] is None]
    pooled = [name for name, about in groups.groups.items() if about["of"] is None and {*about["members"]} <= {*labels}]
    curve = [label for kind in (HOST, SCALED) for label in labels if groups.kind(label) == kind]
    kept = _common_episodes(episodes, labels)
    hosts = {(episode["task"], episode["rng_seed"]) for episode in kept}
    if {groups.kind(label) for label in curve} != {HOST, SCALED} or len(hosts) < 2:
        return None
    table = score_table(kept)
    metric, cost = _pooled(table, groups, [*labels, *pooled], curve[0])
    on_curve = np.stack([np.stack((cost[own][0], metric[own][0])) for own in curve], -1)  # (2, K, N, points)
    rows = groups.rows([*labels, *pooled])
    share = front_shares(np.stack([cost[own].mean(0) for own in rows]), np.stack([metric[own].mean(0) for own in rows]))
    front = on_front(*(np.array([[values[own].mean() for own in rows]]) for values in (cost, metric)))[0]
    points = [_point(own, metric[own], cost[own], on_curve, compared=own not in curve) for own in (*labels, *pooled)]
    for point in points:
        index = rows.index(point["controller"]) if point["controller"] in rows else None
        point |= {
            "on_front": None if index is None else bool(front[index]),
            "front_share": None if index is None else float(share[index]),
        }
    order = sorted(points, key=lambda point: point["log2_compute"]["mean"])
    return {"host": curve[0], "curve": curve, "tasks": sorted({task for task, _ in hosts}), "points": order}


def read_curve(curve: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The metric of each host's curve at a cost (P, K, N), and whether the cost lies beyond the curve's last point.

    `curve` (2, K, N, points) holds costs and metrics, in any order.
    """
    order = curve[0].argsort(-1, kind="stable")
    costs, metrics = (np.take_along_axis(values, order, -1) for values in curve)
    read = np.empty_like(cost)
    for place in np.ndindex(cost.shape):
        read[place] = np.interp(cost[place], costs[place[1:]], metrics[place[1:]])
    return read, cost > costs[..., -1] + ROUNDING


def on_front(cost: np.ndarray, metric: np.ndarray) -> np.ndarray:
    """Which of Q points (R, Q) no other point beats: as cheap and as good, and better in one of both."""
    cheaper = cost[:, :, None] - cost[:, None, :]  # (R, Q, Q): positive where the second costs less
    better = metric[:, None, :] - metric[:, :, None]
    no_worse = (cheaper >= -ROUNDING) & (better >= -ROUNDING)
    beaten = no_worse & ((cheaper > ROUNDING) | (better > ROUNDING))
    return np.logical_not(beaten.any(2))


def front_shares(cost: np.ndarray, metric: np.ndarray, *, rng_seed: int = 0) -> np.ndarray:
    """How often each of Q points (Q, K, N) is on the front (Q,) if tasks are drawn anew; of one task, its hosts."""

    def resample(values: np.ndarray) -> np.ndarray:
        of_hosts, of_tasks = zip(*(resampled_means(own[None], rng_seed) for own in values), strict=True)
        return np.stack(of_tasks if values.shape[1] > 1 else of_hosts, 1)  # (R, Q)

    return on_front(resample(cost), resample(metric)).mean(0)


def _common_episodes(episodes: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[Mapping[str, Any]]:
    """The episodes of these controllers on the tasks that all of them played."""
    tasks = {label: {e["task"] for e in episodes if e["controller"] == label} for label in labels}
    common = set.intersection(*tasks.values()) if tasks else set[str]()
    return [episode for episode in episodes if episode["controller"] in tasks and episode["task"] in common]


def _pooled(
    table: Mapping[str, Mapping[str, np.ndarray]], groups: Groups, labels: Sequence[str], host: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Metric and compute (P, K, N) by controller or group."""
    metric, cost, alone = dict[str, np.ndarray](), dict[str, np.ndarray](), table[host]["flops"]
    for label in labels:
        members = groups.members(label)
        metric[label] = np.concatenate([table[member]["metric"] for member in members])
        cost[label] = np.log2(np.concatenate([table[member]["flops"] for member in members]) / alone)
    return metric, cost


def _point(label: str, metric: np.ndarray, cost: np.ndarray, curve: np.ndarray, *, compared: bool) -> dict[str, Any]:
    """The figures of a controller or group; those at equal compute are None for the curve's own points."""
    read, beyond = read_curve(curve, cost)
    host = curve[1, ..., :1].transpose(2, 0, 1)  # (1, K, N): the host alone is the curve's first point
    return {
        "controller": label,
        "log2_compute": _figures(_mean(cost)),
        "metric": _figures(_mean(metric)),
        "gain_over_host": _figures(paired_difference(metric, host)),
        "metric_at_equal_compute": _figures(_mean(read)) if compared else None,
        "gain_at_equal_compute": _figures(paired_difference(metric, read)) if compared else None,
        "beyond_curve": float(beyond.mean()) if compared else None,
    }


def _mean(values: np.ndarray) -> Difference:
    """A mean with the interval of a difference, over tasks too: that from nothing."""
    return paired_difference(values, np.zeros_like(values))


def _figures(difference: Difference) -> dict[str, float]:
    return dict(zip(PAIRED_KEYS, difference, strict=False))

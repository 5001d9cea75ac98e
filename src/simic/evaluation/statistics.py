"""What runs of several controllers on the same hosts say, and how surely (Agarwal et al. 2021; no torch).

Scores have the shape (P, K, N): P policies of one kind (1 for a rule), K tasks, N runs of each task; (K, N) also does.
Intervals hold 95 % of R bootstrap resamples. A resample is a table of how often each item was drawn, so that every
statistic is a weighted mean; all statistics of one shape and rng seed share the same resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

NUM_RESAMPLES = 2000
MEASURES = ("metric", "score", "area", "parameters", "flops", "accuracy_per_parameter")
PAIRED: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "metric": ("metric", np.asarray),
    "score": ("score", np.asarray),
    "flops": ("flops", np.asarray),
    "log2_flops": ("flops", np.log2),
    "log2_parameters": ("parameters", np.log2),
}
"""What is compared pair by pair: the measure behind it, and the scale on which differences are taken."""


class Estimate(NamedTuple):
    """A figure and its interval; arrays for a curve."""

    value: Any
    low: Any
    high: Any


class Difference(NamedTuple):
    """A mean difference, its interval, and the narrower one for other hosts of the same tasks."""

    value: float
    low: float
    high: float
    hosts_low: float
    hosts_high: float


class Resamples(NamedTuple):
    """How often each item was drawn in each of R resamples."""

    policies: np.ndarray
    """(R, P), sums to P."""
    tasks: np.ndarray
    """(R, K), sums to K."""
    runs: np.ndarray
    """(K, R, N), sums to N within each task."""
    other_runs: np.ndarray
    """The same drawn again, for a second controller that is not paired with the first."""


def iqm(scores: np.ndarray) -> float:
    """Interquartile mean: the mean without the lowest and the highest quarter of all runs."""
    scores = _as_scores(scores)
    return float(_weighted_iqm(scores, np.ones((1, scores.size)))[0])


def iqm_interval(scores: np.ndarray, *, rng_seed: int = 0) -> Estimate:
    """Interquartile mean; policies are resampled, and runs within each task."""
    scores = _as_scores(scores)
    return Estimate(iqm(scores), *_interval(_weighted_iqm(scores, _weights(scores, rng_seed))))


def performance_profile(scores: np.ndarray, taus: np.ndarray, *, rng_seed: int = 0) -> Estimate:
    """Share of runs above each tau, with a band that holds 95 % at each tau, resampled as in `iqm_interval`."""
    scores = _as_scores(scores)
    above = (scores.reshape(-1, 1) > np.asarray(taus, float)).astype(float)  # (P*K*N, taus)
    return Estimate(above.mean(0), *_interval(_weights(scores, rng_seed) @ above / len(above)))


def probability_of_improvement(x: np.ndarray, y: np.ndarray, *, rng_seed: int = 0) -> Estimate:
    """P(X > Y) + P(X = Y) / 2 of a run of each on the same task, averaged over tasks; runs are resampled independently.

    Policies are matched as in `paired_difference`.
    """
    x, y = np.broadcast_arrays(*_matched(x, y))
    wins = (np.sign(x[..., :, None] - y[..., None, :]) + 1) / 2  # (P, K, N, N)
    draws = _draw(x.shape, rng_seed)
    shares = [np.einsum("krn,krn->r", draws.runs @ own, draws.other_runs) / own.size for own in wins]  # P of (R,)
    return Estimate(float(wins.mean()), *_interval((draws.policies * np.stack(shares, 1)).mean(1)))


def paired_difference(x: np.ndarray, y: np.ndarray, *, rng_seed: int = 0) -> Difference:
    """Mean of x - y over pairs that share task and rng seed, averaged over policies.

    Two intervals are taken: one resamples pairs within each task (another draw of hosts for these tasks: the stratified
    bootstrap), one resamples whole tasks (other tasks like these); both resample policies too. `hosts_low` and
    `hosts_high` are the first; `low` and `high` enclose both, so that a difference counts only if it is there either
    way. Resampling P items understates their spread by a factor sqrt(1 - 1 / P): with 3 policies or few tasks the
    interval is somewhat too narrow.

    P is the same on both sides, or 1 on one. Policies are matched by place: the second replay is of the second policy.
    """
    x, y = _matched(x, y)
    difference = x - y
    draws = _draw(difference.shape, rng_seed)
    of_pairs = (draws.runs @ difference[..., None])[..., 0].mean(1) / difference.shape[2]  # (P, R)
    of_tasks = draws.tasks @ difference.mean(2).T / difference.shape[1]  # (R, P)
    hosts, tasks = (_interval((draws.policies * means).mean(1)) for means in (of_pairs.T, of_tasks))
    return Difference(float(difference.mean()), min(hosts[0], tasks[0]), max(hosts[1], tasks[1]), *hosts)


def summarize(
    episodes: Sequence[Mapping[str, Any]],
    *,
    against: Sequence[str] | None = None,
    pooled: Mapping[str, Sequence[str]] | None = None,
    rng_seed: int = 0,
) -> dict[str, Any]:
    """Every controller by itself, and paired with those of `against` (by default all others).

    `pooled` names groups of controllers, such as policies trained alike, that are judged as one beside their members.
    In `controllers`, low and high belong to iqm; in `paired`, to mean, and figures are of controller minus other;
    what hosts_low and hosts_high are says `paired_difference`.
    """
    pooled = pooled or {}
    scores = score_table(episodes)
    for group, members in pooled.items():
        _check_group(group, members, scores)
        scores[group] = {m: np.concatenate([scores[label][m] for label in members]) for m in MEASURES}
    others = list(scores) if against is None else list(against)
    if unknown := [label for label in others if label not in scores]:
        raise ValueError(f"no episodes of {unknown}, named in `against`; there are {list(scores)}")

    def comparable(label: str, other: str) -> bool:
        return label != other and label not in pooled.get(other, ()) and other not in pooled.get(label, ())

    return {
        "controllers": {
            label: {m: _alone(values, rng_seed) for m, values in table.items()} for label, table in scores.items()
        },
        "paired": {
            label: {
                other: _paired(scores[label], scores[other], rng_seed) for other in others if comparable(label, other)
            }
            for label in scores
        },
    }


def score_table(episodes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """Scores (1, K, N) by controller and measure, tasks and rng seeds in sorted order; refuses gaps and NaN."""
    found: dict[str, dict[tuple[str, int], Mapping[str, Any]]] = {}
    for episode in episodes:
        place = (episode["task"], episode["rng_seed"])
        if found.setdefault(episode["controller"], {}).setdefault(place, episode) is not episode:
            raise ValueError(f"two episodes of {episode['controller']!r} on task {place[0]!r}, rng seed {place[1]}")
    if not found:
        raise ValueError("there are no episodes to summarize")
    hosts = sorted(set().union(*found.values()))
    for label, places in found.items():
        if missing := [host for host in hosts if host not in places]:
            raise ValueError(
                f"controllers are compared on the same hosts, but {label!r} lacks {len(missing)} of {len(hosts)}, "
                f"first task {missing[0][0]!r} with rng seed {missing[0][1]}: evaluate it there too, or leave it out"
            )
    num_tasks = len({task for task, _ in hosts})
    counts = {task: sum(task == own for own, _ in hosts) for task, _ in hosts}
    if len(set(counts.values())) > 1:
        raise ValueError(f"every task needs the same number of rng seeds, got {counts}")
    return {
        label: {m: _column(label, m, [places[host] for host in hosts], num_tasks) for m in MEASURES}
        for label, places in found.items()
    }


def _column(label: str, measure: str, episodes: list[Mapping[str, Any]], num_tasks: int) -> np.ndarray:
    for episode in episodes:
        if not np.isfinite(episode[measure]) or (measure in ("parameters", "flops") and episode[measure] <= 0):
            raise ValueError(
                f"{measure} of {label!r} on task {episode['task']!r} with rng seed {episode['rng_seed']} is "
                f"{episode[measure]}: figures must be finite, and sizes positive; leave that host out"
            )
    return np.array([float(episode[measure]) for episode in episodes]).reshape(1, num_tasks, -1)


def _check_group(group: str, members: Sequence[str], scores: Mapping[str, Any]) -> None:
    if group in scores:
        raise ValueError(f"the group {group!r} is named like a controller; choose another name")
    if not members or any(label not in scores for label in members):
        raise ValueError(f"the group {group!r} needs members that were evaluated, got {list(members)}")


def _alone(scores: np.ndarray, rng_seed: int) -> dict[str, float]:
    middle = iqm_interval(scores, rng_seed=rng_seed)
    return {"mean": float(scores.mean()), "iqm": middle.value, "low": middle.low, "high": middle.high}


def _paired(mine: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], rng_seed: int) -> dict[str, Any]:
    figures = {}
    for name, (measure, scale) in PAIRED.items():
        x, y = scale(mine[measure]), scale(other[measure])
        difference = paired_difference(x, y, rng_seed=rng_seed)
        chance = probability_of_improvement(x, y, rng_seed=rng_seed)
        figures[name] = {
            "mean": difference.value,
            "low": difference.low,
            "high": difference.high,
            "hosts_low": difference.hosts_low,
            "hosts_high": difference.hosts_high,
            "probability": chance.value,
            "probability_low": chance.low,
            "probability_high": chance.high,
        }
    return figures


def _as_scores(scores: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores, float)
    scores = scores[None] if scores.ndim == 2 else scores
    if scores.ndim != 3 or not scores.size:
        raise ValueError(f"scores have the shape (policies, tasks, runs) or (tasks, runs), got {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite: leave out what was not measured")
    return scores


def _matched(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = _as_scores(x), _as_scores(y)
    if x.shape[1:] != y.shape[1:] or (len(x) != len(y) and 1 not in (len(x), len(y))):
        raise ValueError(
            f"pairs share tasks and runs, with as many policies on both sides or 1 on one; got {x.shape} and {y.shape}"
        )
    return x, y


@lru_cache(maxsize=8)
def _draw(shape: tuple[int, int, int], rng_seed: int) -> Resamples:
    """The resamples of scores of a shape."""
    policies, tasks, runs = shape
    if tasks == runs == 1:
        raise ValueError("one task with one rng seed gives no interval: evaluate at least 2 rng seeds, or 2 tasks")
    rng = np.random.default_rng(rng_seed)

    def draw(items: int, *times: int) -> np.ndarray:
        return rng.multinomial(items, np.full(items, 1 / items), (*times, NUM_RESAMPLES)).astype(float)

    of_policies, of_tasks = draw(policies), draw(tasks)
    if runs == 1:
        # Within a task there is nothing to draw from, and an interval without width would be a lie: tasks are drawn.
        return Resamples(of_policies, of_tasks, of_tasks.T[..., None].copy(), np.ones((tasks, NUM_RESAMPLES, 1)))
    return Resamples(of_policies, of_tasks, draw(runs, tasks), draw(runs, tasks))


def _weights(scores: np.ndarray, rng_seed: int) -> np.ndarray:
    """How often every single run counts in every resample: (R, P*K*N), sums to P*K*N."""
    draws = _draw(scores.shape, rng_seed)
    return np.einsum("rp,krn->rpkn", draws.policies, draws.runs).reshape(NUM_RESAMPLES, -1)


def _weighted_iqm(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Interquartile means (R,) of scores that count `weights` (R, P*K*N) times, whole numbers."""
    flat = scores.reshape(-1)
    order = flat.argsort()
    cut = flat.size // 4
    reached = weights[:, order].cumsum(1).clip(cut, flat.size - cut)
    return np.diff(reached, axis=1, prepend=cut) @ flat[order] / (flat.size - 2 * cut)


def _interval(resampled: np.ndarray) -> tuple[Any, Any]:
    """The middle 95 % over the first axis."""
    low, high = np.percentile(resampled, (2.5, 97.5), axis=0)
    return (low, high) if resampled.ndim > 1 else (float(low), float(high))

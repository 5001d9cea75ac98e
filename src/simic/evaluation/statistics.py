"""What runs of several controllers on the same hosts say, and how surely (Agarwal et al. 2021; no torch).

Scores have the shape (P, K, N): P policies of one kind (1 for a rule), K tasks, N runs of each task; (K, N) also does.
Intervals hold 95 % of R bootstrap resamples. A resample is a table of how often each item was drawn, so that every
statistic is a weighted mean; all statistics of one shape and rng seed share the same resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from simic.evaluation.groups import Groups

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


def mean_interval(scores: np.ndarray, *, rng_seed: int = 0) -> Estimate:
    """Mean; policies are resampled, and runs within each task."""
    scores = _as_scores(scores)
    resampled = _weights(scores, rng_seed) @ scores.reshape(-1) / scores.size
    return Estimate(float(scores.mean()), *_interval(resampled))


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


def probability_of_improvement(x: np.ndarray, y: np.ndarray, *, matched: bool = True, rng_seed: int = 0) -> Estimate:
    """P(X > Y) + P(X = Y) / 2 of a run of each on the same task, averaged over tasks; runs are resampled independently.

    Policies are matched as in `paired_difference`; if they are not, every one of x meets every one of y.
    """
    x, y = _same_hosts(x, y, matched=matched)
    one_by_one = matched or 1 in (len(x), len(y))
    draws = _draw(np.broadcast_shapes(x.shape, y.shape) if one_by_one else x.shape, rng_seed)

    def share(mine: np.ndarray, other: np.ndarray) -> tuple[float, np.ndarray]:
        wins = (np.sign(mine[:, :, None] - other[:, None, :]) + 1) / 2  # (K, N, N)
        return float(wins.mean()), np.einsum("krn,krn->r", draws.runs @ wins, draws.other_runs) / wins.size

    if one_by_one:
        found = [share(mine, other) for mine, other in zip(*np.broadcast_arrays(x, y), strict=True)]
        weights = draws.policies  # (R, P)
    else:
        found = [share(mine, other) for mine in x for other in y]
        others = _draw_other_policies(len(y), rng_seed)
        weights = (draws.policies[:, :, None] * others[:, None, :]).reshape(NUM_RESAMPLES, -1)  # (R, P * Q)
    shares = np.stack([resampled for _, resampled in found], 1)
    return Estimate(float(np.mean([value for value, _ in found])), *_interval((weights * shares).mean(1)))


def paired_difference(x: np.ndarray, y: np.ndarray, *, matched: bool = True, rng_seed: int = 0) -> Difference:
    """Mean of x - y over pairs that share task and rng seed, averaged over policies.

    Two intervals are taken: one resamples pairs within each task (another draw of hosts for these tasks: the stratified
    bootstrap), one resamples whole tasks (other tasks like these); both resample policies too. `hosts_low` and
    `hosts_high` are the first; `low` and `high` enclose both, so that a difference counts only if it is there either
    way. Resampling P items understates their spread by a factor sqrt(1 - 1 / P): with 3 policies or few tasks the
    interval is somewhat too narrow.

    `matched` policies belong together by place (the second replay is of the second policy): P is the same on both
    sides, or 1 on one. Others are resampled independently, as two groups that were trained apart.
    """
    x, y = _same_hosts(x, y, matched=matched)
    if matched or 1 in (len(x), len(y)):
        difference = x - y
        hosts, tasks = _resampled_means(difference, _draw(difference.shape, rng_seed).policies, rng_seed)
        value = float(difference.mean())
    else:
        mine = _resampled_means(x, _draw(x.shape, rng_seed).policies, rng_seed, x.shape)
        other = _resampled_means(y, _draw_other_policies(len(y), rng_seed), rng_seed, x.shape)
        hosts, tasks = mine[0] - other[0], mine[1] - other[1]
        value = float(x.mean() - y.mean())
    of_hosts, of_tasks = _interval(hosts), _interval(tasks)
    return Difference(value, min(of_hosts[0], of_tasks[0]), max(of_hosts[1], of_tasks[1]), *of_hosts)


def _resampled_means(
    scores: np.ndarray, policies: np.ndarray, rng_seed: int, shape: tuple[int, ...] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Means (R,) with runs drawn within each task, and with tasks drawn, as for scores of `shape`; policies (R, P)."""
    draws = _draw(shape or scores.shape, rng_seed)
    of_runs = (draws.runs @ scores[..., None])[..., 0].mean(1) / scores.shape[2]  # (P, R)
    of_tasks = draws.tasks @ scores.mean(2).T / scores.shape[1]  # (R, P)
    return (policies * of_runs.T).mean(1), (policies * of_tasks).mean(1)


def summarize(
    episodes: Sequence[Mapping[str, Any]], groups: Groups | None = None, *, rng_seed: int = 0
) -> dict[str, Any]:
    """Every controller and group by itself, and paired with those it is compared with.

    In `controllers`, low and high are the interval of the mean, iqm_low and iqm_high that of the interquartile mean. In
    `paired`, figures are means of controller minus other; for hosts_low and hosts_high see `paired_difference`.
    """
    scores = score_table(episodes)
    groups = groups or Groups({label: {"kind": label, "of": None} for label in scores})
    for group, about in groups.groups.items():
        _check_group(group, about["members"], scores)
        scores[group] = {m: np.concatenate([scores[label][m] for label in about["members"]]) for m in MEASURES}
    pairs: dict[tuple[str, str], dict[str, Any]] = {}
    for label, other in combinations(sorted(scores), 2):
        if groups.comparable(label, other):
            figures = _paired(scores[label], scores[other], groups.matched(label, other), rng_seed)
            pairs[label, other] = figures
            pairs[other, label] = {name: _swapped(figure) for name, figure in figures.items()}
    paired = {label: {other: pairs[label, other] for other in scores if (label, other) in pairs} for label in scores}
    alone = {label: {m: _alone(values, rng_seed) for m, values in table.items()} for label, table in scores.items()}
    return {"controllers": alone, "paired": paired}


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
    mean, middle = mean_interval(scores, rng_seed=rng_seed), iqm_interval(scores, rng_seed=rng_seed)
    return {
        **{"mean": mean.value, "low": mean.low, "high": mean.high},
        **{"iqm": middle.value, "iqm_low": middle.low, "iqm_high": middle.high},
    }


def _paired(
    mine: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], matched: bool, rng_seed: int
) -> dict[str, Any]:
    figures = {}
    for name, (measure, scale) in PAIRED.items():
        x, y = scale(mine[measure]), scale(other[measure])
        difference = paired_difference(x, y, matched=matched, rng_seed=rng_seed)
        chance = probability_of_improvement(x, y, matched=matched, rng_seed=rng_seed)
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


def _swapped(figure: Mapping[str, float]) -> dict[str, float]:
    """The same comparison seen from the other side; 0.0 minus, because a negative zero would be told as one."""
    return {
        "mean": 0.0 - figure["mean"],
        "low": 0.0 - figure["high"],
        "high": 0.0 - figure["low"],
        "hosts_low": 0.0 - figure["hosts_high"],
        "hosts_high": 0.0 - figure["hosts_low"],
        "probability": 1 - figure["probability"],
        "probability_low": 1 - figure["probability_high"],
        "probability_high": 1 - figure["probability_low"],
    }


def _as_scores(scores: np.ndarray) -> np.ndarray:
    scores = np.asarray(scores, float)
    scores = scores[None] if scores.ndim == 2 else scores
    if scores.ndim != 3 or not scores.size:
        raise ValueError(f"scores have the shape (policies, tasks, runs) or (tasks, runs), got {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite: leave out what was not measured")
    return scores


def _same_hosts(x: np.ndarray, y: np.ndarray, *, matched: bool) -> tuple[np.ndarray, np.ndarray]:
    x, y = _as_scores(x), _as_scores(y)
    if x.shape[1:] != y.shape[1:] or (matched and len(x) != len(y) and 1 not in (len(x), len(y))):
        raise ValueError(
            "pairs share tasks and runs, with as many policies on both sides or 1 on one if they are matched; "
            f"got {x.shape} and {y.shape}"
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


def _draw_other_policies(policies: int, rng_seed: int) -> np.ndarray:
    """How often each policy (R, Q) of a second group was drawn, independently of the first group's."""
    rng = np.random.default_rng([rng_seed, 1])
    return rng.multinomial(policies, np.full(policies, 1 / policies), NUM_RESAMPLES).astype(float)


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

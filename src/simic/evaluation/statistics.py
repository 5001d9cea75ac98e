"""Statistics of several controllers on the same hosts, with bootstrap intervals (Agarwal et al. 2021). No torch.

Scores have the shape (P, K, N): P policies of one kind (1 for a rule), K tasks, N runs of each task; (K, N) is accepted
too. Intervals cover 95 % of R bootstrap resamples. A resample is stored as counts of how often each item was drawn, so
that every statistic is a weighted mean and all resamples are one matrix product:

    runs of a task   52   61   58        resample (61, 52, 61)  ->  counts 1 2 0  ->  mean (52 + 2 * 61) / 3

All statistics of one shape and rng seed share the same resamples.
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
"""Paired comparisons: the measure, and the scale on which differences are taken."""
PAIRED_KEYS = ("mean", "low", "high", "hosts_low", "hosts_high", "probability", "probability_low", "probability_high")
"""Figures of a paired comparison: those of `paired_difference`, then those of `probability_of_improvement`."""


class Estimate(NamedTuple):
    """A statistic and its interval; arrays for a curve."""

    value: Any
    low: Any
    high: Any


class Difference(NamedTuple):
    """A mean difference, its interval, and the narrower interval over other hosts of the same tasks."""

    value: float
    low: float
    high: float
    hosts_low: float
    hosts_high: float


class Resamples(NamedTuple):
    """Counts of how often each item was drawn in each of R resamples."""

    policies: np.ndarray
    """(R, P), rows sum to P."""
    tasks: np.ndarray
    """(R, K), rows sum to K."""
    runs: np.ndarray
    """(K, R, N), rows sum to N within each task."""
    other_runs: np.ndarray
    """A second, independent draw, for a controller that is not paired with the first."""


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
    """Share of runs above each tau, with a pointwise 95 % band, resampled as in `iqm_interval`."""
    scores = _as_scores(scores)
    above = (scores.reshape(-1, 1) > np.asarray(taus, float)).astype(float)  # (P*K*N, taus)
    return Estimate(above.mean(0), *_interval(_weights(scores, rng_seed) @ above / len(above)))


def probability_of_improvement(x: np.ndarray, y: np.ndarray, *, matched: bool = True, rng_seed: int = 0) -> Estimate:
    """P(X > Y) + P(X = Y) / 2 of one run of each on the same task, averaged over tasks; runs resample independently.

    Policies are matched as in `paired_difference`; if they are not, each of x is compared with each of y.
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

    There are two intervals; both resample policies. One resamples pairs within each task (the stratified bootstrap:
    other hosts of these tasks) and gives `hosts_low` and `hosts_high`. The other resamples whole tasks (other tasks of
    this kind). `low` and `high` enclose both: a difference is significant only if it is in both ways. Resampling P
    items understates their spread by a factor sqrt(1 - 1 / P): with 3 policies or few tasks the interval is too narrow.

    `matched` policies correspond by position (the second replay is that of the second policy): P is the same on both
    sides, or 1 on one. Other policies are resampled independently, as two groups trained separately.
    """
    x, y = _same_hosts(x, y, matched=matched)
    if matched or 1 in (len(x), len(y)):
        difference = x - y
        hosts, tasks = resampled_means(difference, rng_seed)
        value = float(difference.mean())
    else:
        mine = resampled_means(x, rng_seed)
        other = resampled_means(y, rng_seed, x.shape, _draw_other_policies(len(y), rng_seed))
        hosts, tasks = mine[0] - other[0], mine[1] - other[1]
        value = float(x.mean() - y.mean())
    of_hosts, of_tasks = _interval(hosts), _interval(tasks)
    return Difference(value, min(of_hosts[0], of_tasks[0]), max(of_hosts[1], of_tasks[1]), *of_hosts)


def resampled_means(
    scores: np.ndarray, rng_seed: int, shape: tuple[int, ...] | None = None, policies: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Resampled means (R,) over runs within each task, and over tasks; the draw is that of scores of `shape`.

    `policies` (R, P) are counts of policies that were drawn otherwise.
    """
    draws = _draw(shape or scores.shape, rng_seed)
    policies = draws.policies if policies is None else policies
    of_runs = (draws.runs @ scores[..., None])[..., 0].mean(1) / scores.shape[2]  # (P, R)
    of_tasks = draws.tasks @ scores.mean(2).T / scores.shape[1]  # (R, P)
    return (policies * of_runs.T).mean(1), (policies * of_tasks).mean(1)


def summarize(
    episodes: Sequence[Mapping[str, Any]], groups: Groups | None = None, *, rng_seed: int = 0
) -> dict[str, Any]:
    """The `summary` of results.json: statistics of every controller and group, and of every pair.

    In `controllers`, low and high are the interval of the mean, iqm_low and iqm_high that of the interquartile mean. In
    `paired`, figures are differences controller minus other; for hosts_low and hosts_high see `paired_difference`.
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
    """Scores (1, K, N) by controller and measure, tasks and rng seeds sorted; missing hosts and NaN are refused."""
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
    figures = (*mean_interval(scores, rng_seed=rng_seed), *iqm_interval(scores, rng_seed=rng_seed))
    return dict(zip(("mean", "low", "high", "iqm", "iqm_low", "iqm_high"), figures, strict=True))


def _paired(
    mine: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], matched: bool, rng_seed: int
) -> dict[str, dict[str, float]]:
    figures = {}
    for name, (measure, scale) in PAIRED.items():
        x, y = scale(mine[measure]), scale(other[measure])
        difference = paired_difference(x, y, matched=matched, rng_seed=rng_seed)
        chance = probability_of_improvement(x, y, matched=matched, rng_seed=rng_seed)
        figures[name] = dict(zip(PAIRED_KEYS, (*difference, *chance), strict=True))
    return figures


def _swapped(figure: Mapping[str, float]) -> dict[str, float]:
    """The same comparison with the sides exchanged: intervals are mirrored."""
    mean, low, high, hosts_low, hosts_high, chance, chance_low, chance_high = (figure[key] for key in PAIRED_KEYS)
    # 0.0 minus, because a plain minus would turn 0.0 into -0.0, which prints as -0.00.
    differences = (0.0 - value for value in (mean, high, low, hosts_high, hosts_low))
    return dict(zip(PAIRED_KEYS, (*differences, 1 - chance, 1 - chance_high, 1 - chance_low), strict=True))


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
    """The resamples for scores of a shape (P, K, N)."""
    policies, tasks, runs = shape
    if tasks == runs == 1:
        raise ValueError("one task with one rng seed gives no interval: evaluate at least 2 rng seeds, or 2 tasks")
    rng = np.random.default_rng(rng_seed)

    def draw(items: int, *times: int) -> np.ndarray:
        return rng.multinomial(items, np.full(items, 1 / items), (*times, NUM_RESAMPLES)).astype(float)

    of_policies, of_tasks = draw(policies), draw(tasks)
    if runs == 1:
        # One run per task leaves nothing to resample within a task: resample tasks instead of an interval of no width.
        return Resamples(of_policies, of_tasks, of_tasks.T[..., None].copy(), np.ones((tasks, NUM_RESAMPLES, 1)))
    return Resamples(of_policies, of_tasks, draw(runs, tasks), draw(runs, tasks))


def _draw_other_policies(policies: int, rng_seed: int) -> np.ndarray:
    """Counts (R, Q) of the policies of a second group, drawn independently of the first group's."""
    rng = np.random.default_rng([rng_seed, 1])
    return rng.multinomial(policies, np.full(policies, 1 / policies), NUM_RESAMPLES).astype(float)


def _weights(scores: np.ndarray, rng_seed: int) -> np.ndarray:
    """Counts of every single run in every resample: (R, P*K*N), rows sum to P*K*N."""
    draws = _draw(scores.shape, rng_seed)
    return np.einsum("rp,krn->rpkn", draws.policies, draws.runs).reshape(NUM_RESAMPLES, -1)


def _weighted_iqm(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Interquartile means (R,) of scores that occur `weights` (R, P*K*N) times; weights are whole numbers."""
    flat = scores.reshape(-1)
    order = flat.argsort()
    cut = flat.size // 4
    # Cumulative counts clipped to the middle half; their differences are the counts that remain after trimming.
    reached = weights[:, order].cumsum(1).clip(cut, flat.size - cut)
    return np.diff(reached, axis=1, prepend=cut) @ flat[order] / (flat.size - 2 * cut)


def _interval(resampled: np.ndarray) -> tuple[Any, Any]:
    """The 2.5 % and 97.5 % quantiles over the first axis."""
    low, high = np.percentile(resampled, (2.5, 97.5), axis=0)
    return (low, high) if resampled.ndim > 1 else (float(low), float(high))

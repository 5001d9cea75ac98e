"""Attribution of a network's metric to its seeds: Shapley values and pairwise interactions.

The players of the game are all seeds, fossils included. A coalition is a mask of slots; its value is the metric of the
network in which exactly the seeds of these slots are active, that of the bare host for the empty coalition.

Shapes: N hosts, M of them in a game, S slots, P players, K coalitions. Results are (S,) or (S, S) if a coalition has
one value, (M, S) or (M, S, S) if it has one per host; NaN where there is no seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import comb
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from simic.stacked.forward import Kept
from simic.stacked.hosts import StackedHosts

Value = Callable[[np.ndarray], np.ndarray]
"""Coalitions, bool (K, S) -> their values, (K,) or (K, M)."""
MAX_EXACT_SEEDS = 4
"""Players up to which all 2^P coalitions are evaluated; beyond, orders are sampled."""


class Shapley(NamedTuple):
    """Shapley values and their standard errors; 0 where the values are exact."""

    values: np.ndarray
    standard_error: np.ndarray


class EpisodeAttribution(NamedTuple):
    """Attribution at the end of episodes; NaN where the episode goes on or there is no seed."""

    shapley: np.ndarray  # (N, S)
    shapley_error: np.ndarray  # (N, S)
    interaction: np.ndarray  # (N, S, S)


def cached(value: Value) -> Value:
    """The same game with a cache: no coalition is evaluated twice."""
    known: dict[bytes, np.ndarray] = {}

    def look_up(coalitions: np.ndarray) -> np.ndarray:
        keys = [row.tobytes() for row in coalitions]
        new = list(dict.fromkeys(key for key in keys if key not in known))
        if new:
            fresh = np.stack([np.frombuffer(key, dtype=bool) for key in new])
            known.update(zip(new, np.asarray(value(fresh), dtype=np.float64), strict=True))
        return np.stack([known[key] for key in keys])

    return look_up


def pairwise_interaction(value: Value, present: np.ndarray) -> np.ndarray:
    """v(all) - v(all without i) - v(all without j) + v(all without both): symmetric, NaN on the diagonal.

    Positive for seeds that need each other, negative for seeds that replace each other, within the full network.
    """
    players = np.flatnonzero(present).tolist()
    pairs = [(i, j) for i in players for j in players if i < j]
    absent = [(), *((i,) for i in players), *pairs]
    coalitions = np.tile(present, (len(absent), 1))
    for coalition, left_out in zip(coalitions, absent, strict=True):
        coalition[list(left_out)] = False
    values = value(coalitions)
    without = dict(zip(absent, values, strict=True))
    result = np.full((*values.shape[1:], present.size, present.size), np.nan)
    for i, j in pairs:
        result[..., i, j] = result[..., j, i] = without[()] - without[i,] - without[j,] + without[i, j]
    return result


def shapley(value: Value, present: np.ndarray, *, generator: np.random.Generator, num_pairs: int = 32) -> Shapley:
    """The marginal value of each seed, averaged over all orders in which seeds can join; the sum is v(all) - v(none).

    Exact for up to MAX_EXACT_SEEDS seeds. For more, the mean over `num_pairs` random orders and their reversals: a seed
    that joins late in one joins early in the other, which cancels most of the variance (antithetic sampling).
    """
    num_seeds = int(np.count_nonzero(present))
    if num_seeds <= MAX_EXACT_SEEDS:
        exact = _spread(_exact_shapley(value, present), present)
        return Shapley(exact, exact * 0)
    if num_pairs < 2:
        raise ValueError(f"num_pairs must be at least 2, or there is no standard error, got {num_pairs}")
    game, players = cached(value), np.tile(np.flatnonzero(present), (num_pairs, 1))
    orders = generator.permuted(players, axis=1)
    pairs = (_marginals(game, orders, present) + _marginals(game, orders[:, ::-1], present)) / 2
    error = pairs.std(0, ddof=1) / np.sqrt(num_pairs)
    return Shapley(_spread(pairs.mean(0), present), _spread(error, present))


@torch.no_grad()
def coalition_metrics(
    hosts: StackedHosts, x: Tensor, y: Tensor, coalitions: np.ndarray, who: np.ndarray | None = None
) -> np.ndarray:
    """The metric (K, M) of the hosts `who` (M,), default all, with only the seeds of a mask (K, M, S) active.

    Samples are (M, B, ...). A seed whose alpha is 0, for instance in training, is active with its alpha target.
    """
    who = np.arange(hosts.num_hosts) if who is None else who
    present = hosts.slot_state.occupied[who]
    if coalitions.shape[1:] != present.shape:
        raise ValueError(f"coalitions must be (K, *{present.shape}), got {coalitions.shape}")
    active = np.where(hosts.slot_state.alpha > 0, hosts.slot_state.alpha, hosts.slot_state.alpha_target)
    # Coalitions that agree in the first slots share the activations up to there. np.unique sorts by the first slot, the
    # second and so on, so that each coalition shares as much as possible with the one before:
    #
    #     slots 0 1 2
    #           0 0 1    run
    #           0 1 1    run_from slot 1
    #           1 1 0    run_from slot 0
    different, which = np.unique((coalitions & present).swapaxes(1, 2), axis=0, return_inverse=True)  # (D, S, M)
    metrics, kept = np.empty((len(different), len(who))), dict[int, Kept]()
    slots, rows, alpha = range(present.shape[1]), hosts.index(who), np.zeros_like(active)
    for index, coalition in enumerate(different):
        alpha[who] = np.where(coalition.T, active[who], 0.0)
        plan = hosts.plan_pass(who, alpha, learning=())
        if index == 0:
            out, new = hosts.run(x, rows, plan, keep=slots)
        else:
            first = int((coalition != different[index - 1]).any(1).argmax())
            out, new = hosts.run_from(first, kept[first], rows, plan, keep=slots)
        kept |= new
        metrics[index] = hosts.metrics(out, y).cpu().numpy()
    return metrics[which.reshape(-1)]


def seed_game(
    hosts: StackedHosts, batches: Sequence[tuple[Tensor, Tensor]], who: np.ndarray | None = None
) -> tuple[Value, np.ndarray]:
    """The game of the hosts `who` (M,), default all, on samples (N, B, ...), and the slots that take part (S,).

    All hosts play the same slots; a host without a seed in one of them gets the value 0 there.
    """
    members = np.arange(hosts.num_hosts) if who is None else who
    rows, sizes = hosts.index(members), [x.shape[1] for x, _ in batches]

    def value(coalitions: np.ndarray) -> np.ndarray:
        masks = np.repeat(coalitions[:, None], len(members), axis=1)
        parts = [coalition_metrics(hosts, x[rows], y[rows], masks, members) for x, y in batches]
        return np.average(parts, axis=0, weights=sizes)

    return cached(value), np.any(hosts.slot_state.occupied[members], axis=0)


def attribute_episodes(
    hosts: StackedHosts, batches: Sequence[tuple[Tensor, Tensor]], which: np.ndarray
) -> EpisodeAttribution:
    """Shapley values and pairwise interactions of the seeds of the hosts `which`, a mask (N,).

    Costs one pass over the samples per coalition. With up to MAX_EXACT_SEEDS slots the hosts share the passes of all
    2^S coalitions; with more, every host plays alone, so that its sampled orders depend on its own rng seed only.
    """
    present = hosts.slot_state.occupied & which[:, None]
    (n, s), players = present.shape, np.flatnonzero(present.any(1))
    result = EpisodeAttribution(*(np.full(shape, np.nan) for shape in ((n, s), (n, s), (n, s, s))))
    at_once = hosts.hosts_at_once if s <= MAX_EXACT_SEEDS else 1
    for start in range(0, len(players), at_once):
        who = players[start : start + at_once]
        value, slots = seed_game(hosts, batches, who)
        orders = np.random.SeedSequence(int(hosts.rng_seeds[who[0]]), spawn_key=(0,))
        result.shapley[who], result.shapley_error[who] = shapley(value, slots, generator=np.random.default_rng(orders))
        result.interaction[who] = pairwise_interaction(value, slots)
    for values in result[:2]:
        values[~present] = np.nan
    result.interaction[~(present[:, :, None] & present[:, None, :])] = np.nan
    return result


def _spread(per_seed: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Results of the players (P, ...) over all slots (..., S), NaN elsewhere."""
    result = np.full((*per_seed.shape[1:], present.size), np.nan)
    result[..., present] = np.moveaxis(per_seed, 0, -1)
    return result


def _exact_shapley(value: Value, present: np.ndarray) -> np.ndarray:
    """Shapley values (P, ...) from all 2^P coalitions."""
    num_seeds = int(np.count_nonzero(present))
    inside = np.array(list(product((False, True), repeat=num_seeds)), dtype=bool).reshape(2**num_seeds, num_seeds)
    coalitions = np.zeros((len(inside), present.size), dtype=bool)
    coalitions[:, present] = inside
    sizes = inside.sum(1, keepdims=True)
    # phi_i = 1/P * sum over coalitions C with i of (v(C) - v(C without i)) / binomial(P - 1, |C| - 1). As one sum over
    # all coalitions, a coalition counts positively for its members and negatively for the others.
    others = np.array([comb(num_seeds - 1, size) for size in range(num_seeds)] + [1])
    weights = np.where(inside, 1 / others[sizes - 1], -1 / others[sizes]) / max(num_seeds, 1)
    return np.tensordot(weights.T, value(coalitions), axes=1)


def _marginals(value: Value, orders: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Marginal values (orders, P, ...), by slot, of seeds that join in the given orders (orders, P) of their slots.

    With slots 0, 1, 2 and the order 2, 0, 1 the coalitions are {}, {2}, {0, 2}, {0, 1, 2}.
    """
    num_orders, num_seeds = orders.shape
    arrival = np.full((num_orders, present.size), num_seeds)
    np.put_along_axis(arrival, orders, np.arange(num_seeds)[None], axis=1)
    coalitions = arrival[:, None, :] < np.arange(num_seeds + 1)[None, :, None]  # (orders, P + 1, S)
    values = value(coalitions.reshape(-1, present.size))
    added = np.diff(values.reshape(num_orders, num_seeds + 1, *values.shape[1:]), axis=1)
    return added[np.arange(num_orders)[:, None], arrival[:, present]]

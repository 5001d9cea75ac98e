"""What each seed is worth: leave-one-out, pairwise interaction and Shapley values of the game that seeds play.

The players are all seeds, fossils and live ones. A coalition is a mask of the slots whose seeds speak, and its value is
the metric of the network with exactly these seeds: that of the bare host if there are none.

Shapes: N hosts, M of them, S slots, K coalitions. Results are (S,) or (S, S) if the value of a coalition is one number,
with M in front if it is one per host; NaN where no seed is present.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import comb
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from simic.stacked.hosts import StackedHosts
from simic.stacked.seed_groups import blend_seeds

Value = Callable[[np.ndarray], np.ndarray]
"""Coalitions, bool (K, S) -> the metric with exactly these seeds, (K,) or (K, M)."""
MAX_EXACT_SEEDS = 4


class Shapley(NamedTuple):
    """Shapley values, and the standard error of each: 0 where they are exact."""

    values: np.ndarray
    standard_error: np.ndarray


class EpisodeAttribution(NamedTuple):
    """How seeds share what growth brought, at the end of episodes; NaN where none ended or no seed is present."""

    shapley: np.ndarray  # (N, S)
    shapley_error: np.ndarray  # (N, S)
    interaction: np.ndarray  # (N, S, S)


def cached(value: Value) -> Value:
    """The same game, in which no coalition is evaluated twice."""
    known: dict[bytes, np.ndarray] = {}

    def look_up(coalitions: np.ndarray) -> np.ndarray:
        keys = [row.tobytes() for row in coalitions]
        new = list(dict.fromkeys(key for key in keys if key not in known))
        if new:
            fresh = np.stack([np.frombuffer(key, dtype=bool) for key in new])
            known.update(zip(new, np.asarray(value(fresh), dtype=np.float64), strict=True))
        return np.stack([known[key] for key in keys])

    return look_up


def leave_one_out(value: Value, present: np.ndarray) -> np.ndarray:
    """v(all) - v(all without i), for every seed i in the mask `present` (S,)."""
    players = np.flatnonzero(present).tolist()
    values = value(_without(present, [(), *((i,) for i in players)]))
    return _spread(values[:1] - values[1:], present)


def pairwise_interaction(value: Value, present: np.ndarray) -> np.ndarray:
    """v(all) - v(all without i) - v(all without j) + v(all without both): symmetric, NaN on the diagonal.

    Above 0 the two help each other; below 0 each does part of the other's work. Seeds are judged where they live, in
    the full network, rather than as a pair alone.
    """
    players = np.flatnonzero(present).tolist()
    pairs = [(i, j) for i in players for j in players if i < j]
    values = value(_without(present, [(), *((i,) for i in players), *pairs]))
    alone = dict(zip(players, values[1:], strict=False))
    both = values[1 + len(players) :]
    result = np.full((*values.shape[1:], present.size, present.size), np.nan)
    for (i, j), without in zip(pairs, both, strict=True):
        result[..., i, j] = result[..., j, i] = values[0] - alone[i] - alone[j] + without
    return result


def shapley(value: Value, present: np.ndarray, *, generator: np.random.Generator, num_pairs: int = 32) -> Shapley:
    """What each seed adds, averaged over all orders of arrival; together they add up to v(all) - v(none).

    Exact for up to 4 seeds. For more, the average of `num_pairs` random orders, each also taken backwards: a seed that
    came late then comes early, and most of the noise cancels.
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
    """The metric (K, M) of the hosts `who` (M,), or all, with exactly these seeds speaking, masks (K, M, S).

    Samples are (M, B, ...). A seed whose alpha is 0 speaks with its alpha target, so that one in training counts too.
    Coalitions that agree up to a slot share the activations before it.
    """
    who = np.arange(hosts.num_hosts) if who is None else who
    present = hosts.slot_state.occupied[who]
    if coalitions.shape[1:] != present.shape:
        raise ValueError(f"coalitions must be (K, *{present.shape}), got {coalitions.shape}")
    active = np.where(hosts.slot_state.alpha > 0, hosts.slot_state.alpha, hosts.slot_state.alpha_target)
    # Sorted by the first slot, then the second, and so on: neighbours differ as late in the network as can be.
    different, which = np.unique((coalitions & present).swapaxes(1, 2), axis=0, return_inverse=True)  # (D, S, M)
    metrics, kept = np.empty((len(different), len(who))), dict[int, Tensor]()
    slots, chosen, spoken = range(present.shape[1]), torch.from_numpy(who), np.zeros_like(active)
    for index, coalition in enumerate(different):
        spoken[who] = np.where(coalition.T, active[who], 0.0)
        plan = [hosts._active_seeds(slot, who, spoken[:, slot], learns=False) for slot in slots]
        if index == 0:
            out = hosts._run(x, 0, chosen, plan, kept=kept, keep=set(slots))
        else:
            first = int((coalition != different[index - 1]).any(1).argmax())
            out = hosts._run(blend_seeds(kept[first], plan[first]), first + 1, chosen, plan, kept=kept, keep=set(slots))
        metrics[index] = vmap(hosts.metric)(out, y).cpu().numpy()
    return metrics[which.reshape(-1)]


def seed_game(
    hosts: StackedHosts, batches: Sequence[tuple[Tensor, Tensor]], who: np.ndarray | None = None
) -> tuple[Value, np.ndarray]:
    """The game that the seeds of `who` (M,), or of all hosts, play on samples (N, B, ...); the slots in it (S,).

    A host without a seed in a slot gets 0 there: nothing changes when nobody leaves.
    """
    members = np.arange(hosts.num_hosts) if who is None else who
    sizes = [x.shape[1] for x, _ in batches]

    def value(coalitions: np.ndarray) -> np.ndarray:
        masks = np.repeat(coalitions[:, None], len(members), axis=1)
        parts = [coalition_metrics(hosts, x[members], y[members], masks, members) for x, y in batches]
        return np.average(parts, axis=0, weights=sizes)

    return cached(value), np.any(hosts.slot_state.occupied[members], axis=0)


def attribute_episodes(
    hosts: StackedHosts, batches: Sequence[tuple[Tensor, Tensor]], which: np.ndarray
) -> EpisodeAttribution:
    """Shapley values and pairwise interactions of all seeds of the hosts `which` (mask (N,)).

    Costs one pass over the samples per coalition: 2^S of them, shared by all hosts of up to 4 slots. Where there are
    more slots every host plays alone, so that its orders of arrival are those of its own rng seed.
    """
    present = hosts.slot_state.occupied & which[:, None]
    (n, s), players = present.shape, np.flatnonzero(present.any(1))
    result = EpisodeAttribution(*(np.full(shape, np.nan) for shape in ((n, s), (n, s), (n, s, s))))
    at_once = hosts._hosts_at_once if s <= MAX_EXACT_SEEDS else 1
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


def _without(present: np.ndarray, absent: list[tuple[int, ...]]) -> np.ndarray:
    """The full coalition without each of these (K, S)."""
    coalitions = np.tile(present, (len(absent), 1))
    for coalition, left_out in zip(coalitions, absent, strict=True):
        coalition[list(left_out)] = False
    return coalitions


def _spread(per_seed: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Results of the seeds present (P, ...) over all slots (..., S)."""
    result = np.full((*per_seed.shape[1:], present.size), np.nan)
    result[..., present] = np.moveaxis(per_seed, 0, -1)
    return result


def _exact_shapley(value: Value, present: np.ndarray) -> np.ndarray:
    """From all 2^P coalitions (P, ...)."""
    num_seeds = int(np.count_nonzero(present))
    inside = np.array(list(product((False, True), repeat=num_seeds)), dtype=bool).reshape(2**num_seeds, num_seeds)
    coalitions = np.zeros((len(inside), present.size), dtype=bool)
    coalitions[:, present] = inside
    sizes = inside.sum(1, keepdims=True)
    # A coalition of each size is met equally often: it counts for a seed inside it, and against one outside.
    others = np.array([comb(num_seeds - 1, size) for size in range(num_seeds)] + [1])
    weights = np.where(inside, 1 / others[sizes - 1], -1 / others[sizes]) / max(num_seeds, 1)
    return np.tensordot(weights.T, value(coalitions), axes=1)


def _marginals(value: Value, orders: np.ndarray, present: np.ndarray) -> np.ndarray:
    """What each seed adds when it arrives, in every order (orders, P): (orders, P, ...) with seeds by slot."""
    num_orders, num_seeds = orders.shape
    arrival = np.full((num_orders, present.size), num_seeds)
    np.put_along_axis(arrival, orders, np.arange(num_seeds)[None], axis=1)
    coalitions = arrival[:, None, :] < np.arange(num_seeds + 1)[None, :, None]  # (orders, P + 1, S)
    values = value(coalitions.reshape(-1, present.size))
    added = np.diff(values.reshape(num_orders, num_seeds + 1, *values.shape[1:]), axis=1)
    return added[np.arange(num_orders)[:, None], arrival[:, present]]

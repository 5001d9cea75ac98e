"""Statistics against rliable, hand-worked resamples, and what must hold for any scores."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from simic.evaluation.groups import Groups
from simic.evaluation.statistics import (
    MEASURES,
    PAIRED,
    iqm,
    iqm_interval,
    mean_interval,
    paired_difference,
    performance_profile,
    probability_of_improvement,
    score_table,
    summarize,
)

X = np.array([[52, 61, 58, 70, 49, 66, 58, 63], [80, 91, 85, 85, 77, 88, 94, 79], [30, 12, 44, 25, 38, 19, 33, 27]])
Y = np.array([[50, 58, 55, 64, 52, 60, 57, 61], [85, 83, 79, 90, 74, 81, 88, 80], [22, 18, 31, 25, 29, 12, 26, 30]])
TAUS = np.array([20.0, 44.0, 60.0, 80.0])
# What rliable 1.2.0 (arch 7.2.0, numpy 2.4.6, scipy 1.17.1, pandas 2.3.3) says of X, Y and TAUS:
#   from rliable import library, metrics
#   np.random.seed(0)
#   iqm = lambda s: np.array([metrics.aggregate_iqm(s)])
#   better = lambda a, b: np.array([metrics.probability_of_improvement(a, b)])
#   library.get_interval_estimates({"x": X.T, "y": Y.T}, iqm, reps=50000)
#   library.get_interval_estimates({"x,y": (X.T, Y.T)}, better, reps=20000)
#   library.create_performance_profile({"x": X.T}, TAUS, reps=20000)
RLIABLE_IQM = {"x": (59.58333333, 56.0, 62.66666667), "y": (55.91666667, 53.66666667, 58.08333333)}
RLIABLE_IMPROVEMENT = (0.625, 0.45833333, 0.78125)
RLIABLE_PROFILE = (
    [0.91666667, 0.66666667, 0.5, 0.20833333],
    [0.79166667, 0.66666667, 0.375, 0.08333333],
    [1.0, 0.66666667, 0.625, 0.29166667],
)


@pytest.mark.parametrize(("name", "scores"), [("x", X), ("y", Y)])
def test_iqm_is_that_of_rliable(name, scores):
    value, low, high = RLIABLE_IQM[name]
    estimate = iqm_interval(scores)
    assert estimate.value == iqm(scores) == pytest.approx(value)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.35)  # noise of 2,000 resamples


def test_probability_of_improvement_is_that_of_rliable():
    estimate = probability_of_improvement(X, Y)
    assert estimate.value == pytest.approx(RLIABLE_IMPROVEMENT[0])
    assert (estimate.low, estimate.high) == pytest.approx(RLIABLE_IMPROVEMENT[1:], abs=0.02)


def test_performance_profile_is_that_of_rliable():
    estimate = performance_profile(X, TAUS)
    np.testing.assert_allclose(estimate.value, RLIABLE_PROFILE[0], rtol=1e-6)
    # A band's end is a multiple of 1 / 24; between resamples it may jump to the next.
    np.testing.assert_allclose(estimate.low, RLIABLE_PROFILE[1], atol=0.042)
    np.testing.assert_allclose(estimate.high, RLIABLE_PROFILE[2], atol=0.042)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[5.0, 5.0]], 5.0),
        ([[0.0, 1.0, 2.0, 100.0]], 1.5),  # a quarter is one run: 0 and 100 do not count
        ([[7.0, 1.0, 4.0]], 4.0),  # a quarter of three is none
        ([[9.0, 1.0], [2.0, 8.0], [3.0, 4.0], [5.0, 6.0]], 4.5),  # of eight, 1 2 and 8 9 do not count
    ],
)
def test_iqm_by_hand(scores, expected):
    assert iqm(np.array(scores)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        # Two pairs, means of resamples 0, 2, 2, 4: each end has a chance of a quarter.
        ([[[0.0, 4.0]]], (2.0, 0.0, 4.0, 0.0, 4.0)),
        # Nothing varies within a task, so the interval is that of resampled tasks; other hosts would be the same.
        ([[[1.0, 1.0], [3.0, 3.0]]], (2.0, 1.0, 3.0, 2.0, 2.0)),
        # Tasks are alike on average, so the interval is that of resampled pairs.
        ([[[0.0, 4.0], [4.0, 0.0]]], (2.0, 0.0, 4.0, 0.0, 4.0)),
        # Two policies, one of them no better: all resampled policies may be that one.
        ([[[0.0, 0.0], [0.0, 0.0]], [[2.0, 2.0], [2.0, 2.0]]], (1.0, 0.0, 2.0, 0.0, 2.0)),
        # One run per task: tasks are resampled.
        ([[[1.0], [3.0]]], (2.0, 1.0, 3.0, 1.0, 3.0)),
    ],
)
def test_paired_difference_by_hand(difference, expected):
    difference = np.array(difference)
    other = np.arange(difference[0].size).reshape(1, *difference[0].shape) * 10.0
    assert paired_difference(other + difference, other) == pytest.approx(expected)


def test_paired_difference_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        host = rng.normal(70, 20, (8, 10))
        estimate = paired_difference(host + rng.normal(3, 2, (8, 10)), host)
        covered.append(estimate.low <= 3 <= estimate.high)
    assert 0.92 <= np.mean(covered) <= 1.0


def test_policies_that_differ_widen_the_interval():
    rng = np.random.default_rng(0)
    host = rng.normal(70, 5, (4, 10))
    alike = host + rng.normal(2, 1, (3, 4, 10))
    unlike = alike + np.array([-3.0, 0.0, 3.0])[:, None, None]
    narrow, wide = paired_difference(alike, host), paired_difference(unlike, host)
    assert wide.value == pytest.approx(narrow.value)
    assert wide.low < 0 < narrow.low
    assert wide.high > narrow.high


def test_policies_are_matched_by_place():
    x = np.random.default_rng(0).normal(0, 50, (3, 2, 4))
    assert paired_difference(x, x - 1) == pytest.approx((1.0,) * 5)


def test_probability_of_improvement_by_hand():
    x, y = np.array([[1.0, 2.0], [5.0, 5.0]]), np.array([[1.0, 1.0], [5.0, 6.0]])
    # First task: ties twice, wins twice: 3 / 4. Second: ties twice, loses twice: 1 / 4.
    assert probability_of_improvement(x, y).value == pytest.approx(0.5)


def test_probability_of_improvement_resamples_policies():
    wins, loses = np.full((2, 3), 9.0), np.full((2, 3), 1.0)
    assert probability_of_improvement(np.stack([wins, loses]), np.full((2, 3), 5.0)) == pytest.approx((0.5, 0, 1))


def test_one_run_per_task_resamples_tasks():
    x, y = np.array([[2.0], [1.0]]), np.array([[1.0], [2.0]])
    assert probability_of_improvement(x, y) == pytest.approx((0.5, 0.0, 1.0))
    assert iqm_interval(x) == pytest.approx((1.5, 1.0, 2.0))


@pytest.mark.parametrize("statistic", [iqm_interval, lambda s: paired_difference(s, s)])
def test_a_single_run_gives_no_interval(statistic):
    with pytest.raises(ValueError, match="at least 2 rng seeds"):
        statistic(np.array([[1.0]]))


tables = st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(2, 5)).flatmap(
    lambda shape: st.tuples(*[arrays(float, shape, elements=st.integers(-20, 20).map(float))] * 2)
)
few = settings(max_examples=25, deadline=None)


@few
@given(tables)
def test_figures_stay_within_what_was_seen(pair):
    x, y = pair
    for estimate in (iqm_interval(x), paired_difference(x, y), probability_of_improvement(x, y)):
        assert estimate.low <= estimate.high
    difference = paired_difference(x, y)
    assert difference.low <= difference.hosts_low <= difference.hosts_high <= difference.high
    assert x.min() - 1e-9 <= iqm_interval(x).low <= iqm_interval(x).high <= x.max() + 1e-9
    assert 0 <= probability_of_improvement(x, y).low <= probability_of_improvement(x, y).high <= 1 + 1e-12


@few
@given(tables)
def test_sides_can_be_swapped(pair):
    x, y = pair
    there, back = paired_difference(x, y), paired_difference(y, x)
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low))
    assert probability_of_improvement(x, y).value + probability_of_improvement(y, x).value == pytest.approx(1)
    assert probability_of_improvement(x, x).value == pytest.approx(0.5)


@few
@given(tables, st.integers(-50, 50), st.sampled_from([0.5, 2.0, 8.0]))
def test_units_do_not_matter(pair, shift, scale):
    x, y = pair
    moved = x * scale + shift, y * scale + shift
    np.testing.assert_allclose(iqm_interval(moved[0]), np.array(iqm_interval(x)) * scale + shift, atol=1e-9)
    np.testing.assert_allclose(paired_difference(*moved), np.array(paired_difference(x, y)) * scale, atol=1e-9)
    np.testing.assert_allclose(probability_of_improvement(*moved), probability_of_improvement(x, y))


@few
@given(tables)
def test_profile_falls_from_all_to_none(pair):
    value, low, high = performance_profile(pair[0], np.arange(-21.0, 22.0))
    assert value[0] == 1
    assert value[-1] == 0
    assert (np.diff(value) <= 0).all()
    assert ((low <= high) & (low >= 0) & (high <= 1)).all()


def make_episodes(
    controllers=("learned-0", "learned-1", "wait"), tasks=("a", "b"), rng_seeds: Sequence[int] = range(4)
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        {
            "controller": label,
            "task": task,
            "rng_seed": rng_seed,
            "metric": rng.uniform(0.5, 1.0),
            "score": rng.uniform(50, 100),
            "area": rng.uniform(0.5, 1.0),
            "parameters": int(rng.integers(50, 500)),
            "flops": rng.uniform(1e9, 4e9),
            "accuracy_per_parameter": rng.uniform(0.001, 0.01),
        }
        for label in controllers
        for task in tasks
        for rng_seed in rng_seeds
    ]


def make_groups(kinds: dict[str, str], **groups: list[str]) -> Groups:
    """Controllers by kind; `replay(x)` derives from x, and a group of replays from the group of theirs."""
    owner = {label: name for name, members in groups.items() for label in members}

    def origin(label: str) -> str | None:
        return label.removeprefix("replay(").removesuffix(")") if label.startswith("replay(") else None

    return Groups(
        {label: {"kind": kind, "of": origin(label)} for label, kind in kinds.items()},
        {
            name: {"kind": kinds[members[0]], "members": members, "of": owner.get(origin(members[0]) or "")}
            for name, members in groups.items()
        },
    )


def test_summary_has_every_controller_and_pair():
    episodes = make_episodes()
    kinds = {"learned-0": "learned", "learned-1": "learned", "wait": "wait"}
    summary = summarize(episodes, make_groups(kinds, ours=["learned-0", "learned-1"]))
    assert set(summary["controllers"]) == {"learned-0", "learned-1", "wait", "ours"}
    assert {name: set(others) for name, others in summary["paired"].items()} == {
        "ours": {"wait"},  # a group is not compared with its members
        "wait": {"ours", "learned-0", "learned-1"},
        "learned-0": {"wait"},
        "learned-1": {"wait"},
    }
    assert set(summary["controllers"]["ours"]) == set(MEASURES)
    assert set(summary["paired"]["ours"]["wait"]) == set(PAIRED)
    flops = {label: [e["flops"] for e in episodes if e["controller"] == label] for label in ("learned-0", "wait")}
    ratios = np.log2(np.array(flops["learned-0"]) / np.array(flops["wait"]))
    assert summary["paired"]["learned-0"]["wait"]["log2_flops"]["mean"] == pytest.approx(ratios.mean())
    figure = summary["paired"]["learned-0"]["wait"]["flops"]
    assert figure["mean"] == pytest.approx(np.mean(flops["learned-0"]) - np.mean(flops["wait"]))
    assert figure["low"] <= figure["hosts_low"] < figure["hosts_high"] <= figure["high"]
    pooled = [summary["controllers"][label]["score"]["mean"] for label in ("learned-0", "learned-1")]
    assert summary["controllers"]["ours"]["score"]["mean"] == pytest.approx(np.mean(pooled))


def test_without_groups_all_meet_all_and_both_sides_say_the_same():
    paired = summarize(make_episodes())["paired"]
    assert {label: len(others) for label, others in paired.items()} == {"learned-0": 2, "learned-1": 2, "wait": 2}
    one, other = paired["wait"]["learned-0"]["score"], paired["learned-0"]["wait"]["score"]
    assert (one["mean"], one["low"], one["hosts_high"]) == (-other["mean"], -other["high"], -other["hosts_low"])
    assert one["probability_low"] == 1 - other["probability_high"]
    alike = [episode | {"score": 1.0} for episode in make_episodes()]
    for others in summarize(alike)["paired"].values():
        assert {f"{figure['score'][name]:+.1f}" for figure in others.values() for name in ("mean", "low")} == {"+0.0"}


def test_groups_of_any_size_are_compared_and_ablations_meet_their_own_kin():
    policies = ["a", "b", "c", "d", "e", "alone"]
    kinds = dict.fromkeys(policies, "learned") | {f"replay({p})": "replay" for p in policies} | {"wait": "wait"}
    groups = {"ours": ["a", "b"], "theirs": ["c", "d", "e"]}
    groups |= {f"replay({name})": [f"replay({p})" for p in members] for name, members in groups.items()}
    paired = summarize(make_episodes(tuple(kinds)), make_groups(kinds, **groups))["paired"]
    assert set(paired["ours"]) == {"theirs", "alone", "wait", "replay(ours)", "c", "d", "e"}
    assert set(paired["alone"]) == {"ours", "theirs", "wait", "replay(alone)", "a", "b", "c", "d", "e"}
    assert set(paired["replay(ours)"]) == {"ours", "wait"}
    assert set(paired["a"]) == {"replay(a)", "theirs", "alone", "wait"}
    assert set(paired["replay(a)"]) == {"a"}
    figure = paired["ours"]["theirs"]["score"]
    assert figure["low"] < figure["mean"] < figure["high"]


def test_policies_that_were_trained_apart_are_not_paired_by_place():
    # Within each group policies differ by 10; by place they would cancel, and the difference would look certain.
    noise = np.random.default_rng(0).normal(size=(1, 3, 8))
    x, y = (np.array([0.0, 10.0])[:, None, None] + noise for _ in range(2))
    matched, apart = (paired_difference(x, y, matched=own) for own in (True, False))
    assert matched.value == apart.value == 0.0
    assert matched.high - matched.low == pytest.approx(0.0, abs=1e-9)
    assert apart.high - apart.low > 10
    assert probability_of_improvement(x, y, matched=False).value == pytest.approx(0.5)
    # One policy on a side has nobody else to be paired with.
    assert paired_difference(x, y[:1], matched=False) == paired_difference(x, y[:1])
    assert probability_of_improvement(x, y[:1], matched=False) == probability_of_improvement(x, y[:1])


def test_difference_of_groups_by_hand():
    x, y = np.array([[[1.0, 3.0]], [[5.0, 7.0]]]), np.array([[[0.0, 1.0]], [[2.0, 3.0]], [[1.0, 8.0]]])
    assert paired_difference(x, y, matched=False).value == pytest.approx(4.0 - 2.5)
    wins = [[(a > b) + (a == b) / 2 for a in p[0] for b in q[0]] for p in x for q in y]
    assert probability_of_improvement(x, y, matched=False).value == pytest.approx(np.mean(wins))


def test_mean_interval_is_the_stratified_bootstrap():
    # Runs differ by 2 within a task, tasks by 100: tasks are not resampled.
    scores = np.array([[0.0, 2.0], [100.0, 102.0]])
    assert mean_interval(scores) == (51.0, 50.0, 52.0)


def test_summary_depends_on_neither_order_nor_chance():
    episodes = make_episodes()
    shuffled = copy.deepcopy(episodes)
    random.Random(0).shuffle(shuffled)
    assert summarize(episodes) == summarize(shuffled) == summarize(episodes)
    assert summarize(episodes) != summarize(episodes, rng_seed=1)


def test_tasks_are_rows_and_rng_seeds_columns():
    episodes = make_episodes(("wait",), ("b", "a"), (7, 3))
    for episode in episodes:
        episode["score"] = {"a": 10, "b": 20}[episode["task"]] + episode["rng_seed"]
    np.testing.assert_array_equal(score_table(episodes)["wait"]["score"], [[[13, 17], [23, 27]]])


def change(episodes, **values):
    return [{**episodes[0], **values}, *episodes[1:]]


@pytest.mark.parametrize(
    ("episodes", "options", "message"),
    [
        ([], {}, "no episodes"),
        (make_episodes()[1:], {}, "'learned-0' lacks 1 of 8, first task 'a' with rng seed 0"),
        (make_episodes() + make_episodes()[:1], {}, "two episodes of 'learned-0' on task 'a', rng seed 0"),
        (change(make_episodes(), score=float("nan")), {}, "score of 'learned-0' on task 'a' with rng seed 0 is nan"),
        (make_episodes(("wait",)) + make_episodes(("wait",), ("c",), range(2)), {}, "same number of rng seeds"),
        (change(make_episodes(), flops=0.0), {}, "flops of 'learned-0' on task 'a' with rng seed 0 is 0.0"),
        (make_episodes(), {"groups": Groups({}, {"wait": {"members": ["learned-0"]}})}, "named like a controller"),
        (make_episodes(), {"groups": Groups({}, {"ours": {"members": ["learned-7"]}})}, "needs members that were eval"),
        (make_episodes(), {"groups": Groups({}, {"ours": {"members": []}})}, "needs members that were evaluated"),
    ],
)
def test_bad_input_is_named(episodes, options, message):
    with pytest.raises(ValueError, match=message):
        summarize(episodes, **options)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), "pairs share tasks and runs"),
        (np.zeros((2, 2, 3)), np.zeros((3, 2, 3)), "as many policies on both sides"),
        (np.full((2, 2), np.nan), np.zeros((2, 2)), "must be finite"),
        (np.zeros(3), np.zeros(3), "shape"),
        (np.zeros((2, 0)), np.zeros((2, 0)), "shape"),
    ],
)
def test_bad_arrays_are_named(x, y, message):
    for statistic in (paired_difference, probability_of_improvement):
        with pytest.raises(ValueError, match=message):
            statistic(x, y)

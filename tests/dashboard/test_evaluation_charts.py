"""Charts of an evaluation: series, colours, timelines."""

import re

import numpy as np
import pytest
from helpers.reports import QUALITY, make_results, two_groups

from simic.dashboard.charts import PALETTE
from simic.dashboard.evaluation_charts import make_series, timeline_rows
from simic.evaluation.statistics import score_table


def test_the_mean_of_a_group_counts_every_policy_alike():
    kinds, groups = two_groups()
    results = make_results(kinds, groups=groups)
    (ours,) = [own for own in make_series(results) if own.name == "ours"]
    scores = [e["score"] for e in results["episodes"] if e["controller"] in "abc"]
    assert ours.scores(score_table(results["episodes"])).mean() == pytest.approx(np.mean(scores))


def test_colours_never_run_out(monkeypatch):
    many = {"wait": "wait", "heuristic": "heuristic"} | {f"policy-{i}": "learned" for i in range(40)}
    results = make_results(many, tasks=1, rng_seeds=2)
    series = make_series(results)
    assert len({own.colour for own in series}) == len(series) == 42
    assert series[2].colour == PALETTE[0]  # learned controllers come first
    assert all(re.fullmatch("#[0-9A-F]{6}", own.colour) for own in series)
    monkeypatch.setitem(QUALITY, "an eleventh kind", 50.0)
    (own,) = make_series(make_results({"new": "an eleventh kind"}, tasks=1, rng_seeds=2))
    assert own.colour


def test_timelines_show_every_learned_row_and_then_one_of_each_kind():
    kinds = {"a": "learned", "b": "learned", "heuristic": "heuristic", "wait": "wait"}
    rows = timeline_rows(make_results(kinds), "mlp-held_out-0", 0)
    assert [name for name, _, _ in rows] == ["a: stem", "b: stem", "heuristic: stem"]
    kinds = {f"p{i}": "learned" for i in range(7)} | {"heuristic": "heuristic"}
    rows = timeline_rows(make_results(kinds, groups={"ours": ["p0", "p1"]}), "mlp-held_out-0", 0)
    assert [name for name, _, _ in rows] == [f"p{i}: stem" for i in (0, 2, 3, 4, 5, 6)]

"""Charts of an evaluation: series, colours, timelines."""

import re

import numpy as np
import pytest
from helpers.reports import QUALITY, make_results, two_groups

from simic.dashboard.charts import PALETTE
from simic.dashboard.evaluation_charts import compute_curve, make_series, row_colours, timeline_rows
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


def test_the_compute_curve_joins_wider_hosts_and_rings_the_front():
    from matplotlib.figure import Figure

    kinds = {"wait": "wait", "scaled_2x": "static_scaled", "ours": "learned", "heuristic": "heuristic"}
    kinds |= {"a": "learned", "b": "learned"}
    results = make_results(kinds, groups={"pair": ["a", "b"]})
    curve, axes = results["compute_curve"], Figure().subplots()
    # Growth doubles the compute of all, so that only the host alone and the best of the others are on the front.
    best = max((p for p in curve["points"] if p["on_front"] is not None), key=lambda p: p["metric"]["mean"])
    compute_curve(axes, curve, row_colours(results))
    line = axes.lines[0].get_xydata()
    assert [tuple(point) for point in np.asarray(line)] == [
        (p["log2_compute"]["mean"], p["gain_over_host"]["mean"])
        for p in curve["points"]
        if p["controller"] in ("wait", "scaled_2x")
    ]
    rings = [np.asarray(drawn.get_xydata())[0, 1] for drawn in axes.lines if drawn.get_markerfacecolor() == "none"]
    assert rings == pytest.approx([0, best["gain_over_host"]["mean"]])
    assert {text.get_text() for text in axes.texts} == {"wait", "scaled_2x", "ours", "heuristic", "pair"}

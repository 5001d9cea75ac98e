"""The compute curve: read by hand, the front by hand, and the same figures in all outputs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.tiny_comparison import make_task, of

from simic.api import evaluate
from simic.evaluation.compute_curve import compute_curve, front_shares, on_front, read_curve
from simic.evaluation.groups import Groups
from simic.evaluation.parsing import NamedTask

KINDS = {"wait": "wait", "scaled_2x": "static_scaled", "scaled_4x": "static_scaled", "plan": "plan"}


def episodes(label: str, cells: dict[tuple[str, int], tuple[float, float]]) -> list[dict[str, Any]]:
    """Episodes of a controller: (task, rng seed) -> (metric, floating-point operations)."""
    other = {"score": 0.0, "area": 0.0, "parameters": 1, "accuracy_per_parameter": 0.0}
    return [
        {"controller": label, "task": task, "rng_seed": seed, "metric": metric, "flops": flops, **other}
        for (task, seed), (metric, flops) in cells.items()
    ]


def make_episodes() -> list[dict[str, Any]]:
    """Two tasks of two hosts each; all hosts of a task are alike but for 1 point."""
    table = {
        "wait": {"a": (50.0, 10.0), "b": (70.0, 1000.0)},
        "scaled_2x": {"a": (60.0, 20.0), "b": (72.0, 2000.0)},
        "scaled_4x": {"a": (64.0, 40.0), "b": (72.0, 4000.0)},
        # On a twice the host's compute times sqrt 2: the curve is at 62. On b beyond the curve: it stays at 72.
        "plan": {"a": (67.0, 20.0 * math.sqrt(2)), "b": (73.0, 8000.0)},
    }
    return [
        episode
        for label, tasks in table.items()
        for episode in episodes(
            label, {(task, seed): (metric + seed, flops) for task, (metric, flops) in tasks.items() for seed in (0, 1)}
        )
    ]


def about(kinds: dict[str, str], **groups: list[str]) -> Groups:
    grouped = {name: {"kind": kinds[own[0]], "of": None, "members": own} for name, own in groups.items()}
    return Groups({label: {"kind": kind, "of": None} for label, kind in kinds.items()}, grouped)


def by_label(curve: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    assert curve is not None
    return {point["controller"]: point for point in curve["points"]}


def test_gain_at_equal_compute_by_hand():
    curve = compute_curve(make_episodes(), about(KINDS))
    assert curve is not None
    assert (curve["host"], curve["curve"], curve["tasks"]) == ("wait", ["wait", "scaled_2x", "scaled_4x"], ["a", "b"])
    points = by_label(curve)
    assert list(points) == ["wait", "scaled_2x", "scaled_4x", "plan"], "cheapest first; equal ones in their order"
    plan = points["plan"]
    assert plan["log2_compute"]["mean"] == pytest.approx((1.5 + 3) / 2)
    assert plan["metric"]["mean"] == pytest.approx((67 + 73) / 2 + 0.5)
    assert plan["gain_over_host"]["mean"] == pytest.approx((17 + 3) / 2)
    assert plan["metric_at_equal_compute"]["mean"] == pytest.approx((62 + 72) / 2 + 0.5)
    gain = plan["gain_at_equal_compute"]
    assert gain["mean"] == pytest.approx((5 + 1) / 2)
    assert (gain["low"], gain["high"]) == pytest.approx((1, 5)), "over two tasks a resample is a, b or both"
    assert (gain["hosts_low"], gain["hosts_high"]) == pytest.approx((3, 3)), "hosts of a task gain the same"
    assert plan["beyond_curve"] == 0.5
    assert points["wait"]["gain_at_equal_compute"] is points["scaled_2x"]["beyond_curve"] is None


def test_the_curve_is_that_of_the_same_host():
    # The second host is 20 points better at any size: a mean curve would credit the controller for its cheap host.
    x = np.array([[[0.0, 0.0]], [[1.0, 1.0]]])  # (points, K, N)
    y = np.array([[[50.0, 70.0]], [[60.0, 80.0]]])
    curve = np.stack((np.moveaxis(x, 0, -1), np.moveaxis(y, 0, -1)))
    read, beyond = read_curve(curve, np.array([[[0.5, 1.0]], [[-0.1, 1.1]]]))
    np.testing.assert_allclose(read, [[[55, 80]], [[50, 80]]])
    np.testing.assert_array_equal(beyond, [[[False, False]], [[False, True]]])
    np.testing.assert_allclose(read_curve(curve[..., ::-1], np.full((1, 1, 2), 0.5))[0], [[[55, 75]]])


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0, 50), (1, 60), (2, 60)], [True, True, False]),  # as good for more
        ([(0, 50), (1, 49), (2, 55)], [True, False, True]),
        ([(1, 50), (1, 50)], [True, True]),  # equals beat neither
        ([(1, 50), (1, 51)], [False, True]),
    ],
)
def test_front_by_hand(points, expected):
    cost, metric = np.array(points, float).T[:, None]
    np.testing.assert_array_equal(on_front(cost, metric), [expected])


def test_share_of_resamples_on_the_front():
    # The second costs more, is better on one task and worse on the other: it is beaten if only the other is drawn.
    cost = np.array([[[0.0], [0.0]], [[1.0], [1.0]]])
    metric = np.array([[[50.0], [50.0]], [[60.0], [45.0]]])
    first, second = front_shares(cost, metric)
    assert first == 1
    assert second == pytest.approx(0.75, abs=0.04)
    one_task = (values.transpose(0, 2, 1) for values in (cost, metric))
    assert front_shares(*one_task)[1] == pytest.approx(0.75, abs=0.04), "one task of two hosts"


def test_members_of_a_group_are_points_but_not_on_the_front():
    kinds = KINDS | {"p": "learned", "q": "learned"}
    own = make_episodes()
    own += [e | {"controller": name} for name in "pq" for e in own if e["controller"] == "plan"]
    for episode in own:
        episode["metric"] += 4 * (episode["controller"] == "q")
    points = by_label(compute_curve(own, about(kinds, ours=["p", "q"])))
    assert {label: point["on_front"] for label, point in points.items() if label in ("p", "q", "ours", "plan")} == {
        **{"p": None, "q": None, "ours": True, "plan": False}
    }
    gains = {label: points[label]["gain_at_equal_compute"]["mean"] for label in ("p", "q", "ours")}
    assert gains == pytest.approx({"p": 3, "q": 7, "ours": 5})


def test_only_tasks_that_all_played_count():
    own = make_episodes()
    without = [e for e in own if not (e["controller"].startswith("scaled") and e["task"] == "b")]
    curve = compute_curve(without, about(KINDS))
    assert curve is not None
    assert curve["tasks"] == ["a"]
    assert by_label(curve)["plan"]["gain_at_equal_compute"]["mean"] == pytest.approx(5)
    for missing in ("wait", "scaled"):
        few = [e for e in own if not e["controller"].startswith(missing)]
        assert compute_curve(few, about({k: v for k, v in KINDS.items() if not k.startswith(missing)})) is None
    assert compute_curve([e for e in without if e["rng_seed"] == 0], about(KINDS)) is None, "one host has no interval"


# Through evaluate.


def test_evaluate_plays_scales_and_the_host_alone(tiny_comparison_task, capsys):
    comparison = evaluate(["heuristic"], ["spirals-mlp"], rng_seeds=2, horizon=4, scales=[2, 4], quiet=False)
    results = comparison.results
    assert list(results["controllers"]) == ["heuristic", "wait", "scaled_2x", "scaled_4x"]
    assert "--scales 2 4" in results["command"]
    sizes = {label: of(results, label)[0]["parameters"] for label in ("wait", "scaled_2x", "scaled_4x")}
    assert sizes["scaled_2x"] >= 2 * sizes["wait"]
    assert sizes["scaled_4x"] >= 4 * sizes["wait"]
    points = by_label(results["compute_curve"])
    assert points["wait"]["log2_compute"]["mean"] == 0
    assert points["scaled_2x"]["log2_compute"]["mean"] == pytest.approx(
        math.log2(of(results, "scaled_2x")[0]["flops"] / of(results, "wait")[0]["flops"])
    )
    said = capsys.readouterr().out
    assert "gain at equal compute" in said
    assert f"{points['heuristic']['gain_at_equal_compute']['mean']:+.2f}" in said
    assert "gain at equal compute" in comparison.table()


def test_hosts_of_one_width_leave_the_curve_to_the_other_tasks(monkeypatch, capsys, tmp_path):
    task = make_task()
    rigid = replace(task, host_of_width=None)
    monkeypatch.setattr(NamedTask, "find", lambda self: rigid if self.name == "digits-mlp" else task)
    results = evaluate(
        ["wait"], ["spirals-mlp", "digits-mlp"], rng_seeds=2, horizon=2, scales=[2], quiet=False, out=tmp_path
    ).results
    assert results["compute_curve"]["tasks"] == ["spirals-mlp"]
    assert "scaled_2x is left out" in results["notes"][0]
    assert "is of 1 of 2 tasks" in capsys.readouterr().out.replace("\n", " ")
    page = (tmp_path / "report.html").read_text()
    assert "is of 1 of 2 tasks" in page
    assert "minus the host&#39;s, against training compute" in page
    assert {episode["controller"] for episode in results["episodes"]} == {"wait"}


@pytest.mark.parametrize("scales", [(1.0,), (2.0, 2.0), (0.5, 2.0), (5000.0,), (math.nan,)])
def test_wrong_scales_are_told(scales):
    with pytest.raises(ValueError, match="--scales must be different factors above 1, which is the host alone, and at"):
        evaluate(["wait"], ["spirals-mlp"], rng_seeds=2, scales=scales)

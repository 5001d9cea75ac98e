"""Evaluations as JSON: what is listed, and what one holds."""

import json
import os

import pytest
from helpers.reports import make_results, two_groups

from simic.dashboard import evaluation_view as views
from simic.dashboard.evaluation_view import evaluation_list, evaluation_view


def write(directory, results):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_text(json.dumps(results))
    return directory


def test_a_view_holds_means_differences_and_fates(tmp_path):
    results = make_results({"wait": "wait", "heuristic": "heuristic", "ours": "learned"})
    view = evaluation_view(write(tmp_path / "first", results))
    assert [own["name"] for own in view["controllers"]] == ["ours", "heuristic", "wait"]
    assert [own["learned"] for own in view["controllers"]] == [True, False, False]
    scores = [e["score"] for e in results["episodes"] if e["controller"] == "ours"]
    assert view["controllers"][0]["score"]["mean"] == pytest.approx(sum(scores) / 12)
    on_one = [e["score"] for e in results["episodes"] if (e["controller"], e["task"]) == ("ours", "mlp-held_out-1")]
    assert view["by_task"]["mlp-held_out-1"]["ours"] == pytest.approx(sum(on_one) / 4)
    assert view["fates"] == {
        name: {"mlp_small": {"fossilized": 12, "pruned": 0, "live": 0}} for name in ("ours", "heuristic")
    }
    assert {(pair["controller"], pair["other"]) for pair in view["paired"]} == {("ours", "wait"), ("ours", "heuristic")}
    assert view["paired"][0]["sentence"].startswith("ours is better than ")
    assert (len(view["tasks"]), view["rng_seeds"], view["name"]) == (3, 4, "first")
    json.dumps(view, allow_nan=False)


def test_groups_are_judged_as_one_and_their_members_apart(tmp_path):
    kinds, groups = two_groups()
    view = evaluation_view(write(tmp_path / "e", make_results(kinds, groups=groups)))
    members = {own["name"]: own["member_of"] for own in view["controllers"]}
    assert (members["ours"], members["a"], members["alone"]) == (None, "ours", None)
    (ours,) = [own for own in view["controllers"] if own["name"] == "ours"]
    assert ours["description"] == "a, b, c, judged as one"
    others = {pair["other"] for pair in view["paired"] if pair["controller"] == "ours"}
    assert others == {"wait", "theirs", "alone", "replay(ours)"}
    task = view["by_task"]["mlp-held_out-0"]
    assert task["ours"] == pytest.approx((task["a"] + task["b"] + task["c"]) / 3)


def test_evaluations_are_found_in_runs_and_by_themselves(tmp_path):
    results = make_results({"wait": "wait", "heuristic": "heuristic"})
    for place in ("early", "run/comparison", "run/episodes", "a/b/c/too_deep", ".hidden"):
        write(tmp_path / place, results)
    (tmp_path / "link").symlink_to(tmp_path / "early")
    os.utime(tmp_path / "early" / "results.json", (5, 5))
    found = evaluation_list(tmp_path)
    assert [entry["id"] for entry in found] == ["run/comparison", "early"]
    assert {name: found[1][name] for name in ("modified", "controllers", "tasks", "hosts")} == {
        **{"modified": 5.0, "controllers": ["heuristic", "wait"]},
        **{"tasks": 3, "hosts": 12},
    }
    (alone,) = evaluation_list(tmp_path / "early")
    assert alone["id"] == "early"


def test_what_cannot_be_read_is_listed_without_its_facts(tmp_path, monkeypatch):
    damaged = write(tmp_path / "damaged", {"format": 2})
    good = write(tmp_path / "good", make_results({"wait": "wait"}))
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "results.json").symlink_to(good / "results.json")
    assert {entry["id"]: entry["controllers"] for entry in evaluation_list(tmp_path)} == {
        "damaged": None,
        "good": ["wait"],
    }
    with pytest.raises(ValueError, match=r"damaged/results\.json holds no whole results .* run it again"):
        evaluation_view(damaged)
    with pytest.raises(OSError, match="is a symbolic link"):
        evaluation_view(tmp_path / "link")
    monkeypatch.setattr(views, "MAX_LISTED_BYTES", 100)
    assert {entry["controllers"] is None for entry in evaluation_list(tmp_path)} == {True}


def test_results_are_read_again_when_they_changed(tmp_path):
    path = write(tmp_path / "e", make_results({"wait": "wait"}))
    assert len(evaluation_view(path)["controllers"]) == 1
    write(path, make_results({"wait": "wait", "heuristic": "heuristic"}))
    assert len(evaluation_view(path)["controllers"]) == 2


def test_an_evaluation_without_episodes_is_shown(tmp_path):
    results = make_results({"wait": "wait"})
    view = evaluation_view(
        write(tmp_path / "e", results | {"episodes": [], "summary": {"controllers": {}, "paired": {}}})
    )
    assert (view["controllers"], view["by_task"], view["fates"]) == ([], {}, {})

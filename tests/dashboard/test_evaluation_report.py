"""Reports of evaluations: whole, escaped, the same every time, and right in what they say."""

import json
import re
import sys
from xml.etree import ElementTree

import pytest
from helpers.reports import HOSTILE, QUALITY, check_page, make_results, two_groups, write_run

from simic.cli import main
from simic.dashboard.evaluation_charts import make_series
from simic.dashboard.evaluation_report import verdict, write_evaluation_report


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    results = make_results({"wait": "wait", "heuristic": "heuristic", HOSTILE: "learned"})
    results["controllers"]["gone"] = {"kind": "replay", "of": HOSTILE, "description": "did not play"}
    next(e for e in results["episodes"] if e["controller"] == "heuristic")["seeds"] = []
    results["notes"] = ["gone is left out: <no> reason"]
    write_evaluation_report(results, path)
    first = path.read_bytes()
    write_evaluation_report(json.loads(json.dumps(results)), path)
    assert path.read_bytes() == first, "the same results gave another report"
    return first.decode()


def test_report_is_whole_and_escaped(page):
    seen, charts = check_page(page)
    assert len(charts) >= 9
    # The hostile name is text wherever it stands, in charts too: not markup, and no formula.
    assert seen.text.count(HOSTILE) > 10
    assert all(HOSTILE in "".join(ElementTree.fromstring(chart).itertext()) for chart in charts[:7])


def test_report_tells_all_that_was_asked(page):
    seen, _ = check_page(page)
    for part in (
        *(f"{HOSTILE} is better than wait", f"{HOSTILE} is better than heuristic", "gone is left out: <no> reason"),
        *("Paired differences", "Validation metric", "Mean score against parameters", "Share of runs above a score"),
        *("by rng seed", "mlp-held_out-2, rng seed 0", "mlp_small +2.5", "grew nothing", "few hosts"),
        *("simic evaluate --controllers wait,heuristic", '"horizon": 8', '"simic": "0.1.0"', "a heuristic"),
    ):
        assert part in seen.text, part


def test_report_adapts_to_dark_mode_and_phones(page):
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert "currentColor" in page
    assert "#010203" not in page


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.5, 2.0, "a is better than b"), (-2.0, -0.5, "a is worse than b"), (-1.0, 1.0, "no clear difference")],
)
def test_verdict(low, high, expected):
    said = verdict("a", "b", {"mean": (low + high) / 2, "low": low, "high": high, "probability": 0.5})
    assert expected in said
    assert f"{low:+.2f} to {high:+.2f}" in said


def test_every_group_is_judged_and_drawn_and_nobody_else_is_pooled(tmp_path):
    kinds, groups = two_groups()
    results = make_results(kinds, groups=groups)
    write_evaluation_report(results, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    seen, charts = check_page(page)
    verdicts = [
        re.search(r"(?:between )?(\S+) (?:is \w+ than|and) (\S+):", li) for li in re.findall("<li>(.*?)</li>", page)
    ]
    judged = [found.groups() for found in verdicts if found]
    assert {one.removeprefix("<li>") for one, _ in judged} == {"ours", "theirs", "alone"}
    assert sorted(other for one, other in judged if one == "ours") == ["alone", "replay(ours)", "theirs", "wait"]
    assert "a, b, c, judged as one" in seen.text
    assert "Each policy by itself" in seen.text
    rows = ["wait", "ours", "theirs", "alone", "replay(ours)", "replay(theirs)", "replay(alone)"]
    assert [own.name for own in make_series(results)] == rows
    curves = [c for c in charts if "Validation metric" in c or "Mean score against" in c or "Share of runs" in c]
    assert len(curves) == 4
    for chart in curves:
        drawn = set(ElementTree.fromstring(chart).itertext())
        assert drawn >= set(rows)
        assert not drawn & set("abcde")


def test_test_metric_against_compute_is_drawn_and_told(tmp_path):
    results = make_results({"wait": "wait", "scaled_2x": "static_scaled", HOSTILE: "learned", "other": "learned"})
    other = next(point for point in results["compute_curve"]["points"] if point["controller"] == "other")
    other["beyond_curve"] = 0.25
    write_evaluation_report(results, tmp_path / "report.html")
    seen, charts = check_page((tmp_path / "report.html").read_text())
    drawn = [c for c in charts if "against training compute" in c and "minus the host" in c]
    assert len(drawn) == 1
    assert set(ElementTree.fromstring(drawn[0]).itertext()) >= {"wait", "scaled_2x", HOSTILE, "other"}
    gain = other["gain_at_equal_compute"]
    assert 13 < gain["mean"] < 17
    assert f"{gain['mean']:+.2f}" in seen.text
    assert "other: 25% of its hosts cost more than the largest of the wider hosts" in seen.text


def test_results_without_wider_hosts_have_no_curve(tmp_path):
    results = make_results({"wait": "wait", "heuristic": "heuristic"})
    assert results["compute_curve"] is None
    del results["compute_curve"]  # as earlier versions wrote them
    write_evaluation_report(results, tmp_path / "report.html")
    assert "gain at equal compute" not in (tmp_path / "report.html").read_text()


def test_no_controller_was_evaluated(tmp_path):
    results = make_results({"wait": "wait"}) | {"episodes": [], "summary": {"controllers": {}, "paired": {}}}
    write_evaluation_report(results, tmp_path / "report.html")
    assert "No controller was evaluated" in (tmp_path / "report.html").read_text()


def test_without_matplotlib_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'simic-rl[report]'")):
        write_evaluation_report(make_results({"wait": "wait"}), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_large_report_is_small_enough(tmp_path):
    kinds = {f"c{i}": kind for i, kind in enumerate([*QUALITY, *QUALITY, "learned", "learned"])}
    write_evaluation_report(make_results(kinds, tasks=16, rng_seeds=20, horizon=24), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 1_500_000


def test_command_writes_both_kinds(tmp_path, capsys):
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    (evaluation / "results.json").write_text(json.dumps(make_results({"wait": "wait", "heuristic": "heuristic"})))
    main(["report", str(evaluation)])
    assert "Comparison of controllers" in (evaluation / "report.html").read_text()
    main(["report", str(write_run(tmp_path / "run")), "--out", str(tmp_path / "mine.html")])
    assert "Training run run" in (tmp_path / "mine.html").read_text()
    assert capsys.readouterr().out == f"report: {evaluation / 'report.html'}\nreport: {tmp_path / 'mine.html'}\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nowhere", None, "holds neither results.json nor events"),
        ("broken", "{", "results.json is not valid JSON"),
        ("deep", "[" * 10**5 + "]" * 10**5, "nests values more than 64 deep"),
        ("older", '{"format": 1}', "is not of format 2"),
        ("newer", '{"format": 3}', "is not of format 2"),
        ("hollow", '{"format": 2}', "not whole results of simic evaluate (KeyError"),
        ("other", "[1]", "is not of format 2"),
    ],
)
def test_command_refuses_what_it_cannot_read(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path / name)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1

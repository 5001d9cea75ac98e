"""Reports: whole, escaped, the same every time, and right in what they say."""

import json
import math
import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simic.cli import main
from simic.dashboard.evaluation_charts import COLOURS, make_series, timeline_rows
from simic.dashboard.evaluation_report import verdict, write_evaluation_report
from simic.dashboard.page import PALETTE, amount, colours, spread
from simic.dashboard.run_report import read_story, running_mean, write_run_report
from simic.evaluation.groups import Groups
from simic.evaluation.statistics import score_table, summarize
from simic.telemetry.events import (
    Anomaly,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
    PhaseTimings,
    RunFinished,
    RunStarted,
    Update,
    WorkerFault,
    to_json,
)

HOSTILE = '<script>alert("1 & 2")</script> $x^2$'
QUALITY = {"wait": 60.0, "heuristic": 70.0, "learned": 80.0, "replay": 75.0}


def make_results(controllers, *, tasks=3, rng_seeds=4, horizon=8, groups=None):
    """Results as `simic evaluate` writes them; the quality of a controller follows from its kind."""
    rng = np.random.default_rng(0)
    names = [f"mlp-held_out-{i}" for i in range(tasks)]
    episodes = []
    for label, kind in controllers.items():
        for task in names:
            for rng_seed in range(rng_seeds):
                metric, grown = QUALITY[kind] + rng.normal(), 0 if kind == "wait" else 1
                parameters = 100 * 2**grown
                seed = {
                    "slot": "stem",
                    "blueprint": "mlp_small",
                    "germinated": 1,
                    "ended": 4,
                    "fate": "fossilized",
                    "contribution": 2.5,
                }
                episodes.append(
                    {
                        "controller": label,
                        "task": task,
                        "rng_seed": rng_seed,
                        "metric": metric,
                        "score": metric - grown,
                        "area": metric / 2,
                        "parameters": parameters,
                        "host_parameters": 100,
                        "flops": 1e9 * (1 + grown),
                        "accuracy_per_parameter": metric / parameters,
                        "val_curve": [metric * i / horizon for i in range(horizon + 1)],
                        "parameter_curve": [100] * 3 + [parameters] * (horizon - 2),
                        "seeds": [seed] * grown,
                    }
                )
    about = {
        label: {"kind": kind, "of": origin(label), "description": f"a {kind}"} for label, kind in controllers.items()
    }
    grouped = {
        name: {"kind": controllers[members[0]], "of": origin(name), "members": members}
        for name, members in (groups or {}).items()
    }
    return {
        "format": 2,
        "command": "simic evaluate --controllers " + ",".join(controllers),
        "versions": {"simic": "0.1.0"},
        "settings": {"horizon": horizon},
        "controllers": about,
        "groups": grouped,
        "tasks": names,
        "rng_seeds": list(range(rng_seeds)),
        "notes": [],
        "episodes": episodes,
        "summary": summarize(episodes, Groups(about, grouped)),
    }


def origin(label):
    """Whom `replay(x)` derives from."""
    return label.removeprefix("replay(").removesuffix(")") if label.startswith("replay(") else None


class Seen(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


def check_page(page):
    """One whole file that loads nothing, runs nothing, and whose charts are sound."""
    seen = Seen(page)
    assert not {"script", "img", "link", "iframe", "object"} & set(seen.tags)
    assert not [value for name, value in seen.attributes if name in ("src", "href") and not value.startswith("#")]
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "@import" not in page
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for chart in charts:
        ElementTree.fromstring(chart)
    return seen, charts


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


def two_groups():
    """Two groups of unlike size, one policy alone, their replays and a rule."""
    groups = {"ours": ["a", "b", "c"], "theirs": ["d", "e"]}
    kinds = {"wait": "wait"} | dict.fromkeys("abcde", "learned") | {"alone": "learned"}
    kinds |= {f"replay({own})": "replay" for own in [*"abcde", "alone"]}
    groups |= {f"replay({name})": [f"replay({own})" for own in members] for name, members in groups.items()}
    return kinds, groups


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
    assert series[0].colour == COLOURS["wait"]  # as in every other report
    assert series[2].colour == PALETTE[0]
    assert all(re.fullmatch("#[0-9A-F]{6}", own.colour) for own in series)
    assert len(set(colours([str(i) for i in range(100)]).values())) == 100
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


def test_nobody_evaluated(tmp_path):
    results = make_results({"wait": "wait"}) | {"episodes": [], "summary": {"controllers": {}, "paired": {}}}
    write_evaluation_report(results, tmp_path / "report.html")
    assert "Nobody was evaluated" in (tmp_path / "report.html").read_text()


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


@given(st.lists(st.floats(0, 1), max_size=12).map(sorted), st.sampled_from([1 / 16, 1 / 30]))
def test_names_are_spread_apart(positions, gap):
    places = spread(positions, gap)
    assert all(0 <= place <= 1 + 1e-9 for place in places)
    assert all(above - below > gap - 1e-9 for below, above in pairwise(places))
    if all(above - below >= gap for below, above in pairwise(positions)):
        assert places == pytest.approx(positions)


@pytest.mark.parametrize(
    ("value", "said"), [(1004, "1,004"), (14.3e9, "14.3G"), (0, "0"), (12.34, "12.3"), (2.5e6, "2.5M"), (3e12, "3T")]
)
def test_amounts(value, said):
    assert amount(value) == said


def change(blueprint, old, new, reason, update=0):
    return LifecycleChange(
        update=update,
        group=0,
        env=0,
        decision=1,
        slot="stem",
        blueprint=blueprint,
        old_stage=old,
        new_stage=new,
        reason=reason,
    )


def write_run(path, updates=4):
    """A run in which three seeds germinated: one was kept, one pruned, one was undecided at the end."""
    path.mkdir()
    figures = {"score": 70.0, "episode_return": 5.0, "entropy": 2.0, "kl": 0.01, "kl_after": math.nan}
    figures |= {"explained_variance": 0.5, "op/wait": 0.75, "op/germinate": 0.25}
    events = [Update(update=i, metrics=figures | {"score": 70.0 + i}) for i in range(updates)]
    events += [change("mlp", "dormant", "blending", "germinate")] * 3
    events += [change("mlp", "blending", "holding", "advance"), change("mlp", "holding", "fossilized", "fossilize")]
    events += [change("mlp", "blending", "pruned", "time"), change("norm", "dormant", "training", "germinate", 3)]
    events += [
        Anomaly(update=2, name="kl_spike", value=0.5, threshold=0.1, where=HOSTILE),
        GovernorRollback(update=1, group=0, env=3, decision=7, verdict="diverged", val_loss=math.inf),
        GamingSuspicion(
            update=1, group=0, env=0, decision=1, slot="stem", blueprint="mlp", reason="overclaiming", contribution=0.1
        ),
    ]
    process = [
        RunStarted(
            update=0,
            command=("simic", "train", "--out", HOSTILE),
            config={"task": "mlp", "updates": 9, "algorithm": "ppo"},
            versions={"torch": "2"},
            rng_seeds={"run": 0},
            threads=1,
            pid=1,
            host="here",
        ),
        *(PhaseTimings(update=i, seconds={"rollout": 3.0, "update": 1.0}) for i in range(updates)),
        WorkerFault(update=1, worker=0, group=1, error="killed"),
    ]
    (path / "events.jsonl").write_text("".join(to_json(event) + "\n" for event in events))
    (path / "process.jsonl").write_text("".join(to_json(event) + "\n" for event in process))
    return path


def test_run_report(tmp_path):
    run = write_run(tmp_path / "run")
    with open(run / "events.jsonl", "a") as file:
        file.write('{"kind":"update","upd')  # still being written
    write_run_report(run, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    seen, charts = check_page(page)
    assert len(charts) == 8  # five curves, operations, seeds in both halves
    for part in (
        *("4 updates are on record of 9; ppo on mlp", "still running, or was killed", "33% kept", "wait 75%"),
        *("kl_spike: 1", HOSTILE, "rollback: diverged", "loss nan", "worker fault", "overclaiming"),
        *("75.0%", "--out", '"task": "mlp"'),
    ):
        assert part in seen.text, part
    write_run_report(run, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page


def test_story_of_a_run_counts_fates(tmp_path):
    story = read_story(write_run(tmp_path / "run"))
    assert story.fates[0, "mlp", "germinated"] == 3
    assert story.fates[0, "mlp", "fossilized"] == story.fates[0, "mlp", "pruned"] == 1
    assert story.fates[3, "norm", "germinated"] == 1
    assert [update for update, *_ in sorted(story.incidents)] == [1, 1, 2]


def test_run_that_ended(tmp_path):
    run = write_run(tmp_path / "run", updates=1)
    with open(run / "process.jsonl", "a") as file:
        file.write(to_json(RunFinished(update=1, status="diverged", exit_code=3, seconds=1.0, reason="<why>")) + "\n")
    write_run_report(run, tmp_path / "report.html")
    seen, _ = check_page((tmp_path / "report.html").read_text())
    assert "It ended as diverged (<why>)." in seen.text


def test_run_that_has_just_begun(tmp_path):
    (tmp_path / "process.jsonl").touch()
    write_run_report(tmp_path, tmp_path / "report.html")
    seen, charts = check_page((tmp_path / "report.html").read_text())
    assert "0 updates are on record" in seen.text
    assert not charts


def test_running_mean_by_hand():
    np.testing.assert_allclose(running_mean(np.array([2.0, 4.0, 9.0]), 2), [2.0, 3.0, 6.5])


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

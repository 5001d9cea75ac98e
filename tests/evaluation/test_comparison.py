"""evaluate: the same hosts for all, the same bytes every time, and nothing lost when it is killed."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_comparison import EAGER, make_blind, make_task, of, save_network

from simic import GrowableModel, GrowthScheduler, LearnedController, pretrained
from simic.api import evaluate
from simic.cli import main
from simic.control.registry import make_controller
from simic.evaluation import comparison
from simic.evaluation.parsing import ABLATIONS, NamedTask
from simic.evaluation.scale import Scale
from simic.lifecycle.actions import Op
from simic.policy.network import FactoredRecurrentActorCritic
from simic.ppo.agent import PPOAgent
from simic.ppo.config import PPOConfig

KEYS = [
    "format",
    "command",
    "versions",
    "settings",
    "controllers",
    "groups",
    "tasks",
    "rng_seeds",
    "notes",
    "episodes",
    "summary",
    "compute_curve",
]


def compare(*controllers: str, rng_seeds: Any = range(3), horizon: int = 12, **options: Any) -> dict[str, Any]:
    return evaluate(controllers, ["spirals-mlp"], rng_seeds=list(rng_seeds), horizon=horizon, **options).results


def test_results_hold_every_episode_once(tiny_comparison_task):
    results = compare("wait", "heuristic", rng_seeds=(4, 2))
    assert list(results) == KEYS
    order = [(episode["controller"], episode["task"], episode["rng_seed"]) for episode in results["episodes"]]
    assert order == [(who, "spirals-mlp", seed) for who in ("wait", "heuristic") for seed in (4, 2)]
    assert results["controllers"]["wait"]["of"] is None
    assert set(results["summary"]) == {"controllers", "paired"}


def test_all_lead_the_same_hosts_however_they_are_grouped(tiny_comparison_task):
    together = of(compare("wait", "random"), "wait")
    pair = of(compare("wait", rng_seeds=[2, 5]), "wait")
    assert pair[0] == together[2]
    assert len({tuple(episode["val_curve"]) for episode in together}) == 3
    others = of(compare("random", "autogrow", "heuristic"), "heuristic")
    assert [own["val_curve"][0] for own in others] == [own["val_curve"][0] for own in together]


def test_workers_change_nothing():
    here, there = (
        evaluate(["wait", "random"], ["mlp:train"], rng_seeds=2, num_tasks=1, horizon=2, workers=workers).results
        for workers in (0, 1)
    )
    assert here == there


def test_the_same_command_gives_the_same_bytes(tiny_comparison_task, tmp_path, grower):
    for name in "ab":
        compare("wait", "random", f"p={grower}", ablations=True, out=tmp_path / name, horizon=6)
    first, second = ((tmp_path / name / "results.json").read_bytes() for name in "ab")
    assert first == second
    assert (tmp_path / "a" / "episodes.csv").read_bytes() == (tmp_path / "b" / "episodes.csv").read_bytes()
    assert str(tmp_path / "a").encode() not in first
    assert (tmp_path / "a" / "episodes.csv").read_text().count("\n") == 1 + 8 * 3
    assert set(json.loads((tmp_path / "a" / "timing.json").read_text())) == {*json.loads(first)["controllers"]}


def test_what_was_done_before_a_kill_is_not_done_again(tiny_comparison_task, tmp_path, grower, monkeypatch):
    names, settings = ("wait", "random", f"p={grower}"), {"ablations": True, "horizon": 6}
    compare(*names, **settings, out=tmp_path / "whole")
    played, play_unit = [], comparison.play_unit

    def killed_after(limit: int) -> None:
        def play(settings: Any, unit: Any) -> Any:
            if len(played) == limit:
                raise KeyboardInterrupt
            played.append(unit.kind)
            return play_unit(settings, unit)

        monkeypatch.setattr(comparison, "play_unit", play)

    for limit in (2, 5):
        killed_after(limit)
        with pytest.raises(KeyboardInterrupt):
            compare(*names, **settings, out=tmp_path / "killed")
    killed_after(100)
    compare(*names, **settings, out=tmp_path / "killed")
    lone, derived = (
        ["wait", "random", "learned", "static_scaled", "shuffled"],
        ["static_final", "static_wide", "replay"],
    )
    assert played == lone + derived
    assert (tmp_path / "killed" / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()


def test_other_settings_use_no_part_of_these(tiny_comparison_task, tmp_path, grower):
    def parts() -> int:
        return len(list((tmp_path / "out" / "parts").iterdir()))

    compare("wait", out=tmp_path / "out")
    compare("wait", out=tmp_path / "out")
    assert parts() == 1
    changes: dict[str, Any]
    for changes in ({"horizon": 3}, {"rng_seeds": [0, 1]}, {"incubation": "shadow"}, {"seeds_per_slot": 2}):
        before = parts()
        compare("wait", out=tmp_path / "out", **changes)
        assert parts() == before + 1
    other = Path(grower).with_name("other.safetensors")
    other.write_bytes(Path(grower).read_bytes())
    compare(f"p={grower}", out=tmp_path / "out")
    before = parts()
    compare(f"q={other}", out=tmp_path / "out")  # the same controller in another place
    assert parts() == before


def test_a_registered_controller_or_task_whose_file_changed_is_evaluated_again(
    tiny_comparison_task, tmp_path, monkeypatch
):
    for source, parts in (("as it was", 1), ("as it was", 1), ("changed", 2)):
        monkeypatch.setattr(comparison, "_source", lambda module, source=source: source)
        compare("wait", out=tmp_path)
        assert len(list((tmp_path / "parts").iterdir())) == parts


# What derives from a learned controller.


@pytest.fixture(scope="module")
def ablated(tmp_path_factory) -> dict[str, Any]:
    """A policy that grows at once, and all that derives from it."""
    path, task = save_network(tmp_path_factory.mktemp("ablated") / "p", EAGER), make_task()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NamedTask, "find", lambda self: task)
        return compare("wait", f"p={path}", ablations=True, rng_seeds=range(4))


def test_static_final_has_the_same_architecture_from_the_start(ablated):
    for own, static in zip(of(ablated, "p"), of(ablated, "static_final(p)"), strict=True):
        fossils = [(seed["slot"], seed["blueprint"]) for seed in own["seeds"] if seed["fate"] == "fossilized"]
        assert fossils
        assert sorted((seed["slot"], seed["blueprint"]) for seed in static["seeds"]) == sorted(fossils)
        assert {(seed["germinated"], seed["ended"], seed["fate"]) for seed in static["seeds"]} == {(0, 0, "fossilized")}
        assert set(static["parameter_curve"]) == {own["parameters"]}
        assert static["val_curve"][0] == own["val_curve"][0]  # the same host, and its seeds say nothing yet
        assert static["flops"] > own["flops"]


def test_static_wide_is_the_least_that_is_as_large(ablated):
    for own, wide in zip(of(ablated, "p"), of(ablated, "static_wide(p)"), strict=True):
        width = round((wide["parameters"] + 14) ** 0.5) - 4  # w (w + 8) + 2 parameters
        assert wide["parameters"] == width * (width + 8) + 2 >= own["parameters"]
        assert (width - 1) * (width + 7) + 2 < own["parameters"]
        assert wide["host_parameters"] == own["host_parameters"] == 50
        assert wide["seeds"] == []


def test_static_scaled_widens_every_host_by_one_factor(tiny_comparison_task, tmp_path):
    Scale(parameter_factor=2.5).save(tmp_path / "mine.json")
    results = compare("wait", str(tmp_path / "mine.json"), horizon=4)
    about = results["controllers"]["mine"]
    assert about["kind"] == "static_scaled"
    assert about["description"].startswith("every host, widened to at least 2.5 times its parameters (")
    for alone, scaled in zip(of(results, "wait"), of(results, "mine"), strict=True):
        assert set(scaled["parameter_curve"]) == {8 * 16 + 2}  # of 8 features; 7 have 107, less than 2.5 times 50
        assert scaled["host_parameters"] == alone["parameters"] == 50
        assert scaled["score"] == pytest.approx(scaled["metric"] - math.log2(130 / 50))
        assert scaled["seeds"] == []


def test_static_scaled_is_one_of_the_ablations_unless_another_is_named(tiny_comparison_task, tmp_path, grower):
    Scale(parameter_factor=1.0).save(tmp_path / "mine.json")
    settings: dict[str, Any] = {"ablations": True, "horizon": 2}
    shipped = compare(f"p={grower}", **settings)["controllers"]
    assert (shipped["static_scaled"]["kind"], shipped["static_scaled"]["of"]) == ("static_scaled", None)
    own = compare(f"p={grower}", f"scaled={tmp_path / 'mine.json'}", "wait", **settings)
    assert [label for label, about in own["controllers"].items() if about["kind"] == "static_scaled"] == ["scaled"]
    assert of(own, "scaled") == of(own, "wait")  # a factor of 1 is the host itself
    assert "scaled" in own["summary"]["paired"]["p"]


def test_replay_of_a_policy_that_does_not_look_is_that_policy(tiny_comparison_task, tmp_path):
    PPOAgent(make_blind(EAGER), PPOConfig()).save(tmp_path / "p")
    results = compare("wait", f"p={tmp_path / 'p'}", ablations=True, horizon=6)
    assert of(results, "replay(p)") == of(results, "shuffled(p)") == of(results, "p") != of(results, "wait")


@pytest.fixture
def policies(tmp_path, grower) -> dict[str, str]:
    """Policies that behave unlike: one that plants at once, and two that never do."""
    idle = {name: save_network(tmp_path / f"{name}.safetensors", {Op.GERMINATE: -99.0}) for name in ("idle", "lazy")}
    return {"grower": grower} | idle


def test_unlike_policies_are_rows_of_their_own_unless_grouped(tiny_comparison_task, tmp_path, policies, capsys):
    settings = {"ablations": True, "horizon": 3, "rng_seeds": [0, 1], "out": tmp_path / "out", "quiet": False}
    results = compare("wait", *policies.values(), **settings)
    assert results["groups"] == {}
    assert set(results["summary"]["controllers"]) == set(results["controllers"])
    assert "learned" not in results["summary"]["controllers"]
    said = capsys.readouterr().out
    assert not re.search(r"^ *learned ", said, re.MULTILINE)
    table = said[said.index("means over all hosts") :]
    for label in policies:
        assert re.search(rf"^ *{label} ", table, re.MULTILINE)


def test_what_is_grouped_is_judged_as_one_beside_others(tiny_comparison_task, tmp_path, policies, capsys):
    ours, base = f"ours={policies['grower']},{policies['idle']}", f"base={policies['lazy']}"
    settings = {"ablations": True, "horizon": 3, "rng_seeds": [0, 1], "out": tmp_path / "out"}
    results = compare("wait", ours, base, **settings, quiet=False)
    assert {name: about["members"] for name, about in results["groups"].items()} == {
        "ours": ["grower", "idle"],
        **{f"{kind}(ours)": [f"{kind}(grower)", f"{kind}(idle)"] for kind in ABLATIONS},
    }
    figures, paired = results["summary"]["controllers"], results["summary"]["paired"]
    both = [figures[label]["score"]["mean"] for label in ("grower", "idle")]
    assert figures["ours"]["score"]["mean"] == pytest.approx(sum(both) / 2)
    rules = {"wait", "static_scaled"}
    assert set(paired["ours"]) == {*rules, "base", *(f"{kind}(ours)" for kind in ABLATIONS)}
    assert set(paired["base"]) == {*rules, "ours", "grower", "idle", *(f"{kind}(base)" for kind in ABLATIONS)}
    said = capsys.readouterr().out
    assert f"ours stands for {policies['grower']}, {policies['idle']}, judged as one" in said
    assert "minus base" in said
    with (tmp_path / "out" / "episodes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["group"] for row in rows if row["controller"] in ("grower", "idle")} == {"ours"}
    assert {row["group"] for row in rows if row["controller"] in ("replay(idle)", "base")} == {"replay(ours)", "base"}


def test_another_grouping_in_the_same_place_is_judged_anew(tiny_comparison_task, tmp_path, policies):
    settings = {"horizon": 3, "rng_seeds": [0, 1], "out": tmp_path / "out", "ablations": True}
    grower, idle, lazy = policies.values()
    compare("wait", f"ours={grower},{idle}", f"rest={lazy}", **settings)
    for words in (("wait", f"ours={idle},{grower}", lazy), ("wait", f"rest={grower},{lazy}", idle)):
        again = compare(*words, **settings)
        assert again == compare(*words, **settings | {"out": tmp_path / words[1].partition("=")[0] / words[2][-9:]})


def test_parts_that_were_changed_are_done_again(tiny_comparison_task, tmp_path):
    first = compare("wait", out=tmp_path)
    (part,) = (tmp_path / "parts").iterdir()
    text = part.read_text()
    digit = re.search(r'"score": \d+\.(\d)', text)
    assert digit is not None
    place = digit.start(1)
    changed = text[:place] + str(9 - int(text[place])) + text[place + 1 :]
    for content in (changed, "[" * 10**5, "7", "{}", '{"sha256": 1, "part": []}', ""):
        part.write_text(content)
        assert compare("wait", out=tmp_path) == first
        assert part.read_text() != content


def test_one_main_figure_in_terminal_results_and_report(compete_on, tmp_path, policies, capsys):
    compete_on(make_task())
    words = ["wait", f"ours={policies['grower']},{policies['idle']}", policies["lazy"]]
    compare(*words, horizon=4, rng_seeds=range(5), out=tmp_path / "out", quiet=False)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    told = capsys.readouterr().out.split("means over all hosts")[1]
    page = (tmp_path / "out" / "report.html").read_text()
    text = re.sub(r"<[^>]*>|&#8288;", "", page)  # cells without what is between them
    assert told.split()[:2] == ["mean", "score"]
    assert page.count("<th>mean score</th>") == 4  # rows and members of groups, alone and in pairs
    assert "<th>score</th>" not in page
    for label in ("wait", "ours", "lazy", "grower"):
        figure = results["summary"]["controllers"][label]["score"]
        by_hand = [
            e["score"]
            for e in results["episodes"]
            if e["controller"] in results["groups"].get(label, {"members": [label]})["members"]
        ]
        assert figure["mean"] == pytest.approx(sum(by_hand) / len(by_hand))
        main = f"{figure['mean']:.2f}"
        assert re.search(rf"^ *{label} +{main} ", told, re.MULTILINE), told
        shown = f"{main} [{figure['low']:.2f}, {figure['high']:.2f}]"
        assert f"{label}{shown}" in text
    difference = results["summary"]["paired"]["ours"]["wait"]["score"]
    assert f"{difference['mean']:+.2f} ({difference['low']:+.2f}, {difference['high']:+.2f})" in told
    assert f"{difference['mean']:+.2f} [{difference['low']:+.2f}, {difference['high']:+.2f}]" in text
    assert f"{difference['mean']:+.2f} points of mean score" in page


def test_a_policy_that_never_grows_has_only_itself_for_baselines(tiny_comparison_task, tmp_path):
    path = save_network(tmp_path / "idle.safetensors", {Op.GERMINATE: -99.0})
    results = compare("wait", f"p={path}", ablations=True, horizon=4)
    for label in results["controllers"].keys() - {"static_scaled"}:
        assert of(results, label) == of(results, "wait")


def test_a_host_of_one_width_has_no_wider_one(compete_on, grower):
    compete_on(make_task(host_of_width=None))
    results = compare(f"p={grower}", ablations=True, horizon=3)
    for label, kind in (("static_scaled", "static_scaled"), ("static_wide(p)", "static_wide")):
        assert of(results, label) == []
        note = f"{label} is left out: task tiny has hosts of one width only: no {kind}"
        assert note in results["notes"]
        assert label not in results["summary"]["controllers"]
    assert len(results["notes"]) == 2


# On the command line.


def test_the_command_writes_results_table_and_report(compete_on, tmp_path, capsys, grower):
    compete_on(make_task())
    arguments = f"--controllers wait,plan,p={grower} --tasks digits-mlp --rng-seeds 2 --horizon 8 --workers 0"
    main(["evaluate", *arguments.split(), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    for part in ("wait", "plan", "MFLOP", "minus wait", "results: "):
        assert part in said
    assert ("report: " in said and (tmp_path / "out" / "report.html").is_file()) or "simic-rl[report]" in said
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["command"] == f"simic evaluate {arguments.replace(' --workers 0', '')}".replace(
        "--rng-seeds", "--num-tasks 16 --rng-seeds"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--controllers heuristc", "did you mean heuristic?"),
        ("--tasks fashion-cn", "did you mean fashion-cnn?"),
        ("--rng-seeds 0", "at least one"),
        ("--workers -1", "workers must not be negative, got -1"),
        ("--address auto", "--address is for --backend ray: add that, or leave it out"),
        ("--gpus-per-worker 1", "--gpus-per-worker is for --backend ray"),
        ("--ablations", "name one with --controllers"),
        ("--horizon 0", "horizon must be at least 1"),
    ],
)
def test_wrong_arguments_exit_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", *arguments.split()])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_pretrained_controller_is_found_everywhere(tiny_comparison_task, grower, monkeypatch):
    monkeypatch.setattr(pretrained, "CONTROLLER", Path(grower))
    controller = make_controller("pretrained")
    assert isinstance(controller, LearnedController)
    assert isinstance(controller.network, FactoredRecurrentActorCritic)
    assert controller.network.op.bias[Op.FOSSILIZE] == 9.0
    model = GrowableModel(make_task().make_host(), ["stem"], example_input=make_task().data.train_x[:2])
    scheduler = GrowthScheduler(
        model, torch.optim.AdamW(model.parameters()), "pretrained", evaluate=lambda: {"val_loss": 1.0}
    )
    scheduler.optimizer.step()
    assert scheduler.step().action.op == "germinate"
    main(["grow", "--controller", "pretrained", "--task", "digits-mlp", "--host-epochs", "1", "--quiet"])
    results = compare("pretrained", f"p={grower}", rng_seeds=[0, 1])
    assert of(results, "pretrained") == of(results, "p")
    assert results["controllers"]["pretrained"]["kind"] == "learned"

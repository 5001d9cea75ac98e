"""The search for the best plan or scale: what it tries, the budget it keeps, and that it finds what was planted."""

import json
import math

import numpy as np
import pytest
from helpers.tiny_comparison import make_settings, make_task

from simic.cli import main
from simic.control.baselines import WaitController
from simic.control.plan import Plan, load_plan
from simic.environment.episodes import decide_by, play
from simic.evaluation import plan_search
from simic.evaluation.parsing import NamedTask
from simic.evaluation.plan_search import STACK, Trial, plan_grid, play_trial, scale_grid, search
from simic.evaluation.scale import Scale, load_scale


def test_the_grid_is_large_and_knows_how_not_to_grow():
    plans = plan_grid()
    assert len(set(plans)) == len(plans) >= 60
    assert any(plan.max_seeds == 0 for plan in plans)
    assert {plan.reads for plan in plans} == {"output", "input", "both"}
    assert Scale(parameter_factor=1.0) in scale_grid()


def test_the_default_budget_of_the_command_is_enough_for_all_plans(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_search, "play_trial", lambda common, trial: [[0.0]] * len(trial.options))
    main(["plan", "--workers", "0", "--quiet", "--out", str(tmp_path / "plan.json")])
    assert load_plan(tmp_path / "plan.json") in plan_grid()


def test_the_best_plan_is_found_within_the_budget(monkeypatch):
    """Scores are the distance to a planted plan, plus noise that is the same for all plans on a host."""
    wanted, hosts, tasks = Plan(first=6, size=0.8), [], []

    def play(common, trial: Trial):
        hosts.append(len(trial.rng_seeds) * len(trial.options))
        tasks.append((str(trial.task), trial.rng_seeds))
        noise = np.random.default_rng(trial.rng_seeds[0]).normal(size=len(trial.rng_seeds))
        plans = [plan for plan in trial.options if isinstance(plan, Plan)]
        return [(noise - abs(p.first - wanted.first) - abs(p.size - wanted.size)).tolist() for p in plans]

    monkeypatch.setattr(plan_search, "play_trial", play)
    plans = [Plan(first=first, size=size) for first in (0, 6, 12) for size in (0.2, 0.5, 0.8)]
    assert search(plans, budget=200, tasks=["mlp:train"]) == wanted
    assert sum(hosts) <= 200
    assert max(hosts) <= STACK
    assert {name.rpartition("-")[0] for name, _ in tasks} == {"mlp-train"}
    assert len({seeds for _, seeds in tasks}) == len({name for name, _ in tasks}) > 1


def test_a_budget_that_is_too_small_is_told():
    with pytest.raises(ValueError, match=r"--budget must be at least 4044 for 337 plans in 6 rungs, got 9"):
        search(plan_grid(), budget=9, tasks=["mlp:train"])
    with pytest.raises(ValueError, match=r"--budget must be at least 66 for 11 scales in 3 rungs, got 9"):
        search(scale_grid(), budget=9, tasks=["mlp:train"])


def test_every_plan_leads_its_own_copies_of_the_same_hosts(monkeypatch):
    monkeypatch.setattr(NamedTask, "find", lambda self: make_task())
    common = (make_settings(horizon=8).episode, make_settings().lifecycle)
    never, grows = Plan(max_seeds=0), Plan(first=0, size=1.0)
    trial = Trial(NamedTask("tiny"), (0, 1), (never, grows, never))
    first, second, third = play_trial(common, trial)
    assert first == third != second
    assert len(first) == 2


# Scales.


def test_a_scaled_host_is_scored_in_relation_to_the_unscaled_one(monkeypatch):
    monkeypatch.setattr(NamedTask, "find", lambda self: make_task())
    settings = make_settings(2, horizon=4)
    scales = (Scale(parameter_factor=1.0), Scale(parameter_factor=2.5))
    same, wide = play_trial((settings.episode, settings.lifecycle), Trial(NamedTask("tiny"), (0, 1), scales))
    alone = play(settings.trainings(make_task()), decide_by(WaitController().act))
    assert same == alone.score.tolist()
    wider = play(settings.trainings(make_task().widened(8)), decide_by(WaitController().act))  # 130 parameters, not 50
    assert wide == pytest.approx((100 * wider.quality[-1] - math.log2(130 / 50)).tolist())


def test_a_task_of_one_width_cannot_be_scaled(monkeypatch):
    monkeypatch.setattr(NamedTask, "find", lambda self: make_task(host_of_width=None))
    with pytest.raises(ValueError, match="hosts of task tiny come in one width, which cannot be scaled; leave it out"):
        search(scale_grid(), budget=100, tasks=["mlp:train"], horizon=1)


def test_the_command_searches_a_scale(monkeypatch, tmp_path, capsys):
    def play(common, trial: Trial):
        return [[-abs(own.parameter_factor - 6.0)] for own in trial.options if isinstance(own, Scale)]

    monkeypatch.setattr(plan_search, "play_trial", play)
    monkeypatch.chdir(tmp_path)
    main(["plan", "--kind", "scale", "--budget", "99", "--workers", "0"])
    assert load_scale(tmp_path / "scale.json") == Scale(parameter_factor=6.0)
    assert "rung 1/3: 11 scales on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"parameter_factor": 0.5}, "parameter_factor must be a number from 1 to 1024, got 0.5"),
        ({"parameter_factor": "2"}, "parameter_factor must be a number from 1 to 1024, got '2'"),
        ({"parameter_factor": True}, "parameter_factor must be a number from 1 to 1024, got True"),
        ({"parameter_factor": [2]}, r"parameter_factor must be a number from 1 to 1024, got \[2\]"),
        ({"parameter_factor": 2, "first": 1}, "its only key must be parameter_factor"),
        ({}, "its only key must be parameter_factor"),
        ([], "its only key must be parameter_factor"),
    ],
)
def test_wrong_scales_are_told(tmp_path, table, message):
    path = tmp_path / "scale.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=message) as error:
        load_scale(path)
    assert str(error.value).startswith(f"{path} holds no scale: ")
    assert str(error.value).endswith("`simic plan --kind scale` writes one")


def test_a_scale_is_no_controller_of_a_model(tmp_path, capsys):
    Scale(parameter_factor=2.0).save(tmp_path / "scale.json")
    with pytest.raises(SystemExit):
        main(f"grow --controller {tmp_path}/scale.json --task spirals-mlp --host-epochs 1".split())
    assert "a plan has no parameter_factor" in capsys.readouterr().err

"""The search for the best plan: the plans it tries, the budget it keeps, and that it finds what was planted."""

import numpy as np
import pytest

from simic.control.plan import Plan
from simic.evaluation import plan_search
from simic.evaluation.parsing import NamedTask
from simic.evaluation.plan_search import STACK, Trial, grid, play_trial, search_plan


def test_the_grid_is_large_and_knows_how_not_to_grow():
    plans = grid()
    assert len(set(plans)) == len(plans) >= 60
    assert any(plan.max_seeds == 0 for plan in plans)


def test_the_best_plan_is_found_within_the_budget(monkeypatch):
    """Scores are the distance to a planted plan, plus noise that is the same for all plans on a host."""
    wanted, hosts, tasks = Plan(first=6, size=0.8), [], []

    def play(common, trial: Trial):
        hosts.append(len(trial.rng_seeds) * len(trial.plans))
        tasks.append((str(trial.task), trial.rng_seeds))
        noise = np.random.default_rng(trial.rng_seeds[0]).normal(size=len(trial.rng_seeds))
        return [(noise - abs(p.first - wanted.first) - abs(p.size - wanted.size)).tolist() for p in trial.plans]

    monkeypatch.setattr(plan_search, "play_trial", play)
    plans = [Plan(first=first, size=size) for first in (0, 6, 12) for size in (0.2, 0.5, 0.8)]
    assert search_plan(budget=200, tasks=["mlp:train"], plans=plans) == wanted
    assert sum(hosts) <= 200
    assert max(hosts) <= STACK
    assert {name.rpartition("-")[0] for name, _ in tasks} == {"mlp-train"}
    assert len({seeds for _, seeds in tasks}) == len({name for name, _ in tasks}) > 1


def test_a_budget_that_is_too_small_is_told():
    with pytest.raises(ValueError, match=r"--budget must be at least 2010 for 201 plans in 5 rungs, got 9"):
        search_plan(budget=9, tasks=["mlp:train"])


def test_every_plan_leads_its_own_copies_of_the_same_hosts(monkeypatch):
    from helpers.tiny_comparison import make_settings, make_task

    monkeypatch.setattr(NamedTask, "find", lambda self: make_task())
    common = (make_settings(horizon=8).episode, make_settings().lifecycle)
    never, grows = Plan(max_seeds=0), Plan(first=0, size=1.0)
    trial = Trial(NamedTask("tiny"), (0, 1), (never, grows, never))
    first, second, third = play_trial(common, trial)
    assert first == third != second
    assert len(first) == 2

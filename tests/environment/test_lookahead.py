"""The search finds what pays, never does worse than its rule on validation data, and counts what it costs."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_run
from torch import nn

from simic.control.baselines import RandomController
from simic.control.registry import make_controller
from simic.environment.config import EpisodeConfig
from simic.environment.episodes import EpisodeRecord, decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.environment.lookahead import Candidates, Lookahead, choose_best, make_lookahead
from simic.environment.lookahead_config import LookaheadConfig
from simic.lifecycle.actions import HEADS, Op
from simic.tasks.data import Data
from simic.tasks.task import Task

HORIZON, NUM_HOSTS = 8, 2


def linear_host() -> nn.Sequential:
    return nn.Sequential(OrderedDict(stem=nn.Linear(2, 8), head=nn.Linear(8, 2)))


def xor_task() -> Task:
    """Whether two numbers have the same sign: nothing for a linear host, easy with a seed that is not linear."""
    x = torch.randn(384, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    parts = zip(("train", "validation", "test"), x.split(128), y.split(128), strict=True)
    data = Data(**{f"{n}_{s}": p for n, a, b in parts for s, p in (("x", a), ("y", b))}, num_classes=2)
    return tiny_run.make_task(data=data, make_host=linear_host, slots=("stem",), learning_rate=3e-2, batch_size=16)


XOR = xor_task()


def new_trainings(num_hosts: int = NUM_HOSTS, task: Task = XOR) -> HostTrainings:
    return HostTrainings(task, range(num_hosts), episode=EpisodeConfig(horizon=HORIZON))


def search(task: Task = XOR, **settings: Any) -> tuple[Lookahead, EpisodeRecord]:
    config = LookaheadConfig(**{"every": 2, "candidates": 7, "rows": 16, **settings})
    found = make_lookahead(new_trainings(task=task), lambda rows: new_trainings(rows, task), config)
    return found, play(found.trunk, found.decide)


def alone(controller: str, task: Task = XOR) -> EpisodeRecord:
    return play(new_trainings(task=task), decide_by(make_controller(controller).act))


def test_it_plants_what_a_host_cannot_do_without():
    _, found = search(candidates=20)
    assert (found.score > alone("wait").score + 20).all()
    assert (found.action[..., 0] == Op.GERMINATE).any(0).all()


@pytest.mark.parametrize("rules", [("finish",), ("plan", "finish")])
def test_it_is_never_below_its_rule_on_validation_data(rules):
    task = tiny_run.make_task()
    _, found = search(task, margin=0.0, pooling=0.0, rules=rules)
    assert (found.score >= alone(rules[0], task).score - 1e-3).all()


def test_another_rule_that_wins_goes_on():
    """With one candidate, which cannot be planted in time, only the other rule can plant."""
    found, record = search(rules=("wait", "plan"), candidates=1, every=HORIZON)
    np.testing.assert_array_equal(record.action, alone("plan").action)
    assert found.host_trainings == pytest.approx(1 + 16 / NUM_HOSTS)


def test_with_a_margin_that_nothing_reaches_the_rule_plays():
    _, found = search(margin=200.0)
    np.testing.assert_allclose(found.score, alone("wait").score, atol=1e-3)
    assert not found.action.any()


@pytest.mark.parametrize(("depth", "steps"), [(None, 8), (3, 3)])
def test_costs_are_counted_by_hand(depth, steps):
    """One search, at decision 0: at decision 4 a seed needs 5 more. 2 hosts with 1 + 7 candidates fill 16 rows."""
    found, _ = search(every=4, depth=depth, margin=200.0)
    assert found.host_epochs == HORIZON * NUM_HOSTS + 16 * steps


def test_a_policy_can_be_followed_while_the_search_labels():
    found, record = search(follow="policy", policy="wait", candidates=20)
    np.testing.assert_allclose(record.val_loss, alone("wait").val_loss, rtol=1e-4)
    labels = np.stack(found.labels)
    assert labels.shape == (HORIZON, NUM_HOSTS, len(HEADS))
    assert (labels[0, :, 0] == Op.GERMINATE).all()
    assert record.action.sum() == 0


def test_the_best_is_chosen_by_hand():
    """Host 0 tries a and b, host 1 tries a: a leads by 1 and by 3, b by 2."""
    rows = np.zeros((5, len(HEADS)), dtype=np.int64)
    rows[[1, 4], 1], rows[2, 1] = 1, 2
    candidates = Candidates(np.array([0, 0, 0, 1, 1]), rows, np.zeros(5, dtype=np.int64))
    value = np.array([80.0, 81.0, 82.0, 70.0, 73.0])
    assert choose_best(candidates, value, margin=0.0, pooling=0.0).tolist() == [2, 4]
    # Pooled with the mean lead of a, 2, host 0 has 1.5 for a and 2 for b, host 1 has 2.5 for a.
    assert choose_best(candidates, value, margin=1.9, pooling=0.5).tolist() == [2, 4]
    assert choose_best(candidates, value, margin=2.1, pooling=0.5).tolist() == [0, 4]
    assert choose_best(candidates, value, margin=2.6, pooling=0.5).tolist() == [0, 3]


@pytest.mark.parametrize("name", ["heuristic", "autogrow", "pretrained"])
def test_a_controller_for_copies_of_hosts_acts_as_on_their_sources(name):
    trainings, copies = new_trainings(3), new_trainings(3)
    controller: Any = make_controller(name)
    for _ in range(3):
        trainings.step(controller.act(trainings.facts()))
    hosts = np.array([2, 0, 2])
    copies.copy_hosts(hosts, range(3), trainings)
    copied = controller.for_hosts(hosts)
    for _ in range(4):
        actions, others = controller.act(trainings.facts()), copied.act(copies.facts())
        np.testing.assert_array_equal(others, actions[hosts])
        trainings.step(actions)
        copies.step(others)


def test_a_rule_whose_memory_cannot_be_copied_is_refused():
    found = Lookahead(new_trainings(), new_trainings, [RandomController()], LookaheadConfig(rows=4))
    with pytest.raises(TypeError, match=r"a RandomController remembers its hosts.*for_hosts\(hosts\)"):
        play(found.trunk, found.decide)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"depth": 0}, "depth must be at least 1, or null"),
        ({"pooling": 1.5}, "pooling must be a weight from 0 to 1, got 1.5"),
        ({"margin": float("nan")}, "margin must be at least 0 points"),
        ({"rules": ()}, "rules must name at least one controller"),
        ({"follow": "me"}, "follow must be one of search, policy, got 'me'"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LookaheadConfig(**settings)

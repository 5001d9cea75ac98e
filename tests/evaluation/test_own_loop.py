"""Hosts trained one by one through GrowthScheduler: measured like stacked ones, also with batch norm."""

from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_comparison import EAGER, make_planted, make_settings, make_task, scripted
from torch import nn

import simic
from simic.evaluation.candidates import Unit, inputs_from_episodes, play_unit
from simic.evaluation.measures import Fossil
from simic.evaluation.own_loop import OwnEpisode, count_step_flops, play_own_host
from simic.evaluation.parsing import NamedTask
from simic.evaluation.scale import Scale
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import Action
from simic.lifecycle.stages import LifecycleConfig
from simic.training.episodes import PolicyWeights


def batch_norm_host(width: int) -> nn.Sequential:
    segments = {
        "stem": nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU()),
        "block1": nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()),
        "head": nn.Linear(width, 2),
    }
    return nn.Sequential(OrderedDict(segments))


def batch_norm_task(**changes: Any) -> simic.Task:
    make = partial(partial, batch_norm_host)
    return make_task(**{"make_host": make(4), "host_of_width": make} | changes)


class Script:
    """A controller that plays a script."""

    def __init__(self, *actions: Action) -> None:
        self.act = scripted(*actions)


GROW = (Action("germinate", "stem", "mlp_small", tempo=3), *[Action()] * 3)


def play(*actions: Action, host_epochs: int = 8, fossils: Any = (), task: simic.Task | None = None) -> OwnEpisode:
    return play_own_host(
        task or batch_norm_task(),
        Script(*actions),
        host_epochs=host_epochs,
        rng_seed=3,
        lifecycle=LifecycleConfig(),
        host_parameters=20,
        fossils=fossils,
    )


def test_measures_of_a_host_alone_by_hand():
    own = play(host_epochs=3)
    # stem 4 * 4 + 4 and batch norm 8; block1 the same; head 4 * 2 + 2
    assert own.measures["parameters"] == 28 + 28 + 10
    assert own.measures["parameter_curve"] == [66] * 4
    # the rent of 66 parameters beyond 20
    assert own.measures["score"] == pytest.approx(own.measures["metric"] - np.log2(66 / 20))
    assert own.measures["area"] == pytest.approx(np.mean(own.measures["val_curve"][1:]))
    # 2 * (16 + 16 + 8) forward, as much for the weights, and for the inputs of all but the first layer
    assert own.measures["flops"] == 3 * 32 * (2 * 40 + 2 * 40 + 2 * 24)
    assert own.measures["seeds"] == []
    assert own.actions.shape[0] == 3
    assert not own.actions.any()
    assert own.fossils == []


def test_a_seed_is_followed_from_germination_to_its_end():
    live = play(*GROW, host_epochs=3).measures
    assert [(own["germinated"], own["ended"], own["fate"]) for own in live["seeds"]] == [(0, None, "live")]
    assert live["parameters"] == 66  # live seeds are not exported
    assert live["parameter_curve"][-1] > 66
    assert [own["blueprint"] for own in live["seeds"]] == ["mlp_small"]
    pruned = play(*GROW, Action("prune", "stem")).measures
    assert [own["fate"] for own in pruned["seeds"]] == ["pruned"]
    kept = play(*GROW, Action("advance", "stem"), *[Action()] * 3, Action("fossilize", "stem"), host_epochs=9)
    assert [own["fate"] for own in kept.measures["seeds"]] == ["fossilized"]
    assert kept.measures["seeds"][0]["contribution"] is not None
    assert kept.fossils == [Fossil(0, "mlp_small", "linear-add")]
    assert kept.measures["parameters"] > 66
    assert kept.measures["flops"] > play(host_epochs=9).measures["flops"]


def test_planted_fossils_are_there_from_the_start():
    own = play(host_epochs=2, fossils=[Fossil(1, "mlp_small", "linear-add")])
    first, *others = own.measures["parameter_curve"]
    assert others == [first, first]
    assert own.measures["parameters"] == first > 66
    assert [(seed["slot"], seed["fate"], seed["ended"]) for seed in own.measures["seeds"]] == [
        ("block1", "fossilized", 0)
    ]


def test_counting_operations_leaves_no_trace():
    task = batch_norm_task()
    model = GrowableModel(task.make_host(), task.slots, example_input=task.data.train_x[:2])
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    count_step_flops(model, task)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture
def own_task(own_names: None) -> NamedTask:
    simic.task("mine", own_loop=True)(batch_norm_task)
    return NamedTask("mine")


def test_the_same_hosts_every_time(own_task):
    settings = make_settings(2, horizon=3)
    first, again = (play_unit(settings, Unit(own_task, "wait"))["episodes"] for _ in range(2))
    assert first == again
    assert [own["rng_seed"] for own in first] == [0, 1]
    assert first[0]["val_curve"] != first[1]["val_curve"]


def test_every_kind_of_candidate(own_task):
    settings = make_settings(2, horizon=10)
    weights = PolicyWeights.of(make_planted(EAGER))
    learned = play_unit(settings, Unit(own_task, "learned", weights))
    assert np.shape(learned["actions"])[:2] == (10, 2)
    assert all(learned["fossils"])
    for kind in ("static_wide", "static_final", "replay"):
        inputs = inputs_from_episodes(kind, learned)
        for mine, grown in zip(
            play_unit(settings, Unit(own_task, kind, inputs))["episodes"], learned["episodes"], strict=True
        ):
            assert mine["host_parameters"] == 66
            if kind != "replay":
                assert mine["parameters"] >= grown["parameters"]
    scaled = play_unit(settings, Unit(own_task, "static_scaled", Scale(parameter_factor=3.0)))["episodes"]
    assert all(own["parameters"] >= 3 * 66 for own in scaled)
    assert "no shuffled observations" in play_unit(settings, Unit(own_task, "shuffled", weights))["note"]


def test_hosts_of_one_width_are_not_widened(own_names):
    simic.task("mine", own_loop=True)(lambda: batch_norm_task(host_of_width=None))
    part = play_unit(make_settings(2), Unit(NamedTask("mine"), "static_wide", [100, 100]))
    assert part == {"episodes": [], "note": "task mine has hosts of one width only: no static_wide"}

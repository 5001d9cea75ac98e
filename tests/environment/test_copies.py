"""A copied host is its source bit for bit, and has the same future, whatever both have grown and whatever befalls them.

In float64: rows of a stack round differently, and within a few host epochs float32 would make that visible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simic.control.baselines import RandomController
from simic.control.facts import TRAINING_FACTS
from simic.control.governor import Verdict
from simic.control.legality import legal_masks
from simic.control.plan import move_on
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import Column, Op
from simic.rewards.schemes import RewardConfig
from simic.tasks.data import Data
from simic.tasks.registry import find_task
from simic.tasks.task import Task
from simic.tasks.variation import HostTask, HostVariation

HORIZON, NUM_HOSTS = 12, 4
FAMILIES = ("mlp", "cnn", "sequences")


@dataclass(frozen=True, kw_only=True)
class Precise(HostVariation):
    """Hosts as another variation draws them, with few samples in float64."""

    drawn_by: HostVariation

    def host(self, reference: Data, learning_rate: float, rng_seed: int) -> HostTask:
        host = self.drawn_by.host(reference, learning_rate, rng_seed)
        return replace(host, data=precise(host.data))


def precise(data: Data) -> Data:
    parts = {f.name: getattr(data, f.name)[:64] for f in fields(data) if f.name != "num_classes"}
    return replace(data, **{name: x.double() if x.is_floating_point() else x for name, x in parts.items()})


@lru_cache
def task_of(family: str) -> Task:
    task = find_task(family, split="validation", rng_seed=3)
    return replace(
        task,
        batch_size=16,
        data=precise(task.data),
        variation=Precise(drawn_by=task.variation),
        make_host=lambda: task.make_host().double(),
    )


def new_trainings(family: str, rng_seeds: Sequence[int] = range(NUM_HOSTS), **changes: Any) -> HostTrainings:
    settings: dict[str, Any] = {"horizon": HORIZON, **changes}
    return HostTrainings(task_of(family), rng_seeds, episode=EpisodeConfig(**settings), reward=RewardConfig())


def grow(trainings: HostTrainings, steps: int, rng_seed: int) -> None:
    """Random legal actions; every other decision moves seeds on, so that some are blended in and fossilized."""
    random = RandomController(rng_seed)
    for step in range(steps):
        facts = trainings.facts()
        drawn, on = random.act(facts), move_on(legal_masks(facts))
        trainings.step(np.where((on[:, [Column.OP]] != Op.WAIT) & (step % 2 == 1), on, drawn))


def step_alike(trainings: HostTrainings, sources, targets, rng_seed: int) -> None:
    actions = RandomController(rng_seed).act(trainings.facts())
    actions[targets] = actions[sources]
    trainings.step(actions)


def everything(trainings: HostTrainings, hosts) -> dict[str, np.ndarray]:
    """All that is known about some hosts, their weights included."""
    facts = trainings.facts()
    known = {f.name: getattr(facts.slots, f.name)[hosts] for f in fields(facts.slots)}
    for name in ("val_loss", "val_accuracy", "train_loss", "parameters", "host_gradient_norm", "decision"):
        known[f"facts.{name}"] = getattr(facts, name)[hosts]
    for name in TRAINING_FACTS:
        known[f"facts.{name}"] = np.broadcast_to(getattr(facts, name), facts.num_hosts)[hosts]
    known |= {"weights": trainings.hosts.hosts.rows.numpy()[hosts], "score": trainings.score()[hosts]}
    for name, memory in trainings.governor.state_dict().items():
        known[f"governor.{name}"] = memory[:, hosts] if name == "history" else memory[hosts]
    return known | {"seeds": facts.seed_parameters[hosts], "action": facts.previous_action[hosts]}


def check_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], *, exact: bool = False) -> None:
    for name, values in one.items():
        np.testing.assert_allclose(
            values, other[name], rtol=0 if exact else 1e-9, atol=0 if exact else 1e-9, err_msg=name
        )


@settings(deadline=None, max_examples=12)
@given(
    family=st.sampled_from(FAMILIES),
    before=st.integers(0, 8),
    pairs=st.lists(st.tuples(st.integers(0, 1), st.integers(2, 3)), min_size=1, unique_by=lambda pair: pair[1]),
    rng_seed=st.integers(0, 1000),
)
def test_a_copy_has_the_same_future_as_its_source(family, before, pairs, rng_seed):
    trainings = new_trainings(family)
    grow(trainings, before, rng_seed)
    sources, targets = (list(hosts) for hosts in zip(*pairs, strict=True))
    trainings.copy_hosts(sources, targets)
    check_same(everything(trainings, sources), everything(trainings, targets), exact=True)
    for step in range(3):
        step_alike(trainings, sources, targets, rng_seed + step)
        check_same(everything(trainings, sources), everything(trainings, targets))


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_also_earn_and_break_and_recover_alike(family):
    trainings = new_trainings(family)
    grow(trainings, 7, rng_seed=5)
    trainings.copy_hosts([1], [3])
    with torch.no_grad():
        trainings.hosts.hosts.rows[[1, 3]] = float("nan")
    step = np.zeros((NUM_HOSTS, 8), dtype=np.int64)
    outcome = trainings.step(step)
    assert outcome.verdict.tolist() == [Verdict.OK, Verdict.NOT_FINITE, Verdict.OK, Verdict.NOT_FINITE]
    assert outcome.reward is not None
    assert outcome.reward.total[1] == pytest.approx(outcome.reward.total[3])
    check_same(everything(trainings, [1]), everything(trainings, [3]))
    trainings.step(step)
    check_same(everything(trainings, [1]), everything(trainings, [3]))


def test_other_hosts_are_not_touched():
    with_copies, without = new_trainings("mlp"), new_trainings("mlp")
    for trainings in (with_copies, without):
        grow(trainings, 6, rng_seed=2)
    with_copies.copy_hosts([0, 0], [2, 3])
    for trainings in (with_copies, without):
        trainings.step(np.zeros((NUM_HOSTS, 8), dtype=np.int64))
    check_same(everything(with_copies, [0, 1]), everything(without, [0, 1]))


def test_hosts_can_change_places():
    trainings = new_trainings("mlp")
    grow(trainings, 6, rng_seed=4)
    before = everything(trainings, [0, 1])
    trainings.copy_hosts([1, 0], [0, 1])
    check_same(before, everything(trainings, [1, 0]), exact=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_host_can_be_copied_into_another_stack(family):
    trunk, branches = new_trainings(family), new_trainings(family, rng_seeds=(50, 51, 52, 53, 54, 55))
    grow(trunk, 6, rng_seed=1)
    grow(branches, 3, rng_seed=9)
    branches.copy_hosts([3, 3, 0], [0, 5, 2], trunk)
    check_same(everything(trunk, [3, 3, 0]), everything(branches, [0, 5, 2]), exact=True)
    drawn = RandomController(3).act(trunk.facts())
    others = np.zeros((6, 8), dtype=np.int64)
    others[[0, 5, 2]] = drawn[[3, 3, 0]]
    trunk.step(drawn)
    branches.step(others)
    check_same(everything(trunk, [3, 3, 0]), everything(branches, [0, 5, 2]))


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0], [1, 2], "every target needs one source, got 1 sources for 2 targets"),
        ([0, 1], [2, 2], "targets must differ"),
        ([0], [4], "targets must be hosts from 0 to 3"),
        ([-1], [0], "sources must be hosts from 0 to 3"),
    ],
)
def test_wrong_hosts_are_refused(sources, targets, message):
    trainings = new_trainings("mlp")
    with pytest.raises(ValueError, match=message):
        trainings.copy_hosts(sources, targets)


@pytest.mark.parametrize("other", [{"family": "cnn"}, {"family": "mlp", "horizon": 6}])
def test_hosts_of_other_trainings_are_refused(other):
    trainings = new_trainings("mlp")
    with pytest.raises(ValueError, match="the same task with the same settings"):
        trainings.copy_hosts([0], [1], new_trainings(**other))

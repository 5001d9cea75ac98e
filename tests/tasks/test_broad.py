"""Family broad: hosts of every kind, trained in every way that the ranges name."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from simic.control.registry import make_controller
from simic.environment.episodes import decide_by, play
from simic.environment.host_trainings import HostTrainings
from simic.tasks.broad import HOST_EPOCHS
from simic.tasks.hosts import mlp_host, scaled_host
from simic.tasks.registry import find_task
from simic.tasks.task import Length
from simic.tasks.training_ranges import TrainingRanges
from simic.tasks.variation import HostVariation

TASKS = [find_task("broad", rng_seed=rng_seed) for rng_seed in range(240)]


def traits(name):
    return Counter(task.traits.get(name) for task in TASKS)


def test_every_kind_of_host_problem_and_training_occurs():
    problems = Counter(task.draw(0).traits["problem"] for task in TASKS)
    assert set(problems) == {
        *("spirals", "teacher", "teacher_numbers", "motifs", "digits", "mnist1d", "breast_cancer"),
        *("delay", "counting", "pair_table"),
    }
    assert set(traits("ending")) == {"planned", "untold", "open", "cut"}
    assert set(traits("optimizer")) == {"adamw", "sgd"}
    assert set(traits("host_epochs")) == set(HOST_EPOCHS["train"])
    assert max(len(task.slots) for task in TASKS) > 6
    assert {task.data.train_x.dim() for task in TASKS} == {2, 3, 4}


def test_the_ending_decides_what_is_told_and_how_the_learning_rate_falls():
    for task in TASKS:
        ending, epochs = str(task.traits["ending"]), int(task.traits["host_epochs"])
        told = {"planned": epochs, "untold": 0, "open": 0, "cut": 2 * epochs}[ending]
        facts = HostTrainings(task, [0]).facts() if epochs == 8 else None
        assert task.length is not None
        assert task.length.told_host_epochs == told
        assert facts is None or facts.horizon.tolist() == [told]
        last = task.length.rate_factor(np.array([epochs]))[0]
        assert last == pytest.approx({"planned": 0, "untold": 0, "open": 1, "cut": 0.5}[ending])


def test_an_episode_is_as_long_as_its_task_says_whatever_is_told():
    task = next(task for task in TASKS if task.traits["ending"] == "cut" and task.traits["host_epochs"] == 8)
    record = play(HostTrainings(task, [0, 1]), decide_by(make_controller("wait", 0).act))
    assert record.action.shape[:2] == (8, 2)
    assert record.decisions.tolist() == [8, 8]


def test_lengths_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="host_epochs must be at least 1, got 0"):
        Length(host_epochs=0)
    with pytest.raises(ValueError, match=r"planned must be at least host_epochs \(8\), got 4"):
        Length(host_epochs=8, planned=4)


def test_numbers_are_learned_and_judged_by_explained_variance():
    task = next(task for task in TASKS if task.data.is_regression)
    task = replace(task, variation=replace(task.variation, label_noise=(0.0,)), length=Length(host_epochs=20))
    assert task.random_guess_loss == 1
    trainings = HostTrainings(task, [0, 1])
    before = trainings.facts()
    record = play(trainings, decide_by(make_controller("heuristic", 0).act), evaluate=True)
    assert record.test_quality is not None
    assert (record.val_loss[-1] < before.val_loss[:, -1]).all()
    assert ((record.test_quality > 0.1) & (record.test_quality <= 1)).all()


def test_wrong_numbers_are_those_of_other_samples():
    data = next(task for task in TASKS if task.data.is_regression).data
    noisy = HostVariation(label_noise=(0.5,)).host(data, 0.1, 0).data
    assert sorted(noisy.train_y.tolist()) == sorted(data.train_y.tolist())
    assert 0.3 < (noisy.train_y != data.train_y).any(1).float().mean() < 0.55
    assert torch.equal(noisy.validation_y, data.validation_y)


def test_the_rarest_class_is_as_rare_as_drawn():
    data = find_task("mlp", rng_seed=1).data
    drawn = HostVariation(balance=(0.1,)).host(data, 0.1, 0)
    counts = drawn.data.train_y.bincount().sort().values
    assert drawn.traits["balance"] == 0.1
    assert counts[0] / counts[-1] < 0.3
    assert torch.equal(drawn.data.validation_y, data.validation_y)
    assert len(drawn.data.train_y) == len(data.train_y)
    with pytest.raises(ValueError, match="balance must list ratios above 0 and up to 1"):
        HostVariation(balance=(0.0,))


def test_initial_weights_and_batches_are_scaled():
    plain = find_task("mlp", rng_seed=1)
    one = TrainingRanges(host_epochs=(9,), endings=("open",), batch_factors=(0.5,), weight_scales=(2.0,))
    task = replace(one, optimizers=("sgd",)).apply(plain, np.random.default_rng(0))
    assert (task.batch_size, task.optimizer, task.learning_rate) == (32, "sgd", pytest.approx(10 * plain.learning_rate))
    assert task.host_of_width is not None
    assert plain.host_of_width is not None
    for made, make in ((task.make_host, plain.make_host), (task.host_of_width(7), plain.host_of_width(7))):
        torch.manual_seed(0)
        scaled = made()
        torch.manual_seed(0)
        for ours, theirs in zip(scaled.parameters(), make().parameters(), strict=True):
            assert torch.equal(ours, 2 * theirs if theirs.dim() > 1 else theirs)


def test_scaled_hosts_are_the_host_itself_at_scale_one():
    torch.manual_seed(0)
    host = mlp_host(3, 4, 2, 2)
    weights = {name: value.clone() for name, value in host.state_dict().items()}
    assert all(torch.equal(value, weights[name]) for name, value in scaled_host(lambda: host, 1.0).state_dict().items())

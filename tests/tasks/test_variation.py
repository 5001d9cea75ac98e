"""Draws: determined by task and rng seed, of equal shapes, wrong labels and repeated samples as drawn."""

import random
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from simic.tasks.data import Data
from simic.tasks.registry import make_task
from simic.tasks.task import Task
from simic.tasks.variation import HostVariation

SPLITS = ("train", "validation", "test")
GENERATED = pytest.mark.parametrize("name", ["spirals-mlp", "teacher-mlp"])


def tensors(data: Data) -> list[torch.Tensor]:
    return [tensor for split in SPLITS for tensor in data.split(split)]


def digits(**fields) -> Task:
    return replace(make_task("digits-mlp"), variation=HostVariation(**fields))


@GENERATED
def test_the_rng_seed_decides_the_host(name):
    first, again, other = (make_task(name).draw(rng_seed) for rng_seed in (7, 7, 8))
    assert (first.learning_rate, first.traits) == (again.learning_rate, again.traits)
    assert all(map(torch.equal, tensors(first.data), tensors(again.data)))
    assert not any(map(torch.equal, tensors(first.data), tensors(other.data)))


@GENERATED
def test_hosts_of_a_task_can_be_stacked(name):
    task = make_task(name)
    hosts = [task.draw(rng_seed).data for rng_seed in range(5)]
    for parts in zip(tensors(task.data), *map(tensors, hosts), strict=True):
        assert len({(part.shape, part.dtype) for part in parts}) == 1
        torch.stack(parts)
    assert {data.num_classes for data in hosts} == {task.data.num_classes}


def test_difficulties_differ_from_host_to_host():
    traits = [make_task("spirals-mlp").draw(rng_seed).traits for rng_seed in range(60)]
    assert {trait["turns"] for trait in traits} == {0.0, 0.5, 1.0, 1.5, 2.0}


def numpy_state() -> torch.Tensor:
    state = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())  # noqa: NPY002
    return torch.tensor(state[1].astype(int))


def test_drawing_leaves_every_global_generator_alone():
    task = replace(make_task("teacher-mlp"), variation=replace(make_task("teacher-mlp").variation, label_noise=(0.3,)))
    states = [torch.get_rng_state(), numpy_state()]
    state = random.getstate()
    task.draw(0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(numpy_state(), states[1])
    assert random.getstate() == state


@pytest.mark.parametrize("name", ["digits-mlp", "chars-transformer"])
def test_a_shared_data_set_is_not_copied(name):
    task = make_task(name)
    host = task.draw(3)
    assert host.data is task.data
    assert host.learning_rate == task.learning_rate


def test_wrong_labels_are_as_many_as_drawn_and_only_in_train():
    task = digits(label_noise=(0.3,))
    host = task.draw(0)
    wrong = host.data.train_y != task.data.train_y
    assert wrong.sum() == round(0.3 * 1077)
    assert host.traits["label_noise"] == 0.3
    # A wrong label is any other, equally often: 323 of them over nine offsets, about 36 each.
    offsets = ((host.data.train_y - task.data.train_y) % 10)[wrong].bincount(minlength=10)
    assert offsets[0] == 0
    assert offsets[1:].min() > 15
    for kept in ("train_x", "validation_x", "validation_y", "test_x", "test_y"):
        assert getattr(host.data, kept) is getattr(task.data, kept)


def test_rates_of_wrong_labels_are_equally_likely():
    task = digits(label_noise=(0.0, 0.1))
    rates = [(task.draw(rng_seed).data.train_y != task.data.train_y).float().mean().item() for rng_seed in range(80)]
    assert {round(rate, 2) for rate in rates} == {0.0, 0.1}
    assert 20 < sum(rate > 0 for rate in rates) < 60


def test_every_token_may_be_wrong():
    task = replace(
        make_task("chars-transformer", train_size=50), variation=HostVariation(label_noise=(0.5,), data_share=(0.5,))
    )
    host = task.draw(0)
    assert host.data.train_y.shape == (50, 32)
    # Inputs stay clean, so a window's true targets can be read from the inputs.
    rate = (host.data.train_y[:, :-1] != host.data.train_x[:, 1:]).float().mean().item()
    assert rate == pytest.approx(0.5, abs=0.05)


def test_a_smaller_data_size_repeats_distinct_samples():
    task = digits(data_share=(0.25,), label_noise=(0.2,))
    host = task.draw(0)
    size = round(0.25 * 1077)
    assert host.traits["data_size"] == size
    x, y = host.data.train_x, host.data.train_y
    assert x.shape == task.data.train_x.shape
    assert len(x[:size].unique(dim=0)) == size
    for start in range(0, len(x), size):
        part = x[start : start + size]
        assert torch.equal(part, x[: len(part)])
        assert torch.equal(y[start : start + size], y[: len(part)])
    known = {tuple(sample) for sample in task.data.train_x.tolist()}
    assert all(tuple(sample) in known for sample in x[:size].tolist())


def test_learning_rates_are_uniform_in_the_logarithm():
    task = replace(make_task("digits-mlp"), learning_rate=0.01, variation=HostVariation(rate_factor=(0.1, 10.0)))
    exponents = np.log10([task.draw(rng_seed).learning_rate for rng_seed in range(200)])
    assert exponents.min() >= -3
    assert exponents.max() <= -1
    assert exponents.mean() == pytest.approx(-2, abs=0.15)
    assert exponents.std() == pytest.approx(2 / 12**0.5, abs=0.08)


def test_streams_keep_tasks_apart():
    one, other = (digits(data_share=(0.5,), stream=stream) for stream in ((1,), (1, 0)))
    assert not torch.equal(one.draw(0).data.train_y, other.draw(0).data.train_y)


def test_the_task_of_a_host_trains_that_host_alone():
    task = make_task("spirals-mlp")
    host = task.draw(5)
    alone = task.for_host(host)
    assert alone.data is host.data
    assert alone.draw(1).data is host.data
    assert (alone.slots, alone.traits) == (task.slots, host.traits)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HostVariation(data_share=(0.0,)), r"data_share must list shares above 0 and up to 1, got \(0.0,\)"),
        (lambda: HostVariation(data_share=()), r"data_share .* got \(\)"),
        (lambda: HostVariation(label_noise=(1.0,)), r"label_noise must list shares from 0 to below 1, got \(1.0,\)"),
        (
            lambda: HostVariation(rate_factor=(2.0, 1.0)),
            r"rate_factor must be a range above zero, least first, got \(2.0, 1.0\)",
        ),
        (lambda: make_task("digits-mlp").draw(-1), "rng_seed must not be negative, got -1"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

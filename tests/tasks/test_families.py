"""Families: tasks determined by split and rng seed, splits that share nothing, hosts that fit their data."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch

from simic.growth.slot_discovery import find_sites
from simic.tasks.families import MLP, Ranges, TaskFamily
from simic.tasks.registry import FAMILIES, SPLITS, find_task
from simic.tasks.task import Task

DIFFICULTY = ("problem", "turns", "hidden", "extent", "classes", "distance", "modulus", "lag", "frequency")
EVERY = pytest.mark.parametrize("name", FAMILIES)
# In combined, transformers of one split are as wide as other networks of another; its families are tested instead.
EVERY_OF_ONE_KIND = pytest.mark.parametrize("name", [name for name in FAMILIES if name != "combined"])


def architecture(task) -> tuple:
    return (str(task.make_host()), task.slots, task.data.train_x.shape[1:])


@EVERY
@pytest.mark.parametrize("split", SPLITS)
def test_tasks_fit_together(name, split):
    for rng_seed in range(6):
        task = find_task(name, split=split, rng_seed=rng_seed)
        host = task.make_host()
        segments = [segment for segment, _ in host.named_children()]
        assert list(task.slots) == segments[: len(task.slots)]
        assert task.traits["depth"] == len(segments) - 1 >= len(task.slots) >= 1
        assert task.traits["num_slots"] == len(task.slots)
        x, y = task.draw(rng_seed).data.split("train")
        expected = y[:3].shape if task.data.is_regression else (*y[:3].shape, task.data.num_classes)
        assert host(x[:3]).shape == expected
        task.loss(host(x[:3]), y[:3]).backward()


@EVERY
def test_the_rng_seed_decides_the_task(name):
    first, again = find_task(name, rng_seed=4), find_task(name, rng_seed=4)
    assert architecture(first) == architecture(again)
    assert first.traits == again.traits
    assert torch.equal(first.data.train_x, again.data.train_x)
    assert torch.equal(first.draw(2).data.train_y, again.draw(2).data.train_y)
    assert len({architecture(find_task(name, rng_seed=rng_seed)) for rng_seed in range(30)}) > 12


@pytest.mark.parametrize(("name", "steps"), [("mlp", 8), ("cnn", 8), ("mixed", 8), ("sequences", 12)])
def test_generated_tasks_have_data_of_their_own(name, steps):
    tasks = [find_task(name, split=split, rng_seed=rng_seed) for rng_seed in range(8) for split in SPLITS]
    # Two samples of each: single short sequences could be equal by chance.
    samples = {tuple(task.draw(0).data.train_x[:2].flatten().tolist()) for task in tasks}
    assert len(samples | {tuple(task.data.train_x[:2].flatten().tolist()) for task in tasks}) == 2 * len(tasks)
    assert {task.steps_per_host_epoch for task in tasks} == {steps}


def test_mixed_draws_what_mlp_and_cnn_draw():
    tasks = [find_task("mixed", rng_seed=rng_seed) for rng_seed in range(300)]
    pictures = [task.data.train_x.ndim > 2 for task in tasks]
    assert sum(pictures) / len(tasks) == pytest.approx(0.2, abs=0.07)
    for task, picture in zip(tasks, pictures, strict=True):
        assert ("extent" in task.draw(0).traits) == picture


def test_combined_draws_what_its_families_draw():
    names = ("mlp", "cnn", "subsets", "sequences", "broad", "bottlenecks")
    drawn = Counter(
        next(name for name in names if same_task(find_task("combined", rng_seed=seed), find_task(name, rng_seed=seed)))
        for seed in range(120)
    )
    assert drawn["mlp"] == pytest.approx(48, abs=15)
    assert all(3 <= drawn[name] <= 30 for name in names[1:])


def same_task(one: Task, other: Task) -> bool:
    return (
        one.traits == other.traits
        and one.length == other.length
        and one.data.train_x.shape == other.data.train_x.shape
        and torch.equal(one.data.train_x, other.data.train_x)
    )


def test_excerpts_are_clean_samples_of_two_data_sets():
    tasks = [find_task("subsets", rng_seed=rng_seed) for rng_seed in range(60)]
    hosts = [task.draw(0).traits for task in tasks]
    assert {(host["problem"], host["classes"]) for host in hosts} == {("digits", 10), ("mnist1d", 10), ("mnist1d", 5)}
    assert {(host["data_size"], host["label_noise"]) for host in hosts} == {(1024, 0.0)}
    assert {task.steps_per_host_epoch for task in tasks} == {32}


def test_every_transformer_has_a_slot_that_a_seed_can_grow_beside():
    for rng_seed in range(20):
        task = find_task("sequences", rng_seed=rng_seed)
        shapes = [site.shape for site in find_sites(task.make_host(), list(task.slots), task.data.train_x[:2])]
        assert [shape.in_features is None for shape in shapes] == [True] + [False] * (len(shapes) - 1)
        assert len(shapes) >= 2


@EVERY_OF_ONE_KIND
def test_splits_share_neither_architectures_nor_difficulties(name):
    widths, cells, depths = {}, {}, {}
    for split in SPLITS:
        tasks = [find_task(name, split=split, rng_seed=rng_seed) for rng_seed in range(40)]
        hosts = [task.draw(rng_seed).traits for task in tasks for rng_seed in range(6)]
        widths[split] = {traits["width"] for traits in hosts}
        depths[split] = {traits["depth"] for traits in hosts}
        keys = ("data_size",) if name == "digits" else DIFFICULTY
        cells[split] = {tuple(traits.get(key) for key in keys) for traits in hosts}
    for one, other in (("train", "validation"), ("train", "held_out"), ("validation", "held_out")):
        assert not widths[one] & widths[other]
        assert not cells[one] & cells[other]
    assert depths["held_out"] - depths["train"]
    assert max(widths["held_out"]) > max(widths["train"])


@EVERY
def test_splits_draw_from_different_streams(name):
    # With equal ranges the hosts of two splits would still differ.
    variations = [
        replace(find_task(name, split=split, rng_seed=3).variation, problems=(), data_share=(0.5,)) for split in SPLITS
    ]
    data = find_task("digits").data
    labels = [each.host(data, 0.1, rng_seed=0).data.train_y for each in variations]
    assert not torch.equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])
    assert not torch.equal(labels[1], labels[2])


def test_digits_hosts_share_what_is_not_drawn():
    task = find_task("digits")
    hosts = [task.draw(rng_seed).data for rng_seed in range(20)]
    assert all(host.test_x is task.data.test_x for host in hosts)
    assert any(host is task.data for host in hosts)
    assert any(host.train_x is not task.data.train_x for host in hosts)


def test_tasks_travel_to_other_processes():
    task = find_task("mlp")
    copy = pickle.loads(pickle.dumps(task))
    assert str(copy.make_host()) == str(task.make_host())
    assert torch.equal(copy.draw(1).data.train_x, task.draw(1).data.train_x)


def test_families_are_found_by_name():
    assert list(FAMILIES) == [
        "mlp",
        "cnn",
        "mixed",
        "subsets",
        "sequences",
        "digits",
        "broad",
        "bottlenecks",
        "combined",
    ]
    assert find_task("mlp", split="validation", rng_seed=4).name == "mlp-validation-4"
    assert find_task("spirals-mlp", split="validation", rng_seed=4).name == "spirals-mlp"
    with pytest.raises(ValueError, match="task has no choice 'digit'; did you mean digits"):
        find_task("digit")
    with pytest.raises(ValueError, match="task has no choice 'xyz'; valid ones are mlp, cnn, mixed, subsets"):
        find_task("xyz")


def family_of(**ranges: tuple[Ranges, ...]) -> TaskFamily:
    return TaskFamily(ranges=ranges)  # pyright: ignore[reportArgumentType]


def test_bad_arguments_are_refused():
    ranges = MLP.ranges
    with pytest.raises(ValueError, match="split must be one of train, validation, held_out, got 'test'"):
        find_task("mlp", split="test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rng_seed must not be negative, got -1"):
        find_task("mlp", rng_seed=-1)
    with pytest.raises(ValueError, match="a family needs ranges for train, validation, held_out, got train"):
        family_of(train=ranges["train"])
    shared = (*ranges["held_out"], replace(ranges["held_out"][0], widths=(6, 50)))
    with pytest.raises(ValueError, match=r"splits must not share widths, got \[6\] in train and held_out"):
        family_of(train=ranges["train"], validation=ranges["validation"], held_out=shared)

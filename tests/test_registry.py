"""Registry: names in order, refusals that name the nearest, and one look-up for what users bring."""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_run

import simic
from simic.control.registry import CONTROLLERS, make_controller
from simic.evaluation.parsing import parse_controllers, parse_tasks
from simic.registry import Registry
from simic.tasks.registry import check_data, find_task


def one() -> int:
    return 1


def other() -> int:
    return 2


def test_entries_come_in_order_of_registration():
    registry: Registry[int] = Registry("number")
    registry.add("two", 2, other)
    registry.add("one", 1, one)
    assert list(registry) == ["two", "one"]
    assert registry["one"] == 1
    assert "three" not in registry


def test_a_name_is_given_once_but_its_definition_may_be_run_again():
    registry: Registry[int] = Registry("number")
    registry.add("one", 1, one)
    registry.add("one", 11, one)  # a notebook cell run twice
    assert registry["one"] == 11
    with pytest.raises(
        ValueError, match=r"a number named 'one' exists already \(in tests.test_registry\); choose another"
    ):
        registry.add("one", 2, other)


@pytest.mark.parametrize("name", ["", "a,b", "a=b", "a:b", "-a", "a b", 3])
def test_names_that_the_command_line_could_not_read_are_refused(name):
    with pytest.raises(ValueError, match="a number's name consists of letters"):
        Registry("number").add(name, 1, one)


def test_an_unknown_name_is_answered_with_the_nearest():
    registry: Registry[int] = Registry("number")
    registry.add("seven", 7, one)
    with pytest.raises(ValueError, match=r"there is no number named 'sevn'; did you mean seven\?"):
        registry["sevn"]
    with pytest.raises(ValueError, match="size has no choice 'x'; valid ones are seven"):
        registry.check("size", "x")


# Tasks and families of the user's own.


def test_a_task_of_one_s_own_is_found_made_once_and_named_as_registered(own_names):
    calls = []

    @simic.task("mine")
    def mine():
        calls.append(1)
        return tiny_run.make_task()

    assert find_task("mine").name == "mine"
    assert find_task("mine").data is find_task("mine", split="held_out", rng_seed=3).data
    assert len(calls) == 1
    assert parse_tasks(["mine"], 4)[0].find().name == "mine"


def test_a_family_of_one_s_own_draws_by_rng_seed_and_split(own_names):
    seen = []

    @simic.family("ours")
    def ours(rng_seed, split):
        seen.append((rng_seed, split))
        return tiny_run.make_task()

    assert [task.find().name for task in parse_tasks(["ours:validation"], 2)] == [
        "ours-validation-0",
        "ours-validation-1",
    ]
    assert seen == [(0, "validation"), (1, "validation")]


def test_a_task_that_takes_data_dir_is_given_one(own_names, tmp_path):
    @simic.task("mine", find_files=lambda data_dir: [(data_dir or Path("nowhere")).resolve(strict=True)])
    def mine(data_dir=None):
        assert data_dir == tmp_path
        return tiny_run.make_task()

    (task,) = parse_tasks(["mine"], 1, str(tmp_path))
    assert task.find().name == "mine"
    check_data(["mine"], tmp_path)
    with pytest.raises(FileNotFoundError):
        check_data(["mine"], None)


def test_what_is_no_task_is_refused(own_names):
    simic.task("empty")(lambda: None)
    with pytest.raises(ValueError, match=re.escape("task or family empty must return a simic.Task, got None")):
        find_task("empty")
    with pytest.raises(ValueError, match="a task family named 'mlp' exists already"):
        simic.task("mlp")(one)
    with pytest.raises(ValueError, match="a task named 'empty' exists already"):
        simic.family("empty")(one)


# Controllers of the user's own.


def test_a_controller_of_one_s_own_is_made_by_name_and_competes(own_names):
    @simic.controller("mine")
    class Mine:
        """Waits, in its own way.

        And more.
        """

        def __init__(self, rng_seed: int) -> None:
            self.rng_seed = rng_seed

        def act(self, facts):
            return np.zeros((facts.num_hosts, 8), dtype=np.int64)

    @simic.controller("plain", description="says so")
    def plain():
        return Mine(5)

    assert make_controller("mine", rng_seed=3).rng_seed == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert make_controller("plain", rng_seed=3).rng_seed == 5  # pyright: ignore[reportAttributeAccessIssue]
    assert CONTROLLERS["mine"].description == "Waits, in its own way."
    candidates = parse_controllers(["mine,plain"]).candidates
    assert [(own.label, own.kind, own.description) for own in candidates] == [
        ("mine", "mine", "Waits, in its own way."),
        ("plain", "plain", "says so"),
    ]

"""Tasks and families by name: one look-up for those of simic and of users."""

import pytest
from helpers import tiny_run

import simic
from simic.tasks.registry import FAMILIES, SPLITS, TASKS, check_name, find_task


@pytest.mark.usefixtures("own_names")
def test_a_task_and_a_family_of_ones_own_are_found_by_name():
    simic.task("mine")(tiny_run.make_task)
    drawn = []

    @simic.family("ours")
    def ours(rng_seed: int, split: str) -> simic.Task:
        drawn.append((rng_seed, split))
        return tiny_run.make_task()

    assert find_task("mine").name == "mine"
    assert find_task("ours", split="validation", rng_seed=4).slots == ("stem", "block1")
    assert drawn == [(4, "validation")]
    check_name("mine")
    check_name("ours")


@pytest.mark.usefixtures("own_names")
def test_a_name_can_be_given_once():
    simic.task("mine")(tiny_run.make_task)
    with pytest.raises(ValueError, match="named 'mine' exists already"):
        simic.task("mine")(lambda: tiny_run.make_task())
    with pytest.raises(ValueError, match="exists already"):
        simic.family("digits-mlp")(lambda rng_seed, split: tiny_run.make_task())


def test_an_unknown_name_is_met_with_the_nearest():
    with pytest.raises(ValueError, match="'digit-mlp'; did you mean digits-mlp"):
        check_name("digit-mlp")


def test_a_family_draws_other_tasks_from_every_split():
    assert "digits-cnn" in TASKS
    assert set(FAMILIES) >= {"mlp", "cnn"}
    for name in ("mlp", "cnn"):
        tasks = [find_task(name, split=split, rng_seed=1) for split in SPLITS]
        assert len({task.name for task in tasks}) == len(SPLITS)

"""Suites: fixed sets and baselines, whatever else is given, and what they exclude."""

import pytest

from simic.evaluation.config import EvaluationConfig
from simic.evaluation.suites import SUITES, suite_settings
from simic.tasks.registry import TASKS

BASELINES = ["wait", "heuristic", "plan", "static_scaled"]


def config(**given: object) -> EvaluationConfig:
    return EvaluationConfig(**suite_settings("real", given))


def test_the_suite_compares_its_baselines_and_static_wide_of_every_learned_controller(grower):
    found = config(controllers=(f"ours={grower}",))
    labels = [own.label for own in found.candidates]
    assert labels == [*BASELINES, "ours", "static_wide(ours)"]
    assert [str(task) for task in found.named_tasks] == list(SUITES["real"].tasks)
    assert found.rng_seeds == (0, 1, 2, 3, 4)


def test_a_baseline_that_is_named_is_not_added_again():
    found = config(controllers=("heuristic,random", "plan"))
    assert [own.label for own in found.candidates] == ["wait", "static_scaled", "heuristic", "random", "plan"]


def test_its_command_gives_the_same_suite(grower):
    found = config(controllers=(f"ours={grower}",), tasks=("dna-mlp", "mnist-cnn"), rng_seeds=(0, 1))
    assert found.command == (
        f"simic evaluate --suite real --controllers wait,heuristic,plan,static_scaled ours={grower} "
        "--tasks dna-mlp,mnist-cnn --rng-seeds 2"
    )
    again = config(controllers=found.controllers, tasks=("dna-mlp,mnist-cnn",), rng_seeds=(0, 1))
    assert again.candidates == found.candidates
    assert again.named_tasks == found.named_tasks


def test_all_sets_are_tasks_that_read_files():
    for suite in SUITES.values():
        assert all(TASKS[name].reads_files and TASKS[name].find_files for name in suite.tasks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": ("dna-mpl",)}, "there is no task or family 'dna-mpl'; did you mean dna-mlp"),
        ({"tasks": ("digits-mlp",)}, "the suite real has no set 'digits-mlp'; "),
        ({"tasks": ("mlp:held_out",)}, "the suite real has no set 'mlp-held_out-0'; "),
        ({"horizon": 9}, "--horizon and --suite exclude each other: its sets have numbers of host epochs of their own"),
        ({"num_tasks": 9}, "--num-tasks and --suite exclude each other"),
        ({"ablations": True}, "--ablations and --suite exclude each other"),
        ({"rng_seeds": (0,)}, "at least 2 rng seeds, got 1"),
    ],
)
def test_what_does_not_fit_a_suite_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        config(controllers=("heuristic",), **given)


def test_an_unknown_suite_is_met_with_the_names_there_are():
    with pytest.raises(ValueError, match="there is no suite 'reel'; did you mean real"):
        suite_settings("reel", {})

"""Two processes train one model: the numbers of one process, the same on both, and errors instead of drift or hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import parallel_training

pytestmark = pytest.mark.integrations

SCENARIOS = [
    "grow",
    "grow_shadow",
    "grow_shadow_find_unused",
    "grow_straight_through",
    "grow_frozen",
    "grow_frozen_wrapped",
    "grow_compiled",
    "resume",
    "accelerated",
    "larger_network",
    "controller_by_rank",
    "metrics_are_means",
    "different_rng_seeds",
    "prunes_alone",
    "germinates_alone",
    "trains_alone",
    "calls_differ",
    "uneven_inputs",
    "sharded",
    "grow_logged",
]
SECONDS = 150
"""After which processes that hang are ended."""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[Any]]:
    """What both ranks found in every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "helpers.parallel_training"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder), *SCENARIOS], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return {name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in SCENARIOS}


def check_like_one_process(ranks: list[Any], alone: dict[str, Any]) -> None:
    """Both ranks bit for bit the same, and what one process does with whole batches, up to the order of sums."""
    assert ranks[0] == ranks[1]
    for name in ("decisions", "slots", "seed_groups"):
        assert ranks[0][name] == alone[name]
    assert ranks[0]["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert ranks[0]["weights"].keys() == alone["weights"].keys()
    for name, values in alone["weights"].items():
        torch.testing.assert_close(torch.tensor(ranks[0]["weights"][name]), torch.tensor(values), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "scenario",
    [
        "grow",
        "grow_shadow",
        "grow_shadow_find_unused",
        "grow_straight_through",
        "grow_frozen",
        "grow_frozen_wrapped",
    ],
)
def test_two_ranks_with_half_batches_are_one_process_with_whole_batches(found, scenario, tmp_path):
    """Over germination, blending, fossilizing and pruning, with accumulated and clipped gradients."""
    alone = getattr(parallel_training, scenario)(0, 1, tmp_path)
    check_like_one_process(found[scenario], alone)
    if "frozen" not in scenario:
        assert alone["slots"]["1"] == "fossilized"
        assert {"germinate", "advance", "fossilize", "prune"} <= {action.split()[0] for action in alone["decisions"]}


def test_only_the_first_rank_writes_the_log(found):
    first, second = found["grow_logged"]
    assert first["decisions"] == second["decisions"] == list(range(parallel_training.EPOCHS))
    assert (first["written_here"], second["written_here"]) == (True, False)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_loaded_before_or_after_wrapping_continues_exactly(found, when):
    straight, resumed = found["grow"][0], found["resume"]
    assert resumed[0] == resumed[1]
    assert resumed[0][when]["weights"] == straight["weights"]
    assert resumed[0][when]["losses"] == straight["losses"]  # of all decisions, also those before


@pytest.fixture(scope="module")
def accelerated_alone(tmp_path_factory) -> dict[str, Any]:
    return parallel_training.accelerated(0, 1, tmp_path_factory.mktemp("accelerated"))


def test_accelerate_prepares_model_optimizer_and_rate(found, accelerated_alone):
    check_like_one_process([rank["straight"] for rank in found["accelerated"]], accelerated_alone["straight"])


def test_accelerates_own_checkpoint_continues_exactly(found, accelerated_alone):
    for run in (*found["accelerated"], accelerated_alone):
        assert run["resumed"]["weights"] == run["straight"]["weights"]
        assert run["resumed"]["losses"] == run["straight"]["losses"]


def test_a_compiled_model_inside_ddp(found, tmp_path):
    check_like_one_process(found["grow_compiled"], parallel_training.grow_compiled(0, 1, tmp_path))


def test_ddp_around_a_larger_network_that_holds_a_seed(found):
    assert found["larger_network"][0] == found["larger_network"][1]
    assert found["larger_network"][0]["decisions"][2].startswith("prune")


def test_rank_0_decides_where_controllers_differ(found):
    for rank in found["controller_by_rank"]:
        assert rank["slots"] == {"1": "blending", "3": "dormant"}


def test_metrics_are_means_over_ranks(found):
    assert found["metrics_are_means"] == [{"val_loss": 2.5, "val_accuracy": 0.1}] * 2


# Disagreement: an error on every rank, never a hang.


def test_different_rng_seeds(found):
    for error in found["different_rng_seeds"]:
        assert error.startswith(
            "RanksDisagreeError: ranks disagree before a decision about rng seed: rank 0: 0; rank 1: 1"
        )


def test_a_rank_that_prunes_by_itself(found):
    for errors in found["prunes_alone"]:
        assert "about slots: rank 0: 1 blending mlp" in errors["step"]
        assert "rank 1: 1 pruned" in errors["step"]
        assert "different seeds in the same backward pass (rank 0: 1; rank 1: none)" in errors["training"]


def test_a_rank_that_germinates_by_itself(found):
    for error in found["germinates_alone"]:
        assert "different seeds in the same backward pass (rank 0: none; rank 1: 1)" in error


def test_ranks_that_train_without_averaging(found):
    for error in found["trains_alone"]:
        assert "6 of 6 parameter tensors differ" in error
        assert "train the model inside DistributedDataParallel" in error


def test_calls_that_differ(found):
    for errors in found["calls_differ"]:
        assert "rank 0: in evaluate; rank 1: in the metrics given" in errors["arguments"]
        assert "rank 0: val_accuracy; rank 1: val_loss" in errors["metrics"]
        assert "about trained: rank 0: False; rank 1: True" in errors["idle"]
    told = [errors["evaluate"] for errors in found["calls_differ"]]
    assert (
        told[0]
        == "RuntimeError: rank 1 failed in evaluate, so this rank stops too: ZeroDivisionError: division by zero"
    )
    assert told[1] == "ZeroDivisionError: division by zero"


def test_a_step_that_failed_on_one_rank_can_be_repeated(found):
    assert [errors["repeated"] for errors in found["calls_differ"]] == ["no error"] * 2


# What cannot work says so.


def test_uneven_inputs_are_refused(found):
    for error in found["uneven_inputs"]:
        assert "give every rank the same number" in error


def test_sharded_models_are_refused_at_construction(found):
    for errors in found["sharded"]:
        assert "wrapped in FSDPModule: do not call fully_shard" in errors["model"]
        assert "wrapped in FSDPModule: do not call fully_shard" in errors["layer"]
        assert "parameters of the model are DTensors" in errors["tensor"]

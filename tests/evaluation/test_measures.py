"""Episodes and their measures: compute, score and the lives of seeds, by hand."""

import math

import numpy as np
import pytest
from helpers.tiny_comparison import make_settings, make_task, scripted

from simic.evaluation.flops import TrainingFlops
from simic.evaluation.measures import Fossil, episodes, play
from simic.lifecycle.actions import Action
from simic.tasks.hosts import plain_mlp_host, slot_names

# A host of 4 inputs, 3 hidden and 2 outputs: forward 2 (4 3) + 2 (3 2) operations per sample, as many again for the
# gradient of the weights, and 2 (3 2) for the gradient of the hidden layer; the inputs need none.
HOST = 24 + 12 + 24 + 12 + 12
# A seed of hidden size 4 between 3 features: two products of 2 (3 4), each with two gradients. A gate: 2 (3 1).
SEED, GATE = 3 * (24 + 24), 3 * 6
SAMPLES = 32


def narrow(**changes):
    return make_task(make_host=lambda: plain_mlp_host(4, 3, 1, 2), slots=slot_names(1), **changes)


def test_operations_by_hand():
    flops = TrainingFlops(make_settings().trainings(narrow()))
    assert flops.host == HOST
    assert flops.seed(0, "mlp_small", "add") == flops.seed(0, "mlp_small", "multiply") == SEED
    assert flops.seed(0, "mlp_small", "gate") == SEED + GATE
    assert flops.seed(0, "norm", "add") == 0  # no product in it
    assert flops.behind(0) == 12 + 12  # forward, and the gradient of what the seed put in


def test_seeds_cost_while_they_live():
    script = (Action(), Action("germinate", 0, "mlp_small"), Action("prune", 0), Action())
    lives = play(make_settings(2, horizon=4).trainings(narrow()), scripted(*script))
    assert lives.flops.tolist() == [SAMPLES * (4 * HOST + SEED)] * 2


def test_a_seed_in_shadow_training_pays_its_second_pass():
    script = (Action("germinate", 0, "mlp_small"), Action("advance", 0), Action())
    lives = play(make_settings(1, horizon=3, incubation="shadow").trainings(narrow()), scripted(*script))
    assert lives.flops.tolist() == [SAMPLES * (3 * HOST + 2 * (SEED + 24))]


GROWING = (
    Action("germinate", "stem", "mlp", style="gated"),
    Action("germinate", "block1", "norm"),
    Action("prune", "block1"),
    Action("advance", "stem"),
    Action("fossilize", "stem"),
    Action(),
)


def test_what_is_told_of_an_episode():
    trainings = make_settings(2, horizon=6).trainings(make_task())
    lives = play(trainings, scripted(*GROWING))
    own = 4 * 4 + 4 + 4 * 4 + 4 + 4 * 2 + 2  # 50
    seed = 4 * 16 + 16 + 16 * 4 + 4 + 5
    assert trainings.hosts.host_parameters == own
    for record, rng_seed in zip(episodes(lives, [7, 9], own), (7, 9), strict=True):
        assert record["rng_seed"] == rng_seed
        assert (record["parameters"], record["host_parameters"]) == (own + seed, own)
        assert record["score"] == pytest.approx(record["metric"] - math.log2((own + seed) / own))
        assert record["accuracy_per_parameter"] == pytest.approx(record["metric"] / (own + seed))
        assert record["parameter_curve"] == [own, own + seed, own + seed + 9, *[own + seed] * 4]
        assert len(record["val_curve"]) == 7
        assert record["area"] == pytest.approx(np.mean(record["val_curve"][1:]))
        stem, block = record["seeds"]
        worth = stem.pop("contribution"), block.pop("contribution")
        assert all(isinstance(value, float) for value in worth)
        assert stem == {"slot": "stem", "blueprint": "mlp", "germinated": 0, "ended": 4, "fate": "fossilized"}
        assert block == {"slot": "block1", "blueprint": "norm", "germinated": 1, "ended": 2, "fate": "pruned"}
    assert lives.fossils(1) == [Fossil(0, "mlp", "gated")]
    assert lives.test_metric.tolist() == trainings.test_metric().tolist()


def test_a_seed_whose_fate_is_open_does_not_count():
    trainings = make_settings(1, horizon=3).trainings(make_task())
    lives = play(trainings, scripted(Action("germinate", "stem", "mlp")))
    (record,) = episodes(lives, [0], 50)
    assert (record["parameters"], record["score"]) == (50, record["metric"])
    assert [(seed["fate"], seed["ended"]) for seed in record["seeds"]] == [("live", None)]
    assert lives.fossils(0) == []


def test_a_host_that_breaks_stays_as_it_was_then():
    trainings = make_settings(2, horizon=6).trainings(make_task(learning_rate=1e25))
    lives = play(trainings, scripted(Action("germinate", "stem", "mlp")))
    assert (lives.decisions < 6).all()
    for host, end in enumerate(lives.decisions):
        assert len(set(lives.val_metric[end:, host])) == 1
        assert 0 < lives.flops[host] <= end * SAMPLES * 10_000
    assert np.isfinite(lives.test_metric).all()
    assert (lives.exported == 50).all()
    assert not lives.actions[1:].any()
    fates = [[seed["fate"] for seed in record["seeds"]] for record in episodes(lives, [0, 1], 50)]
    assert fates == [["pruned"], ["pruned"]]

"""Episodes and their measures: compute, score and the lives of seeds, by hand."""

import math

import numpy as np
import pytest
from helpers.tiny_comparison import make_settings, make_task, scripted

from simic.environment.episodes import decide_by, play
from simic.evaluation.candidates import Settings, evaluate_episodes
from simic.evaluation.flops import TrainingFlops
from simic.evaluation.measures import Fossil, fossils
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
    assert flops.seed(0, "widen_small", "add") == 3 * (32 + 24)  # from the 4 inputs of the segment
    assert flops.behind(0) == 12 + 12  # forward, and the gradient of what the seed put in


def flops_of(settings: Settings, script: tuple[Action, ...]) -> list[float]:
    trainings = settings.trainings(narrow())
    return TrainingFlops(trainings).of_episodes(play(trainings, decide_by(scripted(*script)))).tolist()


def test_seeds_cost_while_they_live():
    script = (Action(), Action("germinate", 0, "mlp_small"), Action("prune", 0), Action())
    assert flops_of(make_settings(2, horizon=4), script) == [SAMPLES * (4 * HOST + SEED)] * 2


def test_a_seed_in_shadow_training_pays_its_second_pass():
    script = (Action("germinate", 0, "mlp_small"), Action("advance", 0), Action())
    assert flops_of(make_settings(1, horizon=3, incubation="shadow"), script) == [
        SAMPLES * (3 * HOST + 2 * (SEED + 24))
    ]


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
    own = 4 * 4 + 4 + 4 * 4 + 4 + 4 * 2 + 2  # 50
    seed = 4 * 16 + 16 + 16 * 4 + 4 + 5
    assert trainings.hosts.host_parameters == own
    record, results = evaluate_episodes(trainings, scripted(*GROWING), [7, 9], own)
    for result, rng_seed in zip(results, (7, 9), strict=True):
        assert result["rng_seed"] == rng_seed
        assert (result["parameters"], result["host_parameters"]) == (own + seed, own)
        assert result["score"] == pytest.approx(result["metric"] - math.log2((own + seed) / own))
        assert result["accuracy_per_parameter"] == pytest.approx(result["metric"] / (own + seed))
        assert result["parameter_curve"] == [own, own + seed, own + seed + 9, *[own + seed] * 4]
        assert len(result["val_curve"]) == 7
        assert result["area"] == pytest.approx(np.mean(result["val_curve"][1:]))
        stem, block = result["seeds"]
        worth = stem.pop("contribution"), block.pop("contribution")
        assert all(isinstance(value, float) for value in worth)
        assert stem == {"slot": "stem", "blueprint": "mlp", "germinated": 0, "ended": 4, "fate": "fossilized"}
        assert block == {"slot": "block1", "blueprint": "norm", "germinated": 1, "ended": 2, "fate": "pruned"}
    assert fossils(record, 1) == [Fossil(0, "mlp", "gated")]
    assert [result["metric"] for result in results] == (100 * trainings.test_quality()).tolist()


def test_a_seed_whose_fate_is_open_does_not_count():
    trainings = make_settings(1, horizon=3).trainings(make_task())
    record, (result,) = evaluate_episodes(trainings, scripted(Action("germinate", "stem", "mlp")), [0], 50)
    assert (result["parameters"], result["score"]) == (50, result["metric"])
    assert [(seed["fate"], seed["ended"]) for seed in result["seeds"]] == [("live", None)]
    assert fossils(record, 0) == []


def test_a_host_that_breaks_stays_as_it_was_then():
    trainings = make_settings(2, horizon=6).trainings(make_task(learning_rate=1e25))
    record, results = evaluate_episodes(trainings, scripted(Action("germinate", "stem", "mlp")), [0, 1], 50)
    assert (record.decisions < 6).all()
    for end, result in zip(record.decisions, results, strict=True):
        assert len(result["val_curve"]) == len(result["parameter_curve"]) == 7
        assert len(set(result["val_curve"][end:])) == len(set(result["parameter_curve"][end:])) == 1
        assert 0 < result["flops"] <= end * SAMPLES * 10_000
        assert math.isfinite(result["metric"])
        assert result["parameters"] == 50
    assert not record.action[1:].any()
    fates = [[seed["fate"] for seed in result["seeds"]] for result in results]
    assert fates == [["pruned"], ["pruned"]]

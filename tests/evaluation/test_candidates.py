"""Contestants that derive from a learned controller: what they are given, and what they do with it."""

import shutil

import numpy as np
import pytest
import torch
from helpers import tiny_comparison
from helpers.tiny_comparison import make_planted, make_settings, make_task
from torch import nn

from simic.control.baselines import WaitController
from simic.control.learned import LearnedController
from simic.environment.episodes import decide_by, play
from simic.evaluation.candidates import (
    ReplayController,
    ShuffledController,
    count_parameters,
    derangement,
    inputs_of,
    most_frequent,
    plant_fossils,
    width_for,
)
from simic.evaluation.measures import Fossil, fossils
from simic.evaluation.parsing import NamedTask, parse_controllers
from simic.growth.blueprints import new_branch
from simic.lifecycle.actions import HEADS, Action, Op
from simic.lifecycle.stages import Stage
from simic.stacked.seed_groups import GATE, OPERATORS
from simic.storage.bundle import load_bundle
from simic.storage.checkpoint import save_checkpoint

# Fossils that are planted.


def test_planted_fossils_are_newborn_speak_at_once_and_change_nothing_yet():
    settings = make_settings(3)
    alone, planted = settings.trainings(make_task()), settings.trainings(make_task())
    wanted = [[Fossil(0, "mlp", "gated")], [], [Fossil(0, "norm", "linear-add"), Fossil(1, "mlp", "linear-multiply")]]
    plant_fossils(planted, wanted)
    hosts = planted.hosts
    assert torch.equal(hosts.hosts.rows, alone.hosts.hosts.rows)
    assert hosts.slot_state.stage[:, 0].tolist() == [Stage.FOSSILIZED, Stage.DORMANT, Stage.FOSSILIZED]
    assert hosts.slot_state.alpha.tolist() == [[1, 0], [0, 0], [1, 1]]
    assert {key: group.hosts.tolist() for key, group in hosts.groups.items()} == {
        (0, "mlp"): [0],
        (0, GATE): [0],
        (0, "norm"): [2],
        (1, "mlp"): [2],
    }
    operators = [OPERATORS[hosts.structure.operator[host, slot]] for host, slot in ((0, 0), (2, 0), (2, 1))]
    assert operators == ["gate", "add", "multiply"]
    born = new_branch("mlp", hosts.sites[0].shape, (int(hosts.rng_seeds[0]), 0, 0))
    weights = torch.cat([parameter.detach().flatten() for parameter in born.parameters()])
    assert torch.equal(hosts.groups[0, "mlp"].parameters.rows[0], weights)
    assert planted._evaluate("validation")[1].tolist() == alone._evaluate("validation")[1].tolist()


def test_planted_fossils_learn_and_are_exported():
    settings = make_settings(2, horizon=3)
    trainings = settings.trainings(make_task())
    plant_fossils(trainings, [[Fossil(1, "mlp", "linear-add")], []])
    before = trainings.hosts.groups[1, "mlp"].parameters.rows.clone()
    record = play(trainings, decide_by(WaitController().act))
    assert not torch.equal(trainings.hosts.groups[1, "mlp"].parameters.rows, before)
    assert record.exported_parameters.tolist() == [50 + 148, 50]
    assert [seed.blueprint for seed in fossils(record, 0)] == ["mlp"]


# Wider hosts.


@pytest.mark.parametrize(("parameters", "width"), [(1, 1), (50, 4), (51, 5), (1000, 28)])
def test_the_least_width_with_so_many_parameters(parameters, width):
    assert width_for(tiny_comparison.host_of_width, parameters) == width  # (w + 4) w + 4 w + 2 w + 2 of width w
    assert count_parameters(tiny_comparison.host_of_width(width)) == width * (width + 8) + 2


def test_a_wider_host_learns_the_same_data():
    task = make_task()
    wide = task.widened(7)
    assert wide.data is task.data
    first = wide.make_host().get_submodule("stem.0")
    assert isinstance(first, nn.Linear)
    assert first.out_features == 7
    with pytest.raises(ValueError, match="one width"):
        make_task(host_of_width=None).widened(7)


@pytest.mark.parametrize("name", [NamedTask("mlp", "train", 3), NamedTask("digits-cnn"), NamedTask("mnist1d-cnn")])
def test_hosts_of_families_and_presets_come_in_any_width(name):
    task = name.find()
    assert task.host_of_width is not None
    own = count_parameters(task.make_host)
    width = width_for(task.host_of_width, own)
    assert count_parameters(task.widened(width).make_host) == own
    assert count_parameters(task.widened(width + 1).make_host) > own
    assert [n for n, _ in task.widened(width + 1).make_host().named_children()][: len(task.slots)] == list(task.slots)


# Replay.


def test_the_most_frequent_sequence_counts_as_a_whole():
    actions = np.zeros((2, 5, len(HEADS)), dtype=np.int64)
    actions[0, :, 0] = [Op.PRUNE, Op.ADVANCE, Op.ADVANCE, Op.ADVANCE, Op.WAIT]
    actions[1, :, 0] = [Op.WAIT, Op.PRUNE, Op.WAIT, Op.PRUNE, Op.WAIT]
    assert most_frequent(actions)[:, 0].tolist() == [Op.ADVANCE, Op.PRUNE]
    assert most_frequent(actions[:, 2:])[:, 0].tolist() == [Op.ADVANCE, Op.WAIT]  # the first of equals


def test_replay_waits_where_an_action_is_illegal():
    settings, task = make_settings(2, horizon=4), make_task()
    names = task.slots, settings.trainings(task).hosts.blueprint_names
    script = [Action("fossilize"), Action("germinate", 0, "mlp"), Action("germinate", 0, "mlp"), Action("prune", 1)]
    rows = np.stack([action.encode(*names) for action in script])
    record = play(settings.trainings(task), decide_by(ReplayController(rows).act))
    assert record.action[:, 1, 0].tolist() == [Op.WAIT, Op.GERMINATE, Op.WAIT, Op.WAIT]


# Shuffled.


@pytest.mark.parametrize("size", [2, 3, 10])
def test_everybody_sees_somebody_else(size):
    seen = derangement(size)
    assert sorted(seen.tolist()) == list(range(size))
    assert (seen != np.arange(size)).all()
    assert seen.tolist() == derangement(size).tolist()


def test_shuffled_decides_as_if_it_led_the_host_it_sees():
    # Hosts that only wait have the same masks, so what differs is what is seen, and remembered of it.
    network = make_planted({Op.GERMINATE: 0.0}, gain=3000.0, rng_seed=1)
    trainings = make_settings(6, horizon=8).trainings(make_task())
    own, other = LearnedController(network), ShuffledController(network, 6)
    chosen = []
    for _ in range(6):
        facts = trainings.facts()
        chosen.append(own.act(facts))
        assert other.act(facts).tolist() == chosen[-1][other.seen].tolist()
        trainings.step(np.zeros_like(chosen[-1]))
    assert len({row.tobytes() for row in np.concatenate(chosen)}) > 1


def test_shuffled_obeys_the_masks_of_its_own_hosts():
    controller = ShuffledController(make_planted(tiny_comparison.EAGER), 4)
    record = play(make_settings(4, horizon=10).trainings(make_task()), decide_by(controller.act))
    assert (record.action[..., 0] == Op.FOSSILIZE).any()


# Where learned controllers come from.


def test_a_run_a_checkpoint_and_a_file_hold_the_same_controller(tmp_path, grower):
    state = load_bundle(grower)
    unfinished = tmp_path / "unfinished"
    checkpoint = save_checkpoint(unfinished / "checkpoints", 3, {"agent": state})
    done = tmp_path / "done"
    done.mkdir()
    shutil.copy(grower, done / "controller.safetensors")
    lineup = parse_controllers([grower, str(unfinished), str(checkpoint), str(done)])
    found = [inputs_of(own) for own in lineup.candidates]
    for weights in found:
        assert weights.config == found[0].config
        assert all(np.array_equal(weights.arrays[name], array) for name, array in found[0].arrays.items())
    assert found[0].arrays["op.bias"][Op.FOSSILIZE] == 9.0

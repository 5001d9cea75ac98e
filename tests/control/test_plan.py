"""Fixed plans and AutoGrow, on real hosts of a tiny task and on plans' files."""

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from simic.cli import main
from simic.control.autogrow import AutoGrowConfig, AutoGrowController
from simic.control.plan import Plan, PlanController, decisions_to_fossil, load_plan, pick_blueprints
from simic.control.registry import make_controller
from simic.environment.config import EpisodeConfig
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import Action, Op
from simic.lifecycle.stages import LifecycleConfig, Stage
from simic.tasks.data import Data
from simic.tasks.hosts import plain_mlp_host, slot_names
from simic.tasks.task import Task


def make_trainings(num_slots: int = 3, horizon: int = 20, **lifecycle) -> HostTrainings:
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for name in ("train", "validation", "test"):
        x = torch.randn(16, 4, generator=generator)
        parts |= {f"{name}_x": x, f"{name}_y": (x[:, 0] > 0).long()}
    task = Task(
        name="tiny",
        data=Data(**parts, num_classes=2),
        make_host=lambda: plain_mlp_host(4, 4, 3, 2),
        slots=slot_names(num_slots),
        batch_size=16,
        learning_rate=1e-2,
    )
    episode = EpisodeConfig(horizon=horizon)
    return HostTrainings(task, [1, 2], episode=episode, lifecycle=LifecycleConfig(**lifecycle))


def lead(trainings: HostTrainings, controller) -> list[Action]:
    """What the controller did with the first host, until the end."""
    names, said = (trainings.hosts.slot_names, trainings.hosts.blueprint_names), []
    for _ in range(trainings.length.host_epochs):
        rows = controller.act(trainings.facts())
        assert (rows == rows[0]).all()
        said.append(Action.decode(rows[0], *names))
        trainings.step(rows)
    return said


def when(said: list[Action], op: str) -> list[int]:
    return [decision for decision, action in enumerate(said) if action.op == op]


def test_a_plan_is_carried_out_to_the_decision():
    plan = Plan(first=2, interval=6, max_seeds=2, blueprints=("nonsense", "glu"), style="gated", alpha_target=0.7)
    trainings = make_trainings()
    said = lead(trainings, PlanController(plan))
    assert when(said, "germinate") == [2, 8]
    assert when(said, "advance") == [5, 11]  # the ramp takes 3 decisions
    assert when(said, "fossilize") == [6, 12]
    assert said[2] == Action("germinate", "stem", "glu", "gated", 3, 0.7)
    assert said[8] == Action("germinate", "block1", "glu", "gated", 3, 0.7)
    assert (trainings.hosts.slot_state.stage[:, :2] == Stage.FOSSILIZED).all()
    assert (trainings.hosts.slot_state.stage[:, 2] == Stage.DORMANT).all()


def test_seeds_that_are_due_at_once_are_planted_one_by_one():
    said = lead(make_trainings(), PlanController(Plan(first=0, interval=1, max_seeds=9)))
    assert when(said, "germinate") == [0, 1, 2]
    assert len(when(said, "fossilize")) == 3


@pytest.mark.parametrize("incubation", ["direct", "shadow"])
def test_a_seed_is_planted_only_if_it_can_become_a_fossil(incubation):
    needed = decisions_to_fossil(LifecycleConfig(incubation=incubation), 3)
    in_time = lead(make_trainings(1, needed, incubation=incubation), PlanController(Plan(first=0)))
    assert (when(in_time, "germinate"), when(in_time, "fossilize")) == ([0], [needed - 1])
    assert not when(lead(make_trainings(1, needed - 1, incubation=incubation), PlanController(Plan())), "germinate")


def test_blueprints_by_name_then_by_size():
    facts = make_trainings(2).facts()
    sizes = dict(zip(facts.blueprint_names, facts.blueprint_parameters[0].tolist(), strict=True))
    by_size = sorted(sizes, key=lambda name: sizes[name])
    behind = [name for name in by_size if not name.startswith("widen")]
    assert [facts.blueprint_names[i] for i in pick_blueprints(facts, (), 0.0)] == [behind[0]] * 2
    assert [facts.blueprint_names[i] for i in pick_blueprints(facts, ("conv",), 1.0)] == [behind[-1]] * 2
    fits_nowhere = facts.blueprint_parameters.copy()
    fits_nowhere[1] = -1
    fits_nowhere[0, facts.blueprint_names.index("mlp")] = -1
    facts = replace(facts, blueprint_parameters=fits_nowhere)
    picked = pick_blueprints(facts, ("mlp", "norm"), 1.0)
    assert (facts.blueprint_names[picked[0]], picked[1]) == ("norm", -1)


@pytest.mark.parametrize(
    ("reads", "seeds_per_slot", "sizes"),
    [
        ("output", 1, ["mlp_large"] * 3),
        ("input", 1, ["widen_large"] * 3),
        ("both", 1, ["mlp_large", "widen_large", "mlp_large"]),
        # In every slot a seed of the other kind follows: stem, stem#2, block1, block1#2, block2, block2#2.
        ("both", 2, ["mlp_large", "widen_large", "widen_large", "mlp_large", "mlp_large", "widen_large"]),
    ],
)
def test_what_seeds_read(reads, seeds_per_slot, sizes):
    facts = make_trainings(3, seeds_per_slot=seeds_per_slot).facts()
    assert [facts.blueprint_names[index] for index in pick_blueprints(facts, (), 1.0, reads)] == sizes


def test_a_slot_that_no_seed_fits_beside_gets_one_behind():
    facts = make_trainings(2).facts()
    parameters = facts.blueprint_parameters.copy()
    parameters[0, facts.reads_input] = -1
    facts = replace(facts, blueprint_parameters=parameters)
    assert [facts.blueprint_names[i] for i in pick_blueprints(facts, (), 1.0, "input")] == ["mlp_large", "widen_large"]


def test_every_slot_gets_a_seed_before_one_gets_a_second():
    plan = Plan(first=0, interval=5, max_seeds=3, reads="both", size=1.0)
    said = lead(make_trainings(2, seeds_per_slot=2), PlanController(plan))
    planted = [(action.slot, action.blueprint) for action in said if action.op == "germinate"]
    assert planted == [("stem", "mlp_large"), ("block1", "widen_large"), ("stem#2", "widen_large")]


def test_a_file_without_reads_means_seeds_behind(tmp_path):
    (tmp_path / "plan.json").write_text('{"first": 1, "size": 1.0}')
    assert load_plan(tmp_path / "plan.json") == Plan(first=1, size=1.0, reads="output")


def test_plans_survive_their_files(tmp_path):
    plan = Plan(first=3, blueprints=("mlp", "conv"), reads="both", size=0.25)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    named = make_controller(str(tmp_path / "plan.json"))
    assert isinstance(named, PlanController)
    assert named.plan == plan
    assert isinstance(load_plan(), Plan)  # the one that ships with simic


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"frist": 1}, "a plan has no frist"),
        ({"interval": 0}, "interval must be at least 1 and at most 1000000, got 0"),
        ({"first": 10**30}, "first must be at least 0 and at most 1000000, got 1000"),
        ({"first": 1.5}, "first must be a whole number, got 1.5"),
        ({"first": True}, "first must be a whole number, got True"),
        ({"max_seeds": None}, "max_seeds must be a whole number, got None"),
        ({"blueprints": "mlp"}, "blueprints must be a list of names, got 'mlp'"),
        ({"blueprints": [1, []]}, r"blueprints must be names, .* got \(1, \[\]\)"),
        ({"blueprints": None}, "blueprints must be a list of names, got None"),
        ({"size": "0.5"}, "size must be a rank from 0 to 1, got '0.5'"),
        ({"reads": "any"}, r"reads must be one of \('output', 'input', 'both'\), got 'any'"),
        ({"reads": ["input"]}, r"reads must be one of .* got \['input'\]"),
        ({"style": {"a": []}}, "style must be one of"),
        ({"style": "x" * 10**6}, "style must be one of .* got 'xxx"),
        ({"x" * 10**5: 1}, "a plan has no"),
        ({"size": 2}, "size must be a rank"),
        ({"tempo": 4}, r"tempo must be one of \(3, 5, 8\), got 4"),
        ([], "holds no plan"),
    ],
)
def test_wrong_plans_are_told(tmp_path, table, message):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=message) as error:
        load_plan(path)
    assert str(error.value).startswith(f"{path} ")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "content",
    [
        *(b"[" * 10**5 + b"]" * 10**5, b'{"size": NaN}', b'{"first": 1' + b"0" * 5000 + b"}", b"\xff", b"", b"{"),
        *(b'{"first": 1, "first": 2}', b" " * 2**20 + b"{}"),
    ],
    ids=["deep", "nan", "long number", "no text", "empty", "torn", "twice", "large"],
)
def test_odd_json_is_refused_by_every_command_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    for command in (
        f"evaluate --controllers {path} --tasks spirals-mlp --rng-seeds 2 --horizon 1 --workers 0 --out {tmp_path}/out",
        f"grow --controller {path} --task spirals-mlp --host-epochs 1",
        f"train --fast-dev-run --algorithm imitation --episodes {path} --out {tmp_path}/run --quiet",
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(command.split())
        said = capsys.readouterr().err
        assert (stopped.value.code, said.count("\n")) == (2, 1), said
        assert str(path) in said
        assert "`simic plan` writes one" in said


# AutoGrow, on facts whose accuracy the test sets.


def grown_at(accuracies: list[float], scale: float = 1.0, **config) -> list[int]:
    """The decisions at which a seed is planted, given the accuracy before each and the change that counts as 1."""
    trainings, controller, found = make_trainings(horizon=99), AutoGrowController(AutoGrowConfig(**config)), []
    for decision, accuracy in enumerate(accuracies):
        facts = trainings.facts()
        facts.val_accuracy[:, -1] = accuracy
        rows = controller.act(dataclasses.replace(facts, metric_scale=np.array([scale])))
        if rows[0, 0] == Op.GERMINATE:
            found.append(decision)
        trainings.step(rows)
    return found


def test_it_grows_every_period_as_long_as_that_helps():
    assert grown_at([0.01 * t for t in range(20)], period=5) == [5, 10, 15]


def test_it_stops_for_good_when_a_period_brought_nothing():
    assert grown_at([0.1] * 6 + [0.5] * 30, period=5) == [5, 10]  # the gain came before 10, none before 15
    assert grown_at([0.1] * 12 + [0.9] * 30, period=5) == [5]  # too late


def test_a_gain_too_small_is_none():
    assert grown_at([0.1] * 6 + [0.1049] * 9, period=5, min_gain=0.005) == [5]
    assert grown_at([0.1] * 6 + [0.1051] * 9, period=5, min_gain=0.005) == [5, 10]
    # The same of a metric with another unit.
    assert grown_at([10.0] * 6 + [10.49] * 9, scale=100.0, period=5, min_gain=0.005) == [5]
    assert grown_at([10.0] * 6 + [10.51] * 9, scale=100.0, period=5, min_gain=0.005) == [5, 10]


def test_its_memory_can_be_saved_and_starts_afresh_with_a_host():
    controller, other, trainings = AutoGrowController(), AutoGrowController(), make_trainings()
    for _ in range(8):
        trainings.step(controller.act(trainings.facts()))
    other.load_state_dict(controller.state_dict())
    for name, values in controller.state_dict().items():
        assert np.array_equal(other.state_dict()[name], values)
    trainings.reset(np.arange(2), [5, 6])
    fresh, again = trainings.facts(), AutoGrowController()
    assert other.act(fresh).tolist() == again.act(fresh).tolist()
    assert other.state_dict()["best"] == again.state_dict()["best"]

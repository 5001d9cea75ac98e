"""Names of contestants and tasks: what they stand for, and what is said of wrong ones."""

import json
from pathlib import Path

import pytest

from simic import pretrained
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.names import ABLATIONS, RULES, NamedTask, parse_controllers, parse_tasks


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A run, two of its kind elsewhere, a checkpoint, a lone controller and a plan; seen from their directory."""
    for name in ("runs/a/controller.safetensors", "old/a/controller.safetensors", "lone.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "runs/b/checkpoints/update_000007").mkdir(parents=True)
    (tmp_path / "runs/b/checkpoints/update_000007/manifest.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "plan.json").write_text(json.dumps({"first": 1}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def labels(*names: str, ablations: bool = False) -> dict[str, str]:
    return {own.label: own.kind for own in parse_controllers(names, ablations=ablations)}


def test_labels_are_short_and_unique(files):
    assert labels("wait,random", "runs/a,old/a", "runs/a/controller.safetensors,lone.safetensors") == {
        "wait": "wait",
        "random": "random",
        "a": "learned",
        "a-2": "learned",
        "a-3": "learned",
        "lone": "learned",
    }
    assert labels("runs/b", "runs/b/checkpoints/update_000007") == {"b": "learned", "b-update_000007": "learned"}
    assert labels("mine=runs/a,schedule=plan.json,schedule") == {
        "mine": "learned",
        "schedule": "schedule",
        "schedule-2": "schedule",
    }


def test_ablations_are_those_of_every_learned_one(files):
    found = parse_controllers(["wait,x=runs/a,y=lone.safetensors"], ablations=True)
    assert [own.label for own in found[3:]] == [f"{kind}({of})" for of in "xy" for kind in ABLATIONS]
    assert {(own.of, own.path) for own in found[3:]} == {("x", Path("runs/a")), ("y", Path("lone.safetensors"))}


def test_tasks_are_families_and_names():
    assert [str(task) for task in parse_tasks(["mlp,fashion-cnn", "digits:train"], 2)] == [
        *("mlp-held_out-0", "mlp-held_out-1", "fashion-cnn", "digits-train-0", "digits-train-1"),
    ]
    assert parse_tasks(["mlp:held_out", "mlp"], 1) == [NamedTask("mlp", "held_out", 0)]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["heuristc"], "'heuristc' is neither a name nor a path that exists; did you mean heuristic?"),
        (["empty"], "empty holds neither a controller nor a checkpoint"),
        (["x=nowhere"], "'nowhere' is neither a name nor a path"),
        (["x=runs/a,x=old/a"], "names 'x' twice"),
        ([","], "must name at least one"),
    ],
)
def test_wrong_controllers_are_told(files, names, message):
    with pytest.raises(ValueError, match="--controllers") as error:
        parse_controllers(names)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fashion-cn", "no task or family 'fashion-cn'; did you mean fashion-cnn?"),
        ("mpl:train", "no task or family 'mpl:train'; did you mean mlp?"),
        ("mlp:heldout", "family mlp has no split 'heldout'; did you mean held_out?"),
        ("", "at least one task"),
    ],
)
def test_wrong_tasks_are_told(name, message):
    with pytest.raises(ValueError, match=r"task|split") as error:
        parse_tasks([name], 2)
    assert message in str(error.value)


def test_a_missing_pretrained_controller_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(pretrained, "CONTROLLER", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="comes without a trained controller"):
        parse_controllers(["pretrained"])


def test_wrong_settings_are_told(files):
    settings = {"controllers": ("wait",), "tasks": ("mlp",)}
    with pytest.raises(ValueError, match="different numbers from 0 on"):
        EvaluationConfig(rng_seeds=(1, 1), **settings)
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        EvaluationConfig(rng_seeds=(1,), horizon=0, **settings)
    with pytest.raises(ValueError, match="one host says nothing"):
        EvaluationConfig(rng_seeds=(1,), num_tasks=1, **settings)
    with pytest.raises(ValueError, match="those of a learned controller"):
        EvaluationConfig(rng_seeds=(0, 1), ablations=True, **settings)
    with pytest.raises(ValueError, match="at least 2 rng seeds"):
        EvaluationConfig(rng_seeds=(0,), ablations=True, controllers=("runs/a",), tasks=("mlp",))


def test_the_command_gives_the_same_settings(files):
    config = EvaluationConfig(
        controllers=("wait", "runs/a"), tasks=("mlp",), rng_seeds=(3, 4), horizon=5, ablations=True
    )
    assert config.command == (
        "simic evaluate --controllers wait,runs/a --tasks mlp --num-tasks 16 --rng-seeds 2 --horizon 5 "
        "--first-rng-seed 3 --ablations"
    )


def test_the_names_are_those_that_make_controllers_everywhere():
    from simic.control.named import CONTROLLERS

    assert {*RULES, "pretrained"} == set(CONTROLLERS)

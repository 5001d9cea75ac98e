"""Names of contestants and tasks: what they stand for, and what is said of wrong ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from simic import pretrained
from simic.evaluation.config import EvaluationConfig
from simic.evaluation.parsing import ABLATIONS, NamedTask, describe_groups, parse_controllers, parse_tasks
from simic.storage.checkpoint import save_checkpoint


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """A run, two of its kind elsewhere, a checkpoint, a lone controller and a plan; seen from their directory."""
    for name in ("runs/a/controller.safetensors", "old/a/controller.safetensors", "lone.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "runs/b/checkpoints/update_000007").mkdir(parents=True)
    (tmp_path / "runs/b/checkpoints/update_000007/manifest.json").write_text("{}")
    save_checkpoint(tmp_path / "runs/a/checkpoints", 8, {})
    (tmp_path / "empty").mkdir()
    (tmp_path / "plan.json").write_text(json.dumps({"first": 1}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def labels(*names: str, ablations: bool = False) -> dict[str, str]:
    return {own.label: own.kind for own in parse_controllers(names, ablations=ablations).candidates}


def groups(*names: str, ablations: bool = False) -> dict[str, list[str]]:
    found = describe_groups(parse_controllers(names, ablations=ablations).candidates)
    return {name: about["members"] for name, about in found.items()}


def test_labels_are_as_much_of_the_path_as_is_needed(files):
    assert labels("wait,random", "runs/a,old/a", "lone.safetensors") == {
        "wait": "wait",
        "random": "random",
        "runs/a": "learned",
        "old/a": "learned",
        "lone": "learned",
    }
    assert labels("runs/a,runs/b") == {"a": "learned", "b": "learned"}
    assert labels("runs/b", "runs/b/checkpoints/update_000007") == {"b": "learned", "b-update_000007": "learned"}
    assert labels("runs/a", "runs/a/checkpoints/update_000008.safetensors") == {
        "a": "learned",
        "a-update_000008": "learned",
    }
    assert labels("mine=runs/a,fixed=plan.json") == {"mine": "learned", "fixed": "plan"}
    assert list(labels("other=plan.json", "plan")) == ["other", "plan"]
    (files / "wait").mkdir()
    (files / "wait/controller.safetensors").touch()
    assert list(labels("wait", "./wait")) == ["wait", f"{files.name}/wait"]
    assert list(labels("a=lone.safetensors", "runs/a")) == ["a", "runs/a"]
    (files / "scale.json").write_text('{"parameter_factor": 2}')
    assert labels("scale.json,static_scaled") == {"scale": "static_scaled", "static_scaled": "static_scaled"}
    assert labels("big=scale.json") == {"big": "static_scaled"}
    (files / "lone.json").write_text("{}")
    assert len(labels("lone.safetensors", "lone.json")) == 2


def test_only_what_is_written_as_a_group_is_one(files):
    assert groups("wait,runs/a,runs/b,pretrained") == {}
    assert groups("wait,ours=runs/a,runs/b", "theirs=old/a,lone.safetensors") == {
        "ours": ["runs/a", "b"],
        "theirs": ["old/a", "lone"],
    }
    assert groups("ours=runs/a,runs/b,base=old/a,pretrained", "wait") == {
        "ours": ["runs/a", "b"],
        "base": ["old/a", "pretrained"],
    }
    assert groups("ours=runs/a", "lone.safetensors") == {}  # a word ends a group, and one is its own name
    assert labels("x=wait") == {"x": "wait"}


def test_how_words_were_read_is_told(files):
    assert parse_controllers(["wait,ours=runs/a,runs/b", "x=old/a"]).readings == [
        "ours stands for runs/a, runs/b, judged as one"
    ]
    for name in ("lr=1", "runs/lr=1", "x,y"):
        (files / name).mkdir()
        (files / name / "controller.safetensors").touch()
    found = parse_controllers(["wait,lr=1", "ours=runs/lr=1,runs/a", "x,y", "mine=lone.safetensors"])
    assert {own.label: own.group for own in found.candidates} == {
        "wait": None,
        "lr=1": None,
        "runs/lr=1": "ours",
        "a": "ours",
        "x,y": None,
        "mine": None,
    }
    assert found.readings == [
        "lr=1 is read as a path, which exists, and not as a group named lr",
        "ours stands for runs/lr=1, runs/a, judged as one",
    ]
    assert labels("mine=x,y") == {"mine": "learned"}
    assert labels("wait,random,mine=runs/a") == {"wait": "wait", "random": "random", "mine": "learned"}


def test_ablations_are_those_of_every_learned_one(files):
    found = parse_controllers(["wait,x=runs/a,y=lone.safetensors"], ablations=True).candidates
    assert (found[3].label, found[3].of) == ("static_scaled", None)  # it derives from none of them
    assert [own.label for own in found[4:]] == [f"{kind}({of})" for of in "xy" for kind in ABLATIONS]
    assert {(own.of, own.path) for own in found[4:]} == {("x", Path("runs/a")), ("y", Path("lone.safetensors"))}


def test_ablations_of_a_group_are_groups(files):
    assert groups("ours=runs/a,runs/b", "lone.safetensors", ablations=True) == {
        "ours": ["a", "b"],
        **{f"{kind}(ours)": [f"{kind}(a)", f"{kind}(b)"] for kind in ABLATIONS},
    }
    found = describe_groups(parse_controllers(["ours=runs/a,runs/b"], ablations=True).candidates)
    assert (found["ours"]["of"], found["replay(ours)"]["of"]) == (None, "ours")


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
        (["x=runs/a,x=old/a"], "names 'x' twice; write x=PATH,PATH in one word"),
        (["x=runs/a", "x=old/a"], "names 'x' twice; write x=PATH,PATH in one word"),
        (["x=runs/a", "wait=old/a", "wait"], "names 'wait' twice; give each a name of its own"),
        (
            ["ours=runs/a,wait"],
            "wait is not trained, and the group ours pools trained controllers; write wait as a word",
        ),
        (["ours=runs/a,plan.json"], "plan.json is not trained"),
        (["runs/a,./runs/a"], "names the same one twice: runs/a and ./runs/a"),
        (["ours=runs/a,runs/a/controller.safetensors"], "names the same one twice: runs/a and runs/a/controller"),
        (["ours=runs/a,runs/b", "best=runs/a"], "names the same one twice"),
        (["wait,wait"], "names the same one twice: wait and wait"),
        (["ours="], "'ours=' must be NAME=PATH"),
        (["=runs/a"], "'=runs/a' must be NAME=PATH"),
        (["runs/lr=0.1"], "'runs/lr=0.1' is neither a name nor a path that exists"),
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
    settings: dict[str, Any] = {"controllers": ("wait",), "tasks": ("mlp",)}
    with pytest.raises(ValueError, match="at least one, different and not negative"):
        EvaluationConfig(rng_seeds=(1, 1), **settings)
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        EvaluationConfig(rng_seeds=(1,), horizon=0, **settings)
    with pytest.raises(ValueError, match="one host gives no confidence interval"):
        EvaluationConfig(rng_seeds=(1,), num_tasks=1, **settings)
    with pytest.raises(ValueError, match="those of a learned controller"):
        EvaluationConfig(rng_seeds=(0, 1), ablations=True, **settings)
    with pytest.raises(ValueError, match="at least 2 rng seeds"):
        EvaluationConfig(rng_seeds=(0,), ablations=True, controllers=("runs/a",), tasks=("mlp",))


def test_the_command_gives_the_same_settings(files):
    (files / "my run").mkdir()
    (files / "my run/controller.safetensors").touch()
    config = EvaluationConfig(
        controllers=("wait", "ours=runs/a,my run"), tasks=("mlp",), rng_seeds=(3, 4), horizon=5, ablations=True
    )
    assert config.command == (
        "simic evaluate --controllers wait 'ours=runs/a,my run' --tasks mlp --num-tasks 16 --rng-seeds 2 --horizon 5 "
        "--first-rng-seed 3 --ablations"
    )

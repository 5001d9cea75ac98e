"""Damaged, missing and hostile files: named, never trusted, and the run goes on from what is whole."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.fault_runs import (
    UPDATES,
    Strike,
    Trial,
    assert_same,
    await_,
    command,
    copy_of,
    end_of,
    finish,
    fork,
    launch,
    run_to_end,
    say,
)
from safetensors.torch import save_file

from simic.storage.bundle import load_bundle, save_bundle

FILES = ("state.safetensors", "state.json", "manifest.json")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


class Hostile:
    """A pickle that leaves a mark wherever it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def poison(mark: Path) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.write_bytes(pickle.dumps(Hostile(mark)))

    return replace


def poison_as_torch_does(mark: Path) -> Callable[[Path], None]:
    return lambda path: torch.save(Hostile(mark), path)


@pytest.fixture
def half_done(unharmed, tmp_path) -> Trial:
    """A copy of the run of which the last update can be lost."""
    return copy_of(unharmed, tmp_path / "run")


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink], ids=["flipped", "truncated", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(name, harm, half_done, unharmed):
    newest = half_done.checkpoints / f"update_{UPDATES:06d}"
    harm(newest / name)
    finish(half_done)
    assert f"skipped {newest.name}: {newest / name} is " in half_done.told
    assert f"resuming after update {UPDATES - 1}\n" in half_done.told
    assert_same(half_done, unharmed)


def test_several_damaged_checkpoints(half_done, unharmed):
    for update, name in zip(range(2, UPDATES + 1), FILES, strict=True):
        flip(half_done.checkpoints / f"update_{update:06d}" / name)
    finish(half_done)
    assert half_done.told.count("skipped update_") == UPDATES - 1
    assert "resuming after update 1\n" in half_done.told
    assert_same(half_done, unharmed)


def test_no_checkpoint_is_whole(half_done, unharmed):
    for path in half_done.checkpoints.iterdir():
        flip(path / "state.safetensors")
    finish(half_done)
    assert half_done.told.count("skipped update_") == UPDATES
    assert_same(half_done, unharmed)


def files_of(trial: Trial) -> list[str]:
    return sorted(str(path.relative_to(trial.path)) for path in trial.path.rglob("*") if path.is_file())


ALL_FILES = [
    *("config.json", "events.jsonl", "process.jsonl", "lock", "controller.safetensors"),
    *(f"checkpoints/update_{update:06d}/{name}" for update in range(1, UPDATES + 1) for name in FILES),
    *(f"episodes/update_{update:06d}.safetensors" for update in range(UPDATES)),
]


def test_all_files_of_a_run_are_known_here(unharmed):
    assert files_of(unharmed) == sorted(ALL_FILES)


@pytest.mark.parametrize("kind", [poison, poison_as_torch_does], ids=["pickle", "torch"])
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_hostile_pickle_is_never_executed(name, kind, half_done, tmp_path):
    """Neither when the run goes on nor when somebody looks at it, learns from it or starts from it."""
    mark = tmp_path / "executed"
    kind(mark)(half_done.path / name)
    pickle.loads(pickle.dumps(Hostile(tmp_path / "trial")))
    assert (tmp_path / "trial").is_dir()  # such a pickle does run code
    run, elsewhere = str(half_done.path), str(tmp_path / "elsewhere")
    looks = [
        ["inspect", run],
        ["runs", "--root", str(tmp_path)],
        ["inspect", str(half_done.path / name)],
        half_done.arguments(),
    ]
    if name.startswith("episodes"):
        looks += [["train", "--algorithm", "imitation", "--episodes", run, "--out", elsewhere, "--compare", "0"]]
    if name.startswith("controller"):
        looks = [["train", "--fast-dev-run", "--init", str(half_done.path / name), "--out", elsewhere], *looks]
    for number, arguments in enumerate(looks):
        code, told = say(arguments, tmp_path / f"look{number}.log")
        assert code in (0, 2, 4), told
        assert "Traceback" not in told, told
    assert not mark.exists()


# The rest of the run directory.


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"nonsense", b'{"updates": 4, "ppo": 3}', b"\xff\xfe", b"{}"], ids=repr
)
def test_damaged_settings_are_named(content, half_done):
    before = (half_done.path / "events.jsonl").read_bytes()
    (half_done.path / "config.json").write_bytes(content)
    assert run_to_end(half_done) in (2, 4)
    assert "Traceback" not in half_done.told, half_done.told
    assert str(half_done.path) in half_done.told, half_done.told
    assert (half_done.path / "events.jsonl").read_bytes() == before


def test_missing_settings_do_not_make_it_a_new_run(half_done, unharmed):
    before = (half_done.path / "events.jsonl").read_bytes()
    (half_done.path / "config.json").unlink()
    assert run_to_end(half_done) == 4
    assert "config.json is missing" in half_done.told
    assert (half_done.path / "events.jsonl").read_bytes() == before
    (half_done.path / "config.json").write_bytes((unharmed.path / "config.json").read_bytes())
    assert_same(finish(half_done), unharmed)


def test_events_that_do_not_reach_the_checkpoint_are_refused(half_done):
    truncate(half_done.path / "events.jsonl")
    assert run_to_end(half_done) == 2
    assert "events.jsonl has no line that ends at byte" in half_done.told
    assert "Traceback" not in half_done.told, half_done.told


# Two processes on one run.


def test_a_second_process_is_refused(trial, unharmed):
    first = launch(trial)
    await_(lambda: trial.starts, "the run began")
    second = Trial(trial.path)
    code, told = say(second.arguments(), trial.path.with_name("second.log"))
    assert code == 4, told
    assert f"process {first.pid} on " in told
    assert "Traceback" not in told, told
    assert end_of(first) == 0, trial.told
    assert_same(trial, unharmed)


def test_only_one_of_many_that_start_together_runs(trial, unharmed):
    logs = [trial.path.with_name(f"log{number}") for number in range(4)]
    arguments = trial.arguments()
    processes = [fork(arguments, log) for log in logs]
    assert sorted(end_of(process) for process in processes) == [0, 4, 4, 4]
    assert_same(trial, unharmed)


def test_the_real_command_refuses_too(trial):
    first = launch(trial, Strike("simic.training.run:Run.collect", 2, number=0, hang=100))
    await_(trial.struck.exists, "the run was under way")
    second = command(trial, workers=2)
    assert second.wait(60) == 4
    assert f"process {first.pid} on " in trial.told
    first.kill()
    end_of(first)


# Recorded episodes.


def episodes_of(source: Trial, path: Path, harm: Callable[[dict], object] = lambda saved: None) -> Path:
    """Recorded episodes with something changed in them, and a checksum that fits."""
    path.mkdir()
    saved = load_bundle(source.path / "episodes" / "update_000000.safetensors")
    changed = harm(saved)
    save_bundle(path / "update_000000.safetensors", saved if changed is None else changed)
    return path


def learn(episodes: Path, tmp_path: Path, algorithm: str = "imitation") -> tuple[int, str]:
    arguments = ["train", "--algorithm", algorithm, "--episodes", str(episodes), "--out", str(tmp_path / algorithm)]
    return say([*arguments, "--compare", "0"], tmp_path / "learn.log")


def test_whole_episodes_are_learned_from(unharmed, tmp_path):
    code, told = learn(episodes_of(unharmed, tmp_path / "episodes"), tmp_path)
    assert code == 0, told


def on_group(change: Callable[[dict], object]) -> Callable[[dict], None]:
    def harm(saved: dict) -> None:
        change(saved["groups"][0])

    return harm


STRANGE = {
    "a list": lambda saved: [1, 2],
    "another format": lambda saved: saved | {"format": "simic-agent"},
    "no version": lambda saved: {k: v for k, v in saved.items() if k != "version"},
    "version of the future": lambda saved: saved | {"version": 99},
    "no groups": lambda saved: {k: v for k, v in saved.items() if k != "groups"},
    "groups that are a number": lambda saved: saved | {"groups": 7},
    "groups that are numbers": lambda saved: saved | {"groups": [1]},
    "no rewards": on_group(lambda group: group.pop("reward")),
    "rewards that are text": on_group(lambda group: group.update(reward="much")),
    "rewards of another length": on_group(lambda group: group.update(reward=group["reward"][:-1])),
    "rewards without an end": on_group(lambda group: group["reward"].fill(float("inf"))),
    "actions of another world": on_group(lambda group: group["action"].fill(999)),
    "negative actions": on_group(lambda group: group["action"].fill(-3)),
    "actions with fewer heads": on_group(lambda group: group.update(action=group["action"][..., :3])),
    "nothing allowed": on_group(lambda group: group["mask"].fill(False)),
    "other features": on_group(lambda group: group.update(base=group["base"][..., :2])),
    "features that are not numbers": on_group(lambda group: group["slots"].fill(float("nan"))),
    "more slots than masks": on_group(lambda group: group.update(slots=group["slots"].repeat(2, axis=2))),
    "something more": on_group(lambda group: group.update(more=group["reward"])),
}


@pytest.mark.parametrize("algorithm", ["imitation", "iql"])
@pytest.mark.parametrize("name", STRANGE)
def test_strange_episodes_are_refused(name, algorithm, unharmed, tmp_path):
    code, told = learn(episodes_of(unharmed, tmp_path / "episodes", STRANGE[name]), tmp_path, algorithm)
    assert "Traceback" not in told, told
    assert code in (2, 4), told
    assert not (tmp_path / algorithm / "controller.safetensors").exists()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    save_file({"weights": torch.zeros(3)}, path)


@pytest.mark.parametrize("harm", [flip, truncate, empty, foreign])
def test_damaged_episodes_are_named(harm, unharmed, tmp_path):
    file = episodes_of(unharmed, tmp_path / "episodes") / "update_000000.safetensors"
    harm(file)
    code, told = learn(file.parent, tmp_path)
    assert code == 2, told
    assert str(file) in told
    assert "Traceback" not in told, told


def test_a_config_of_another_run_is_refused(half_done):
    settings = json.loads((half_done.path / "config.json").read_text()) | {"rng_seed": 7}
    (half_done.path / "config.json").write_text(json.dumps(settings))
    assert run_to_end(half_done) == 2
    assert "rng_seed = 7, not 0" in half_done.told

"""Damaged, missing and hostile files: named, never trusted; the run resumes from what is intact."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.fault_places import COLLECT_PLACE, UPDATES
from helpers.fault_runs import (
    FaultRun,
    InjectedSignal,
    assert_same_results,
    checkpoint_name,
    command,
    copy_of,
    finish,
    run_command,
    run_to_end,
    start,
    start_command,
    wait_for,
    wait_until,
)
from safetensors.torch import save_file

from simic.storage.bundle import load_bundle, save_bundle


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


class Hostile:
    """A pickle that creates a directory when it is loaded."""

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
def copied(reference, tmp_path) -> FaultRun:
    """A copy of the reference run."""
    return copy_of(reference, tmp_path / "run")


@pytest.mark.parametrize("harm", [flip, truncate], ids=["flipped", "truncated"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(harm, copied, reference):
    newest = copied.checkpoints / checkpoint_name(UPDATES)
    harm(newest)
    finish(copied)
    assert f"skipped {newest.name}: {newest} is " in copied.output
    assert f"resuming after update {UPDATES - 1}\n" in copied.output
    assert_same_results(copied, reference)


def test_a_missing_checkpoint_makes_way_for_the_one_before(copied, reference):
    (copied.checkpoints / checkpoint_name(UPDATES)).unlink()
    finish(copied)
    assert f"resuming after update {UPDATES - 1}\n" in copied.output
    assert_same_results(copied, reference)


def test_several_damaged_checkpoints(copied, reference):
    for update, harm in zip(range(2, UPDATES + 1), (flip, truncate, empty), strict=True):
        harm(copied.checkpoints / checkpoint_name(update))
    finish(copied)
    assert copied.output.count("skipped update_") == UPDATES - 1
    assert "resuming after update 1\n" in copied.output
    assert_same_results(copied, reference)


def test_no_checkpoint_is_intact(copied, reference):
    for path in copied.checkpoints.iterdir():
        flip(path)
    finish(copied)
    assert copied.output.count("skipped update_") == UPDATES
    assert_same_results(copied, reference)


def files_of(run: FaultRun) -> list[str]:
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())


ALL_FILES = [
    *("config.json", "events.jsonl", "process.jsonl", "lock", "controller.safetensors"),
    *(f"checkpoints/{checkpoint_name(update)}" for update in range(1, UPDATES + 1)),
    *(f"episodes/update_{update:06d}.safetensors" for update in range(UPDATES)),
]


def test_all_files_of_a_run_are_known_here(reference):
    assert files_of(reference) == sorted(ALL_FILES)


@pytest.mark.parametrize("kind", [poison, poison_as_torch_does], ids=["pickle", "torch"])
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_hostile_pickle_is_never_executed(name, kind, copied, tmp_path):
    """Neither on resume nor when the file is inspected, learned from or used as initial weights."""
    mark = tmp_path / "executed"
    kind(mark)(copied.path / name)
    pickle.loads(pickle.dumps(Hostile(tmp_path / "live")))
    assert (tmp_path / "live").is_dir()  # loading such a pickle does run code
    run, elsewhere = str(copied.path), str(tmp_path / "elsewhere")
    commands = [
        ["inspect", run],
        ["runs", "--root", str(tmp_path)],
        ["inspect", str(copied.path / name)],
        copied.arguments(),
    ]
    if name.startswith("episodes"):
        commands += [["train", "--algorithm", "imitation", "--episodes", run, "--out", elsewhere, "--compare", "0"]]
    if name.startswith("controller"):
        commands = [["train", "--fast-dev-run", "--init", str(copied.path / name), "--out", elsewhere], *commands]
    for number, arguments in enumerate(commands):
        code, output = run_command(arguments, tmp_path / f"command{number}.log")
        assert code in (0, 2, 4), output
        assert "Traceback" not in output, output
    assert not mark.exists()


# The rest of the run directory.


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"nonsense", b'{"updates": 4, "ppo": 3}', b"\xff\xfe", b"{}"], ids=repr
)
def test_damaged_settings_are_named(content, copied):
    before = (copied.path / "events.jsonl").read_bytes()
    (copied.path / "config.json").write_bytes(content)
    assert run_to_end(copied) in (2, 4)
    assert "Traceback" not in copied.output, copied.output
    assert str(copied.path) in copied.output, copied.output
    assert (copied.path / "events.jsonl").read_bytes() == before


def test_missing_settings_do_not_start_a_new_run(copied, reference):
    before = (copied.path / "events.jsonl").read_bytes()
    (copied.path / "config.json").unlink()
    assert run_to_end(copied) == 4
    assert "config.json is missing" in copied.output
    assert (copied.path / "events.jsonl").read_bytes() == before
    (copied.path / "config.json").write_bytes((reference.path / "config.json").read_bytes())
    assert_same_results(finish(copied), reference)


def test_events_that_do_not_reach_the_checkpoint_are_refused(copied):
    truncate(copied.path / "events.jsonl")
    assert run_to_end(copied) == 2
    assert "events.jsonl has no line that ends at byte" in copied.output
    assert "Traceback" not in copied.output, copied.output


# Two processes on one run.


def test_a_second_process_is_refused(run, reference):
    first = start(run)
    wait_until(lambda: run.starts, "the run began")
    second = FaultRun(run.path)
    code, output = run_command(second.arguments(), run.path.with_name("second.log"))
    assert code == 4, output
    assert f"process {first.pid} on " in output
    assert "Traceback" not in output, output
    assert wait_for(first) == 0, run.output
    assert_same_results(run, reference)


def test_only_one_of_many_that_start_together_runs(run, reference):
    logs = [run.path.with_name(f"log{number}") for number in range(4)]
    arguments = run.arguments()
    processes = [start_command(arguments, log) for log in logs]
    assert sorted(wait_for(process) for process in processes) == [0, 4, 4, 4]
    assert_same_results(run, reference)


def test_the_real_command_refuses_too(run):
    first = start(run, InjectedSignal(COLLECT_PLACE, 2, number=0, hang=100))
    wait_until(run.signal_file.exists, "the run was under way")
    second = command(run, workers=2)
    assert second.wait(60) == 4
    assert f"process {first.pid} on " in run.output
    first.kill()
    wait_for(first)


# Recorded episodes.


def episodes_of(source: FaultRun, path: Path, harm: Callable[[dict], object] = lambda saved: None) -> Path:
    """Recorded episodes with a change in them and a correct checksum."""
    path.mkdir()
    saved = load_bundle(source.path / "episodes" / "update_000000.safetensors")
    changed = harm(saved)
    save_bundle(path / "update_000000.safetensors", saved if changed is None else changed)
    return path


def learn(episodes: Path, tmp_path: Path, algorithm: str = "imitation") -> tuple[int, str]:
    arguments = ["train", "--algorithm", algorithm, "--episodes", str(episodes), "--out", str(tmp_path / algorithm)]
    return run_command([*arguments, "--compare", "0"], tmp_path / "learn.log")


def test_whole_episodes_are_learned_from(reference, tmp_path):
    code, output = learn(episodes_of(reference, tmp_path / "episodes"), tmp_path)
    assert code == 0, output


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
def test_strange_episodes_are_refused(name, algorithm, reference, tmp_path):
    code, output = learn(episodes_of(reference, tmp_path / "episodes", STRANGE[name]), tmp_path, algorithm)
    assert "Traceback" not in output, output
    assert code in (2, 4), output
    assert not (tmp_path / algorithm / "controller.safetensors").exists()


def foreign(path: Path) -> None:
    save_file({"weights": torch.zeros(3)}, path)


@pytest.mark.parametrize("harm", [flip, truncate, empty, foreign])
def test_damaged_episodes_are_named(harm, reference, tmp_path):
    file = episodes_of(reference, tmp_path / "episodes") / "update_000000.safetensors"
    harm(file)
    code, output = learn(file.parent, tmp_path)
    assert code == 2, output
    assert str(file) in output
    assert "Traceback" not in output, output


def test_a_config_of_another_run_is_refused(copied):
    settings = json.loads((copied.path / "config.json").read_text()) | {"rng_seed": 7}
    (copied.path / "config.json").write_text(json.dumps(settings))
    assert run_to_end(copied) == 2
    assert "rng_seed = 7, not 0" in copied.output

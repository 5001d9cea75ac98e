"""A plugin by flags alone: one module adds something of every kind, then train and evaluate use all of it by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import simic
from simic.storage.bundle import load_bundle
from simic.telemetry.events import Update
from simic.telemetry.reader import read_events

PLUGIN = '''
import torch
from torch import nn

import simic
from simic.policy.network import FactoredRecurrentActorCritic


@simic.task("mine")
def my_task():
    """The sign of the product of two numbers."""
    x = torch.randn(96, 2, generator=torch.Generator().manual_seed(0))
    y = (x.prod(1) > 0).long()
    parts = {"train": slice(0, 48), "validation": slice(48, 72), "test": slice(72, 96)}
    splits = {f"{name}_{axis}": values[part] for name, part in parts.items() for axis, values in (("x", x), ("y", y))}
    return simic.Task(
        data=simic.Data(**splits, num_classes=2),
        make_host=lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)),
        slots=("0", "1"),
        batch_size=16,
        learning_rate=0.01,
    )


@simic.reward_term("frugality", bound=5.0)
def frugality(transition, config):
    return -1e-2 * (transition.parameters_after - transition.parameters_before)


@simic.reward("mine")
def my_reward():
    return {"score": 1.0, "frugality": 0.5}


@simic.blueprint("my_branch", topology="features")
def my_branch(shape):
    return nn.Sequential(nn.Linear(shape.features, 3), nn.Tanh(), simic.zeroed(nn.Linear(3, shape.features)))


@simic.controller("mine")
class MyController(simic.ScriptedController):
    """Plants one branch at once."""

    def __init__(self):
        super().__init__([simic.Action("germinate", slot=0, blueprint="my_branch")])


@simic.policy_network("mine")
class MyNetwork(FactoredRecurrentActorCritic):
    """The shipped network with another initial value."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        nn.init.constant_(self.critic[-1].bias, 0.5)
'''
TRAIN = (
    *("--task", "mine", "--reward", "mine", "--policy.network", "mine", "--policy.hidden-size", "16"),
    *("--policy.encoding-size", "8", "--workers", "2", "--updates", "2", "--num-groups", "2", "--group-size", "4"),
    *("--episode.horizon", "6", "--compare", "0", "--out", "run"),
)
EVALUATE = (
    *("--controllers", "mine,run", "--tasks", "mine", "--rng-seeds", "2", "--horizon", "6", "--workers", "2"),
    *("--out", "ev"),
)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with the plugin, where commands are run."""
    (tmp_path / "my_module.py").write_text(PLUGIN)
    return tmp_path


def run_simic(here: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    source = str(Path(simic.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "simic.cli", *args]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_everything_that_a_plugin_adds_is_trained_with_and_evaluated_by_name(here):
    trained = run_simic(here, "train", "--plugin", "my_module", *TRAIN)
    assert trained.returncode == 0, trained.stderr
    config = json.loads((here / "run" / "config.json").read_text())
    assert (config["plugins"], config["task"]) == (["my_module"], "mine")
    assert (config["reward"]["scheme"], config["policy"]["network"]) == ("mine", "mine")
    updates = list(read_events(here / "run", [Update]))
    assert len(updates) == 2
    for update in updates:
        assert {"reward/score", "reward/frugality", "reward/rollback"} <= update.metrics.keys()
    assert any(update.metrics["reward/frugality"] for update in updates)  # it was computed in worker processes
    saved = load_bundle(here / "run" / "controller.safetensors")
    assert (saved["about"]["policy"]["network"], saved["about"]["network"]) == ("mine", "MyNetwork")

    evaluated = run_simic(here, "evaluate", "--plugin", "my_module", *EVALUATE)
    assert evaluated.returncode == 0, evaluated.stderr
    results = json.loads((here / "ev" / "results.json").read_text())
    assert {label: about["kind"] for label, about in results["controllers"].items()} == {
        "mine": "mine",
        "run": "learned",
    }
    assert results["controllers"]["mine"]["description"] == "Plants one branch at once."
    played = [(episode["controller"], episode["task"], episode["rng_seed"]) for episode in results["episodes"]]
    assert played == [(label, "mine", seed) for label in ("mine", "run") for seed in (0, 1)]
    for episode in results["episodes"][:2]:
        assert [seed["blueprint"] for seed in episode["seeds"]] == ["my_branch"]
    assert "--plugin my_module" in results["command"]

    for controllers in ("mine,run", "run"):
        refused = run_simic(here, "evaluate", *EVALUATE[2:], "--controllers", controllers)
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1
        assert "--plugin MODULE" in refused.stderr
    alone = run_simic(here, "evaluate", "--controllers", "run", "--tasks", "spirals-mlp", "--rng-seeds", "2")
    assert alone.returncode == 2
    assert "load the plugin that defines it with --plugin" in alone.stderr


def test_help_lists_the_names_of_a_plugin(here):
    shown = run_simic(here, "train", "--help", "--plugin", "my_module")
    assert shown.returncode == 0, shown.stderr
    assert "fashion-resnet, mine." in " ".join(shown.stdout.split())


MISTAKES = {
    "a reward term that fails": (
        "return -1e-2 * (transition.parameters_after",
        "return -1e-2 * (transition.paramters_after",
        "reward term frugality failed in my_module.py, line 27 (AttributeError: 'Transition' object has no attribute",
    ),
    "a task without a return": ("return simic.Task(", "simic.Task(", "task or family mine must return a simic.Task"),
    "a branch that is not zero": (
        "simic.zeroed(nn.Linear(3, shape.features))",
        "nn.Linear(3, shape.features)",
        "blueprint 'my_branch' is not born as identity",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_plugin_is_one_line_also_from_workers(here, mistake):
    old, new, message = MISTAKES[mistake]
    (here / "my_module.py").write_text(PLUGIN.replace(old, new))
    # Enough hosts that an untrained policy tries every blueprint.
    failed = run_simic(here, "train", "--plugin", "my_module", *TRAIN, "--group-size", "16")
    assert failed.returncode == 2, failed.stderr
    assert failed.stderr.count("\n") == 1
    assert message in failed.stderr

"""Files that version 0.1 wrote, kept in tests/data: later versions read them, through an upgrade if need be."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from simic import Action, GrowableModel, GrowthScheduler, ScriptedController
from simic.cli import main
from simic.config import PRESETS, read_config
from simic.control.learned import LearnedController, make_network
from simic.lifecycle.stages import Stage
from simic.settings import override
from simic.storage.checkpoint import find_checkpoint
from simic.telemetry.events import Update
from simic.telemetry.reader import read_events
from simic.training.episode_files import load_episodes

FILES = Path(__file__).parent / "data" / "files_of_0_1"


def test_a_controller():
    controller = LearnedController.load(FILES / "controller.safetensors")
    assert controller.network.config.hidden_size == 12
    total = sum(float(parameter.detach().double().sum()) for parameter in controller.network.parameters())
    assert total == pytest.approx(18.799265, abs=1e-5)


def test_a_checkpoint_goes_on(tmp_path):
    """The run had made two updates; a third follows."""
    run = tmp_path / "run"
    shutil.copytree(FILES, run)
    main(["train", "--resume", str(run), "--updates", "3", "--quiet"])
    found = find_checkpoint(run / "checkpoints").checkpoint
    assert found is not None
    assert found.update == 3
    assert [event.update for event in read_events(run, [Update])] == [0, 1, 2]


def test_recorded_episodes():
    rollouts = load_episodes(FILES, 24)
    assert [rollout.shape for rollout in rollouts] == [(6, 2)] * 2
    assert [int(rollout.action.sum()) for rollout in rollouts] == [30, 25]
    sizes = {part: values.shape[-1] for part, values in rollouts[0].observation.items()}
    assert sizes == make_network().sizes, "features that came later are zero"


def test_settings():
    saved = read_config(FILES / "config.json")
    config = override(PRESETS["quick"][1], saved)
    assert (config.policy.hidden_size, config.episode.horizon, config.rng_seed) == (12, 6, 5)


def test_events():
    updates = list(read_events(FILES, [Update]))
    assert [update.update for update in updates] == [0, 1]
    assert all(json.loads(line) for line in (FILES / "events.jsonl").read_text().splitlines())


def test_a_growing_model():
    torch.manual_seed(1)  # other weights than those in the file
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    model = GrowableModel(net, ["0", "2"], example_input=torch.zeros(1, 4))
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()

    def evaluate():
        return {"val_loss": float(nn.functional.cross_entropy(model(x), y))}

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    growth = GrowthScheduler(model, optimizer, ScriptedController([Action("wait")] * 9), evaluate=evaluate)
    growth.load(FILES / "growth.safetensors")
    assert [report.blueprint for report in model.growth()] == ["mlp", "low_rank"]
    assert model.growth()[0].stage == Stage.BLENDING
    assert float(model.eval()(x).detach().sum()) == pytest.approx(7.7841477, abs=1e-5)
    nn.functional.cross_entropy(model.train()(x), y).backward()
    optimizer.step()
    assert growth.step().index == 4
    assert [decision.index for decision in growth.decisions] == [4], "the first four are not in the file"
    assert [row["host_epoch"] for row in growth.history()] == [5]


def test_a_growing_model_of_format_2():
    """Written beside a governor, with loss and accuracy; it has no decisions and names no metric."""

    def make(**settings) -> GrowthScheduler:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
        model = GrowableModel(net, ["0", "2"], example_input=torch.zeros(1, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        script = ScriptedController([Action("wait")] * 9)
        metrics = {"val_loss": 0.6, "val_accuracy": 0.5, "f1": 0.5}
        return GrowthScheduler(model, optimizer, script, evaluate=lambda: metrics, governor=True, **settings)

    growth = make()
    growth.load(FILES / "growth_version_2.safetensors")
    model = growth.model
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    assert float(model.eval()(x).detach().sum()) == pytest.approx(7.3859696, abs=1e-5)
    assert growth.decisions == []
    nn.functional.cross_entropy(model.train()(x), (x[:, 0] > 0).long()).backward()
    growth.optimizer.step()
    assert growth.step().index == 3
    assert growth.facts().val_accuracy[0, -4:].tolist() == [0.4375, 0.4375, 0.4375, 0.5]
    with pytest.raises(ValueError, match=r"metric is val_accuracy or val_loss, here it is f1 \(max\)"):
        make(metric="f1", mode="max").load(FILES / "growth_version_2.safetensors")

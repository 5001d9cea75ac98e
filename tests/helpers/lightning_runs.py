"""A tiny LightningModule, data whose order depends on the epoch alone, and trainers that say nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler, TensorDataset

from simic import Action, ScriptedController
from simic.integrations.lightning import GrowthCallback

X = torch.linspace(-2, 2, 48 * 6).view(48, 6).sin()
Y = (X.sum(1) > 0).long()
SLOTS = ["stem", "body"]
GROW = {0: Action("germinate", "body", "mlp", tempo=3), 2: Action("germinate", "stem", "widen", tempo=3)}
"""From the third epoch on two seeds are blended in."""


def make_net() -> nn.Sequential:
    """Two blocks with batch norm and dropout, and a head."""
    net = nn.Sequential()
    net.add_module("stem", nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()))
    net.add_module("body", nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    net.add_module("head", nn.Linear(8, 2))
    return net


class LitNet(LightningModule):
    """A classifier like those in Lightning's documentation, without a word of simic."""

    net: Any
    other: Any

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = make_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.log("val_loss", cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)]


class EpochSampler(Sampler[int]):
    """An order of the samples that depends on the epoch only, as DistributedSampler's does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(X), generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return len(X)


def train_data() -> DataLoader:
    """Three batches in another order every epoch."""
    return DataLoader(TensorDataset(X, Y), batch_size=16, sampler=EpochSampler())


def val_data() -> DataLoader:
    """Two batches of 20 and 4 samples, so that a mean of batches is not that of samples."""
    return DataLoader(TensorDataset(X[:24] + 0.1, Y[:24]), batch_size=20)


def make_trainer(directory: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    """A trainer on the CPU."""
    usual = {"devices": 1, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(accelerator="cpu", default_root_dir=directory, callbacks=list(callbacks), **usual | settings)


def scripted(**settings: Any) -> GrowthCallback:
    """A callback that plays GROW."""
    return GrowthCallback(**{"slots": SLOTS, "controller": ScriptedController(GROW)} | settings)


def keep_all(directory: Path, **settings: Any) -> ModelCheckpoint:
    """Checkpoints of every epoch, in files named after it."""
    return ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, **settings)


def digest(module: LightningModule, trainer: Trainer) -> str:
    """A hash of weights, buffers, optimizer states, parameter groups and learning rates, to the last bit."""
    hashed = hashlib.sha256()
    for name, value in module.state_dict().items():
        hashed.update(name.encode() + value.detach().contiguous().cpu().numpy().tobytes())
    for optimizer in trainer.optimizers:
        state = optimizer.state_dict()
        for index, entry in state["state"].items():
            hashed.update(repr([(index, name, value.tolist()) for name, value in entry.items()]).encode())
        hashed.update(repr(state["param_groups"]).encode())
    for config in trainer.lr_scheduler_configs:
        hashed.update(repr(config.scheduler.state_dict()).encode())
    return hashed.hexdigest()

"""What growth costs inside other training libraries: a training step with empty slots over the step without simic.

Run: python benchmarks/integrations.py [lightning ...]. Interleaved, one thread; without a name all are measured.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH, IMAGE = 60, 32, 16
BATCHES, EPOCHS, PAIRS = 20, 3, 16


def interleaved_ratio(with_growth: Callable[[], list[float]], without: Callable[[], list[float]]) -> float:
    """CPU seconds of an epoch of the first over those of the second.

    Both return the CPU seconds of every step of an epoch. Of each step the best of many runs in turns counts, so that
    what is done in some steps only, such as measuring gradients, is included.
    """
    best = {run: [float("inf")] * BATCHES for run in (with_growth, without)}
    for pair in range(PAIRS):
        for run in (with_growth, without) if pair % 2 else (without, with_growth):
            best[run] = list(map(min, best[run], run()))
    return sum(best[with_growth]) / sum(best[without])


class Net(nn.Sequential):
    """Three convolutional blocks and a head, about 100,000 parameters."""

    def __init__(self) -> None:
        sizes = [(3, WIDTH, 1), (WIDTH, WIDTH, 2), (WIDTH, 2 * WIDTH, 2)]
        blocks = [
            nn.Sequential(nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(3, width), nn.ReLU())
            for channels, width, stride in sizes
        ]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, 10))


def lightning_ratio() -> float:
    """A training step in Lightning's Trainer with a GrowthCallback that waits over one without, in whole epochs."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from simic.integrations.lightning import GrowthCallback

    class LitNet(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Clock(Callback):
        """The least CPU seconds of every step of an epoch; the first includes the decision."""

        def __init__(self) -> None:
            self.best, self.last = [float("inf")] * BATCHES, 0.0

        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.last = time.process_time()

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            now = time.process_time()
            self.best[batch_idx], self.last = min(self.best[batch_idx], now - self.last), now

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = image_data()

    def run(callbacks: list[Callback]) -> list[float]:
        clock = Clock()
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            limit_val_batches=1,
            callbacks=[*callbacks, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(LitNet(), data, data)
        return clock.best

    slots = ["0", "1", "2"]
    return interleaved_ratio(lambda: run([GrowthCallback(slots, "wait")]), lambda: run([]))


def image_data() -> DataLoader:
    """Batches of random images and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * BATCH, 3, IMAGE, IMAGE, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(10, (len(x),), generator=generator)), BATCH)


def transformers_ratio() -> float:
    """A training step in transformers' Trainer with growth that waits over one without, in whole epochs."""
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from simic.integrations.transformers import attach

    class Clock(TrainerCallback):
        """The least CPU seconds of every step of an epoch; the first includes the decision."""

        def __init__(self) -> None:
            self.best, self.last = [float("inf")] * BATCHES, 0.0

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.last = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step, now = (state.global_step - 1) % BATCHES, time.process_time()
            self.best[step], self.last = min(self.best[step], now - self.last), now

    tokens = torch.randint(64, (BATCHES * BATCH, 32), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    size: dict[str, Any] = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**size, bos_token_id=None, eos_token_id=None)

    def run(folder: str, *, grows: bool) -> list[float]:
        quiet: dict[str, Any] = {
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_strategy": "no",
        }
        args = TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            eval_strategy="epoch",
            use_cpu=True,
            dataloader_pin_memory=False,
            **quiet,
        )
        clock = Clock()
        sets: dict[str, Any] = {"train_dataset": data, "eval_dataset": data[:BATCH]}
        trainer = Trainer(GPT2LMHeadModel(config), args, callbacks=[clock], **sets)
        if grows:
            attach(trainer, controller="wait")
        with redirect_stdout(io.StringIO()):  # Trainer prints its logs where it has no progress bar
            trainer.train()
        return clock.best

    with tempfile.TemporaryDirectory() as folder:
        return interleaved_ratio(lambda: run(folder, grows=True), lambda: run(folder, grows=False))


MEASURES: dict[str, Callable[[], float]] = {"lightning": lightning_ratio, "transformers": transformers_ratio}


def main() -> None:
    """Measure what is named, or all, and print."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result = {}
    for name in sys.argv[1:] or MEASURES:
        result[f"{name}_ratio"] = round(MEASURES[name](), 4)
        print(f"{name}_ratio: {result[f'{name}_ratio']}")
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()

"""What growth costs inside other training libraries: a training step with empty slots over the step without simic.

Run: python benchmarks/integrations.py [lightning ...] [--rounds 60]. One thread; without a name all are measured.

Whole trainings with and without simic cannot be compared to 2 % on a machine that others use: two without simic differ
by more. So there is one training, of one network in one process, and simic's parts are taken out of it and put back
from step to step. A round is 24 steps in random order, 8 each of

    with       simic's parts are in place: wrapper, seeds, callback, optimizer hook
    without    they are not
    again      the same as `without`: what the clock says where there is no difference

and gives the ratios with / (without and again) and again / without of CPU time. The host's gradient is measured at
every 8th step with simic, so once in each round. Reported are medians over rounds with 95 % bootstrap intervals.
Decisions, which are made once per validation, are timed by themselves.
"""

from __future__ import annotations

import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from simic.scheduler.gradients import HOST_NORM_EVERY
from simic.scheduler.scheduler import GrowthScheduler

STATES = ("with", "without", "again")
ROUND = HOST_NORM_EVERY * len(STATES)
EPOCH = 10 * ROUND
"""Steps between two validations."""
WARM_UP_ROUNDS = 2
BOOTSTRAPS = 10_000


class Switch:
    """Takes simic's parts out of a running training and puts them back."""

    def __init__(self, optimizer: Optimizer, put: Callable[[bool], None]) -> None:
        hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks
        self._hooks, self._own = hooks, dict(hooks)
        assert len(self._own) == 1, "only the scheduler's hook is expected"
        self._put = put

    def set(self, *, present: bool) -> None:
        """Simic is `present` from the next step on."""
        self._put(present)
        self._hooks.clear()
        if present:
            self._hooks.update(self._own)


@dataclass
class StepClock:
    """CPU times of the steps of a training that is switched after each of them."""

    rounds: int
    times: dict[str, list[float]] = field(default_factory=lambda: {state: [] for state in STATES})
    decisions: list[float] = field(default_factory=list)
    switch: Switch | None = None

    def __post_init__(self) -> None:
        self._order = _states_in_turn()
        self._state, self._begun = "with", 0.0

    def watch(self, growth: GrowthScheduler, switch: Switch) -> None:
        """Begin; decisions count separately."""
        self.switch, decide = switch, growth.step

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return decide(*args, **kwargs)
            finally:
                self.decisions.append(time.process_time() - start)
                self._begun += self.decisions[-1]

        growth.step = timed
        self.next_step()

    def end_step(self) -> None:
        """Called when a step has ended."""
        self.times[self._state].append(time.process_time() - self._begun)
        self.next_step()

    def next_step(self) -> None:
        """Let the next step begin."""
        self._state = next(self._order)
        self.begin_step()

    def begin_step(self) -> None:
        """Switch, and let the step begin whose turn it is: what passed before, such as a validation, does not count."""
        assert self.switch is not None
        self.switch.set(present=self._state == "with")
        self._begun = time.process_time()

    def figures(self) -> dict[str, Any]:
        """Ratios with intervals, and milliseconds of a step and of a decision."""
        rows = {
            state: np.reshape(values[: self.rounds * HOST_NORM_EVERY], (self.rounds, -1))[WARM_UP_ROUNDS:].mean(axis=1)
            for state, values in self.times.items()
        }
        without = (rows["without"] + rows["again"]) / 2
        ratio, ratio_interval = _median_and_interval(rows["with"] / without)
        null, null_interval = _median_and_interval(rows["again"] / rows["without"])
        return {
            "ratio": ratio,
            "interval": ratio_interval,
            "null": null,
            "null_interval": null_interval,
            "step_ms": round(1000 * float(np.median(without)), 2),
            "decision_ms": round(1000 * float(np.median(self.decisions)), 2),
        }


def _states_in_turn() -> Iterator[str]:
    """States of steps; each round has as many of every state, in random order."""
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(np.repeat(STATES, HOST_NORM_EVERY)).tolist()


def _median_and_interval(values: np.ndarray) -> tuple[float, list[float]]:
    drawn = np.random.default_rng(0).choice(values, (BOOTSTRAPS, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return round(float(np.median(values)), 4), [round(float(low), 4), round(float(high), 4)]


class Residual(nn.Module):
    """Two convolutions with batch norm, and a projection around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.project = nn.Conv2d(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.project(x))


def resnet() -> nn.Sequential:
    """Three residual blocks, 310,000 parameters."""
    blocks = [Residual(*sizes) for sizes in ((3, 32, 1), (32, 64, 2), (64, 128, 2))]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def measure_lightning(rounds: int) -> dict[str, Any]:
    """A ResNet in Lightning's Trainer, with a GrowthCallback that waits."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from simic.integrations.lightning import GrowthCallback

    class LitNet(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = resnet()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Clock(Callback):
        """The last callback."""

        def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
            callbacks, model = list(trainer.callbacks), growth.model

            def put(present: bool) -> None:
                trainer.callbacks = [each for each in callbacks if present or each is not growth]
                pl_module._modules["net"] = model if present else model.host

            clock.watch(growth.growth, Switch(trainer.optimizers[0], put))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.end_step()

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            assert clock.switch is not None
            clock.switch.set(present=True)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            clock.begin_step()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    growth, clock = GrowthCallback(["0", "1", "2"], "wait"), StepClock(rounds)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16 * EPOCH, 3, 16, 16, generator=generator)
    data = DataLoader(TensorDataset(x, torch.randint(10, (len(x),), generator=generator)), 16)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=rounds * ROUND,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        callbacks=[growth, Clock()],
        **quiet,
    ).fit(LitNet(), data, data)
    return clock.figures()


def measure_transformers(rounds: int) -> dict[str, Any]:
    """A GPT-2 of 4 layers of width 128 in transformers' Trainer, with growth that waits."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from simic.integrations.transformers import attach

    class Clock(TrainerCallback):
        """The last callback."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            handler: Any = trainer.callback_handler
            callbacks, host, scheduler = list(handler.callbacks), growth.model.host, growth.scheduler
            own = [each for each in callbacks if type(each).__module__.startswith("simic")]
            seeds = host._modules["seeds"]
            assert len(own) == 1
            assert scheduler is not None

            def put(present: bool) -> None:
                handler.callbacks = [each for each in callbacks if present or each not in own]
                host._modules.pop("seeds", None)
                if present:
                    host._modules["seeds"] = seeds

            clock.watch(scheduler, Switch(scheduler.optimizer, put))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.end_step()
            if state.global_step % EPOCH == 0:  # an evaluation comes
                assert clock.switch is not None
                clock.switch.set(present=True)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.begin_step()

    tokens = torch.randint(256, (4 * EPOCH, 64), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    size: dict[str, Any] = {"vocab_size": 256, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
    quiet: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    clock = StepClock(rounds)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # Trainer prints its logs
        args = TrainingArguments(
            folder,
            max_steps=rounds * ROUND,
            per_device_train_batch_size=4,
            eval_strategy="steps",
            eval_steps=EPOCH,
            use_cpu=True,
            dataloader_pin_memory=False,
            **quiet,
        )
        model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=None, eos_token_id=None))
        sets: dict[str, Any] = {"train_dataset": data, "eval_dataset": data[:4]}
        trainer = Trainer(model, args, **sets)
        growth = attach(trainer, controller="wait")
        trainer.add_callback(Clock())
        trainer.train()
    return clock.figures()


Library = Literal["lightning", "transformers"]
MEASURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "lightning": measure_lightning,
    "transformers": measure_transformers,
}


def main(
    libraries: tyro.conf.Positional[tuple[Library, ...]] = ("lightning", "transformers"), rounds: int = 60
) -> None:
    """Measure and print; a round is 24 steps."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    result = {}
    for name in libraries:
        figures = MEASURES[name](rounds)
        print(f"{name}: {figures}")
        result |= {f"{name}_{key}": value for key, value in figures.items()}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    tyro.cli(main)

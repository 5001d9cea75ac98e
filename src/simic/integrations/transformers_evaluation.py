"""The evaluation that measures contributions inside transformers' Trainer: its data and metrics, without its traces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Subset


class TrainerEvaluation:
    """Evaluates as `trainer.evaluate()` does, but logs nothing, calls no callback and changes no state.

    The metric that counts is `metric_for_best_model` of the training arguments, by default the loss; its name also says
    which of several evaluation datasets is used. With `max_samples` that many evenly spaced samples are evaluated.
    """

    def __init__(self, trainer: Any, max_samples: int | None) -> None:
        self._trainer, self._max_samples = trainer, max_samples
        self._loader: tuple[Any, DataLoader] | None = None  # the dataset, and the loader made of it
        self.known: dict[str, float] | None = None
        """Metrics that Trainer has just measured, so that the next call need not."""
        self._samples()

    @property
    def metric(self) -> str:
        """Name of the metric that counts, as Trainer logs it."""
        name = self._trainer.args.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def prefix(self) -> str:
        """What Trainer puts before the names of the metrics of this dataset."""
        return "eval" if self._dataset_name is None else f"eval_{self._dataset_name}"

    def __call__(self) -> dict[str, float]:
        """The metrics of the network as it is now, under the names that GrowthScheduler uses."""
        known, self.known = self.known, None
        reusable = (
            known is not None and self._max_samples is None and all(map(math.isfinite, self.read(known).values()))
        )
        return self.read(known if known is not None and reusable else self._run())

    def needed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metric that counts and the loss, of those that Trainer has measured."""
        if self.metric not in metrics:
            raise ValueError(
                f"growth is judged by {self.metric!r} (metric_for_best_model), but the evaluation gives "
                f"{', '.join(metrics)}: let compute_metrics return it, or, for the loss, put labels into the dataset"
            )
        names = (self.metric, f"{self.prefix}_loss")
        return {name: float(metrics[name]) for name in names if name in metrics}

    @property
    def counted(self) -> dict[str, Any]:
        """The metric that counts as GrowthScheduler names it, and its mode: Trainer's, unless it is the loss."""
        if self.metric == f"{self.prefix}_loss":
            return {"metric": "val_loss"}
        return {"metric": self.metric, "mode": "max" if self._trainer.args.greater_is_better else "min"}

    def read(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Trainer's metrics under the names that GrowthScheduler uses."""
        loss = f"{self.prefix}_loss"
        return {"val_loss" if name == loss else name: value for name, value in self.needed(metrics).items()}

    def _run(self) -> dict[str, float]:
        trainer = self._trainer
        with _silent(trainer):
            output = trainer.evaluation_loop(
                self._data_loader(),
                description="Contribution",
                prediction_loss_only=True if trainer.compute_metrics is None else None,
                metric_key_prefix=self.prefix,
            )
        return output.metrics

    @property
    def _dataset_name(self) -> str | None:
        """The name of the dataset that the metric belongs to; None if there is only one dataset."""
        datasets = self._trainer.eval_dataset
        if not isinstance(datasets, dict):
            return None
        names = [name for name in datasets if self.metric.startswith(f"eval_{name}_")]
        if not names:
            raise ValueError(
                f"there are {len(datasets)} evaluation datasets ({', '.join(datasets)}), and {self.metric!r} belongs "
                f'to none: name one, as metric_for_best_model="eval_{next(iter(datasets))}_loss"'
            )
        return max(names, key=len)

    def _samples(self) -> Any:
        """The dataset to evaluate on; raise if it cannot be cut to `max_samples`."""
        datasets, name = self._trainer.eval_dataset, self._dataset_name
        dataset = datasets if name is None else datasets[name]
        if self._max_samples is None:
            return dataset
        if self._max_samples < 1:
            raise ValueError(f"max_eval_samples must be at least 1, got {self._max_samples}")
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"max_eval_samples needs a dataset with a length and an index, got a {type(dataset).__name__}; cut the "
                "evaluation dataset yourself"
            )
        count = min(self._max_samples, len(dataset))
        return Subset(dataset, np.linspace(0, len(dataset) - 1, count).round().astype(int).tolist())

    def _data_loader(self) -> Any:
        """The loader of the evaluation dataset; it is kept, because accelerate keeps every loader that it prepares."""
        trainer = self._trainer
        if self._loader is None or self._loader[0] is not trainer.eval_dataset:
            # Samples go through a test loader: Trainer may keep an evaluation loader and evaluate on it itself.
            limited = self._max_samples is not None
            make = trainer.get_test_dataloader if limited else trainer.get_eval_dataloader
            self._loader = trainer.eval_dataset, make(self._samples() if limited else self._dataset_name)
        return self._loader[1]


@contextmanager
def _silent(trainer: Any) -> Iterator[None]:
    """Let a trainer evaluate without its callbacks, such as progress bars, and without a trace."""
    handler = trainer.callback_handler
    callbacks, loader = handler.callbacks, handler.eval_dataloader
    handler.callbacks = []
    try:
        yield
    finally:
        handler.callbacks, handler.eval_dataloader = callbacks, loader

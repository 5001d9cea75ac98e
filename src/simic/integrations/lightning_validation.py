"""Lightning's own validation, run once more on the network as it is, so that nobody notices.

The module's `validation_step` and validation hooks run as in every validation. Callbacks do not, loggers receive
nothing, and metrics, progress, plain attributes of the module and the trainer's state are as before afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor
from torchmetrics import Metric

from simic.growth.isolation import preserved_rng


def run_validation(trainer: Trainer, max_batches: int | None = None) -> dict[str, float]:
    """What one validation logs, by name; `max_batches` of each dataloader are used, or as many as the trainer does.

    On several processes every value is the mean over all of them.
    """
    epoch_loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
    usual = epoch_loop.val_loop
    with _undisturbed(trainer, module):
        if usual._combined_loader is None:  # resumed, and not validated yet
            usual.setup_data()
        # Without inference mode: tensors that a metric keeps could not be used in training.
        loop = _EvaluationLoop(trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False)
        loop._combined_loader, loop._last_val_dl_reload_epoch = usual._combined_loader, trainer.current_epoch
        limit = float("inf") if max_batches is None else max_batches
        loop._max_batches = [min(batches, limit) for batches in usual._max_batches]
        epoch_loop.val_loop = loop
        try:
            loop.run()
        finally:
            epoch_loop.val_loop = usual
        return read_metrics(trainer)


def read_metrics(trainer: Trainer) -> dict[str, float]:
    """Single numbers logged so far, as callbacks see them."""
    logged = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
    if trainer.world_size > 1:
        logged = {
            name: trainer.strategy.reduce(value.detach().clone(), reduce_op="mean") for name, value in logged.items()
        }
    return {name: float(value) for name, value in logged.items()}


@contextmanager
def _undisturbed(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Validate without callbacks and loggers, and restore everything that a validation changes."""
    connector = trainer._logger_connector
    with ExitStack() as stack:
        stack.enter_context(preserved_rng())
        for each in (trainer, trainer.state, connector, module):
            stack.enter_context(_attributes_restored(each))
        for metric in module.modules():
            if isinstance(metric, Metric):
                stack.enter_context(_attributes_restored(metric, copy_tensors=True))
        trainer.callbacks = _Hidden(trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        trainer.loggers = [DummyLogger()] if trainer.loggers else []
        trainer.validating = True
        connector.reset_metrics()
        connector.epoch_end_reached()
        yield


class _Hidden(list):
    """Callbacks that only other threads see, such as the one that draws the progress bar."""

    def __init__(self, callbacks: list[Any]) -> None:
        super().__init__(callbacks)
        self._thread = get_ident()

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if get_ident() == self._thread else super().__iter__()


@contextmanager
def _attributes_restored(owner: Any, *, copy_tensors: bool = False) -> Iterator[None]:
    """Restore an object's attributes, and the contents of those that are lists, sets or dicts."""
    attributes = dict(vars(owner))
    contents = {name: value.copy() for name, value in attributes.items() if type(value) in (list, set, dict)}
    tensors = {name: value.clone() for name, value in attributes.items() if copy_tensors and isinstance(value, Tensor)}
    try:
        yield
    finally:
        for name, content in contents.items():
            if not _holds(attributes[name], content):  # else other threads could see it empty for a moment
                attributes[name].clear()
                attributes[name].extend(content) if isinstance(content, list) else attributes[name].update(content)
        for name in vars(owner).keys() - attributes.keys():
            del vars(owner)[name]
        vars(owner).update(attributes | tensors)


def _holds(container: Any, content: Any) -> bool:
    """Whether a list, set or dict holds these very objects."""
    if isinstance(content, dict):
        return list(container) == list(content) and all(container[key] is content[key] for key in content)
    if isinstance(content, list):
        return len(container) == len(content) and all(map(operator.is_, container, content))
    return container == content

"""The model, optimizer and learning-rate schedulers inside the wrappers that torch and accelerate put around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from simic.growth.data_parallel import link_ddp, unwrap_model
from simic.growth.model import GrowableModel
from simic.scheduler.checks import check_parts, refuse_sharded


def unwrap(model: Any, optimizer: Any, lr_schedulers: Any) -> tuple[GrowableModel, Optimizer, tuple[LRScheduler, ...]]:
    """The three inside their wrappers; raise unless growth can work with them."""
    (model, ddp), optimizer = unwrap_model(model), _inner_optimizer(optimizer)
    check_parts(model, optimizer)
    refuse_sharded(model)
    if ddp is not None:
        link_ddp(model, ddp)
    several = lr_schedulers if isinstance(lr_schedulers, Sequence) else (lr_schedulers,)
    return model, optimizer, tuple(map(_inner_lr_scheduler, several))


def _inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside accelerate's, whose `step` runs no hooks; anything else as it is."""
    while isinstance(optimizer, Optimizer) and isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _inner_lr_scheduler(scheduler: Any) -> Any:
    inner = getattr(scheduler, "scheduler", None)
    return inner if not isinstance(scheduler, LRScheduler) and isinstance(inner, LRScheduler) else scheduler

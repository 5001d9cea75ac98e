"""Model, optimizer, learning-rate schedulers and GrowthScheduler in one safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from simic.growth.model import GrowableModel
from simic.growth.state_dict import GROWTH_KEY, growth_record
from simic.scheduler.parameter_groups import SLOT_KEY
from simic.storage.bundle import load_bundle, save_bundle


def save_growth(
    path: str | Path,
    model: GrowableModel,
    optimizer: Optimizer,
    lr_schedulers: Sequence[LRScheduler],
    growth: dict[str, Any],
) -> None:
    """Write the whole state of a training; `growth` is the GrowthScheduler's own state."""
    _check_complete(model, optimizer)
    tree = {
        "kind": "growth",
        "model": {GROWTH_KEY: growth_record(model), **model.state_dict()},
        "optimizer": optimizer.state_dict(),
        "lr_schedulers": [scheduler.state_dict() for scheduler in lr_schedulers],
        "growth": growth,
        **_classes(optimizer, lr_schedulers),
    }
    save_bundle(path, tree)


def read_growth(path: str | Path, optimizer: Optimizer, lr_schedulers: Sequence[LRScheduler]) -> dict[str, Any]:
    """Read what `save_growth` wrote; classes and group sizes must be those of the objects given."""
    tree = load_bundle(path)
    if not isinstance(tree, dict) or tree.get("kind") != "growth":
        raise ValueError(f"{path} does not hold a growing model")
    for name, value in _classes(optimizer, lr_schedulers).items():
        if tree[name] != value:
            raise ValueError(f"the checkpoint's {name} is {tree[name]}, here it is {value}")
    sizes, own = _host_sizes(tree["optimizer"]["param_groups"]), _host_sizes(optimizer.param_groups)
    if sizes != own:
        raise ValueError(f"the checkpoint's optimizer has groups of {sizes} host parameters, this one of {own}")
    return tree


def _host_sizes(groups: Sequence[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups if SLOT_KEY not in group]


def _classes(optimizer: Optimizer, lr_schedulers: Sequence[LRScheduler]) -> dict[str, Any]:
    return {
        "optimizer_class": type(optimizer).__name__,
        "lr_scheduler_classes": [_class_name(scheduler) for scheduler in lr_schedulers],
    }


def _class_name(scheduler: LRScheduler) -> str:
    members = ", ".join(_class_name(member) for member in getattr(scheduler, "_schedulers", ()))
    return f"{type(scheduler).__name__}({members})" if members else type(scheduler).__name__


def _check_complete(model: GrowableModel, optimizer: Optimizer) -> None:
    known = set(model.parameters())
    others = [p for group in optimizer.param_groups for p in group["params"] if p not in known]
    if others:
        raise ValueError(
            f"the optimizer trains {len(others)} parameter tensors that are not this model's, so one file would "
            "not hold everything: wrap the whole network in one GrowableModel, or, as where models share an "
            "optimizer, save the state_dict() of each model, scheduler and optimizer"
        )

"""What integrations tell GrowableModel and GrowthScheduler: keywords that are passed on, and the size of a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from simic.growth.model import GrowableModel
from simic.scheduler.scheduler import GrowthScheduler

_OWN = {"example_input", "evaluate", "metric", "mode", "horizon"}
"""What an integration finds out by itself or has a setting of its own for."""


def split_settings(taker: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of GrowableModel, and keywords of GrowthScheduler; one that neither has raises.

    `taker` is what the user gave them to, for the error. Keywords that both have, such as `rng_seed`, go to both.
    """
    known = [
        {name for name, each in inspect.signature(owner).parameters.items() if each.kind is each.KEYWORD_ONLY} - _OWN
        for owner in (GrowableModel, GrowthScheduler)
    ]
    if unknown := settings.keys() - known[0] - known[1]:
        names = ", ".join(sorted(known[0] | known[1]))
        raise TypeError(f"{taker} has no setting {', '.join(sorted(unknown))}; those passed on are {names}")
    model, scheduler = ({name: value for name, value in settings.items() if name in names} for names in known)
    return model, scheduler


def dataset_size(dataset: Any) -> int | None:
    """The number of samples of a dataset, for `train_samples`; None of one that does not tell, such as a stream."""
    try:
        return len(dataset) or None
    except (TypeError, NotImplementedError):  # torch's own streams have a `__len__` that raises the one or the other
        return None

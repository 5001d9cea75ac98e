"""What a controller sees of one model in training: the facts of a single host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simic.control.facts import HISTORY, Facts
from simic.growth.budget import styles_within_budget, table_within_budget
from simic.growth.contribution_errors import contribution_error
from simic.growth.model import GrowableModel


def model_facts(model: GrowableModel, history: Mapping[str, Sequence[float]], **scheduled: Any) -> Facts:
    """The facts of a model; `history` are its measurements, the newest last, `scheduled` what its scheduler knows."""
    padded = {name: np.array([[math.nan] * (HISTORY - len(own)) + list(own)]) for name, own in history.items()}
    return Facts(
        slots=model.slot_state.copy(),
        lifecycle=model.lifecycle,
        slot_names=model.slot_names,
        blueprint_names=model.blueprint_names,
        blueprint_parameters=table_within_budget(model),
        legal_styles=styles_within_budget(model),
        host_parameters=np.array([sum(parameter.numel() for parameter in model.host_parameters())]),
        seed_parameters=np.array([[report.parameters for report in model.growth()]]),
        in_features=np.array([site.shape.in_features or 0 for site in model.sites]),
        contribution_error=contribution_error(model),
        random_guess_loss=np.array([math.nan]),
        **padded,
        **scheduled,
    )

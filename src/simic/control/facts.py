"""Facts: what is known about N hosts and their slots when a decision is due, as arrays.

Shapes: N hosts, S slots, B blueprints, K host epochs of history (the newest last).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import LifecycleConfig

FIGURES = ("val_loss", "val_accuracy", "train_loss", "parameters")
HISTORY = 16
"""Host epochs of measurements that a controller sees."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything a controller may use. Measurements that were not made are NaN."""

    slots: SlotState
    lifecycle: LifecycleConfig
    slot_names: tuple[str, ...]
    blueprint_names: tuple[str, ...]
    blueprint_parameters: np.ndarray
    """Parameters of each blueprint in each slot (S, B); -1 where it does not fit, or not into a model's budget."""
    host_parameters: np.ndarray
    """Parameters of each host without seeds (N,)."""
    seed_parameters: np.ndarray
    """Parameters of each slot's seed, gates included (N, S)."""
    decision: np.ndarray
    """Decisions taken before this one (N,)."""
    horizon: np.ndarray
    """Decisions of the whole episode (N,); 0 if unknown."""
    previous_action: np.ndarray
    """The last action (N, H); zeros (wait) before the first decision."""
    random_guess_loss: np.ndarray
    """Loss of random guessing (N,); NaN if unknown."""
    host_gradient_norm: np.ndarray
    """Mean gradient norm of each host, without seeds, over the last host epoch (N,)."""
    train_loss: np.ndarray
    """Mean training loss of each of the last host epochs (N, K)."""
    val_loss: np.ndarray
    """Validation loss after each of the last host epochs (N, K)."""
    val_accuracy: np.ndarray
    """Validation accuracy after each of the last host epochs (N, K); NaN if the task has none."""
    parameters: np.ndarray
    """Parameters of host and seeds at the time of these measurements (N, K)."""
    metric_scale: np.ndarray = field(default_factory=lambda: np.ones(1))
    """The change of `metric` that counts as 1 (N,); another value than 1 only for a user's metric without bounds."""
    awaits_contribution: np.ndarray = field(default_factory=lambda: np.zeros((1, 1), dtype=bool))
    """Held seeds that are still to be measured (N, S), where not all seeds are measured at every decision."""
    contribution_error: np.ndarray | None = None
    """Standard errors of the contributions (N, S), NaN where not known; None if none is."""
    legal_styles: np.ndarray | None = None
    """Styles that a budget allows under each operation (N, ops, styles); None if it allows all."""

    def __post_init__(self) -> None:
        for name, shape in (("metric_scale", (self.num_hosts,)), ("awaits_contribution", self.slots.stage.shape)):
            object.__setattr__(self, name, np.broadcast_to(getattr(self, name), shape))

    in_features: np.ndarray | None = None
    """Features of what goes into each slot's submodule (S,), 0 where no seed can read it; None if not known."""

    @property
    def num_hosts(self) -> int:
        """N."""
        return self.slots.stage.shape[0]

    @property
    def reads_input(self) -> np.ndarray:
        """Blueprints that grow beside a slot's submodule, not behind it (B,)."""
        from simic.growth.blueprints import BLUEPRINTS  # it loads torch

        names = self.blueprint_names
        return np.array([name in BLUEPRINTS and BLUEPRINTS[name].reads == "input" for name in names], dtype=bool)

    @property
    def metric(self) -> np.ndarray:
        """The metric of contributions, higher is better: accuracy, or minus the loss if there is none (N, K)."""
        return np.where(np.isnan(self.val_accuracy), -self.val_loss, self.val_accuracy)

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
LAYER_KINDS = ("linear", "convolution", "attention", "embedding", "norm")
"""Kinds of layers that a host's parameters are counted by."""
USUAL_RATE = {"adaptive": 1e-3, "sgd": 1.0}
"""Learning rates that count as 1: of AdamW and its like, and of SGD divided by 1 - momentum (0.1 with momentum 0.9)."""

TRAINING_FACTS = (
    *("batches", "train_samples", "metric_error", "learning_rate", "first_learning_rate"),
    *("adaptive", "loss_noise", "host_weight_norm"),
)
"""Facts about how hosts are trained, one number each; all may be unknown."""


def _unknown() -> np.ndarray:
    return np.full(1, np.nan)


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """What hosts of one structure are built of, without seeds. Numbers that are not known are NaN."""

    inputs: float
    """Features that the first layer reads: channels of a convolution, tokens of an embedding."""
    outputs: float
    """Features that the last layer puts out: of a classifier the number of classes."""
    depth: float
    """Layers with a weight matrix."""
    shares: np.ndarray
    """Share of the parameters in each of LAYER_KINDS (5,)."""
    batch_norm: float
    """1 if samples of a batch are normalised together, else 0."""
    features: np.ndarray
    """Features of each slot (S,)."""
    in_features: np.ndarray
    """Features of what goes into each slot's submodule (S,), 0 where no seed can read it."""
    positions: np.ndarray
    """Pixels of an image or places of a sequence in each slot (S,), as in the example input; 1 without any."""

    @classmethod
    def unknown(cls, num_slots: int) -> Architecture:
        """That of hosts of which nothing was said."""
        nothing = np.full(num_slots, np.nan)
        numbers = dict.fromkeys(("inputs", "outputs", "depth", "batch_norm"), np.nan)
        shares = np.full(len(LAYER_KINDS), np.nan)
        return cls(**numbers, shares=shares, features=nothing, in_features=nothing, positions=nothing)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything a controller may use, as arrays. Measurements that were not made are NaN.

    Shapes: N hosts (1 beside your own training), S slots, B blueprints, K host epochs of history (the newest last).

        >>> facts = GrowthScheduler(model, optimizer, evaluate=validate).facts()
        >>> facts.slot_names == model.slot_names, facts.slots.stage.shape == (1, len(model.slot_names))
        (True, True)
    """

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

    in_features: np.ndarray | None = None
    """Features of what goes into each slot's submodule (S,), 0 where no seed can read it; None if not known."""
    architecture: Architecture | None = None
    """What the hosts are built of; None if not known."""
    batches: np.ndarray = field(default_factory=_unknown)
    """Optimizer steps of the last host epoch, before the first one those that are planned (N,)."""
    train_samples: np.ndarray = field(default_factory=_unknown)
    """Distinct training samples (N,)."""
    metric_error: np.ndarray = field(default_factory=_unknown)
    """Standard error of the newest validation metric (N,)."""
    learning_rate: np.ndarray = field(default_factory=_unknown)
    """Learning rate of the last host epoch over the optimizer's usual one, see USUAL_RATE (N,)."""
    first_learning_rate: np.ndarray = field(default_factory=_unknown)
    """The same at the start of training (N,)."""
    adaptive: np.ndarray = field(default_factory=_unknown)
    """1 if the optimizer scales every parameter's step, as AdamW does, 0 if not, as SGD (N,)."""
    loss_noise: np.ndarray = field(default_factory=_unknown)
    """Standard deviation of the losses of the last host epoch's batches over their mean (N,)."""
    host_weight_norm: np.ndarray = field(default_factory=_unknown)
    """Norm of all parameters of each host, without seeds, after the last host epoch (N,)."""

    def __post_init__(self) -> None:
        for name in ("metric_scale", *TRAINING_FACTS):
            object.__setattr__(self, name, np.broadcast_to(getattr(self, name), (self.num_hosts,)))
        awaited = np.broadcast_to(self.awaits_contribution, self.slots.stage.shape)
        object.__setattr__(self, "awaits_contribution", awaited)

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

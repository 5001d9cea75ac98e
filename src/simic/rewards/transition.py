"""Transition: one decision of N hosts, the only input of rewards.

Shapes: N hosts, S slots. Quality is a fraction in [0, 1], see `score.quality`; contributions are in the same unit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from simic.lifecycle.slots import SlotState
from simic.rewards.score import quality


@dataclass(frozen=True, kw_only=True)
class Transition:
    """State before, action and state after one decision of N hosts. Missing measurements are NaN.

    What a reward term gets: (N,) arrays of hosts, (N, S) arrays of slots.

    Example::

        def no_pruning(transition, config):
            return -(transition.op == simic.Op.PRUNE).astype(float)
    """

    op: np.ndarray
    """The operation (N,)."""
    slot: np.ndarray
    """The slot it applies to (N,)."""
    slots_before: SlotState
    """Slots at the decision (N, S): a copy, because operations change slots in place."""
    slots_after: SlotState
    """Slots after operation, tick and measurement (N, S)."""
    metric_before: np.ndarray
    """Accuracy in [0, 1] (N,); NaN for tasks without one, see `first_metric`."""
    metric_after: np.ndarray
    """Accuracy afterwards (N,); at the final decision that of the exported network, live seeds dropped."""
    loss_before: np.ndarray
    """Validation loss (N,); NaN counts as the worst."""
    loss_after: np.ndarray
    """Validation loss afterwards (N,); at the final decision that of the exported network."""
    parameters_before: np.ndarray
    """Parameters of host and seeds (N,)."""
    parameters_after: np.ndarray
    """Parameters afterwards (N,); at the final decision those of the exported network."""
    host_parameters: np.ndarray
    """Parameters of the host alone (N,)."""
    seed_parameters_after: np.ndarray
    """Parameters of each slot's seed (N, S)."""
    final: np.ndarray
    """The last decision of the episode (N,). The horizon is part of the task, so no value is bootstrapped."""
    rolled_back: np.ndarray
    """The governor ended the episode (N,)."""
    decision: np.ndarray
    """Decisions taken before this one (N,)."""
    horizon: np.ndarray
    """Decisions in an episode (N,)."""
    random_guess_loss: np.ndarray
    """Loss of a random guess in this task (N,): the scale of its losses."""
    first_metric: np.ndarray
    """Accuracy at the start of the episode (N,); NaN if the task has no accuracy."""
    first_loss: np.ndarray
    """Validation loss at the start of the episode (N,)."""
    earned: np.ndarray
    """Reward that a rollback at this decision would take back (N,), see `schemes.earned_next`."""

    def __post_init__(self) -> None:
        num_hosts, num_slots = self.slots_before.stage.shape
        for field in fields(self):
            value = getattr(self, field.name)
            got = value.stage.shape if isinstance(value, SlotState) else np.shape(value)
            per_slot = isinstance(value, SlotState) or field.name == "seed_parameters_after"
            expected = (num_hosts, num_slots) if per_slot else (num_hosts,)
            if got != expected:
                raise ValueError(f"{field.name} must have shape {expected}, like slots_before, got {got}")
        usable = (self.random_guess_loss > 0) & np.isfinite(self.random_guess_loss)
        if not usable.all():
            host = int(usable.argmin())
            raise ValueError(
                f"random_guess_loss must be positive and finite, got {self.random_guess_loss[host]} for host {host}: "
                "pass the loss of a network that guesses"
            )

    @cached_property
    def terminal(self) -> np.ndarray:
        """Hosts whose episode ends with this decision (N,)."""
        return self.final | self.rolled_back

    @cached_property
    def quality_before(self) -> np.ndarray:
        """Quality when the controller decided (N,)."""
        return self._quality(self.metric_before, self.loss_before)

    @cached_property
    def quality_after(self) -> np.ndarray:
        """Quality after the decision (N,)."""
        return self._quality(self.metric_after, self.loss_after)

    @cached_property
    def first_quality(self) -> np.ndarray:
        """Quality at the start of the episode (N,)."""
        return self._quality(self.first_metric, self.first_loss)

    @cached_property
    def contribution_before(self) -> np.ndarray:
        """Contributions in units of quality, in [-1, 1], counterfactual ones included; NaN if not measured (N, S)."""
        return self._contribution(self.slots_before)

    @cached_property
    def contribution_after(self) -> np.ndarray:
        """The same after the decision (N, S)."""
        return self._contribution(self.slots_after)

    @cached_property
    def counted_before(self) -> np.ndarray:
        """Seeds with alpha > 0 and a contribution measured at that alpha: bool (N, S)."""
        return _counted(self.slots_before)

    @cached_property
    def counted_after(self) -> np.ndarray:
        """The same after the decision; the end of an episode drops live seeds."""
        return _counted(self.slots_after) & ~(self.slots_after.live & self.terminal[:, None])

    def at_slot(self, per_slot: np.ndarray) -> np.ndarray:
        """The value (N,) at the slot of the action."""
        return per_slot[np.arange(len(self.slot)), self.slot]

    @cached_property
    def _has_accuracy(self) -> np.ndarray:
        return ~np.isnan(self.first_metric)

    def _quality(self, metric: np.ndarray, loss: np.ndarray) -> np.ndarray:
        return quality(metric, loss, self.random_guess_loss, self._has_accuracy)

    def _contribution(self, slots: SlotState) -> np.ndarray:
        unit = np.where(self._has_accuracy, 1.0, self.random_guess_loss)[:, None]
        with np.errstate(over="ignore"):
            return np.clip(slots.contribution / unit, -1.0, 1.0)


def _counted(slots: SlotState) -> np.ndarray:
    return slots.occupied & (slots.alpha > 0) & ~slots.counterfactual & ~np.isnan(slots.contribution)

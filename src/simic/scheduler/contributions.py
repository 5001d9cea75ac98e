"""Contributions of the seeds of one model, measured by running the user's `evaluate` with a seed switched off or in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from simic.growth.isolation import evaluating, evaluating_others, preserve_state
from simic.growth.model import GrowableModel
from simic.lifecycle.slots import note_contributions, to_measure
from simic.scheduler.usage import StepUsage
from simic.scheduler.validation import contribution_metric, read_metrics

Evaluate = Callable[[], Mapping[str, float]]


class ContributionMeter:
    """Runs `evaluate` so that model, modes and random state stay as they are."""

    def __init__(self, model: GrowableModel, evaluate: Evaluate | None, usage: StepUsage) -> None:
        self._model, self.evaluate, self._usage = model, evaluate, usage

    def validate(self) -> dict[str, float]:
        """The metrics of the network as it is; they may not be finite."""
        with preserve_state(self._model), evaluating(self._model):
            return self._run()

    def measure(self, metric: float | None) -> None:
        """Note metric with the seed minus metric without it; at alpha 0, what the alpha target would give.

        `metric` is that of the network as it is, if it is known. Without `evaluate` nothing is measured.
        """
        slot_state = self._model.slot_state
        measured = to_measure(slot_state)
        if self.evaluate is None or not measured.any():
            return
        switched = np.full(measured.shape, math.nan)
        with preserve_state(self._model), evaluating(self._model):
            metric = contribution_metric(self._run()) if metric is None else metric
            for index in np.flatnonzero(measured[0]):
                slot = self._model.slot_names[index]
                blended_in = slot_state.alpha[0, index] > 0
                with self._model.switched_off(slot) if blended_in else self._model.switched_in(slot):
                    switched[0, index] = contribution_metric(self._run())
                self._usage.check_ablation(self._model, slot)
        note_contributions(slot_state, measured, np.array([metric]), switched)

    def _run(self) -> dict[str, float]:
        assert self.evaluate is not None
        with evaluating_others(self._model):
            return read_metrics(self.evaluate())

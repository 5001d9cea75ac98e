"""Contributions of the seeds of one model, measured by running the user's `evaluate` with a seed switched off or in.

An ablation is one run of `evaluate` with one seed switched. By default every decision ablates every live seed that is
blended in or in training, and one fossil. Two settings lower this: `every` ablates at every k-th decision only, and
`max_ablations` ablates at most m seeds at once; those that are left out keep their last contribution and its age.

If `evaluate` returns several values of the metric that counts, one per batch or sample, their mean counts, and each
contribution gets a standard error: that of the mean difference on the same batches. Of several ranks, whose values are
of different data, only means are exchanged, and the error stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from simic.growth.contribution_errors import paired_error
from simic.growth.isolation import evaluating, evaluating_others, preserve_state
from simic.growth.model import GrowableModel
from simic.lifecycle.slots import SlotState, note_contributions, to_measure
from simic.lifecycle.stages import Stage
from simic.scheduler.metric_values import average_values, paired_differences
from simic.scheduler.ranks import Ranks
from simic.scheduler.usage import StepUsage
from simic.scheduler.validation import CountedMetric

Evaluate = Callable[[], Mapping[str, Any]]


class ContributionMeter:
    """Runs `evaluate` so that model, modes and random state stay as they are."""

    def __init__(
        self,
        model: GrowableModel,
        evaluate: Evaluate | None,
        metric: CountedMetric,
        usage: StepUsage,
        ranks: Ranks,
        *,
        every: int = 1,
        max_ablations: int | None = None,
    ) -> None:
        self._model, self.evaluate, self._metric, self._usage = model, evaluate, metric, usage
        self._ranks, self._every, self._max_ablations = ranks, every, max_ablations
        self.evaluations = 0
        """Calls of `evaluate` in this decision."""
        self._values: np.ndarray | None = None  # of the metric that counts, in the last run; None if it was one number
        self._whole: np.ndarray | None = None  # the same of the network as it is

    def start(self) -> None:
        """Begin a decision."""
        self.evaluations, self._whole = 0, None

    @property
    def metric_error(self) -> float:
        """Standard error of the metric of the network as it is, in this decision; NaN if it was one number."""
        if self._whole is None or self._metric.relative or not np.isfinite(self._whole).all():
            return math.nan
        return paired_error(self._whole)

    @property
    def sparse(self) -> bool:
        """Whether some decisions leave seeds unmeasured."""
        return self._every > 1 or self._max_ablations is not None

    def validate(self) -> dict[str, float]:
        """The metrics of the network as it is; they may not be finite."""
        with preserve_state(self._model), evaluating(self._model):
            numbers = self._run()
        self._whole = self._values
        return numbers

    def measure(self, decision: int, goodness: float | None) -> None:
        """Note the metric with the seed minus that without it; at alpha 0, what the alpha target would give.

        `goodness` is the metric of the network as it is, if it is known. Without `evaluate` nothing is measured.
        """
        slot_state = self._model.slot_state
        measured = self.due(decision)
        if self.evaluate is None or not measured.any():
            return
        switched, values = np.full(measured.shape, math.nan), dict[int, np.ndarray | None]()
        with preserve_state(self._model), evaluating(self._model):
            if goodness is None:
                goodness, self._whole = self._metric.goodness(self._run()), self._values
            for index in np.flatnonzero(measured[0]).tolist():
                slot = self._model.slot_names[index]
                blended_in = slot_state.alpha[0, index] > 0
                with self._model.switched_off(slot) if blended_in else self._model.switched_in(slot):
                    switched[0, index], values[index] = self._metric.goodness(self._run()), self._values
                self._usage.check_ablation(self._model, slot)
        scale = self._metric.contribution_scale(goodness, switched)
        errors = {index: self._error(values[index]) / scale[0, index] for index in values}
        note_contributions(slot_state, measured, np.array([goodness]), switched, scale)
        for index, error in errors.items():
            if math.isfinite(error):
                known = float(slot_state.contribution[0, index]), float(error)
                self._model.contribution_errors[self._model.slot_names[index]] = known

    def _error(self, switched: np.ndarray | None) -> float:
        """The standard error of the mean difference of two runs; NaN if one of them gave a single number."""
        if self._whole is None or switched is None:
            return math.nan
        differences = paired_differences(self._whole, switched)
        return paired_error(differences) if np.isfinite(differences).all() else math.nan

    def forget_outdated(self) -> None:
        """Call before every action: a seed that is held since the last measurement must be measured first."""
        if self.evaluate is not None and self.sparse:
            forget_earlier_alphas(self._model.slot_state)

    def due(self, decision: int) -> np.ndarray:
        """Seeds that are measured at this decision, bool (1, S)."""
        slot_state = self._model.slot_state
        if decision % self._every:
            return np.zeros(slot_state.stage.shape, dtype=bool)
        return most_urgent(slot_state, to_measure(slot_state), self._max_ablations)

    def awaited(self) -> np.ndarray:
        """Held seeds that are still to be measured, bool (1, S): nothing can be said about them yet."""
        slot_state = self._model.slot_state
        if self.evaluate is None or not self.sparse:
            return np.zeros(slot_state.stage.shape, dtype=bool)
        return (slot_state.stage == Stage.HOLDING) & np.isnan(slot_state.contribution)

    def cost(self) -> str:
        """What a step runs, in words."""
        if self.evaluate is None:
            return "a step evaluates nothing, because evaluate=... is missing"
        limit = "" if self._max_ablations is None else f", at most {self._max_ablations} seeds"
        when = "" if self._every == 1 else f", in one of {self._every} decisions"
        return f"a step calls evaluate once, and once more per live seed and for one fossil{limit}{when}"

    def _run(self) -> dict[str, float]:
        evaluate = self.evaluate
        assert evaluate is not None
        self.evaluations += 1
        several: dict[str, np.ndarray] = {}

        def read() -> dict[str, float]:
            metrics, values = average_values(evaluate())
            several.update(values)
            return self._metric.read(metrics)

        with evaluating_others(self._model):
            numbers = self._ranks.mean("in evaluate", read)
        self._values = several.get(self._metric.name_in(numbers)) if self._ranks.size == 1 else None
        return numbers


def most_urgent(slots: SlotState, candidates: np.ndarray, limit: int | None) -> np.ndarray:
    """At most `limit` of the candidates of one model, bool (1, S).

    Held seeds come first if they are not measured yet, because their fate is due; then others that were never measured;
    then the oldest measurements, so that n seeds take turns and no measurement gets older than n / limit decisions.
    """
    if limit is None or candidates.sum() <= limit:
        return candidates
    unknown, held = np.isnan(slots.contribution[0]), slots.stage[0] == Stage.HOLDING
    order = np.lexsort((-slots.contribution_age[0], ~unknown, ~(unknown & held), ~candidates[0]))  # the last key first
    chosen = np.zeros_like(candidates)
    chosen[0, order[:limit]] = True
    return chosen


def forget_earlier_alphas(slots: SlotState) -> None:
    """Drop contributions of held seeds that were measured before their ramp landed, in place.

    A seed enters stage holding with its ramp landed, so a measurement that is older than the stage was made at a lower
    alpha. It must not decide whether the seed is fossilized.
    """
    slots.contribution[(slots.stage == Stage.HOLDING) & (slots.contribution_age > slots.stage_age)] = math.nan

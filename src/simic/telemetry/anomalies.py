"""Anomaly detection: the metrics of each update against thresholds, and plateaus of the score.

The detector's state is part of a checkpoint.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from simic.telemetry.events import Anomaly, Plateau


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a metric counts as an anomaly. Shared by agent and detector."""

    ratio_high: float = 5.0
    """Upper bound of the probability ratio of a decision after an update."""
    ratio_low: float = 0.1
    """Lower bound of that ratio."""
    ratio_share: float = 0.01
    """Maximum share of free decisions beyond either bound; single ones occur in healthy runs."""
    explained_variance: float = -1.0
    """Minimum explained variance of the critic after the warm-up."""
    kl_factor: float = 4.0
    """Maximum KL divergence of an update, as a multiple of target_kl."""
    entropy: float = 0.01
    """Minimum normalized entropy of a head that had a choice; below, it no longer explores."""
    gradient_factor: float = 100.0
    """Maximum gradient norm, as a multiple of the clipping norm."""
    drift_factor: float = 20.0
    """Maximum gradient norm of the policy or of a head, as a multiple of its running mean."""
    state_rms: float = 10.0
    """Maximum root mean square of the recurrent state."""
    host_gradient: float = 1e4
    """Maximum gradient norm of a host."""
    seed_gradient: float = 1e4
    """Maximum gradient norm of a seed."""
    warm_up: int = 5
    """Updates before explained variance, entropy and drift are checked."""
    decay: float = 0.9
    """Decay of the running means, per update."""
    escalate_updates: int = 3
    """Updates recorded in full detail after an anomaly."""
    plateau_updates: int = 30
    """Updates without improvement of the score's running mean that count as a plateau; 0 reports none."""
    plateau_margin: float = 0.1
    """Points by which that mean must rise to count as an improvement."""

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self)):
            (low, high), value = _RANGES.get(name, (0, math.inf)), getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be between {low} and {high}, got {value}")


_RANGES = {
    "ratio_high": (1, math.inf),
    "ratio_low": (0, 1),
    "ratio_share": (0, 1),
    "explained_variance": (-math.inf, 1),
    "entropy": (0, 1),
    "decay": (0, 1),
}
"""Ranges of the thresholds; those not named must not be negative."""


class Rule(NamedTuple):
    """One kind of anomaly."""

    name: str
    metric: str
    """The metric's name; one that ends in a slash stands for that metric of every head."""
    beyond: Callable[[float, float], bool]
    """Compares metric and threshold. Comparisons with NaN are False: what was not measured is no anomaly."""
    threshold: Callable[[AnomalyDetector], float]
    after_warm_up: bool = False


MUST_BE_FINITE = ("entropy", "value_mean", "return_mean", "kl_after")
"""Metrics that every update measures."""
RULES = (
    Rule("ratio_explosion", "ratio_exploded", operator.gt, lambda d: d.thresholds.ratio_share),
    Rule("ratio_collapse", "ratio_collapsed", operator.gt, lambda d: d.thresholds.ratio_share),
    Rule("kl_spike", "kl_after", operator.gt, lambda d: d.thresholds.kl_factor * d.target_kl),
    Rule("value_collapse", "explained_variance", operator.lt, lambda d: d.thresholds.explained_variance, True),
    Rule("entropy_collapse", "head_entropy/", operator.lt, lambda d: d.thresholds.entropy, True),
    Rule("gradient_explosion", "gradient_norm", operator.gt, lambda d: d.gradient_limit),
    Rule("skipped_step", "skipped_steps", operator.gt, lambda d: 0.0),
    *(
        Rule("not_finite", name, lambda value, _: not math.isfinite(value), lambda d: math.inf)
        for name in MUST_BE_FINITE
    ),
    Rule("state_not_finite", "state_finite", operator.lt, lambda d: 1.0),
    Rule("state_dead", "state_rms", operator.eq, lambda d: 0.0),
    Rule("state_explosion", "state_rms", operator.gt, lambda d: d.thresholds.state_rms),
    Rule("host_gradient", "host_gradient_max", operator.gt, lambda d: d.thresholds.host_gradient),
    Rule("seed_gradient", "seed_gradient_max", operator.gt, lambda d: d.thresholds.seed_gradient),
)
NORMS = ("gradient_norm", "head_gradient_norm/")
"""Metrics that are compared with their running mean."""
NAMES = (*dict.fromkeys(rule.name for rule in RULES), "gradient_drift")


class AnomalyDetector:
    """Checks the metrics of every update."""

    def __init__(
        self, thresholds: Thresholds | None = None, *, target_kl: float | None, max_gradient_norm: float
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.target_kl = math.inf if target_kl is None else target_kl
        self.gradient_limit = self.thresholds.gradient_factor * max_gradient_norm
        self._running: dict[str, float] = {}
        self._seen = 0
        self._plateau = PlateauState()

    def check(
        self, update: int, metrics: Mapping[str, float], places: Mapping[str, str] | None = None
    ) -> list[Anomaly]:
        """The anomalies of an update; `places` says where a metric was measured, if its name does not."""
        found = []
        for name, key, threshold in (*self._violations(metrics), *self._drift(metrics)):
            where = (places or {}).get(key) or key.partition("/")[2] or key
            found.append(Anomaly(update=update, name=name, value=metrics[key], threshold=threshold, where=where))
        self._seen += 1
        for key in _matching(metrics, *NORMS):
            if math.isfinite(metrics[key]) and metrics[key] > 0:
                mean = self._running.get(key, metrics[key])
                self._running[key] = mean + (1 - self.thresholds.decay) * (metrics[key] - mean)
        return found

    def _violations(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
        for rule in RULES:
            if rule.after_warm_up and self._seen < self.thresholds.warm_up:
                continue
            threshold = rule.threshold(self)
            for key in _matching(metrics, rule.metric):
                if rule.beyond(metrics[key], threshold):
                    yield rule.name, key, threshold

    def _drift(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
        if self._seen < self.thresholds.warm_up:
            return
        for key in _matching(metrics, *NORMS):
            limit = self.thresholds.drift_factor * self._running.get(key, math.inf)
            if metrics[key] > limit:
                yield "gradient_drift", key, limit

    def check_plateau(self, update: int, metrics: Mapping[str, float]) -> Plateau | None:
        """The plateau that this update completes, if it does: it is reported once, until the score improves again."""
        self._plateau, found = follow_plateau(self._plateau, update, metrics.get(PLATEAU_METRIC), self.thresholds)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The running means, the number of updates, and the best score."""
        return {"running": dict(self._running), "seen": self._seen, "plateau": self._plateau._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; older states know no plateaus, and start counting anew."""
        self._running, self._seen = dict(state["running"]), int(state["seen"])
        self._plateau = PlateauState(**state.get("plateau", {}))


PLATEAU_METRIC = "score"


class PlateauState(NamedTuple):
    """The running mean of the score, its best value so far, and whether its plateau has been reported."""

    mean: float | None = None
    best: float | None = None
    best_update: int = 0
    reported: bool = False


def follow_plateau(
    state: PlateauState, update: int, score: float | None, thresholds: Thresholds
) -> tuple[PlateauState, Plateau | None]:
    """The state after an update, and the plateau if there now is one. A score that was not measured changes nothing."""
    if score is None or not math.isfinite(score):
        return state, None
    mean = score if state.mean is None else state.mean + (1 - thresholds.decay) * (score - state.mean)
    if state.best is None or mean >= state.best + thresholds.plateau_margin:
        return PlateauState(mean, mean, update), None
    state = state._replace(mean=mean)
    too_long = thresholds.plateau_updates and update - state.best_update >= thresholds.plateau_updates
    if not too_long or state.reported:
        return state, None
    found = Plateau(update=update, metric=PLATEAU_METRIC, best=state.best or 0.0, best_update=state.best_update)
    return state._replace(reported=True), found


def _matching(metrics: Mapping[str, float], *names: str) -> list[str]:
    """The metrics by name; a name that ends in a slash matches that metric of every head."""
    return [key for name in names for key in metrics if key == name or (name.endswith("/") and key.startswith(name))]

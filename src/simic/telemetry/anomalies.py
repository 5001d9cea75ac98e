"""Anomaly detection: figures of a run against one set of thresholds. The detector's memory is part of a checkpoint."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from simic.telemetry.events import Anomaly


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a figure counts as an anomaly. Shared by agent and detector."""

    ratio_high: float = 5.0
    """Probability of an action after an update over that before."""
    ratio_low: float = 0.1
    """The same, downwards."""
    ratio_share: float = 0.01
    """Share of free decisions beyond one of these: single ones occur in healthy runs."""
    explained_variance: float = -1.0
    """A critic below this, after the warm-up, does far worse than a constant."""
    kl_factor: float = 4.0
    """KL of an update over its target."""
    entropy: float = 0.01
    """Normalised entropy of a head that had a choice: below, it no longer explores."""
    gradient_factor: float = 100.0
    """Gradient norm over the norm it is clipped to."""
    drift_factor: float = 20.0
    """Gradient norm over its running mean, of the whole policy or of a head."""
    state_rms: float = 10.0
    """Root mean square of the recurrent state."""
    host_gradient: float = 1e4
    """Gradient norm of a host."""
    seed_gradient: float = 1e4
    """Gradient norm of a seed."""
    warm_up: int = 5
    """Updates before figures that need experience are judged."""
    decay: float = 0.9
    """Of the running means, per update."""
    escalate_updates: int = 3
    """Updates for which everything is recorded after an anomaly."""

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
"""What thresholds are possible; those that are not named need only not be negative."""


class Rule(NamedTuple):
    """One kind of anomaly."""

    name: str
    figure: str
    """What is looked at; a name that ends in a slash stands for that figure of every head."""
    beyond: Callable[[float, float], bool]
    """Of the figure and the threshold. Comparisons with NaN are False, so what was not measured is no anomaly."""
    threshold: Callable[[AnomalyDetector], float]
    needs_experience: bool = False
    """Judged after the warm-up only."""


def _not_finite(value: float, threshold: float) -> bool:
    return not math.isfinite(value)


MUST_BE_FINITE = ("entropy", "value_mean", "return_mean", "kl_after")
"""Figures that every update measures: of policy and critic before it, of the rewards, of the policy after it."""
RULES = (
    Rule("ratio_explosion", "ratio_exploded", operator.gt, lambda d: d.thresholds.ratio_share),
    Rule("ratio_collapse", "ratio_collapsed", operator.gt, lambda d: d.thresholds.ratio_share),
    Rule("kl_spike", "kl_after", operator.gt, lambda d: d.thresholds.kl_factor * d.target_kl),
    Rule("value_collapse", "explained_variance", operator.lt, lambda d: d.thresholds.explained_variance, True),
    Rule("entropy_collapse", "head_entropy/", operator.lt, lambda d: d.thresholds.entropy, True),
    Rule("gradient_explosion", "gradient_norm", operator.gt, lambda d: d.gradient_limit),
    Rule("skipped_step", "skipped_steps", operator.gt, lambda d: 0.0),
    *(Rule("not_finite", figure, _not_finite, lambda d: math.inf) for figure in MUST_BE_FINITE),
    Rule("state_not_finite", "state_finite", operator.lt, lambda d: 1.0),
    Rule("state_dead", "state_rms", operator.eq, lambda d: 0.0),
    Rule("state_explosion", "state_rms", operator.gt, lambda d: d.thresholds.state_rms),
    Rule("host_gradient", "host_gradient_max", operator.gt, lambda d: d.thresholds.host_gradient),
    Rule("seed_gradient", "seed_gradient_max", operator.gt, lambda d: d.thresholds.seed_gradient),
)
NORMS = ("gradient_norm", "head_gradient_norm/")
"""Figures whose drift is watched."""
NAMES = (*dict.fromkeys(rule.name for rule in RULES), "gradient_drift")


class AnomalyDetector:
    """Looks at the figures of every update."""

    def __init__(
        self, thresholds: Thresholds | None = None, *, target_kl: float | None, max_gradient_norm: float
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.target_kl = math.inf if target_kl is None else target_kl
        self.gradient_limit = self.thresholds.gradient_factor * max_gradient_norm
        self._running: dict[str, float] = {}
        self._seen = 0

    def look(self, update: int, figures: Mapping[str, float], places: Mapping[str, str] | None = None) -> list[Anomaly]:
        """The anomalies among the figures of an update; `places` says where a figure comes from, such as its head."""
        found = [
            Anomaly(update=update, name=name, value=figures[key], threshold=threshold, where=_where(key, places or {}))
            for name, key, threshold in (*self._broken_rules(figures), *self._drift(figures))
        ]
        self._remember(figures)
        return found

    def _broken_rules(self, figures: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
        for rule in RULES:
            threshold = rule.threshold(self)
            if rule.needs_experience and self._seen < self.thresholds.warm_up:
                continue
            for key in _matching(figures, rule.figure):
                if rule.beyond(figures[key], threshold):
                    yield rule.name, key, threshold

    def _drift(self, figures: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
        if self._seen < self.thresholds.warm_up:
            return
        for key in (key for name in NORMS for key in _matching(figures, name)):
            limit = self.thresholds.drift_factor * self._running.get(key, math.inf)
            if figures[key] > limit:
                yield "gradient_drift", key, limit

    def _remember(self, figures: Mapping[str, float]) -> None:
        self._seen += 1
        for key in (key for name in NORMS for key in _matching(figures, name)):
            if math.isfinite(figures[key]) and figures[key] > 0:
                usual = self._running.get(key, figures[key])
                self._running[key] = usual + (1 - self.thresholds.decay) * (figures[key] - usual)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered."""
        return {"running": dict(self._running), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember it again."""
        self._running, self._seen = dict(state["running"]), int(state["seen"])


def _matching(figures: Mapping[str, float], name: str) -> list[str]:
    if name.endswith("/"):
        return [key for key in figures if key.startswith(name)]
    return [name] if name in figures else []


def _where(key: str, places: Mapping[str, str]) -> str:
    return places.get(key) or key.partition("/")[2] or key

"""Validation metrics as users pass them: read, checked, and shown to controllers as a loss and an accuracy.

One metric counts: contributions are measured in it. Controllers know two figures, a loss and an accuracy in [0, 1], and
judge losses by relative changes only, so a metric of any scale takes the place of one of the two:

    metric that counts                val_loss (Facts)          val_accuracy (Facts)   contribution
    none named: accuracy if given     val_loss or -accuracy     val_accuracy           difference of accuracies
                else loss             val_loss                  NaN                    difference of losses
    "val_loss"                        val_loss                  NaN                    difference of losses
    own, "max", so far in [0, 1]      val_loss or -metric       metric                 difference of the metric
    own, "max", beyond [0, 1]         exp(-asinh(metric / its   NaN                    difference / larger magnitude
                                      first magnitude))
    own, "min"                        metric                    NaN                    difference / larger magnitude

exp(-asinh(z)) = sqrt(1 + z^2) - z is positive, as losses are, and falls as z rises: like 1 / 2z for large z and like
2|z| for negative ones, so that its relative changes are those of the metric whatever the unit and the sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

METRICS_RETURNED = '{"val_loss": ..., "val_accuracy": ...}'
Mode = Literal["min", "max"]
_KNOWN: dict[str, Mode] = {"val_loss": "min", "val_accuracy": "max"}
_ROUNDING = 1e-6  # a mean of ones may be off by a rounding error


class CountedMetric:
    """The metric that counts, by name and mode; without a name the accuracy, or the loss where there is none."""

    def __init__(self, name: str | None = None, mode: str | None = None) -> None:
        check_metric(name, mode)
        self.name = name
        self.mode = mode if name is None else _KNOWN.get(name, mode)
        self.own = name is not None and name not in _KNOWN
        """Whether it is neither val_loss nor val_accuracy."""
        self.bounded = self.mode == "max"
        """Whether an own metric has been in [0, 1] so far, like an accuracy."""
        self.unit = 0.0
        """Magnitude of the first value that is not 0; 0 before there is one."""

    def __repr__(self) -> str:
        return "val_accuracy or val_loss" if self.name is None else f"{self.name} ({self.mode})"

    @property
    def expected(self) -> str:
        """What users are to give, for errors."""
        return METRICS_RETURNED if self.name is None else f'{{"{self.name}": ...}}'

    @property
    def keywords(self) -> str:
        """What `step` is to get, for errors."""
        return "val_loss=... (and val_accuracy=...)" if self.name is None else f"{self.name}=..."

    @property
    def positional(self) -> str:
        """The name of a value that is given without one."""
        return self.name or "val_loss"

    @property
    def relative(self) -> bool:
        """Whether contributions are shares of the metric's value, because its scale is not known."""
        return self.own and not self.bounded

    def read(self, metrics: Any, rule: str = "evaluate must return") -> dict[str, float]:
        """The numbers in a mapping, as floats; None counts as not given, and what is no number must not count."""
        given = {str(k): v for k, v in metrics.items() if v is not None} if isinstance(metrics, Mapping) else {}
        counted = [name for name in ((self.name,) if self.name else _KNOWN) if name in given]
        if not counted:
            hint = ""
            if self.name is None and given:
                first = next(iter(given))
                hint = f'; for another metric build GrowthScheduler(..., metric="{first}", mode="max") or mode="min"'
            raise ValueError(f"{rule} {self.expected}, got {metrics!r}{hint}")
        numbers = {name: read_number(name, value) for name, value in given.items() if name in _KNOWN or name in counted}
        accuracy = numbers["val_accuracy"] if "val_accuracy" in counted else 0.0
        if 1 + _ROUNDING < accuracy < math.inf:
            raise ValueError(f"val_accuracy must be a fraction between 0 and 1, got {accuracy}: divide percent by 100")
        others = {name: _number_or_none(value) for name, value in given.items() if name not in numbers}
        return numbers | {name: value for name, value in others.items() if value is not None}

    def collect(self, metrics: Any, named: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics given to `step`: one value or a mapping, and keywords; None counts as not given."""
        if metrics is not None and not isinstance(metrics, Mapping):
            metrics = {self.positional: metrics}
        given = [(str(name), value) for part in (metrics or {}, named) for name, value in part.items()]
        given = [(name, value) for name, value in given if value is not None]
        names = [name for name, _ in given]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"step got {twice} twice: give it once, as a value, in the mapping or as a keyword")
        return dict(given)

    def name_in(self, numbers: Mapping[str, float]) -> str:
        """The name of the metric that counts among those given."""
        if self.name is not None:
            return self.name
        return "val_loss" if math.isnan(numbers.get("val_accuracy", math.nan)) else "val_accuracy"

    def goodness(self, numbers: Mapping[str, float]) -> float:
        """The metric that counts, as a number that is better if it is higher.

        A value that is not finite becomes minus infinity: a broken network is worse than any other.
        """
        name = self.name_in(numbers)
        value = numbers.get(name, math.nan)
        value = -value if _KNOWN.get(name, self.mode) == "min" else value
        return value if math.isfinite(value) else -math.inf

    def observe(self, numbers: Mapping[str, float]) -> bool:
        """Take note of the metrics of the network as it is; whether they end that an own one is like an accuracy."""
        value = numbers[self.name_in(numbers)]
        if not self.unit and math.isfinite(value):
            self.unit = abs(value)
        ends = self.own and self.bounded and math.isfinite(value) and not -_ROUNDING <= value <= 1 + _ROUNDING
        self.bounded = self.bounded and not ends
        return ends

    def broken(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The values that are needed and not finite."""
        beside: Iterable[str] = ("val_loss",)
        if self.name is None:
            beside = _KNOWN
        elif self.relative or self.name == "val_loss":
            beside = ()
        used = {name: numbers[name] for name in (self.name_in(numbers), *beside) if name in numbers}
        return {name: value for name, value in used.items() if not math.isfinite(value)}

    def figures(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Loss and accuracy as controllers see them, see the table above; raises unless what they need is finite."""
        for name, value in self.broken(numbers).items():
            raise ValueError(f"{name} must be finite, got {value}: the host diverged; restore a checkpoint")
        name = self.name_in(numbers)
        value, mode = numbers[name], _KNOWN.get(name, self.mode)
        if mode == "min" or self.relative:
            return {"val_loss": value if mode == "min" else self.as_loss(value), "val_accuracy": math.nan}
        return {"val_loss": numbers.get("val_loss", -value), "val_accuracy": value}

    def restate(self, history: dict[str, list[float]]) -> dict[str, list[float]]:
        """A history in which the metric was shown as an accuracy, with losses instead."""
        accuracy = history["val_accuracy"]
        losses = [self.as_loss(value) for value in accuracy]
        return history | {"val_loss": losses, "val_accuracy": [math.nan] * len(accuracy)}

    def as_loss(self, value: float) -> float:
        """A metric without bounds that is better if higher, as a positive loss; see above."""
        return math.exp(min(-math.asinh(value / (self.unit or 1.0)), 700.0))  # exp(710) overflows

    def judged(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """What the governor judges: losses and an accuracy, where a metric is one or like one."""
        known = {name: numbers[name] for name in ("val_loss", "train_loss") if name in numbers}
        if not self.own:
            return known | {k: numbers[k] for k in ("val_accuracy",) if k in numbers and self.name != "val_loss"}
        value = numbers[self.name_in(numbers)]
        if self.bounded or (self.mode == "max" and not math.isfinite(value)):
            return known | {"val_accuracy": value}
        if self.mode == "min" and ("val_loss" not in numbers or not math.isfinite(value)):
            return {"val_loss": value}  # alone, because a training loss has another scale
        return known

    def contribution_scale(self, goodness: float, switched: np.ndarray) -> np.ndarray:
        """What differences of `goodness` are divided by (N, S): the larger magnitude of both values, if relative."""
        if not self.relative:
            return np.ones_like(switched)
        larger = np.fmax(abs(goodness), np.abs(switched))
        return np.where(np.isfinite(larger) & (larger > 0), larger, 1.0)

    def scale_of(self, history: Sequence[float]) -> np.ndarray:
        """The change of the metric that counts as 1, given its values as a loss: its present magnitude, if relative."""
        return np.array([(abs(history[-1]) or 1.0) if self.relative and history else 1.0])

    def state_dict(self) -> dict[str, Any]:
        """Name, mode, and what is known of its values."""
        return {"name": self.name, "mode": self.mode, "bounded": self.bounded, "unit": self.unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict` of the same metric."""
        self.bounded, self.unit = state["bounded"], state["unit"]


def check_metric(name: Any, mode: Any) -> None:
    """Raise unless these are the name of a metric and its mode, or None for the default."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f'metric must be the name of a metric that evaluate returns, such as "f1", got {name!r}')
    if mode is not None and mode not in get_args(Mode):
        raise ValueError(f'mode must be "min" (lower is better) or "max" (higher is better), got {mode!r}')
    if name is None and mode is not None:
        raise ValueError(f'mode={mode!r} needs the name of its metric: metric="f1", mode="max"')
    if name in _KNOWN and mode not in (None, _KNOWN[name]):
        raise ValueError(f'{name} has mode "{_KNOWN[name]}", got mode={mode!r}; leave it out')
    if name is not None and name not in _KNOWN and mode is None:
        raise ValueError(f'metric={name!r} needs mode="max" if higher is better, mode="min" if lower is better')


def read_number(name: str, value: Any) -> float:
    """A number of any type, also a tensor of one element, as a float."""
    number = _number_or_none(value)
    if number is None:
        raise TypeError(f"{name} must be one number, got {value!r}; give float(...) of it")
    return number


def _number_or_none(value: Any) -> float | None:
    try:
        return None if isinstance(value, str) else float(value)  # float() would parse a string
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None

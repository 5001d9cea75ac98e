"""Health lights: the metrics of the last update against the limits of anomaly detection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from simic.telemetry.anomalies import Thresholds

LightState = Literal["ok", "warn", "bad", "unknown"]
SENTENCES: dict[str, tuple[str, ...]] = {
    "kl_after": (
        "up to about twice `target_kl`",
        "`kl_after` above 4 times `target_kl`; never without a target. Lower the learning rate",
    ),
    "head_entropy/*": (
        "normalized entropy of a head where it had a choice, before the update",
        "1 at first, falls slowly; below 0.01 it no longer explores; NaN if it never had a choice",
        "`head_entropy` of a head below 0.01 after the warm-up. Raise the entropy coefficient or `entropy_floor`",
    ),
    "explained_variance": (
        "share of the variance of the value targets that the critic explained before the update",
        "negative in the first update, then 0.4 to 0.8 *measured*",
        "`explained_variance` below -1 after the warm-up: a constant prediction would be better. Check rewards and "
        "value loss",
    ),
    "gradient_norm": (
        "gradient norm of the policy before clipping, mean over steps",
        "0.8 to 4; it is clipped to `max_gradient_norm`",
        "`gradient_norm` above 100 times `max_gradient_norm`",
    ),
    "state_rms": (
        "root mean square of the recurrent state after the last step; NaN if episodes ended inside the rollout or "
        "`sequence_length` cut them",
        "0.3 to 2; 0 means a dead memory; an anomaly above 10",
    ),
    "state_finite": ("the recurrent state holds NaN or infinity",),
    "rollbacks": (
        "hosts that broke and whose last good weights were restored",
        "0; above 0.05 look at the `rollback` events",
    ),
    "gaming": (
        "slots whose live seed was suspected, at some decision of its episode, of a contribution that is not real; "
        "NaN without twins",
        "below 0.1; the `gaming` events hold contribution and gain",
    ),
}
"""What docs/metrics.md says of a metric, word for word: its meaning, its healthy range, the anomaly behind it."""


class Bound(NamedTuple):
    """A limit that a healthy value keeps."""

    limit: float
    above: bool = True

    def broken_by(self, value: float) -> bool:
        """False for NaN: what was not measured breaks no limit."""
        return value > self.limit if self.above else value < self.limit


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The settings of a run that limits follow from."""

    thresholds: Thresholds
    target_kl: float
    max_gradient_norm: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """From the settings in a RunStarted; what is missing or unusable has its default."""
        ppo = config.get("ppo") if isinstance(config.get("ppo"), dict) else {}
        assert isinstance(ppo, dict)
        return cls(
            thresholds=_thresholds(config.get("thresholds")),
            target_kl=_number(ppo.get("target_kl"), math.inf),
            max_gradient_norm=_number(ppo.get("max_gradient_norm"), math.inf),
        )


class Light(NamedTuple):
    """One light: the metric it shows, and from where on it warns."""

    name: str
    metric: str
    """A name that ends in a slash stands for that metric of every head."""
    label: str
    bad: Callable[[Limits], tuple[Bound, ...]] = lambda own: ()
    warn: Callable[[Limits], tuple[Bound, ...]] = lambda own: ()
    after_warm_up: bool = False


LIGHTS = (
    Light(
        "kl",
        "kl_after",
        "KL divergence",
        bad=lambda own: (Bound(own.thresholds.kl_factor * own.target_kl),),
        warn=lambda own: (Bound(2 * own.target_kl),),
    ),
    Light(
        "entropy",
        "head_entropy/",
        "Entropy",
        bad=lambda own: (Bound(own.thresholds.entropy, above=False),),
        warn=lambda own: (Bound(5 * own.thresholds.entropy, above=False),),
        after_warm_up=True,
    ),
    Light(
        "value",
        "explained_variance",
        "Explained variance",
        bad=lambda own: (Bound(own.thresholds.explained_variance, above=False),),
        warn=lambda own: (Bound(0.0, above=False),),
        after_warm_up=True,
    ),
    Light(
        "gradient",
        "gradient_norm",
        "Gradient norm",
        bad=lambda own: (Bound(own.thresholds.gradient_factor * own.max_gradient_norm),),
        warn=lambda own: (Bound(0.2 * own.thresholds.gradient_factor * own.max_gradient_norm),),
    ),
    Light(
        "lstm",
        "state_rms",
        "LSTM state",
        # Exactly 0 is a dead state; no living one is so small.
        bad=lambda own: (Bound(own.thresholds.state_rms), Bound(1e-30, above=False)),
        warn=lambda own: (Bound(0.5 * own.thresholds.state_rms),),
    ),
    Light("lstm_finite", "state_finite", "LSTM state is finite", bad=lambda own: (Bound(1.0, above=False),)),
    Light("governor", "rollbacks", "Hosts rolled back", warn=lambda own: (Bound(0.05),)),
    Light("gaming", "gaming", "Slots suspected of gaming", warn=lambda own: (Bound(0.1),)),
)


def health_lights(config: Mapping[str, Any], update: int, metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """The lights of a run by its settings and the metrics of its newest update; a run without PPO has none."""
    if config.get("algorithm") != "ppo":
        return []
    limits = Limits.of(config)
    return [_shown(light, metric, limits, update, metrics) for light in LIGHTS for metric in _metrics(light, metrics)]


def _metrics(light: Light, metrics: Mapping[str, float]) -> Iterator[str]:
    """The metrics that a light stands for; before the first update one without a value."""
    if not light.metric.endswith("/"):
        yield light.metric
        return
    yield from [name for name in metrics if name.startswith(light.metric)] or [light.metric]


def _shown(light: Light, metric: str, limits: Limits, update: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    head, value = metric.partition("/")[2], metrics.get(metric, math.nan)
    bad, warn = light.bad(limits), light.warn(limits)
    return {
        "name": f"{light.name}/{head}" if head else light.name,
        "label": f"{light.label}: {head}" if head else light.label,
        "value": value if math.isfinite(value) else None,
        "state": _state(value, bad, warn, checked=update >= limits.thresholds.warm_up or not light.after_warm_up),
        "limit": ", ".join(
            f"{'at most' if b.above else 'at least'} {b.limit:.3g}" for b in bad or warn if math.isfinite(b.limit)
        ),
        "sentence": ". ".join(SENTENCES[f"{light.metric}*" if light.metric.endswith("/") else light.metric]),
    }


def _state(value: float, bad: tuple[Bound, ...], warn: tuple[Bound, ...], *, checked: bool) -> LightState:
    if math.isnan(value):
        return "unknown"
    if not checked:
        return "ok"
    if any(bound.broken_by(value) for bound in bad):
        return "bad"
    return "warn" if any(bound.broken_by(value) for bound in warn) else "ok"


def _thresholds(saved: object) -> Thresholds:
    known = {item.name for item in fields(Thresholds)}
    try:
        return Thresholds(**{name: value for name, value in dict(saved or {}).items() if name in known})  # pyright: ignore
    except (TypeError, ValueError):
        return Thresholds()


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else default

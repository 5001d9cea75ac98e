"""UpdateMetrics: the measurements of one update. `docs/metrics.md` explains each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from simic.policy.normalization import widest_float
from simic.telemetry.anomalies import Thresholds

PER_HEAD = ("head_entropy", "head_kl", "head_gradient_norm")


@dataclass(frozen=True)
class RatioAlarm:
    """A decision whose probability ratio is beyond the thresholds after an update, and the head that changed most."""

    head: str
    ratio: float
    step: int
    env: int


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """The measurements of one update. Per-head values are means over the decisions that use the head."""

    update_count: int
    """Updates of this agent, this one included."""
    gradient_steps: int
    """Gradient steps of this agent, those of this update included."""
    steps_taken: int
    """Gradient steps of this update."""
    stopped_early: bool
    """Whether the KL divergence ended the update before its last step."""
    skipped_steps: int
    """Gradient steps of this update that were skipped because they were not finite."""
    decisions: int
    """Valid decisions in the rollout."""
    forced_share: float
    """Share of them with only one legal action."""
    policy_loss: float
    value_loss: float
    auxiliary_loss: float
    entropy: float
    """Mean entropy of the action tree in nats, over free decisions."""
    head_entropy: dict[str, float]
    """Normalized entropy where the head had a choice; NaN if it never had one."""
    kl: float
    """KL divergence of whole actions before the last gradient step, or at the step that was not taken."""
    kl_after: float
    """KL divergence of whole actions after the update."""
    head_kl: dict[str, float]
    clip_fraction: float
    """Share of free decisions whose probability ratio is outside the clip range."""
    ratio_max: float
    ratio_min: float
    ratio_exploded: float
    """Share of free decisions whose ratio is above the threshold."""
    ratio_collapsed: float
    """Share of free decisions whose ratio is below the threshold."""
    ratio_alarms: tuple[RatioAlarm, ...]
    """At most five decisions of each kind, the most extreme first."""
    explained_variance: float
    """Share of the variance of the value targets that the critic explained before the update."""
    gradient_norm: float
    """Before clipping, mean over gradient steps."""
    head_gradient_norm: dict[str, float]
    learning_rate: float
    entropy_coefficient: float
    advantage_mean: float
    """Before standardization."""
    advantage_std: float
    """Before standardization."""
    normalized_advantage_mean: float
    normalized_advantage_std: float
    return_mean: float
    return_std: float
    value_mean: float
    state_rms: float
    """Root mean square of the recurrent state after the last step; NaN if episodes ended inside or were cut."""
    state_finite: float
    """Share of finite entries in that state."""
    reward_scale: float
    """The divisor of rewards."""

    def flat(self) -> dict[str, float]:
        """All numbers by name; `name/head` for per-head values."""
        numbers: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                numbers |= {f"{field.name}/{head}": number for head, number in value.items()}
            elif isinstance(value, tuple):
                numbers[field.name] = len(value)
            else:
                numbers[field.name] = float(value)
        return numbers


def collect_metrics(
    measured: Mapping[str, Tensor], heads: Sequence[str], num_envs: int, thresholds: Thresholds, **known: Any
) -> UpdateMetrics:
    """The metrics from device tensors, transferred at once, and from numbers that are `known` already.

    What was not measured, because the update took no gradient step, is NaN.
    """
    numbers = _to_numbers(measured)
    worst = zip(numbers.pop("worst_ratio"), numbers.pop("worst_head"), numbers.pop("worst_index"), strict=True)
    alarms = (
        RatioAlarm(heads[int(head)], ratio, int(index) // num_envs, int(index) % num_envs)
        for ratio, head, index in worst
        if ratio > thresholds.ratio_high or ratio < thresholds.ratio_low
    )
    known["ratio_alarms"] = tuple(dict.fromkeys(alarms))  # in a small rollout the highest are also among the lowest
    known["decisions"] = int(numbers.pop("decisions", [0])[0])
    missing = [float("nan")] * len(heads)
    for field in fields(UpdateMetrics):
        if field.name not in known:
            values = numbers.get(field.name, missing)
            known[field.name] = dict(zip(heads, values, strict=True)) if field.name in PER_HEAD else values[0]
    return UpdateMetrics(**known)


def _to_numbers(measured: Mapping[str, Tensor]) -> dict[str, list[float]]:
    wide = widest_float(next(iter(measured.values())).device)
    flat = iter(torch.cat([values.detach().reshape(-1).to(wide) for values in measured.values()]).tolist())
    return {name: [next(flat) for _ in range(values.numel())] for name, values in measured.items()}

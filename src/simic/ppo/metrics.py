"""UpdateMetrics: what one update did, as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from simic.policy.moments import widest_float
from simic.telemetry.anomalies import Thresholds

PER_HEAD = ("head_entropy", "head_kl", "head_gradient_norm")


@dataclass(frozen=True)
class RatioAlarm:
    """A decision whose probability changed beyond reason within an update, and the head that changed most."""

    head: str
    ratio: float
    step: int
    env: int


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """What one update did. Per-head figures are means over the decisions where the head matters."""

    update_count: int
    """Updates of this agent, this one included."""
    gradient_steps: int
    """Gradient steps of this agent, those of this update included."""
    steps_taken: int
    """Gradient steps of this update."""
    stopped_early: bool
    """The KL ended the update before its last step."""
    skipped_steps: int
    """Gradient steps of this update that were not finite, and not taken."""
    decisions: int
    """Valid decisions in the rollout."""
    forced_share: float
    """Share of them in which nothing was left to choose."""
    policy_loss: float
    value_loss: float
    auxiliary_loss: float
    entropy: float
    """Mean entropy of the action tree in nats, over free decisions."""
    head_entropy: dict[str, float]
    """Normalised entropy where the head had a choice; NaN if it never had one."""
    kl: float
    """Of whole actions, when last looked at: before the last gradient step, or at the one that was not taken."""
    kl_after: float
    """Of whole actions, after the update."""
    head_kl: dict[str, float]
    clip_fraction: float
    """Share of free decisions whose ratio left the clip range."""
    ratio_max: float
    ratio_min: float
    ratio_exploded: float
    """Share of free decisions whose ratio is above the threshold."""
    ratio_collapsed: float
    """Share of free decisions whose ratio is below the threshold."""
    ratio_alarms: tuple[RatioAlarm, ...]
    """Of these, at most five that exploded and five that collapsed, each the worst first."""
    explained_variance: float
    """Share of the returns' variance that the critic knew before the update."""
    gradient_norm: float
    """Before clipping, mean over steps."""
    head_gradient_norm: dict[str, float]
    learning_rate: float
    entropy_coefficient: float
    advantage_mean: float
    """Before normalisation."""
    advantage_deviation: float
    """Before normalisation."""
    normalized_advantage_mean: float
    normalized_advantage_deviation: float
    return_mean: float
    return_deviation: float
    value_mean: float
    state_rms: float
    """Root mean square of the recurrent state at the end of the episodes; NaN if they were cut into pieces."""
    state_finite: float
    """Share of it that is finite."""
    reward_scale: float
    """What rewards were divided by."""

    def flat(self) -> dict[str, float]:
        """Every number under one name, heads after a slash."""
        numbers: dict[str, float] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                numbers |= {f"{field.name}/{head}": figure for head, figure in value.items()}
            elif isinstance(value, tuple):
                numbers[field.name] = len(value)
            else:
                numbers[field.name] = float(value)
        return numbers


def collect_metrics(
    figures: Mapping[str, Tensor], heads: Sequence[str], num_envs: int, thresholds: Thresholds, **known: Any
) -> UpdateMetrics:
    """The record of an update from its figures, fetched from the device at once, and what is `known` already.

    Figures that the update did not come to, because it took no step, are NaN.
    """
    numbers = _to_numbers(figures)
    alarms = zip(numbers.pop("worst_ratio"), numbers.pop("worst_head"), numbers.pop("worst_index"), strict=True)
    told = (
        RatioAlarm(heads[int(head)], ratio, int(index) // num_envs, int(index) % num_envs)
        for ratio, head, index in alarms
        if ratio > thresholds.ratio_high or ratio < thresholds.ratio_low
    )
    known["ratio_alarms"] = tuple(dict.fromkeys(told))  # in a small rollout the highest are among the lowest too
    known["decisions"] = int(numbers.pop("decisions", [0])[0])
    unknown = [float("nan")] * len(heads)
    for field in fields(UpdateMetrics):
        if field.name in known:
            continue
        values = numbers.get(field.name, unknown)
        known[field.name] = dict(zip(heads, values, strict=True)) if field.name in PER_HEAD else values[0]
    return UpdateMetrics(**known)


def _to_numbers(figures: Mapping[str, Tensor]) -> dict[str, list[float]]:
    wide = widest_float(next(iter(figures.values())).device)
    flat = torch.cat([figure.detach().reshape(-1).to(wide) for figure in figures.values()]).tolist()
    numbers: dict[str, list[float]] = {}
    for name, figure in figures.items():
        numbers[name], flat = flat[: figure.numel()], flat[figure.numel() :]
    return numbers

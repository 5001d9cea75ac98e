"""The record of one decision: what a step observed, what it did, which slots changed their stage; also as JSON values.

A saved decision holds only what differs from the defaults below; NaN is left out, stages are their names:

    {"index": 3, "metrics": {"f1": 0.81}, "metric": "f1", "val_loss": -0.81, "val_accuracy": 0.81,
     "actions": [{"op": "advance", "slot": "body"}], "parameters": 512, "evaluations": 2,
     "changes": [{"slot": "body", "blueprint": "mlp", "old": "blending", "new": "holding", ...}]}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from simic.control.governor import Verdict
from simic.growth.model import GrowableModel
from simic.lifecycle.actions import Action
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage

_WAIT = Action()


@dataclass(frozen=True, kw_only=True)
class StageChange:
    """A slot that moved from one stage to another."""

    slot: str
    blueprint: str
    old: Stage
    new: Stage
    contribution: float = math.nan
    """The last measurement before the change; NaN if there was none."""
    contribution_error: float = math.nan
    """Its standard error; NaN unless `evaluate` returns one value per batch or sample."""
    alpha: float = 0.0
    """After the change."""
    parameters: int = 0
    """Of the seed, which is gone if it was pruned."""

    def __str__(self) -> str:
        measured = "" if math.isnan(self.contribution) else f", contribution {self.contribution:+.4g}"
        measured += "" if math.isnan(self.contribution_error) else f" +- {self.contribution_error:.2g}"
        return (
            f"{self.slot}: {self.blueprint} {self.old} -> {self.new}, alpha {self.alpha:.2f}{measured}, "
            f"{self.parameters:,} parameters"
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one `GrowthScheduler.step` observed and did; `print` tells it in one line.

    >>> growth = GrowthScheduler(model, optimizer, "wait", evaluate=validate)
    >>> train_epoch()
    >>> growth.step().action.op
    'wait'
    """

    index: int
    val_loss: float = math.nan
    """As controllers see it; see the table in `validation` for metrics of your own."""
    val_accuracy: float = math.nan
    early: bool = False
    """Whether the first decision was taken before training, as in a frozen host; then host epochs are one less."""
    actions: tuple[Action, ...] = (_WAIT,)
    """What was done, in order; several only if the scheduler takes several actions per decision."""
    changes: tuple[StageChange, ...] = ()
    verdict: Verdict = Verdict.OK
    """If not OK, the network broke and the governor restored its last good state instead of deciding."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics by name, as they were given or returned by `evaluate`."""
    metric: str = ""
    """The name of the one that counts."""
    parameters: int = 0
    """Of the host and its seeds, after the action."""
    evaluations: int = 0
    """How often `evaluate` was called."""

    @property
    def host_epoch(self) -> int:
        """Host epochs trained before this decision."""
        return self.index if self.early else self.index + 1

    @property
    def action(self) -> Action:
        """The first action."""
        return self.actions[0]

    @property
    def value(self) -> float:
        """The metric that counts; NaN if the network broke before it was validated."""
        return self.metrics.get(self.metric, math.nan)

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        broken = "" if self.verdict == Verdict.OK else f", the network was {self.verdict}, last good state restored"
        return f"host epoch {self.host_epoch}: {shown or 'no metrics'}, {'; '.join(map(str, self.actions))}{broken}"


def stage_changes(
    model: GrowableModel, before: SlotState, parameters: Mapping[str, int] | None = None
) -> tuple[StageChange, ...]:
    """The slots whose stage differs from `before`, without those that merely cool down after a prune.

    `parameters` are those of the seeds that were there before.
    """
    after, parameters = model.slot_state, {**(parameters or {}), **seed_parameters(model)}
    return tuple(
        StageChange(
            slot=model.slot_names[index],
            blueprint=model.blueprint_names[max(before.blueprint[0, index], after.blueprint[0, index])],
            old=Stage(before.stage[0, index]),
            new=Stage(after.stage[0, index]),
            contribution=float(before.contribution[0, index]),
            contribution_error=_error_of(model, index, before),
            alpha=float(after.alpha[0, index]),
            parameters=parameters.get(model.slot_names[index], 0),
        )
        for index in np.flatnonzero(before.stage[0] != after.stage[0]).tolist()
        if before.blueprint[0, index] >= 0 or after.blueprint[0, index] >= 0
    )


def _error_of(model: GrowableModel, index: int, before: SlotState) -> float:
    contribution, error = model.contribution_errors.get(model.slot_names[index], (math.nan, math.nan))
    return error if contribution == before.contribution[0, index] else math.nan


def seed_parameters(model: GrowableModel) -> dict[str, int]:
    """Number of parameters of every seed, by slot."""
    seeds = ((slot, model.seed(slot)) for slot in model.grown_slots)
    return {slot: sum(p.numel() for p in seed.parameters()) for slot, seed in seeds if seed is not None}


def count_parameters(model: GrowableModel) -> int:
    """Number of parameters of the host and its seeds."""
    return sum(parameter.numel() for parameter in model.parameters())


def encode_decision(decision: Decision) -> dict[str, Any]:
    """A decision as JSON values."""
    saved = _differing(decision)
    if "metrics" in saved:
        saved["metrics"] = {name: _encode_number(value) for name, value in decision.metrics.items()}
    if "actions" in saved:
        saved["actions"] = [_differing(action) for action in decision.actions]
    if "changes" in saved:
        saved["changes"] = [_encode_change(change) for change in decision.changes]
    if "verdict" in saved:
        saved["verdict"] = str(decision.verdict)
    return saved


def decode_decision(saved: Mapping[str, Any]) -> Decision:
    """The inverse of `encode_decision`; fields of later versions are ignored."""
    values = {f.name: saved[f.name] for f in fields(Decision) if f.name in saved}
    values |= {name: float(values[name]) for name in ("val_loss", "val_accuracy") if name in values}
    values["metrics"] = {name: float(value) for name, value in saved.get("metrics", {}).items()}
    values["actions"] = tuple(Action(**action) for action in saved.get("actions", [{}]))
    values["changes"] = tuple(_decode_change(change) for change in saved.get("changes", ()))
    values["verdict"] = Verdict[saved.get("verdict", "ok").upper()]
    return Decision(**values)


def _encode_change(change: StageChange) -> dict[str, Any]:
    return _differing(change) | {"old": str(change.old), "new": str(change.new)}


def _decode_change(saved: Mapping[str, Any]) -> StageChange:
    values: dict[str, Any] = {f.name: saved[f.name] for f in fields(StageChange) if f.name in saved}
    values["old"], values["new"] = (Stage[saved[name].upper()] for name in ("old", "new"))
    return StageChange(**values)


def _encode_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _differing(record: Any) -> dict[str, Any]:
    """The fields that differ from their default; NaN, which equals nothing, counts as the default of a measurement."""
    values = {f.name: (getattr(record, f.name), f.default) for f in fields(record)}
    differing = {name: value for name, (value, default) in values.items() if value != default and value == value}
    return {name: _encode_number(value) if isinstance(value, float) else value for name, value in differing.items()}

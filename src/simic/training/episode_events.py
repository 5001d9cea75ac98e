"""From episode records to events, in order of time. Pure functions that loop only over what happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from simic.control.governor import Verdict
from simic.environment.episodes import EpisodeRecord
from simic.lifecycle.actions import HEAD_USED, HEADS, HEADS_USED_BY, Action, Column, Op
from simic.lifecycle.stages import LIVE, Stage
from simic.telemetry.events import (
    DecisionMade,
    EpisodeOutcome,
    EpisodeTrace,
    Event,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
)
from simic.telemetry.series import MAX_VALUES, Series, rounded

TRACED_HOSTS = 4
"""Hosts of each group whose episodes are traced at level normal; at level debug all are."""
_EMPTY = (Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING, Stage.DORMANT)
"""Stages without a seed."""


def episode_events(record: EpisodeRecord, update: int, group: int) -> Iterator[Event]:
    """The result of every episode."""
    assert record.reward is not None
    decisions = record.decisions
    for env in range(len(record.score)):
        final, ops = record.slots.stage[-1, env], record.action[record.valid[:, env], env, Column.OP]
        germinated = int((ops == int(Op.GERMINATE)).sum())
        kept = int((final == int(Stage.FOSSILIZED)).sum())
        dropped = sum(Stage(code) in LIVE for code in final.tolist())
        yield EpisodeOutcome(
            update=update,
            group=group,
            env=env,
            task=record.task,
            decisions=int(decisions[env]),
            score=float(record.score[env]),
            metric=float(record.val_accuracy[decisions[env], env]),
            episode_return=float(record.reward[:, env].sum()),
            host_parameters=record.host_parameters,
            parameters=int(record.exported_parameters[env]),
            operations={str(op): int((ops == int(op)).sum()) for op in Op},
            seeds={"fossilized": kept, "pruned": germinated - kept - dropped, "dropped": dropped},
            rolled_back=bool(record.verdict[:, env].any()),
            gain=float(record.score[env] - record.twins.score[env]) if record.twins else math.nan,
        )


def rollback_events(record: EpisodeRecord, update: int, group: int) -> Iterator[Event]:
    """Hosts that the governor restored."""
    forfeited = (record.reward_terms or {}).get("forfeit", np.zeros(record.valid.shape))
    for step, env in np.argwhere(record.verdict * record.valid).tolist():
        yield GovernorRollback(
            update=update,
            group=group,
            env=env,
            decision=step,
            verdict=str(Verdict(record.verdict[step, env])),
            val_loss=float(record.val_loss[step + 1, env]),
            forfeited=float(-forfeited[step, env]),
        )


def lifecycle_events(record: EpisodeRecord, update: int, group: int) -> Iterator[Event]:
    """Slots that changed their stage."""
    slots = record.slots
    changed = (slots.stage[1:] != slots.stage[:-1]) & record.valid[..., None]
    for step, env, slot in np.argwhere(changed).tolist():
        at = (step, env, slot)
        old, new = Stage(slots.stage[at]), Stage(slots.stage[step + 1, env, slot])
        yield LifecycleChange(
            update=update,
            group=group,
            env=env,
            decision=step,
            slot=record.slot_names[slot],
            # A seed that germinates has its blueprint only in the state after the decision.
            blueprint=_blueprint(record, step + (old in _EMPTY), env, slot),
            old_stage=str(old),
            new_stage=str(new),
            reason=_reason(record, step, env, slot, new),
            readiness={
                "age": float(slots.age[at]),
                "alpha": float(slots.alpha[at]),
                "contribution": float(slots.contribution[at]),
                "contribution_age": float(slots.contribution_age[at]),
                "gradient_norm": float(slots.gradient_norm[at]),
            },
        )


def gaming_events(record: EpisodeRecord, update: int, group: int) -> Iterator[Event]:
    """Seeds whose contribution exceeds what the host gained; none without twins."""
    if record.twins is None:
        return
    gain = record.val_accuracy - record.twins.val_accuracy
    for reason, flags in record.twins.gaming.items():
        for step, env, slot in np.argwhere(flags & record.valid[..., None]).tolist():
            yield GamingSuspicion(
                update=update,
                group=group,
                env=env,
                decision=step,
                slot=record.slot_names[slot],
                blueprint=_blueprint(record, step + 1, env, slot),
                reason=reason,
                contribution=float(record.slots.contribution[step + 1, env, slot]),
                gain=float(gain[step + 1, env]),
            )


def decision_events(record: EpisodeRecord, update: int, group: int) -> Iterator[Event]:
    """Every decision: state, legal operations, action, probabilities, value and reward."""
    assert record.policy is not None
    assert record.policy.probability is not None
    assert record.policy.value is not None
    assert record.reward is not None
    probability, value = record.policy.probability, record.policy.value
    for step, env in np.argwhere(record.valid).tolist():
        row, at = record.action[step, env], (step, env)
        used = HEADS_USED_BY[Op(int(row[Column.OP]))]
        yield DecisionMade(
            update=update,
            group=group,
            env=env,
            decision=step,
            state={
                "val_loss": float(record.val_loss[at]),
                "val_accuracy": float(record.val_accuracy[at]),
                "train_loss": float(record.train_loss[at]),
                "host_gradient": float(record.host_gradient[at]),
            },
            legal_ops=tuple(str(op) for op in Op if record.legal_ops[step, env, op]),
            action=str(Action.decode(row, record.slot_names, record.blueprint_names)),
            probabilities={head: float(probability[step, env, i]) for i, head in enumerate(HEADS) if head in used},
            value=float(value[at]),
            reward=float(record.reward[at]),
            reward_terms={name: float(values[at]) for name, values in (record.reward_terms or {}).items()},
        )


def trace_events(record: EpisodeRecord, update: int, group: int) -> Iterator[Event]:
    """The whole episodes of the group's first hosts."""
    for env in range(min(TRACED_HOSTS, len(record.score)) if _can_be_traced(record) else 0):
        yield _trace(record, update, group, env)


def debug_events(record: EpisodeRecord, update: int, group: int) -> Iterator[Event]:
    """The episodes of the other hosts, and every decision of all of them."""
    for env in range(TRACED_HOSTS, len(record.score) if _can_be_traced(record) else 0):
        yield _trace(record, update, group, env)
    yield from decision_events(record, update, group)


def _can_be_traced(record: EpisodeRecord) -> bool:
    """Whether a whole episode fits into an event: very long ones of many slots do not, and are not traced."""
    series = max(4 * len(record.slot_names), len(HEADS), len(record.reward_terms or {}))
    return series * len(record.slots.stage) <= MAX_VALUES


def _trace(record: EpisodeRecord, update: int, group: int, env: int) -> EpisodeTrace:
    steps = int(record.decisions[env])
    rows, states = record.action[:steps, env], slice(steps + 1)
    actions = [Action.decode(row, record.slot_names, record.blueprint_names) for row in rows]
    legal = [[str(op) for op in Op if record.legal_ops[step, env, op]] for step in range(steps)]
    series = {"val_loss": record.val_loss[1:], "val_accuracy": record.val_accuracy[1:], "reward": record.reward}
    series |= {"value": record.policy.value if record.policy else None}
    return EpisodeTrace(
        update=update,
        group=group,
        env=env,
        task=record.task,
        score=float(record.score[env]),
        metric=float(record.val_accuracy[steps, env]),
        host_parameters=record.host_parameters,
        parameters=int(record.exported_parameters[env]),
        rolled_back=bool(record.verdict[:, env].any()),
        segments=tuple(record.segments.items()),
        seed_parameters=tuple((name, _last_size(record, states, env, i)) for i, name in enumerate(record.slot_names)),
        slots={name: _slot_series(record, states, env, i) for i, name in enumerate(record.slot_names)},
        steps={
            "action": [str(action) for action in actions],
            "legal_ops": [" ".join(ops) for ops in legal],
            **{name: rounded(values[:steps, env]) for name, values in series.items() if values is not None},
        },
        probabilities=_probabilities(record, steps, env),
        reward_terms={name: rounded(values[:steps, env]) for name, values in (record.reward_terms or {}).items()},
    )


def _slot_series(record: EpisodeRecord, states: slice, env: int, slot: int) -> dict[str, Series]:
    slots, at = record.slots, (states, env, slot)
    return {
        "stage": [str(Stage(code)) for code in slots.stage[at].tolist()],
        "alpha": rounded(slots.alpha[at]),
        "contribution": rounded(slots.contribution[at]),
        "blueprint": [record.blueprint_names[index] if index >= 0 else "" for index in slots.blueprint[at].tolist()],
    }


def _last_size(record: EpisodeRecord, states: slice, env: int, slot: int) -> int:
    """Parameters of the last seed that the slot held; 0 if there was none."""
    sizes = record.seed_parameters[states, env, slot]
    return int(sizes[sizes > 0][-1]) if (sizes > 0).any() else 0


def _probabilities(record: EpisodeRecord, steps: int, env: int) -> dict[str, Series]:
    """Of the chosen value of each head that was used at least once."""
    if record.policy is None or record.policy.probability is None:
        return {}
    used = HEAD_USED[record.action[:steps, env, Column.OP]]
    values = np.where(used, record.policy.probability[:steps, env], np.nan)
    return {head: rounded(values[:, i]) for i, head in enumerate(HEADS) if used[:, i].any()}


EVENTS_OF: dict[type[Event], Callable[[EpisodeRecord, int, int], Iterator[Event]]] = {
    EpisodeOutcome: episode_events,
    GovernorRollback: rollback_events,
    LifecycleChange: lifecycle_events,
    GamingSuspicion: gaming_events,
    EpisodeTrace: trace_events,
    DecisionMade: debug_events,
}
"""The function that makes the events of each kind: (record, update, group)."""


def _blueprint(record: EpisodeRecord, state: int, env: int, slot: int) -> str:
    index = record.slots.blueprint[state, env, slot]
    return record.blueprint_names[index] if index >= 0 else ""


def _reason(record: EpisodeRecord, step: int, env: int, slot: int, new: Stage) -> str:
    if record.verdict[step, env] and new is Stage.PRUNED:
        return "governor"
    row = record.action[step, env]
    acted = row[Column.OP] and row[Column.SLOT] == slot
    return str(Op(int(row[Column.OP]))) if acted else "time"

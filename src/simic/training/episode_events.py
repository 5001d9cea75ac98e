"""From what was played to events: the story of every episode, in order. Pure; loops only over what happened."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from simic.control.governor import Verdict
from simic.lifecycle.actions import HEADS, HEADS_USED_BY, Action, Op
from simic.lifecycle.stages import LIVE, Stage
from simic.telemetry.events import (
    DecisionMade,
    EpisodeOutcome,
    Event,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
)
from simic.training.episodes import Trace

_GONE = (Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING, Stage.DORMANT)


def episode_events(trace: Trace, update: int, group: int) -> Iterator[Event]:
    """How every host of a group ended."""
    stages = [Stage(code) for code in range(len(Stage))]
    for env in range(len(trace.score)):
        valid = trace.valid[:, env]
        final, ops = trace.stage[-1, env], trace.action[valid, env, 0]
        germinated = int((ops == int(Op.GERMINATE)).sum())
        kept = int((final == int(Stage.FOSSILIZED)).sum())
        dropped = sum(stages[code] in LIVE for code in final)
        broke = bool(trace.verdict[:, env].any())
        yield EpisodeOutcome(
            update=update,
            group=group,
            env=env,
            task=trace.task,
            decisions=int(trace.decisions[env]),
            score=float(trace.score[env]),
            metric=float(trace.val_accuracy[trace.decisions[env], env]),
            episode_return=float(trace.reward[:, env].sum()),
            host_parameters=int(trace.host_parameters[env]),
            parameters=int(trace.parameters[env]),
            operations={str(op): int((ops == int(op)).sum()) for op in Op},
            seeds={"fossilized": kept, "pruned": germinated - kept - dropped, "dropped": dropped},
            rolled_back=broke,
        )


def rollback_events(trace: Trace, update: int, group: int) -> Iterator[Event]:
    """Hosts that the governor had to restore."""
    forfeited = trace.reward_terms.get("forfeit", np.zeros_like(trace.reward))
    for step, env in np.argwhere(trace.verdict * trace.valid).tolist():
        yield GovernorRollback(
            update=update,
            group=group,
            env=env,
            decision=step,
            verdict=str(Verdict(trace.verdict[step, env])),
            val_loss=float(trace.val_loss[step + 1, env]),
            forfeited=float(-forfeited[step, env]),
        )


def lifecycle_events(trace: Trace, update: int, group: int) -> Iterator[Event]:
    """Slots that changed their stage, in order of time."""
    changed = (trace.stage[1:] != trace.stage[:-1]) & trace.valid[..., None]
    for step, env, slot in np.argwhere(changed).tolist():
        old, new = (Stage(trace.stage[step + i, env, slot]) for i in (0, 1))
        index = trace.blueprint[step + (old in _GONE), env, slot]
        yield LifecycleChange(
            update=update,
            group=group,
            env=env,
            decision=step,
            slot=trace.slot_names[slot],
            blueprint=trace.blueprint_names[index] if index >= 0 else "",
            old_stage=str(old),
            new_stage=str(new),
            reason=_reason(trace, step, env, slot, new),
            readiness={
                "age": float(trace.age[step, env, slot]),
                "alpha": float(trace.alpha[step, env, slot]),
                "contribution": float(trace.contribution[step, env, slot]),
                "contribution_age": float(trace.contribution_age[step, env, slot]),
                "gradient_norm": float(trace.seed_gradient[step, env, slot]),
            },
        )


def gaming_events(trace: Trace, update: int, group: int) -> Iterator[Event]:
    """Seeds that look better than they are."""
    for reason, suspected in trace.gaming.items():
        for step, env, slot in np.argwhere(suspected & trace.valid[..., None]).tolist():
            index = trace.blueprint[step + 1, env, slot]
            yield GamingSuspicion(
                update=update,
                group=group,
                env=env,
                decision=step,
                slot=trace.slot_names[slot],
                blueprint=trace.blueprint_names[index] if index >= 0 else "",
                reason=reason,
                contribution=float(trace.contribution[step + 1, env, slot]),
                gain=float(trace.val_accuracy[step + 1, env] - trace.twin_accuracy[step + 1, env]),
            )


def decision_events(trace: Trace, update: int, group: int) -> Iterator[Event]:
    """Every decision with what was known, what was legal, what was chosen and what came of it."""
    ops = [str(op) for op in Op]
    for step, env in np.argwhere(trace.valid).tolist():
        row = trace.action[step, env]
        matter = HEADS_USED_BY[Op(int(row[0]))]
        yield DecisionMade(
            update=update,
            group=group,
            env=env,
            decision=step,
            state={
                "val_loss": float(trace.val_loss[step, env]),
                "val_accuracy": float(trace.val_accuracy[step, env]),
                "train_loss": float(trace.train_loss[step, env]),
                "host_gradient": float(trace.host_gradient[step, env]),
            },
            legal_ops=tuple(op for op, legal in zip(ops, trace.legal_ops[step, env], strict=True) if legal),
            action=str(Action.decode(row, trace.slot_names, trace.blueprint_names)),
            probabilities={h: float(trace.probability[step, env, i]) for i, h in enumerate(HEADS) if h in matter},
            value=float(trace.value[step, env]),
            reward=float(trace.reward[step, env]),
            reward_terms={name: float(values[step, env]) for name, values in trace.reward_terms.items()},
        )


NARRATORS = {
    EpisodeOutcome: episode_events,
    GovernorRollback: rollback_events,
    LifecycleChange: lifecycle_events,
    GamingSuspicion: gaming_events,
    DecisionMade: decision_events,
}
"""Who tells events of a kind; only the kinds that are recorded are told."""


def _reason(trace: Trace, step: int, env: int, slot: int, new: Stage) -> str:
    if trace.verdict[step, env] and new is Stage.PRUNED:
        return "governor"
    row = trace.action[step, env]
    return str(Op(int(row[0]))) if row[0] and row[1] == slot else "time"

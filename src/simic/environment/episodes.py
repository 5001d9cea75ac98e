"""Play whole episodes of N hosts and record them: the one loop of training, evaluation, plan search and demonstrations.

Shapes: T decisions, N hosts, S slots, H heads of an action, R rows and W choices of the action tree. Decision t leads
from state t to state t + 1. Here host 1 breaks at decision 1 (T = 3):

    states      0     1     2     3         val_loss, slots.stage, ...   (T + 1, N)
    decisions      0     1     2            action, reward, valid, ...   (T, N)
    valid, host 0  True  True  True         decisions[0] = 3
    valid, host 1  True  True  False        decisions[1] = 2: its episode ended in state 2

A host whose episode ended early stays in the stack and waits; its rows after the end are not valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from simic.control.facts import Facts
from simic.control.governor import Verdict
from simic.control.legality import Masks, legal_masks
from simic.environment.host_trainings import HostTrainings
from simic.lifecycle.actions import HEAD_USED, HEADS, Column
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import IllegalActionError
from simic.registry import running

Decide = Callable[[Facts, Masks], np.ndarray]
"""From the facts and legal choices of N hosts to their actions (N, H)."""


@dataclass(frozen=True, kw_only=True)
class PolicyRecord:
    """Inputs and outputs of a policy network at each decision."""

    observation: dict[str, np.ndarray]  # parts (T, N, ...)
    mask: np.ndarray  # (T, N, R, W)
    probability: np.ndarray | None = None  # (T, N, H) of the chosen action; None if another controller decided
    value: np.ndarray | None = None  # (T, N) output of the critic, before denormalization


@dataclass(frozen=True, kw_only=True)
class TwinRecord:
    """The twins of the hosts: the same hosts, data and batches without growth."""

    score: np.ndarray  # (N,)
    val_accuracy: np.ndarray  # (T + 1, N)
    gaming: dict[str, np.ndarray]  # flags (T, N, S) by reason, see `rewards.gaming`


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """Whole episodes of N hosts, as plain arrays that can be sent between processes."""

    task: str
    slot_names: tuple[str, ...]
    blueprint_names: tuple[str, ...]
    host_parameters: int
    action: np.ndarray  # (T, N, H), 0 in heads that the operation does not use
    legal_ops: np.ndarray  # (T, N, ops)
    valid: np.ndarray  # (T, N)
    verdict: np.ndarray  # (T, N)
    slots: SlotState  # (T + 1, N, S)
    val_loss: np.ndarray  # (T + 1, N)
    val_accuracy: np.ndarray  # (T + 1, N)
    train_loss: np.ndarray  # (T + 1, N)
    host_gradient: np.ndarray  # (T + 1, N) mean gradient norm of the last host epoch
    quality: np.ndarray  # (T + 1, N) on validation data, see `rewards.score`
    parameters: np.ndarray  # (T + 1, N), live seeds included
    exported_parameters: np.ndarray  # (N,) of the exported network, at the end of the episode
    score: np.ndarray  # (N,) likewise, on validation data
    seed_parameters: np.ndarray  # (T + 1, N, S) of each slot's seed
    segments: dict[str, int]  # parameters of the host's segments, in order
    reward: np.ndarray | None = None  # (T, N)
    reward_terms: dict[str, np.ndarray] | None = None  # (T, N) each
    test_quality: np.ndarray | None = None  # (N,) of the exported network
    shapley: np.ndarray | None = None  # (N, S) of the seeds present at the horizon
    policy: PolicyRecord | None = None
    twins: TwinRecord | None = None

    @property
    def decisions(self) -> np.ndarray:
        """Decisions until the episode ended (N,); also the index of its last state."""
        return self.valid.sum(0)

    @property
    def terminated(self) -> np.ndarray:
        """Whether the episode is over after each decision (T, N)."""
        return np.arange(len(self.valid))[:, None] >= self.decisions - 1

    def at_end(self, states: np.ndarray) -> np.ndarray:
        """Values (T + 1, N, ...) in the last state of each episode (N, ...)."""
        return states[self.decisions, np.arange(states.shape[1])]


def play(trainings: HostTrainings, decide: Decide, *, evaluate: bool = False) -> EpisodeRecord:
    """Whole episodes of all hosts. With `evaluate` also the test quality and Shapley values at the end of each."""
    facts, n = trainings.facts(), trainings.num_hosts
    alive = np.ones(n, dtype=bool)
    test_quality, shapley = np.full(n, np.nan), np.full(facts.slots.stage.shape, np.nan)
    states, steps = [_state(trainings, facts)], []
    for _ in range(trainings.length.host_epochs):
        masks = legal_masks(facts)
        action = decide(facts, masks) * alive[:, None]
        outcome = trainings.step(action, masks)
        facts = outcome.facts
        step = {
            "action": action * HEAD_USED[action[:, Column.OP]],
            "legal_ops": masks.op,
            "valid": alive,
            "verdict": np.where(alive, outcome.verdict, 0),
        }
        if outcome.reward is not None:
            step |= {"reward": outcome.reward.total * alive, "reward_terms": outcome.reward.terms}
        steps.append(step)
        states.append(_state(trainings, facts))
        ended = alive & outcome.ended
        if evaluate and ended.any():
            # Measured now: a host that ended early goes on training with the others.
            test_quality[ended] = trainings.test_quality()[ended]
            final = outcome.ended & (outcome.verdict == Verdict.OK)
            shapley[ended] = trainings.attribute(final).shapley[ended]
        alive = alive & ~outcome.ended
    per_state, decisions = stacked(states), np.sum([step["valid"] for step in steps], axis=0)
    for name in ("exported_parameters", "score"):
        per_state[name] = per_state[name][decisions, np.arange(n)]
    return EpisodeRecord(
        task=trainings.task.name,
        slot_names=tuple(facts.slot_names),
        blueprint_names=tuple(facts.blueprint_names),
        host_parameters=trainings.hosts.host_parameters,
        segments=trainings.hosts.structure.segment_sizes(),
        test_quality=test_quality if evaluate else None,
        shapley=shapley if evaluate else None,
        **stacked(steps),
        **per_state,
    )


def decide_by(act: Callable[[Facts], Any]) -> Decide:
    """Decisions of a controller's `act`, which computes legality itself."""
    name = getattr(act, "__qualname__", type(act).__qualname__)

    def decide(facts: Facts, masks: Masks) -> np.ndarray:
        with running(name, act.__module__):
            actions = np.asarray(act(facts))
        if actions.shape != (facts.num_hosts, len(HEADS)) or actions.dtype.kind not in "iu":
            got = f"{actions.dtype} of shape {actions.shape}" if actions.dtype != object else repr(actions.tolist())
            expected = f"integers of shape {(facts.num_hosts, len(HEADS))}"
            raise IllegalActionError(f"{name} must return one action per host, {expected}, got {got:.80}")
        return actions

    return decide


def stacked(steps: Sequence[Any]) -> Any:
    """Arrays, or dicts or dataclasses of arrays (N, ...), one per time step, as one with arrays (T, N, ...)."""
    first = steps[0]
    if first is None or isinstance(first, np.ndarray):
        return None if first is None else np.stack(steps)
    if isinstance(first, dict):
        return {name: stacked([step[name] for step in steps]) for name in first}
    return type(first)(**{f.name: stacked([getattr(step, f.name) for step in steps]) for f in fields(first)})


def _state(trainings: HostTrainings, facts: Facts) -> dict[str, Any]:
    return {
        "slots": facts.slots,
        "val_loss": facts.val_loss[:, -1],
        "val_accuracy": facts.val_accuracy[:, -1],
        "train_loss": facts.train_loss[:, -1],
        "host_gradient": facts.host_gradient_norm,
        "quality": trainings.quality(),
        "parameters": trainings.parameters(),
        "exported_parameters": trainings.parameters(exported=True),
        "score": trainings.score(exported=True),
        "seed_parameters": facts.seed_parameters,
    }

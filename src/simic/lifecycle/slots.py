"""The slots of N hosts as arrays, and the rules that move them: legality, execution of operations, time.

Shapes: N hosts, S slots each; every field is (N, S). An action array is (N, H), see `actions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from simic.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, HEAD_VALUES, HEADS, STYLES, TEMPOS, Op
from simic.lifecycle.ramps import CURVES, ramp_alpha
from simic.lifecycle.stages import LIVE, NEXT, IllegalActionError, LifecycleConfig, Stage


def _lookup(*stages: Stage) -> np.ndarray:
    """A table that says of every stage whether it is one of these: indexing is far faster than comparing."""
    return np.array([stage in stages for stage in Stage])


_LIVE, _BLENDING, _TRAINING = _lookup(*LIVE), _lookup(Stage.BLENDING), _lookup(Stage.TRAINING)
_FOSSIL = _lookup(Stage.FOSSILIZED)
_FOLLOWS = np.array([[new in NEXT[old] for new in Stage] for old in Stage])
_STYLE_CURVE = np.array([CURVES.index(style.curve) for style in STYLES])
_SLOT, _BLUEPRINT, _STYLE, _TEMPO, _TARGET, _SPEED, _CURVE = range(1, len(HEADS))
CONTRIBUTION_LIMIT = 1e6
"""What a seed is said to contribute if the network breaks without it."""


@dataclass(kw_only=True)
class SlotState:
    """What the lifecycle knows of each slot. Measurements that were not made are NaN."""

    stage: np.ndarray
    stage_age: np.ndarray  # decisions in this stage
    age: np.ndarray  # decisions since germination
    blueprint: np.ndarray  # index into the host's blueprint names; -1: no seed
    style: np.ndarray
    alpha: np.ndarray
    alpha_start: np.ndarray
    alpha_target: np.ndarray
    ramp_step: np.ndarray
    ramp_length: np.ndarray
    ramp_curve: np.ndarray
    contribution: np.ndarray
    contribution_age: np.ndarray  # decisions since it was measured
    counterfactual: np.ndarray  # measured at the alpha target, because alpha was 0
    gradient_norm: np.ndarray  # mean over the optimizer steps of the last host epoch

    @classmethod
    def dormant(cls, num_hosts: int, num_slots: int) -> SlotState:
        """Slots that never held a seed."""
        return cls(**{f.name: np.full((num_hosts, num_slots), *_EMPTY[f.name]) for f in fields(cls)})

    @property
    def occupied(self) -> np.ndarray:
        """Slots that hold a seed, fossils included."""
        return self.blueprint >= 0

    @property
    def live(self) -> np.ndarray:
        """Slots whose seed's fate is still open."""
        return _LIVE[self.stage]

    @property
    def ramping(self) -> np.ndarray:
        """Slots whose alpha is on its way."""
        return _BLENDING[self.stage] & (self.ramp_step < self.ramp_length)

    @property
    def leaving(self) -> np.ndarray:
        """Slots whose seed is being blended out, to be pruned when it lands at 0."""
        return _BLENDING[self.stage] & (self.alpha_target == 0)

    def copy(self) -> SlotState:
        """An independent copy."""
        return SlotState(**{f.name: getattr(self, f.name).copy() for f in fields(self)})

    def state_dict(self) -> dict[str, list]:
        """Every field as nested lists, for JSON; numbers that are not finite become text."""
        return {
            f.name: [[v if np.isfinite(v) else str(v) for v in row] for row in getattr(self, f.name).tolist()]
            for f in fields(self)
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, list]) -> SlotState:
        """The inverse of `state_dict`; a missing field raises."""
        missing = [f.name for f in fields(cls) if f.name not in state]
        if missing:
            raise ValueError(f"the saved slots lack {', '.join(missing)}: the file is not a simic checkpoint or is cut")
        return cls(
            **{
                f.name: np.array(
                    [[float(v) if isinstance(v, str) else v for v in row] for row in state[f.name]],
                    dtype=_EMPTY[f.name][1],
                )
                for f in fields(cls)
            }
        )


_EMPTY: dict[str, tuple[float, type]] = {
    "stage": (Stage.DORMANT, np.int64),
    "stage_age": (0, np.int64),
    "age": (0, np.int64),
    "blueprint": (-1, np.int64),
    "style": (0, np.int64),
    "alpha": (0.0, np.float64),
    "alpha_start": (0.0, np.float64),
    "alpha_target": (0.0, np.float64),
    "ramp_step": (0, np.int64),
    "ramp_length": (0, np.int64),
    "ramp_curve": (0, np.int64),
    "contribution": (np.nan, np.float64),
    "contribution_age": (0, np.int64),
    "counterfactual": (False, np.bool_),
    "gradient_norm": (np.nan, np.float64),
}


class Rule(NamedTuple):
    """A condition that an operation needs in its slot, and how to say so."""

    text: str
    holds: Callable[[SlotState, LifecycleConfig], np.ndarray]  # -> bool (N, S)


def _stage_in(*stages: Stage) -> Callable[[SlotState, LifecycleConfig], np.ndarray]:
    table = _lookup(*stages)
    return lambda slots, config: table[slots.stage]


def trained_enough(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    """Not in training, or in it for long enough."""
    return ~_TRAINING[slots.stage] | (slots.stage_age >= config.min_training_decisions)


def gradients_healthy(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    """Not in training, or with a measured gradient that is finite and not vanishing."""
    healthy = np.isfinite(slots.gradient_norm) & (slots.gradient_norm >= config.min_gradient_norm)
    return ~_TRAINING[slots.stage] | healthy


def _room(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    limit = slots.stage.shape[1] if config.max_seeds is None else config.max_seeds
    return np.broadcast_to(slots.occupied.sum(1, keepdims=True) < limit, slots.stage.shape)


RULES: dict[Op, tuple[Rule, ...]] = {
    Op.WAIT: (),
    Op.GERMINATE: (
        Rule("the slot must be empty", _stage_in(Stage.DORMANT)),
        Rule("the host must hold fewer than max_seeds seeds", _room),
    ),
    Op.SET_ALPHA_TARGET: (
        Rule("the seed must be blending or holding", _stage_in(Stage.BLENDING, Stage.HOLDING)),
        Rule("no ramp may be running", lambda s, c: ~s.ramping),
    ),
    Op.PRUNE: (
        Rule("the seed must be live", lambda s, c: s.live),
        Rule("the seed must be at least min_prune_age old", lambda s, c: s.age >= c.min_prune_age),
        Rule("the seed must not already be on its way out", lambda s, c: ~s.leaving),
    ),
    Op.FOSSILIZE: (
        Rule("the seed must be holding", _stage_in(Stage.HOLDING)),
        Rule(
            "its contribution must have been measured (give the scheduler evaluate=...)",
            lambda s, c: np.isfinite(s.contribution) & ~s.counterfactual,
        ),
    ),
    Op.ADVANCE: (
        Rule(
            "the seed must be germinated, training or blending",
            _stage_in(Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING),
        ),
        Rule("a training seed must have trained for min_training_decisions", trained_enough),
        Rule("a training seed must have healthy measured gradients", gradients_healthy),
        Rule("a blending seed's ramp must have landed", lambda s, c: ~s.ramping),
    ),
}


def legal_ops(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    """Which operation is legal in which slot: bool (N, ops, S). Wait is always legal."""
    legal = np.ones((slots.stage.shape[0], len(Op), slots.stage.shape[1]), dtype=bool)
    for op, rules in RULES.items():
        here = legal[:, op]
        for rule in rules:
            here &= rule.holds(slots, config)
    return legal


def check_actions(
    slots: SlotState,
    actions: np.ndarray,
    config: LifecycleConfig,
    slot_names: Sequence[str] | None = None,
    legal: np.ndarray | None = None,
) -> None:
    """Raise IllegalActionError, naming host, slot and rule, unless every row can be executed.

    `legal` (N, ops, S) saves computing `legal_ops` again.
    """
    num_hosts, num_slots = slots.stage.shape
    if actions.shape != (num_hosts, len(HEADS)) or not np.issubdtype(actions.dtype, np.integer):
        raise IllegalActionError(
            f"actions must have shape {(num_hosts, len(HEADS))} and be integers, got {actions.shape} of {actions.dtype}"
        )
    sizes = {head: len(values) for head, values in HEAD_VALUES.items()} | {"slot": num_slots}
    wrong = (actions < 0) | (actions >= [sizes.get(head, np.inf) for head in HEADS])
    if wrong.any():
        position, host = np.argwhere(wrong.T)[0]
        head = HEADS[position]
        rule = f"be in 0..{sizes[head] - 1}" if head in sizes else "not be negative"
        raise IllegalActionError(f"head {head} of host {host} must {rule}, got {actions[host, position]}")
    op, slot = actions[:, 0], actions[:, _SLOT]
    refused = ~(legal_ops(slots, config) if legal is None else legal)[np.arange(num_hosts), op, slot]
    if refused.any():
        host = int(refused.argmax())
        at = (host, int(slot[host]))
        broken = [rule.text for rule in RULES[Op(op[host])] if not rule.holds(slots, config)[at]]
        raise IllegalActionError(
            f"cannot {Op(op[host])} in slot {slot_names[at[1]] if slot_names else at[1]} of host {host}, "
            f"whose stage is {Stage(slots.stage[at])}: " + ("; ".join(broken) or "no blueprint fits there")
        )


def execute(slots: SlotState, actions: np.ndarray, config: LifecycleConfig, *, checked: bool = False) -> None:
    """Carry out one action per host, in place. Unless they are `checked`, an illegal one raises and changes nothing."""
    if not checked:
        check_actions(slots, actions, config)
    for op, carry_out in _EXECUTE.items():
        hosts = np.flatnonzero(actions[:, 0] == op)
        if hosts.size:
            carry_out(slots, (hosts, actions[hosts, _SLOT]), actions[hosts], config)


def tick(slots: SlotState, config: LifecycleConfig) -> None:
    """One decision of time, in place: ramps move, cooldowns run, ages grow."""
    slots.ramp_step += slots.ramping
    in_play = _BLENDING[slots.stage]
    alpha = ramp_alpha(slots.alpha_start, slots.alpha_target, slots.ramp_step, slots.ramp_length, slots.ramp_curve)
    slots.alpha[in_play] = alpha[in_play]
    remove(slots, np.nonzero(slots.leaving & ~slots.ramping))
    cooldown = {
        Stage.PRUNED: (1, Stage.EMBARGOED),
        Stage.EMBARGOED: (config.embargo_decisions, Stage.RESETTING),
        Stage.RESETTING: (1, Stage.DORMANT),
    }
    for stage, (duration, following) in cooldown.items():
        _enter(slots, np.nonzero((slots.stage == stage) & (slots.stage_age >= duration)), following)
    slots.stage_age += 1
    slots.age += slots.occupied
    slots.contribution_age += slots.occupied


def to_measure(slots: SlotState) -> np.ndarray:
    """Seeds whose contribution is measured at a decision, bool (N, S).

    These are all live seeds that are blended in or in training, and one fossil of each host: the one whose measurement
    is oldest, the first of them in a tie. The host learns on around its fossils, so what they contribute changes; in
    turns, k fossils cost one ablation per decision and no measurement gets older than k decisions.
    """
    fossil = _FOSSIL[slots.stage]
    oldest = np.where(fossil, slots.contribution_age, -1).argmax(1)
    turn = fossil & (np.arange(slots.stage.shape[1]) == oldest[:, None])
    return slots.live & ((slots.alpha > 0) | _TRAINING[slots.stage]) | turn


def note_contributions(slots: SlotState, measured: np.ndarray, metric: np.ndarray, switched: np.ndarray) -> None:
    """Write the contributions of the `measured` seeds, bool (N, S), in place; other slots stay as they are.

    `metric` (N,) is that of the network as it is. `switched` (N, S) is the metric with one seed switched the other way:
    off if it is blended in, else in at its alpha target.
    """
    blended_in = slots.alpha > 0
    # A network that breaks when a seed is switched is as bad as can be.
    with np.errstate(invalid="ignore"):  # infinity less infinity is not known
        lost = metric[:, None] - np.where(np.isfinite(switched), switched, -np.inf)
    contribution = np.clip(np.where(blended_in, lost, -lost), -CONTRIBUTION_LIMIT, CONTRIBUTION_LIMIT)
    slots.contribution[measured] = contribution[measured]
    slots.counterfactual[measured] = ~blended_in[measured]
    slots.contribution_age[measured] = 0


_At = tuple[np.ndarray, ...]


def _enter(slots: SlotState, at: _At, stage: Stage) -> None:
    assert _FOLLOWS[slots.stage[at], stage].all(), f"a rule let {slots.stage[at]} become {stage}"
    slots.stage[at] = stage
    slots.stage_age[at] = 0


def remove(slots: SlotState, at: _At) -> None:
    """Take seeds out of their slots at once, in place."""
    _enter(slots, at, Stage.PRUNED)
    _clear(slots, at)


def _clear(slots: SlotState, at: _At) -> None:
    for name, (value, _) in _EMPTY.items():
        if name != "stage":
            getattr(slots, name)[at] = value


def _start_ramp(slots: SlotState, at: _At, target: np.ndarray | float, length: np.ndarray, curve: np.ndarray) -> None:
    slots.alpha_start[at] = slots.alpha[at]
    slots.alpha_target[at] = target
    slots.ramp_step[at] = 0
    slots.ramp_length[at] = length
    slots.ramp_curve[at] = curve
    slots.alpha[at] = np.where(length == 0, target, slots.alpha[at])


def _back_to_blending(slots: SlotState, at: _At) -> None:
    holding = slots.stage[at] == Stage.HOLDING
    _enter(slots, tuple(index[holding] for index in at), Stage.BLENDING)


def _germinate(slots: SlotState, at: _At, actions: np.ndarray, config: LifecycleConfig) -> None:
    _clear(slots, at)
    _enter(slots, at, Stage.GERMINATED)
    slots.blueprint[at] = actions[:, _BLUEPRINT]
    slots.style[at] = actions[:, _STYLE]
    target = np.array(ALPHA_TARGETS)[actions[:, _TARGET]]
    _start_ramp(slots, at, target, np.array(TEMPOS)[actions[:, _TEMPO]], _STYLE_CURVE[actions[:, _STYLE]])
    if not config.has_training_stage:
        _enter(slots, at, Stage.BLENDING)


def _set_alpha_target(slots: SlotState, at: _At, actions: np.ndarray, config: LifecycleConfig) -> None:
    _back_to_blending(slots, at)
    slots.style[at] = actions[:, _STYLE]
    target = np.array(ALPHA_TARGETS)[actions[:, _TARGET]]
    _start_ramp(slots, at, target, np.array(ALPHA_SPEEDS)[actions[:, _SPEED]], actions[:, _CURVE])


def _prune(slots: SlotState, at: _At, actions: np.ndarray, config: LifecycleConfig) -> None:
    length = np.array(ALPHA_SPEEDS)[actions[:, _SPEED]]
    fades = (slots.alpha[at] > 0) & (length > 0)
    fading = tuple(index[fades] for index in at)
    _back_to_blending(slots, fading)
    _start_ramp(slots, fading, 0.0, length[fades], actions[fades, _CURVE])
    remove(slots, tuple(index[~fades] for index in at))


def _fossilize(slots: SlotState, at: _At, actions: np.ndarray, config: LifecycleConfig) -> None:
    _enter(slots, at, Stage.FOSSILIZED)


def _advance(slots: SlotState, at: _At, actions: np.ndarray, config: LifecycleConfig) -> None:
    for old, new in _ADVANCES_TO.items():
        chosen = slots.stage[at] == old
        # Each seed moves one stage: those that just moved are no longer in `chosen`.
        at_old = tuple(index[chosen] for index in at)
        at = tuple(index[~chosen] for index in at)
        _enter(slots, at_old, new)


_ADVANCES_TO = {
    Stage.GERMINATED: Stage.TRAINING,
    Stage.TRAINING: Stage.BLENDING,
    Stage.BLENDING: Stage.HOLDING,
}
_EXECUTE = {
    Op.GERMINATE: _germinate,
    Op.SET_ALPHA_TARGET: _set_alpha_target,
    Op.PRUNE: _prune,
    Op.FOSSILIZE: _fossilize,
    Op.ADVANCE: _advance,
}

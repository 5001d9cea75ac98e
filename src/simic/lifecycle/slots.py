"""The slots of N hosts as arrays, and the lifecycle rules on them: legality, operations, passing of time.

Shapes: N hosts, S slots each, H heads. Every field of `SlotState` is (N, S), actions are (N, H), see `actions`.
Two hosts with three slots each:

                slot 0      slot 1    slot 2
    host 0      fossilized  (empty)   blending
    host 1      (empty)     training  (empty)

    stage       [[5, 0, 3],    blueprint  [[ 2, -1,  0],    alpha  [[1.0, 0.0, 0.3],
                 [0, 2, 0]]                [-1,  1, -1]]            [0.0, 0.0, 0.0]]

A single model is the case N = 1, so it shares every rule with stacked hosts. A set of slots is either a mask (N, S) or
a pair of index arrays `at` (hosts, slots), as in numpy's advanced indexing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from simic.lifecycle.actions import ALPHA_SPEEDS, ALPHA_TARGETS, HEAD_VALUES, HEADS, STYLES, TEMPOS, Column, Op
from simic.lifecycle.ramps import CURVES, ramp_alpha
from simic.lifecycle.stages import LIVE, NEXT, IllegalActionError, LifecycleConfig, Stage


def _lookup(*stages: Stage) -> np.ndarray:
    """Bool table indexed by stage. `table[slots.stage]` is much faster than comparing with every stage."""
    return np.array([stage in stages for stage in Stage])


_STAGE_AFTER = {Stage.GERMINATED: Stage.TRAINING, Stage.TRAINING: Stage.BLENDING, Stage.BLENDING: Stage.HOLDING}
_LIVE, _BLENDING, _TRAINING = _lookup(*LIVE), _lookup(Stage.BLENDING), _lookup(Stage.TRAINING)
_FOSSIL = _lookup(Stage.FOSSILIZED)
_FOLLOWS = np.array([[new in NEXT[old] for new in Stage] for old in Stage])
# Head values as arrays, to be indexed with a column of actions.
_STYLE_CURVE = np.array([CURVES.index(style.curve) for style in STYLES])
_TARGET_VALUES, _TEMPO_VALUES, _SPEED_VALUES = np.array(ALPHA_TARGETS), np.array(TEMPOS), np.array(ALPHA_SPEEDS)
CONTRIBUTION_LIMIT = 1e6
"""Bound of the contribution, reached where the metric without (or with) the seed is not finite."""
At = tuple[np.ndarray, ...]
"""Index arrays (hosts, slots)."""


def _empty(value: float, dtype: type) -> dict[str, Any]:
    return {"value": value, "dtype": dtype}


_COUNT, _NUMBER, _UNKNOWN = _empty(0, np.int64), _empty(0.0, np.float64), _empty(np.nan, np.float64)


@dataclass(kw_only=True)
class SlotState:
    """The lifecycle state of every slot. The metadata of a field is its value in an empty slot, and its dtype."""

    stage: np.ndarray = field(metadata=_empty(Stage.DORMANT, np.int64))
    stage_age: np.ndarray = field(metadata=_COUNT)  # decisions in this stage
    age: np.ndarray = field(metadata=_COUNT)  # decisions since germination
    blueprint: np.ndarray = field(metadata=_empty(-1, np.int64))  # index into the host's blueprint names; -1: no seed
    style: np.ndarray = field(metadata=_COUNT)  # index into STYLES
    alpha: np.ndarray = field(metadata=_NUMBER)
    alpha_start: np.ndarray = field(metadata=_NUMBER)
    alpha_target: np.ndarray = field(metadata=_NUMBER)
    ramp_step: np.ndarray = field(metadata=_COUNT)
    ramp_length: np.ndarray = field(metadata=_COUNT)
    ramp_curve: np.ndarray = field(metadata=_COUNT)  # index into CURVES
    contribution: np.ndarray = field(metadata=_UNKNOWN)  # NaN: not measured
    contribution_age: np.ndarray = field(metadata=_COUNT)  # decisions since the measurement
    counterfactual: np.ndarray = field(metadata=_empty(False, np.bool_))  # measured at the alpha target: alpha was 0
    gradient_norm: np.ndarray = field(metadata=_UNKNOWN)  # mean over the optimizer steps of the last host epoch

    @classmethod
    def dormant(cls, num_hosts: int, num_slots: int) -> SlotState:
        """The state of empty slots."""
        shape = (num_hosts, num_slots)
        return cls(**{f.name: np.full(shape, f.metadata["value"], f.metadata["dtype"]) for f in fields(cls)})

    @property
    def occupied(self) -> np.ndarray:
        """Slots that hold a seed, fossils included."""
        return self.blueprint >= 0

    @property
    def live(self) -> np.ndarray:
        """Slots whose seed is neither fossilized nor pruned."""
        return _LIVE[self.stage]

    @property
    def ramping(self) -> np.ndarray:
        """Slots whose alpha ramp is running."""
        return _BLENDING[self.stage] & (self.ramp_step < self.ramp_length)

    @property
    def leaving(self) -> np.ndarray:
        """Slots whose seed is being blended out; it is pruned when alpha reaches 0."""
        return _BLENDING[self.stage] & (self.alpha_target == 0)

    def copy(self) -> SlotState:
        """An independent copy."""
        return SlotState(**{f.name: getattr(self, f.name).copy() for f in fields(self)})

    def clear(self, at: At | np.ndarray) -> None:
        """Empty the slots `at`, or all slots of the hosts `at` (M,), in place."""
        for f in fields(self):
            getattr(self, f.name)[at] = f.metadata["value"]

    def state_dict(self) -> dict[str, list]:
        """Every field as nested lists for JSON; non-finite numbers become strings."""
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
        parsed = {
            f.name: [[float(v) if isinstance(v, str) else v for v in row] for row in state[f.name]] for f in fields(cls)
        }
        return cls(**{f.name: np.array(parsed[f.name], dtype=f.metadata["dtype"]) for f in fields(cls)})


# Legality.


class Rule(NamedTuple):
    """A condition that an operation requires of its slot, and its text for errors."""

    text: str
    holds: Callable[[SlotState, LifecycleConfig], np.ndarray]  # -> bool (N, S)


def _stage_in(*stages: Stage) -> Callable[[SlotState, LifecycleConfig], np.ndarray]:
    table = _lookup(*stages)
    return lambda slots, config: table[slots.stage]


def _trained_enough(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    return ~_TRAINING[slots.stage] | (slots.stage_age >= config.min_training_decisions)


def _gradients_healthy(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    healthy = np.isfinite(slots.gradient_norm) & (slots.gradient_norm >= config.min_gradient_norm)
    return ~_TRAINING[slots.stage] | healthy


def _has_room(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    limit = slots.stage.shape[1] if config.max_seeds is None else config.max_seeds
    return np.broadcast_to(slots.occupied.sum(1, keepdims=True) < limit, slots.stage.shape)


def _seat_open(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    """First seats, and those behind a fossil: with k seeds per slot, columns k i to k i + k - 1 are one submodule's."""
    before = np.roll(_FOSSIL[slots.stage], 1, axis=1)
    return before | (np.arange(slots.stage.shape[1]) % config.seeds_per_slot == 0)


RULES: dict[Op, tuple[Rule, ...]] = {
    Op.WAIT: (),
    Op.GERMINATE: (
        Rule("the slot must be empty", _stage_in(Stage.DORMANT)),
        Rule("the seed before it in the same place must be a fossil", _seat_open),
        Rule("the host must hold fewer than max_seeds seeds", _has_room),
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
        Rule("the seed must be germinated, training or blending", _stage_in(*_STAGE_AFTER)),
        Rule("a training seed must have trained for min_training_decisions", _trained_enough),
        Rule("a training seed must have healthy measured gradients", _gradients_healthy),
        Rule("a blending seed's ramp must have landed", lambda s, c: ~s.ramping),
    ),
}


def legal_ops(slots: SlotState, config: LifecycleConfig) -> np.ndarray:
    """Which operation is legal in which slot: bool (N, ops, S). Wait is always legal."""
    legal = np.ones((slots.stage.shape[0], len(Op), slots.stage.shape[1]), dtype=bool)
    for op, rules in RULES.items():
        for rule in rules:
            legal[:, op] &= rule.holds(slots, config)
    return legal


def check_actions(
    slots: SlotState,
    actions: np.ndarray,
    config: LifecycleConfig,
    slot_names: Sequence[str] | None = None,
    legal: np.ndarray | None = None,
) -> None:
    """Raise IllegalActionError, naming host, slot and rule, unless all actions (N, H) are legal.

    `legal` (N, ops, S), if known, saves computing `legal_ops` again.
    """
    num_hosts, num_slots = slots.stage.shape
    if actions.shape != (num_hosts, len(HEADS)) or not np.issubdtype(actions.dtype, np.integer):
        raise IllegalActionError(
            f"actions must have shape {(num_hosts, len(HEADS))} and be integers, got {actions.shape} of {actions.dtype}"
        )
    sizes = {head: len(values) for head, values in HEAD_VALUES.items()} | {"slot": num_slots}
    wrong = (actions < 0) | (actions >= [sizes.get(head, np.inf) for head in HEADS])
    if wrong.any():
        column, host = np.argwhere(wrong.T)[0]
        head = HEADS[column]
        rule = f"be in 0..{sizes[head] - 1}" if head in sizes else "not be negative"
        raise IllegalActionError(f"head {head} of host {host} must {rule}, got {actions[host, column]}")
    op, slot = actions[:, Column.OP], actions[:, Column.SLOT]
    refused = ~(legal_ops(slots, config) if legal is None else legal)[np.arange(num_hosts), op, slot]
    if refused.any():
        host = int(refused.argmax())
        at = (host, int(slot[host]))
        broken = [rule.text for rule in RULES[Op(op[host])] if not rule.holds(slots, config)[at]]
        raise IllegalActionError(
            f"cannot {Op(op[host])} in slot {slot_names[at[1]] if slot_names else at[1]} of host {host}, "
            f"whose stage is {Stage(slots.stage[at])}: " + ("; ".join(broken) or "no blueprint fits there")
        )


# Change, all in place.


def execute(slots: SlotState, actions: np.ndarray, config: LifecycleConfig) -> None:
    """Carry out one action per host (N, H). An illegal action raises and changes nothing."""
    check_actions(slots, actions, config)
    apply_actions(slots, actions, config)


def apply_actions(slots: SlotState, actions: np.ndarray, config: LifecycleConfig) -> None:
    """`execute` for actions that `check_actions` has already accepted."""
    for op, operation in _OPERATIONS.items():
        hosts = np.flatnonzero(actions[:, Column.OP] == op)
        if hosts.size:
            operation(slots, (hosts, actions[hosts, Column.SLOT]), actions[hosts], config)


def tick(slots: SlotState, config: LifecycleConfig) -> None:
    """Advance time by one decision: alpha ramps, the stages after a prune, ages."""
    slots.ramp_step += slots.ramping
    blending = _BLENDING[slots.stage]
    alpha = ramp_alpha(slots.alpha_start, slots.alpha_target, slots.ramp_step, slots.ramp_length, slots.ramp_curve)
    slots.alpha[blending] = alpha[blending]
    remove(slots, np.nonzero(slots.leaving & ~slots.ramping))
    cooldown = {
        Stage.PRUNED: (1, Stage.EMBARGOED),
        Stage.EMBARGOED: (config.embargo_decisions, Stage.RESETTING),
        Stage.RESETTING: (1, Stage.DORMANT),
    }
    # In this order a slot without embargo passes from pruned to resetting within one tick.
    for stage, (duration, following) in cooldown.items():
        _enter(slots, np.nonzero((slots.stage == stage) & (slots.stage_age >= duration)), following)
    slots.stage_age += 1
    slots.age += slots.occupied
    slots.contribution_age += slots.occupied


def remove(slots: SlotState, at: At) -> None:
    """Prune the seeds `at` immediately, without a ramp."""
    assert _FOLLOWS[slots.stage[at], Stage.PRUNED].all(), f"a rule let {slots.stage[at]} be pruned"
    slots.clear(at)
    slots.stage[at] = Stage.PRUNED


def plant_fossil(slots: SlotState, at: At | tuple[int, int], alpha: float = 1.0) -> None:
    """Turn newly germinated seeds `at` into fossils with this alpha: a grown architecture from the start."""
    slots.stage[at] = Stage.FOSSILIZED
    slots.alpha[at] = slots.alpha_target[at] = alpha
    slots.ramp_step[at] = slots.ramp_length[at]


# Contributions.


def to_measure(slots: SlotState) -> np.ndarray:
    """Seeds whose contribution is measured at this decision, bool (N, S).

    All live seeds that are blended in or in training, and one fossil per host: the one whose measurement is oldest (the
    first of several). The host keeps training around its fossils, so their contributions change; measured in turn, k
    fossils cost one ablation per decision and no measurement is older than k decisions.
    """
    fossil = _FOSSIL[slots.stage]
    oldest = np.where(fossil, slots.contribution_age, -1).argmax(1)
    turn = fossil & (np.arange(slots.stage.shape[1]) == oldest[:, None])
    return slots.live & ((slots.alpha > 0) | _TRAINING[slots.stage]) | turn


def note_contributions(
    slots: SlotState, measured: np.ndarray, metric: np.ndarray, switched: np.ndarray, scale: np.ndarray | float = 1.0
) -> None:
    """Write the contributions of the `measured` seeds, bool (N, S), in place.

    `metric` (N,) is that of the unchanged network, `switched` (N, S) that of the network with one seed switched: off if
    it is blended in, otherwise on at its alpha target. A contribution is their difference divided by `scale` (N, S).
    """
    blended_in = slots.alpha > 0
    # A non-finite metric counts as the worst possible one; if both are infinite the contribution is unknown (NaN).
    with np.errstate(invalid="ignore"):
        lost = (metric[:, None] - np.where(np.isfinite(switched), switched, -np.inf)) / scale
    contribution = np.clip(np.where(blended_in, lost, -lost), -CONTRIBUTION_LIMIT, CONTRIBUTION_LIMIT)
    slots.contribution[measured] = contribution[measured]
    slots.counterfactual[measured] = ~blended_in[measured]
    slots.contribution_age[measured] = 0


# Operations: `at` are the hosts with this operation and their slots, `actions` the rows of these hosts.


def _enter(slots: SlotState, at: At, stage: Stage) -> None:
    assert _FOLLOWS[slots.stage[at], stage].all(), f"a rule let {slots.stage[at]} become {stage}"
    slots.stage[at] = stage
    slots.stage_age[at] = 0


def _where(at: At, chosen: np.ndarray) -> At:
    return tuple(index[chosen] for index in at)


def _start_ramp(slots: SlotState, at: At, target: np.ndarray | float, length: np.ndarray, curve: np.ndarray) -> None:
    slots.alpha_start[at] = slots.alpha[at]
    slots.alpha_target[at] = target
    slots.ramp_step[at] = 0
    slots.ramp_length[at] = length
    slots.ramp_curve[at] = curve
    slots.alpha[at] = np.where(length == 0, target, slots.alpha[at])


def _back_to_blending(slots: SlotState, at: At) -> None:
    _enter(slots, _where(at, slots.stage[at] == Stage.HOLDING), Stage.BLENDING)


def _germinate(slots: SlotState, at: At, actions: np.ndarray, config: LifecycleConfig) -> None:
    slots.clear(at)
    _enter(slots, at, Stage.GERMINATED)
    style = actions[:, Column.STYLE]
    slots.blueprint[at], slots.style[at] = actions[:, Column.BLUEPRINT], style
    target = _TARGET_VALUES[actions[:, Column.ALPHA_TARGET]]
    length = np.ceil(_TEMPO_VALUES[actions[:, Column.TEMPO]] * config.ramp_factor).astype(np.int64)
    _start_ramp(slots, at, target, length, _STYLE_CURVE[style])
    if config.has_training_stage:
        slots.alpha[at] = 0.0  # also if the ramp has no length
    else:
        _enter(slots, at, Stage.BLENDING)


def _set_alpha_target(slots: SlotState, at: At, actions: np.ndarray, config: LifecycleConfig) -> None:
    _back_to_blending(slots, at)
    slots.style[at] = actions[:, Column.STYLE]
    target, length = _TARGET_VALUES[actions[:, Column.ALPHA_TARGET]], _SPEED_VALUES[actions[:, Column.ALPHA_SPEED]]
    _start_ramp(slots, at, target, length, actions[:, Column.ALPHA_CURVE])


def _prune(slots: SlotState, at: At, actions: np.ndarray, config: LifecycleConfig) -> None:
    length = _SPEED_VALUES[actions[:, Column.ALPHA_SPEED]]
    fades = (slots.alpha[at] > 0) & (length > 0)
    _back_to_blending(slots, _where(at, fades))
    _start_ramp(slots, _where(at, fades), 0.0, length[fades], actions[fades, Column.ALPHA_CURVE])
    remove(slots, _where(at, ~fades))


def _fossilize(slots: SlotState, at: At, actions: np.ndarray, config: LifecycleConfig) -> None:
    _enter(slots, at, Stage.FOSSILIZED)


def _advance(slots: SlotState, at: At, actions: np.ndarray, config: LifecycleConfig) -> None:
    before = slots.stage[at]  # a copy, so that each seed moves by one stage only
    for old, new in _STAGE_AFTER.items():
        _enter(slots, _where(at, before == old), new)


_OPERATIONS = {
    Op.GERMINATE: _germinate,
    Op.SET_ALPHA_TARGET: _set_alpha_target,
    Op.PRUNE: _prune,
    Op.FOSSILIZE: _fossilize,
    Op.ADVANCE: _advance,
}

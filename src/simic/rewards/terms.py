"""The terms of rewards as pure functions of one decision: facts in, points (N,) out.

Every term is finite and bounded for every input; its bound stands beside it in `schemes.TERMS`.
A point is one percent of quality. Shapes: N hosts, S slots.
Differences of a function of the state telescope: there the function is bounded, never the difference.
"""

from __future__ import annotations

import numpy as np

from simic.lifecycle.actions import Op
from simic.lifecycle.slots import SlotState
from simic.lifecycle.stages import Stage
from simic.rewards.score import MAX_DOUBLINGS as MAX_DOUBLINGS
from simic.rewards.score import POINTS, doublings, relative_loss, score
from simic.rewards.transition import Transition

MAX_RELATIVE_LOSS = 2.0
"""A loss above this multiple of the random-guess loss is as bad as any."""

USELESS_DEBIT = 0.5
"""Points that a seed without contribution is charged over an episode."""
MAX_DEBIT = 10.0
"""Most points that a harmful seed is charged over an episode."""
WORSENING_SCALE = 0.05
"""Loss of quality within one decision that leaves 1/e of the credit."""

# Points of a stage, and of each decision spent in it up to MAX_PROGRESS_DECISIONS.
# A seed at the end of a stage never stands above the start of the next.
STAGE_POTENTIAL: dict[Stage, tuple[float, float]] = {
    Stage.DORMANT: (0.0, 0.0),
    Stage.GERMINATED: (1.0, 0.1),
    Stage.TRAINING: (2.0, 0.2),
    Stage.BLENDING: (3.5, 0.2),
    Stage.HOLDING: (5.5, 0.0),
    Stage.FOSSILIZED: (6.0, 0.0),
    Stage.PRUNED: (0.0, 0.0),
    Stage.EMBARGOED: (0.0, 0.0),
    Stage.RESETTING: (0.0, 0.0),
}
MAX_PROGRESS_DECISIONS = 5
MAX_POTENTIAL = max(base + MAX_PROGRESS_DECISIONS * rate for base, rate in STAGE_POTENTIAL.values())
_POTENTIAL = np.array([STAGE_POTENTIAL[stage] for stage in Stage])

HOLDING_GRACE = 3
"""Decisions that a seed may be held for free."""
HOLDING_RATE = 0.1
MAX_HOLDING = 1.0
MAX_PRUNE_BONUS = 0.3
"""Below the cost of germinating and pruning together: growing bad seeds to prune them does not pay."""
MAX_PRUNE_PENALTY = 3.0

INTERVENTION_COST: dict[Op, float] = {
    Op.WAIT: 0.0,
    Op.GERMINATE: 0.25,
    Op.SET_ALPHA_TARGET: 0.05,
    Op.PRUNE: 0.1,
    Op.FOSSILIZE: 0.05,
    Op.ADVANCE: 0.05,
}
_COST = np.array([INTERVENTION_COST[op] for op in Op])


def score_before(facts: Transition, rent_weight: float) -> np.ndarray:
    """The score at the decision."""
    return score(facts.quality_before, facts.parameters_before, facts.host_parameters, rent_weight)


def score_after(facts: Transition, rent_weight: float) -> np.ndarray:
    """The score after the decision; at the final decision that of the exported network."""
    return score(facts.quality_after, facts.parameters_after, facts.host_parameters, rent_weight)


def score_change(facts: Transition, rent_weight: float) -> np.ndarray:
    """Change of the score; sums to the final score minus the first."""
    return score_after(facts, rent_weight) - score_before(facts, rent_weight)


def rent_change(facts: Transition) -> np.ndarray:
    """Minus the doublings that this decision added."""
    before = doublings(facts.parameters_before, facts.host_parameters)
    return before - doublings(facts.parameters_after, facts.host_parameters)


def rent(facts: Transition) -> np.ndarray:
    """One decision's share of the rent: parameters kept for a whole episode pay their doublings once."""
    return -doublings(facts.parameters_after, facts.host_parameters) / _decisions(facts)


def loss_change(facts: Transition) -> np.ndarray:
    """Points by which the loss fell, relative to the task's random-guess loss."""
    before = relative_loss(facts.loss_before, facts.random_guess_loss, limit=MAX_RELATIVE_LOSS)
    after = relative_loss(facts.loss_after, facts.random_guess_loss, limit=MAX_RELATIVE_LOSS)
    return POINTS * (before - after)


def worsening_discount(facts: Transition) -> np.ndarray:
    """Factor in (0, 1] on credit: 1 unless the host got worse in this decision."""
    return np.exp(-np.maximum(facts.quality_before - facts.quality_after, 0.0) / WORSENING_SCALE)


def attribution(facts: Transition) -> np.ndarray:
    """Credit for contributions, never more than their geometric mean with the host's progress; debit for bad seeds."""
    contribution = np.where(facts.counted_after, facts.contribution_after, 0.0)
    gain = np.maximum(contribution, 0.0)
    progress = np.maximum(facts.quality_after - facts.first_quality, 0.0)[:, None]
    credit = POINTS * np.minimum(gain, np.sqrt(gain * progress)) * worsening_discount(facts)[:, None]
    debit = np.minimum(USELESS_DEBIT - POINTS * np.minimum(contribution, 0.0), MAX_DEBIT)
    points = np.where(contribution > 0, credit, -debit) * facts.counted_after
    return _together(points).sum(1) / _decisions(facts)


def proxy(facts: Transition) -> np.ndarray:
    """Change of quality in points while a host has live seeds but no contribution is known yet."""
    unknown = facts.slots_after.live.any(1) & ~facts.counted_after.any(1) & ~facts.terminal
    return np.where(unknown, POINTS * (facts.quality_after - facts.quality_before), 0.0)


def timing(facts: Transition) -> np.ndarray:
    """For fossilising a helpful seed: 1 at the start of an episode, falling linearly to 0."""
    helpful = facts.at_slot(facts.counted_after & (facts.contribution_after > 0))
    left = np.clip(1.0 - facts.decision / _decisions(facts), 0.0, 1.0)
    return np.where((facts.op == Op.FOSSILIZE) & helpful, left, 0.0)


def potential(slots: SlotState, terminal: np.ndarray) -> np.ndarray:
    """Phi: mean over the slots of what their stage is worth; 0 for states that end an episode."""
    base, rate = _POTENTIAL[slots.stage, 0], _POTENTIAL[slots.stage, 1]
    value = base + rate * np.clip(slots.stage_age, 0, MAX_PROGRESS_DECISIONS)
    # Any other value at the end would pay for stages as such and change which policy is best (Ng et al. 1999).
    return np.where(terminal, 0.0, value.mean(1))


def stage_bonus(facts: Transition, gamma: float) -> np.ndarray:
    """Potential-based shaping gamma Phi(s') - Phi(s): hints at the way without changing the best policy."""
    before = potential(facts.slots_before, np.zeros_like(facts.terminal))
    return gamma * potential(facts.slots_after, facts.terminal) - before


def alpha_shock(facts: Transition) -> np.ndarray:
    """Minus the squared changes of alpha, at least -1: a slow ramp costs less than a jump."""
    change = facts.slots_after.alpha - facts.slots_before.alpha
    return -np.minimum((change**2).sum(1), 1.0)


def holding(facts: Transition) -> np.ndarray:
    """Penalty for seeds held undecided: linear in the decisions beyond the grace, down to -MAX_HOLDING."""
    held = facts.slots_after.stage == Stage.HOLDING
    overdue = np.where(held, np.maximum(facts.slots_after.stage_age - HOLDING_GRACE, 0), 0).sum(1)
    return -np.minimum(HOLDING_RATE * overdue, MAX_HOLDING)


def prune_shaping(facts: Transition) -> np.ndarray:
    """Bonus for pruning a harmful seed, penalty for a helpful one, each bounded; nothing if it was not measured."""
    contribution = np.nan_to_num(facts.at_slot(facts.contribution_before))
    points = np.clip(-POINTS * contribution, -MAX_PRUNE_PENALTY, MAX_PRUNE_BONUS)
    return np.where(facts.op == Op.PRUNE, points, 0.0)


def intervention(facts: Transition) -> np.ndarray:
    """Minus the cost of the operation, from the one table."""
    return -_COST[facts.op]


def terminal_bonus(facts: Transition, rent_weight: float) -> np.ndarray:
    """At the final decision: the score gained over the whole episode."""
    return np.where(facts.final, score_after(facts, rent_weight) - POINTS * facts.first_quality, 0.0)


def sparse(facts: Transition, rent_weight: float) -> np.ndarray:
    """At the final decision: the score, clamped to +-POINTS. Scaling comes after the clamp."""
    return np.where(facts.final, np.clip(score_after(facts, rent_weight), -POINTS, POINTS), 0.0)


def escrow_change(facts: Transition) -> np.ndarray:
    """Payments (N, S) that bring what each seed was paid to its present credit; a pruned seed pays all of it back."""
    before = _credit(facts.contribution_before, facts.counted_before)
    return _credit(facts.contribution_after, facts.counted_after) - before


def escrow(facts: Transition) -> np.ndarray:
    """The payments of all seeds of a host."""
    return escrow_change(facts).sum(1)


def fossil_worth(facts: Transition, rent_weight: float) -> np.ndarray:
    """Points that each fossil adds minus its own rent (N, S); all fossils of a host together within +-POINTS."""
    fossil = facts.slots_after.stage == Stage.FOSSILIZED
    parameters = np.broadcast_to(facts.parameters_after[:, None], fossil.shape)
    own_rent = rent_weight * doublings(parameters, parameters - facts.seed_parameters_after)
    contribution = np.where(facts.counted_after, facts.contribution_after, 0.0)
    return _together(np.where(fossil, np.clip(POINTS * contribution - own_rent, -POINTS, POINTS), 0.0))


def fossilize_bonus(facts: Transition, rent_weight: float) -> np.ndarray:
    """For fossilising: what the new fossil is worth."""
    return np.where(facts.op == Op.FOSSILIZE, facts.at_slot(fossil_worth(facts, rent_weight)), 0.0)


def drip(facts: Transition, rent_weight: float) -> np.ndarray:
    """One decision's share of what all fossils are worth by their present contribution."""
    return fossil_worth(facts, rent_weight).sum(1) / _decisions(facts)


def rollback(facts: Transition) -> np.ndarray:
    """-1 where the governor ended the episode."""
    return -1.0 * facts.rolled_back


def forfeit(facts: Transition, limit: float) -> np.ndarray:
    """At a rollback: minus what the episode earned, in [-limit, 0], already in units of reward."""
    # Debts stay: to erase them would make breaking a host the way out of a bad episode.
    return np.where(facts.rolled_back, -np.clip(np.nan_to_num(facts.earned), 0.0, limit), 0.0)


def _decisions(facts: Transition) -> np.ndarray:
    return np.maximum(facts.horizon, 1)


def _credit(contribution: np.ndarray, counted: np.ndarray) -> np.ndarray:
    return _together(np.where(counted, POINTS * contribution, 0.0))


def _together(points: np.ndarray) -> np.ndarray:
    """Shares (N, S) shrunk alike where a host's magnitudes exceed POINTS: seeds cannot be worth more than a metric."""
    return points * (POINTS / np.maximum(np.abs(points).sum(1, keepdims=True), POINTS))

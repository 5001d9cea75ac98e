"""Reward terms as pure functions: one transition of N hosts in, points (N,) out. A point is one percent of quality.

Every term is finite and bounded for every input; its bound is listed beside it in `schemes.TERMS`. Terms that are
differences of a function of the state telescope over an episode. There the function is clipped, never the difference.

Shapes: N hosts, S slots.
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
"""Losses are clipped at this multiple of the random-guess loss."""

USELESS_DEBIT = 0.5
"""Points that a seed without contribution costs over an episode."""
MAX_DEBIT = 10.0
"""Most points that a harmful seed costs over an episode."""
WORSENING_SCALE = 0.05
"""Loss of quality within one decision that leaves 1/e of the credit."""

# Potential of a stage, and its increase per decision in that stage, up to MAX_PROGRESS_DECISIONS.
# The end of a stage never has a higher potential than the start of the next: waiting does not pay.
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
"""Decisions in stage holding without penalty."""
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


def score_before(transition: Transition, rent_weight: float) -> np.ndarray:
    """The score at the decision."""
    return score(transition.quality_before, transition.parameters_before, transition.host_parameters, rent_weight)


def score_after(transition: Transition, rent_weight: float) -> np.ndarray:
    """The score after the decision; at the final decision that of the exported network."""
    return score(transition.quality_after, transition.parameters_after, transition.host_parameters, rent_weight)


def score_change(transition: Transition, rent_weight: float) -> np.ndarray:
    """Change of the score; sums to the final score minus the first."""
    return score_after(transition, rent_weight) - score_before(transition, rent_weight)


def rent_change(transition: Transition) -> np.ndarray:
    """Minus the doublings that this decision added."""
    before = doublings(transition.parameters_before, transition.host_parameters)
    return before - doublings(transition.parameters_after, transition.host_parameters)


def rent(transition: Transition) -> np.ndarray:
    """One decision's share of the rent: parameters kept for a whole episode pay their doublings once."""
    return -doublings(transition.parameters_after, transition.host_parameters) / _decisions(transition)


def loss_change(transition: Transition) -> np.ndarray:
    """Points by which the loss fell, relative to the task's random-guess loss."""
    before = relative_loss(transition.loss_before, transition.random_guess_loss, limit=MAX_RELATIVE_LOSS)
    after = relative_loss(transition.loss_after, transition.random_guess_loss, limit=MAX_RELATIVE_LOSS)
    return POINTS * (before - after)


def worsening_discount(transition: Transition) -> np.ndarray:
    """Factor in (0, 1] on credit: 1 unless the host got worse in this decision."""
    return np.exp(-np.maximum(transition.quality_before - transition.quality_after, 0.0) / WORSENING_SCALE)


def attribution(transition: Transition) -> np.ndarray:
    """Credit for contributions, at most their geometric mean with the host's progress; debit for bad seeds."""
    contribution = np.where(transition.counted_after, transition.contribution_after, 0.0)
    gain = np.maximum(contribution, 0.0)
    progress = np.maximum(transition.quality_after - transition.first_quality, 0.0)[:, None]
    credit = POINTS * np.minimum(gain, np.sqrt(gain * progress)) * worsening_discount(transition)[:, None]
    debit = np.minimum(USELESS_DEBIT - POINTS * np.minimum(contribution, 0.0), MAX_DEBIT)
    points = np.where(contribution > 0, credit, -debit) * transition.counted_after
    return _together(points).sum(1) / _decisions(transition)


def proxy(transition: Transition) -> np.ndarray:
    """Change of quality in points while a host has live seeds but no contribution is known yet."""
    unknown = transition.slots_after.live.any(1) & ~transition.counted_after.any(1) & ~transition.terminal
    return np.where(unknown, POINTS * (transition.quality_after - transition.quality_before), 0.0)


def timing(transition: Transition) -> np.ndarray:
    """For fossilising a helpful seed: 1 at the start of an episode, falling linearly to 0."""
    helpful = transition.at_slot(transition.counted_after & (transition.contribution_after > 0))
    left = np.clip(1.0 - transition.decision / _decisions(transition), 0.0, 1.0)
    return np.where((transition.op == Op.FOSSILIZE) & helpful, left, 0.0)


def potential(slots: SlotState, terminal: np.ndarray) -> np.ndarray:
    """Phi: mean potential of the slots' stages (N,); 0 in terminal states."""
    base, rate = _POTENTIAL[slots.stage, 0], _POTENTIAL[slots.stage, 1]
    value = base + rate * np.clip(slots.stage_age, 0, MAX_PROGRESS_DECISIONS)
    # A terminal potential other than 0 would change which policy is optimal (Ng et al. 1999).
    return np.where(terminal, 0.0, value.mean(1))


def stage_bonus(transition: Transition, gamma: float) -> np.ndarray:
    """Potential-based shaping gamma Phi(s') - Phi(s), which leaves the optimal policy unchanged."""
    before = potential(transition.slots_before, np.zeros_like(transition.terminal))
    return gamma * potential(transition.slots_after, transition.terminal) - before


def alpha_shock(transition: Transition) -> np.ndarray:
    """Minus the squared changes of alpha, at least -1: a slow ramp costs less than a jump."""
    change = transition.slots_after.alpha - transition.slots_before.alpha
    return -np.minimum((change**2).sum(1), 1.0)


def holding(transition: Transition) -> np.ndarray:
    """Penalty for seeds in stage holding: linear in the decisions beyond HOLDING_GRACE, down to -MAX_HOLDING."""
    held = transition.slots_after.stage == Stage.HOLDING
    overdue = np.where(held, np.maximum(transition.slots_after.stage_age - HOLDING_GRACE, 0), 0).sum(1)
    return -np.minimum(HOLDING_RATE * overdue, MAX_HOLDING)


def prune_shaping(transition: Transition) -> np.ndarray:
    """Bonus for pruning a harmful seed, penalty for a helpful one, each clipped; 0 if not measured."""
    contribution = np.nan_to_num(transition.at_slot(transition.contribution_before))
    points = np.clip(-POINTS * contribution, -MAX_PRUNE_PENALTY, MAX_PRUNE_BONUS)
    return np.where(transition.op == Op.PRUNE, points, 0.0)


def intervention(transition: Transition) -> np.ndarray:
    """Minus INTERVENTION_COST of the operation."""
    return -_COST[transition.op]


def terminal_bonus(transition: Transition, rent_weight: float) -> np.ndarray:
    """At the final decision: the score gained over the whole episode."""
    return np.where(transition.final, score_after(transition, rent_weight) - POINTS * transition.first_quality, 0.0)


def sparse(transition: Transition, rent_weight: float) -> np.ndarray:
    """At the final decision: the score, clipped to +-POINTS before scaling."""
    return np.where(transition.final, np.clip(score_after(transition, rent_weight), -POINTS, POINTS), 0.0)


def escrow_change(transition: Transition) -> np.ndarray:
    """Change of each seed's credit (N, S), so that a pruned seed pays back all it received."""
    before = _credit(transition.contribution_before, transition.counted_before)
    return _credit(transition.contribution_after, transition.counted_after) - before


def escrow(transition: Transition) -> np.ndarray:
    """Sum of `escrow_change` over the seeds of a host."""
    return escrow_change(transition).sum(1)


def fossil_worth(transition: Transition, rent_weight: float) -> np.ndarray:
    """Contribution of each fossil minus its own rent, in points (N, S); within +-POINTS for all of a host."""
    fossil = transition.slots_after.stage == Stage.FOSSILIZED
    parameters = np.broadcast_to(transition.parameters_after[:, None], fossil.shape)
    own_rent = rent_weight * doublings(parameters, parameters - transition.seed_parameters_after)
    contribution = np.where(transition.counted_after, transition.contribution_after, 0.0)
    return _together(np.where(fossil, np.clip(POINTS * contribution - own_rent, -POINTS, POINTS), 0.0))


def fossilize_bonus(transition: Transition, rent_weight: float) -> np.ndarray:
    """For fossilising: `fossil_worth` of the new fossil."""
    return np.where(transition.op == Op.FOSSILIZE, transition.at_slot(fossil_worth(transition, rent_weight)), 0.0)


def drip(transition: Transition, rent_weight: float) -> np.ndarray:
    """One decision's share of `fossil_worth`, by the current contributions of all fossils."""
    return fossil_worth(transition, rent_weight).sum(1) / _decisions(transition)


def rollback(transition: Transition) -> np.ndarray:
    """-1 where the governor ended the episode."""
    return -1.0 * transition.rolled_back


def forfeit(transition: Transition, limit: float) -> np.ndarray:
    """At a rollback: minus what the episode earned, in [-limit, 0], already in units of reward."""
    # Negative earnings are kept: otherwise breaking the host would be a way out of a bad episode.
    return np.where(transition.rolled_back, -np.clip(np.nan_to_num(transition.earned), 0.0, limit), 0.0)


def _decisions(transition: Transition) -> np.ndarray:
    return np.maximum(transition.horizon, 1)


def _credit(contribution: np.ndarray, counted: np.ndarray) -> np.ndarray:
    return _together(np.where(counted, POINTS * contribution, 0.0))


def _together(points: np.ndarray) -> np.ndarray:
    """Scale down the points (N, S) of hosts whose magnitudes add up to more than POINTS, a perfect quality."""
    return points * (POINTS / np.maximum(np.abs(points).sum(1, keepdims=True), POINTS))

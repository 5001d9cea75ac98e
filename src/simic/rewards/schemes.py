"""Rewards as named weighted sums of terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from simic.rewards import terms
from simic.rewards.transition import Transition

SchemeName = Literal["score", "score_with_costs", "shaped", "simplified", "sparse", "minimal", "escrow", "drip", "loss"]

PROXY_SHARE = 0.3
"""Weight of progress while contributions are unknown, as a share of theirs."""
DRIP_SHARE = 0.7
"""Part of a fossil's worth that is paid later, by what it then contributes."""
FORFEIT_LIMIT = 200.0
"""Most points a rollback takes back."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Which reward the controller learns from. All figures are points: percent of quality."""

    scheme: SchemeName = "score"
    """The weighted sum of terms, see `SCHEMES`."""
    gamma: float = field(default=0.99, metadata={"not_a_setting": "it follows ppo.gamma"})
    """Discount per decision, that of the learner: potential-based shaping is neutral only under the same discount."""
    rent_weight: float = 1.0
    """Points that a doubling of the parameters costs."""
    compute_weight: float = 0.0
    """Cost of a doubling that is trained for a whole episode, kept or not (schemes score, score_with_costs)."""
    contribution_weight: float = 1.0
    """Weight of measured contributions; that of the proxy is derived from it."""
    rollback_penalty: float = 10.0
    """Points that a rollback costs."""
    scale: float = 1.0
    """Factor from points to reward, applied after every clamp."""

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {self.scheme!r}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {self.gamma}")
        if not 0 < self.scale < np.inf:
            raise ValueError(f"scale must be positive and finite, got {self.scale}")
        for name in ("rent_weight", "compute_weight", "contribution_weight", "rollback_penalty"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")

    def check_gamma(self, other: float) -> None:
        """Raise unless `other`, the discount of whoever learns from this reward, is the same gamma."""
        if other != self.gamma:
            raise ValueError(
                f"the reward's gamma is {self.gamma}, the learner's is {other}: shaping with another discount "
                "changes which policy is best; set both to one value"
            )

    @property
    def proxy_weight(self) -> float:
        """Weight of the change of quality while contributions are unknown."""
        return PROXY_SHARE * self.contribution_weight

    @property
    def forfeit_limit(self) -> float:
        """Most reward that a rollback takes back."""
        return self.scale * FORFEIT_LIMIT

    @property
    def bound(self) -> float:
        """No reward of one decision is larger than this in magnitude."""
        points = sum(abs(weight) * TERMS[name].bound(self) for name, weight in _weights(self).items())
        return self.scale * points + self.forfeit_limit


class Term(NamedTuple):
    """A term under a config: its points (N,), and the most they can be in magnitude."""

    points: Callable[[Transition, RewardConfig], np.ndarray]
    bound: Callable[[RewardConfig], float]


def _rent_bound(config: RewardConfig) -> float:
    return config.rent_weight * terms.MAX_DOUBLINGS


def _score_bound(config: RewardConfig) -> float:
    return terms.POINTS + _rent_bound(config)


TERMS: dict[str, Term] = {
    "score": Term(lambda f, c: terms.score_change(f, c.rent_weight), _score_bound),
    "attribution": Term(
        lambda f, c: c.contribution_weight * terms.attribution(f), lambda c: c.contribution_weight * terms.POINTS
    ),
    "proxy": Term(lambda f, c: c.proxy_weight * terms.proxy(f), lambda c: c.proxy_weight * terms.POINTS),
    "timing": Term(lambda f, c: terms.timing(f), lambda c: 1.0),
    "stage": Term(lambda f, c: terms.stage_bonus(f, c.gamma), lambda c: terms.MAX_POTENTIAL),
    "rent": Term(lambda f, c: c.rent_weight * terms.rent(f), _rent_bound),
    "compute": Term(lambda f, c: c.compute_weight * terms.rent(f), lambda c: c.compute_weight * terms.MAX_DOUBLINGS),
    "rent_change": Term(lambda f, c: c.rent_weight * terms.rent_change(f), _rent_bound),
    "alpha_shock": Term(lambda f, c: terms.alpha_shock(f), lambda c: 1.0),
    "holding": Term(lambda f, c: terms.holding(f), lambda c: terms.MAX_HOLDING),
    "prune": Term(lambda f, c: terms.prune_shaping(f), lambda c: max(terms.MAX_PRUNE_BONUS, terms.MAX_PRUNE_PENALTY)),
    "intervention": Term(lambda f, c: terms.intervention(f), lambda c: max(terms.INTERVENTION_COST.values())),
    "terminal": Term(lambda f, c: terms.terminal_bonus(f, c.rent_weight), _score_bound),
    "sparse": Term(lambda f, c: terms.sparse(f, c.rent_weight), lambda c: terms.POINTS),
    "escrow": Term(lambda f, c: terms.escrow(f), lambda c: 2 * terms.POINTS),
    "fossilize": Term(lambda f, c: terms.fossilize_bonus(f, c.rent_weight), lambda c: terms.POINTS),
    "drip": Term(lambda f, c: terms.drip(f, c.rent_weight), lambda c: terms.POINTS),
    "loss": Term(lambda f, c: terms.loss_change(f), lambda c: terms.POINTS * terms.MAX_RELATIVE_LOSS),
    "rollback": Term(lambda f, c: c.rollback_penalty * terms.rollback(f), lambda c: c.rollback_penalty),
}

SCHEMES: dict[SchemeName, dict[str, float]] = {
    "score": {"score": 1.0, "compute": 1.0},
    "score_with_costs": {"score": 1.0, "compute": 1.0, "intervention": 1.0},
    "shaped": {
        "attribution": 1.0,
        "proxy": 1.0,
        "timing": 1.0,
        "stage": 1.0,
        "rent": 1.0,
        "alpha_shock": 0.5,
        "holding": 1.0,
        "prune": 1.0,
        "intervention": 1.0,
        "terminal": 1.0,
    },
    "simplified": {"stage": 1.0, "intervention": 1.0, "terminal": 1.0},
    "sparse": {"sparse": 1.0},
    "minimal": {"sparse": 1.0, "intervention": 1.0},
    "escrow": {"escrow": 1.0, "rent_change": 1.0, "intervention": 1.0},
    "drip": {"fossilize": 1.0 - DRIP_SHARE, "drip": DRIP_SHARE, "intervention": 1.0, "terminal": 1.0},
    "loss": {"loss": 1.0, "rent_change": 1.0},
}

# A rollback ends a path that does not count: only these are paid. The potential must go back to 0 to telescope.
SHAPING = "stage"
PAID_AT_ROLLBACK = frozenset({SHAPING, "rollback"})


@dataclass(frozen=True, kw_only=True)
class RewardBreakdown:
    """The reward of one decision of N hosts, and what it is made of."""

    total: np.ndarray
    """The sum of the terms (N,)."""
    terms: dict[str, np.ndarray]
    """Each term of the scheme, weighted and scaled (N,); every scheme has `rollback` and `forfeit`."""


def reward(facts: Transition, config: RewardConfig) -> RewardBreakdown:
    """What one decision of N hosts was worth under the config's scheme."""
    paid: dict[str, np.ndarray] = {}
    for name, weight in _weights(config).items():
        points = weight * TERMS[name].points(facts, config)
        if name not in PAID_AT_ROLLBACK:
            points = np.where(facts.rolled_back, 0.0, points)
        paid[name] = config.scale * points
    paid["forfeit"] = terms.forfeit(facts, config.forfeit_limit)
    # Added one by one: numpy's own sum would order the terms by the number of hosts.
    return RewardBreakdown(total=sum(paid.values(), start=np.zeros(len(facts.op))), terms=paid)


def earned_next(earned: np.ndarray, paid: RewardBreakdown, gamma: float) -> np.ndarray:
    """What episodes have earned, as a rollback at the next decision would have to take it back (N,).

    Divided by gamma for every decision since: taken back later, it is discounted more than when it was paid, and would
    not be taken back in full. Shaping is left out, since a rollback takes it back by itself.
    """
    return (earned + paid.total - paid.terms.get(SHAPING, 0.0)) / gamma


def _weights(config: RewardConfig) -> dict[str, float]:
    return SCHEMES[config.scheme] | {"rollback": 1.0}

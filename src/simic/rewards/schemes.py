"""Rewards as weighted sums of terms: the registries of terms and schemes, and the reward of a decision.

A term is a function of one decision of N hosts that returns points (N,). A scheme gives each of its terms a weight:

    @simic.reward_term("frugality", bound=10.0)
    def frugality(transition, config):
        return -1e-3 * (transition.parameters_after - transition.parameters_before)

    @simic.reward("mine")
    def mine():
        return {"score": 1.0, "frugality": 0.5}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from simic.registry import Registry
from simic.rewards import terms
from simic.rewards.transition import Transition

PROXY_SHARE = 0.3
"""Weight of the proxy while contributions are unknown, as a share of the weight of contributions."""
DRIP_SHARE = 0.7
"""Share of a fossil's value that is paid later, according to its contribution then."""
FORFEIT_LIMIT = 200.0
"""Maximum number of points that a rollback takes back."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Which reward the controller is trained with. All amounts are points: percent of quality.

    >>> sorted(simic.RewardConfig(weights={"intervention": 0.5}).term_weights)
    ['compute', 'intervention', 'rollback', 'score']
    """

    scheme: str = field(default="score", metadata={"choices": lambda: SCHEMES})
    """The registered scheme: which terms are summed, with which weights; see `@simic.reward`."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights that replace those of the scheme, by term: 0 switches a term off, a term of no scheme is added."""
    gamma: float = field(default=0.99, metadata={"not_a_setting": "it follows ppo.gamma"})
    """Discount per decision, the same as PPO's: potential-based shaping preserves the optimal policy only under it."""
    rent_weight: float = 1.0
    """Points that doubling the parameters costs."""
    compute_weight: float = 0.0
    """Points that training twice the parameters for a whole episode costs (schemes score, score_with_costs)."""
    contribution_weight: float = 1.0
    """Weight of measured contributions; the weight of the proxy is derived from it."""
    rollback_penalty: float = 10.0
    """Points that a rollback costs."""
    scale: float = 1.0
    """Factor from points to reward, applied after every clamp."""

    def __post_init__(self) -> None:
        SCHEMES.check("scheme", self.scheme)
        for name, weight in self.term_weights.items():
            TERMS.check("weights", name)
            if not np.isfinite(weight):
                raise ValueError(f"weights: that of {name} must be finite, got {weight}")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must be in (0, 1], got {self.gamma}")
        if not 0 < self.scale < np.inf:
            raise ValueError(f"scale must be positive and finite, got {self.scale}")
        for name in ("rent_weight", "compute_weight", "contribution_weight", "rollback_penalty"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")

    def check_gamma(self, other: float) -> None:
        """Raise unless `other`, the discount of the learner, is the same gamma."""
        if other != self.gamma:
            raise ValueError(
                f"the reward's gamma is {self.gamma}, the learner's is {other}: shaping with another discount "
                "changes which policy is best; set both to one value"
            )

    @property
    def term_weights(self) -> dict[str, float]:
        """The weight of every term: those of the scheme and of `rollback`, replaced by `weights`."""
        with SCHEMES.running(self.scheme, "scheme"):
            weights = SCHEMES[self.scheme]()
        if not isinstance(weights, Mapping) or not all(isinstance(own, (int, float)) for own in weights.values()):
            raise ValueError(f"scheme {self.scheme} must return {{term: weight}}, got {weights!r:.80}")
        return {**weights, "rollback": 1.0, **self.weights}

    @property
    def proxy_weight(self) -> float:
        """Weight of the change of quality while contributions are unknown."""
        return PROXY_SHARE * self.contribution_weight

    @property
    def forfeit_limit(self) -> float:
        """Maximum reward that a rollback takes back."""
        return self.scale * FORFEIT_LIMIT

    @property
    def bound(self) -> float:
        """Maximum magnitude of the reward of one decision."""
        points = sum(abs(weight) * TERMS[name].bound(self) for name, weight in self.term_weights.items())
        return self.scale * points + self.forfeit_limit


class Term(NamedTuple):
    """A registered term: its points, and the maximum of their magnitude."""

    name: str
    compute: Callable[[Transition, RewardConfig], np.ndarray]
    bound: Callable[[RewardConfig], float]

    def points(self, transition: Transition, config: RewardConfig) -> np.ndarray:
        """Points (N,), clamped to the bound; what is not a number counts as the worst."""
        with TERMS.running(self.name):
            points, bound = np.asarray(self.compute(transition, config)), self.bound(config)
        if points.shape != transition.op.shape or points.dtype.kind not in "biuf":
            got = f"shape {points.shape}" if points.dtype.kind in "biuf" else repr(points.tolist())
            raise ValueError(
                f"reward term {self.name} must return one number per host, shape {transition.op.shape}, got {got:.80}"
            )
        return np.clip(np.where(np.isnan(points), -bound, points), -bound, bound)


TERMS: Registry[Term] = Registry("reward term")
SCHEMES: Registry[Callable[[], Mapping[str, float]]] = Registry("reward scheme")


def reward_term(name: str, *, bound: float | Callable[[RewardConfig], float]) -> Callable[[Function], Function]:
    """Register a function `(transition, config) -> points (N,)` as a term of rewards.

    Args:
        name: For schemes and for `--reward.weights.NAME`.
        bound: Maximum magnitude of the points, which are clamped to it: a number, or a function of the `RewardConfig`.

    Returns:
        A decorator.

    Raises:
        ValueError: The bound is not positive and finite, or the name is taken.

    Example:
        >>> @simic.reward_term("doc_frugality", bound=10.0)
        ... def frugality(transition, config):
        ...     return -1e-3 * (transition.parameters_after - transition.parameters_before)
    """
    if not callable(bound) and not 0 < bound < np.inf:
        raise ValueError(f"bound of reward term {name} must be positive and finite, got {bound}")
    limit = bound if callable(bound) else lambda config, value=bound: value

    TERMS.check_new(name)

    def register(compute: Function) -> Function:
        TERMS.add(name, Term(name, compute, limit), compute)
        return compute

    return register


def reward(name: str) -> Callable[[Function], Function]:
    """Register a reward scheme: a function without arguments that returns {term: weight}.

    Args:
        name: For `--reward NAME` and `RewardConfig(scheme=NAME)`.

    Returns:
        A decorator.

    Raises:
        ValueError: The name is taken.

    Example:
        >>> @simic.reward("doc_scheme")
        ... def scheme():
        ...     return {"score": 1.0, "intervention": 0.1}
    """

    SCHEMES.check_new(name)

    def register(weights: Function) -> Function:
        SCHEMES.add(name, weights, weights)
        return weights

    return register


def _rent_bound(config: RewardConfig) -> float:
    return config.rent_weight * terms.MAX_DOUBLINGS


def _score_bound(config: RewardConfig) -> float:
    return terms.POINTS + _rent_bound(config)


# Built-in terms.
reward_term("score", bound=_score_bound)(lambda t, c: terms.score_change(t, c.rent_weight))
reward_term("attribution", bound=lambda c: c.contribution_weight * terms.POINTS)(
    lambda t, c: c.contribution_weight * terms.attribution(t)
)
reward_term("proxy", bound=lambda c: c.proxy_weight * terms.POINTS)(lambda t, c: c.proxy_weight * terms.proxy(t))
reward_term("timing", bound=1.0)(lambda t, c: terms.timing(t))
reward_term("stage", bound=terms.MAX_POTENTIAL)(lambda t, c: terms.stage_bonus(t, c.gamma))
reward_term("rent", bound=_rent_bound)(lambda t, c: c.rent_weight * terms.rent(t))
reward_term("compute", bound=lambda c: c.compute_weight * terms.MAX_DOUBLINGS)(
    lambda t, c: c.compute_weight * terms.rent(t)
)
reward_term("rent_change", bound=_rent_bound)(lambda t, c: c.rent_weight * terms.rent_change(t))
reward_term("alpha_shock", bound=1.0)(lambda t, c: terms.alpha_shock(t))
reward_term("holding", bound=terms.MAX_HOLDING)(lambda t, c: terms.holding(t))
reward_term("prune", bound=max(terms.MAX_PRUNE_BONUS, terms.MAX_PRUNE_PENALTY))(lambda t, c: terms.prune_shaping(t))
reward_term("intervention", bound=max(terms.INTERVENTION_COST.values()))(lambda t, c: terms.intervention(t))
reward_term("terminal", bound=_score_bound)(lambda t, c: terms.terminal_bonus(t, c.rent_weight))
reward_term("sparse", bound=terms.POINTS)(lambda t, c: terms.sparse(t, c.rent_weight))
reward_term("escrow", bound=2 * terms.POINTS)(lambda t, c: terms.escrow(t))
reward_term("fossilize", bound=terms.POINTS)(lambda t, c: terms.fossilize_bonus(t, c.rent_weight))
reward_term("drip", bound=terms.POINTS)(lambda t, c: terms.drip(t, c.rent_weight))
reward_term("loss", bound=terms.POINTS * terms.MAX_RELATIVE_LOSS)(lambda t, c: terms.loss_change(t))
reward_term("rollback", bound=lambda c: c.rollback_penalty)(lambda t, c: c.rollback_penalty * terms.rollback(t))

# Built-in schemes.
reward("score")(lambda: {"score": 1.0, "compute": 1.0})
reward("score_with_costs")(lambda: {"score": 1.0, "compute": 1.0, "intervention": 1.0})
reward("shaped")(
    lambda: {
        **dict.fromkeys(("attribution", "proxy", "timing", "stage", "rent"), 1.0),
        "alpha_shock": 0.5,
        **dict.fromkeys(("holding", "prune", "intervention", "terminal"), 1.0),
    }
)
reward("simplified")(lambda: {"stage": 1.0, "intervention": 1.0, "terminal": 1.0})
reward("sparse")(lambda: {"sparse": 1.0})
reward("minimal")(lambda: {"sparse": 1.0, "intervention": 1.0})
reward("escrow")(lambda: {"escrow": 1.0, "rent_change": 1.0, "intervention": 1.0})
reward("drip")(lambda: {"fossilize": 1.0 - DRIP_SHARE, "drip": DRIP_SHARE, "intervention": 1.0, "terminal": 1.0})
reward("loss")(lambda: {"loss": 1.0, "rent_change": 1.0})

# A rollback ends a path that does not count: only these are paid. The potential must return to 0 to telescope.
SHAPING = "stage"
PAID_AT_ROLLBACK = frozenset({SHAPING, "rollback"})


@dataclass(frozen=True, kw_only=True)
class RewardBreakdown:
    """The reward of one decision of N hosts, and its terms."""

    total: np.ndarray
    """The sum of the terms (N,)."""
    terms: dict[str, np.ndarray]
    """Each term of the scheme, weighted and scaled (N,); every scheme has `rollback` and `forfeit`."""


def compute_reward(transition: Transition, config: RewardConfig) -> RewardBreakdown:
    """The reward of one decision of N hosts under the config's scheme."""
    paid: dict[str, np.ndarray] = {}
    for name, weight in config.term_weights.items():
        points = weight * TERMS[name].points(transition, config)
        if name not in PAID_AT_ROLLBACK:
            points = np.where(transition.rolled_back, 0.0, points)
        paid[name] = config.scale * points
    paid["forfeit"] = terms.forfeit(transition, config.forfeit_limit)
    # Summed one by one: numpy's own sum would group the terms by the number of hosts.
    return RewardBreakdown(total=sum(paid.values(), start=np.zeros(len(transition.op))), terms=paid)


def earned_next(earned: np.ndarray, paid: RewardBreakdown, gamma: float) -> np.ndarray:
    """The reward that a rollback at the next decision would have to take back (N,).

    Divided by gamma at every decision, because what is taken back later is discounted more than when it was paid.
    Shaping is left out: its potential returns to 0 by itself.
    """
    return (earned + paid.total - paid.terms.get(SHAPING, 0.0)) / gamma

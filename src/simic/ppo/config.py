"""How a policy learns: from rollouts by PPO, from recorded episodes by imitation or implicit Q-learning (IQL)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Surrogate = Literal["joint", "per_head"]
LearningRateSchedule = Literal["constant", "linear", "kl"]
KL_STOP = 1.5
"""An update stops before a step whose KL exceeds so many times the target."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """How a policy learns from rollouts."""

    gamma: float = 0.99
    """Discount; reward shaping uses the same."""
    gae_lambda: float = 0.95
    """Decay of advantage estimates: 0 trusts the critic, 1 the returns."""
    learning_rate: float = 3e-4
    """Adam's step size at the start."""
    learning_rate_schedule: LearningRateSchedule = "constant"
    """Keep it, let it fall linearly to 0 over `anneal_updates`, or steer it by the KL."""
    ppo_epochs: int = 4
    """Passes over a rollout."""
    num_minibatches: int = 4
    """Gradient steps per pass; a minibatch holds whole environments."""
    micro_batches: int = 1
    """Parts of a minibatch that are computed one after the other, to save memory; the gradient is the same."""
    surrogate: Surrogate = "joint"
    """Clip the ratio of whole actions, or that of each head."""
    clip_range: float = 0.2
    """How far a ratio may move before it stops to count."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    value_clip_range: float | None = None
    """Clip values around the old ones, which are stale after the first pass; off by default."""
    entropy_coefficient: float = 0.01
    """Weight of the mean normalised entropy of the heads: its effect does not grow with their number."""
    final_entropy_coefficient: float | None = None
    """Where that weight goes, linearly over `anneal_updates`; None keeps it."""
    head_entropy: dict[str, float] = field(default_factory=dict)
    """Multipliers of that weight for every head; empty means 1 for all."""
    entropy_floor: float = 0.0
    """A head whose normalised entropy, where it had a choice, falls below this gets `floor_boost` times the weight."""
    floor_boost: float = 10.0
    """See `entropy_floor`."""
    anneal_updates: int | None = None
    """Updates over which schedules run; None in a run's settings stands for all of its updates."""
    auxiliary_coefficient: float = 0.1
    """Weight of the loss of predicted contributions."""
    target_kl: float | None = 0.02
    """Stop an update when the policy moved further than 1.5 times this, before the step is taken; None never stops."""
    max_gradient_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    max_head_gradient_norm: float | None = None
    """The same for the parameters of each head alone, before the whole; None does not."""
    adam_epsilon: float = 1e-5
    """Adam's epsilon."""
    critic_weight_decay: float = 0.0
    """Weight decay of the critic; the rest has none."""
    normalize_values: bool = True
    """Whether the critic learns returns of mean 0 and deviation 1."""
    scale_rewards: bool = True
    """Whether rewards are divided by the running deviation of returns."""
    recompute_advantages: bool = False
    """Whether each pass over a rollout begins with fresh values and advantages."""
    max_skipped_steps: int = 10
    """So many gradient steps in a row that are not finite end the run."""

    def __post_init__(self) -> None:
        _check(self, "gamma", 0, 1)
        _check(self, "gae_lambda", 0, 1)
        _check(self, "entropy_floor", 0, 1)
        for name in ("ppo_epochs", "num_minibatches", "micro_batches", "max_skipped_steps"):
            _check(self, name, 1)
        optional = ("value_clip_range", "target_kl", "max_head_gradient_norm")
        given = [name for name in optional if getattr(self, name) is not None]
        for name in ("learning_rate", "clip_range", "max_gradient_norm", "adam_epsilon", *given):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("value_coefficient", "entropy_coefficient", "auxiliary_coefficient", "critic_weight_decay"):
            _check(self, name, 0)
        _check(self, "floor_boost", 1)
        for head, multiplier in self.head_entropy.items():
            if not multiplier >= 0:
                raise ValueError(f"head_entropy must not be negative, got {multiplier} for {head}")
        _check_choice(self, "surrogate", Surrogate)
        _check_choice(self, "learning_rate_schedule", LearningRateSchedule)
        if self.final_entropy_coefficient is not None:
            _check(self, "final_entropy_coefficient", 0)
        if self.anneal_updates is not None:
            _check(self, "anneal_updates", 1)
        if self.learning_rate_schedule == "kl" and self.target_kl is None:
            raise ValueError("learning_rate_schedule 'kl' needs a target_kl, got None")

    def check_schedules(self) -> None:
        """Raise if something anneals and nobody said over how many updates: it would never change."""
        anneals = self.learning_rate_schedule == "linear" or self.final_entropy_coefficient is not None
        if anneals and self.anneal_updates is None:
            raise ValueError("schedules need anneal_updates, the number of updates they run over, got None")

    def progress(self, update: int) -> float:
        """How far schedules are at an update, from 0 to 1."""
        return min(1.0, update / self.anneal_updates) if self.anneal_updates else 0.0

    def entropy_weight(self, update: int) -> float:
        """The entropy coefficient at an update."""
        last = self.entropy_coefficient if self.final_entropy_coefficient is None else self.final_entropy_coefficient
        return self.entropy_coefficient + self.progress(update) * (last - self.entropy_coefficient)


@dataclass(frozen=True, kw_only=True)
class ImitationConfig:
    """How a policy learns from what others did."""

    passes: int = 100
    """Most times that the recorded episodes are gone through."""
    minibatch_envs: int = 16
    """Environments per gradient step, with their whole sequences."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    held_out: float = 0.1
    """Share of environments that is watched instead of learned from; 0 watches none and makes all passes."""
    patience: int = 10
    """Passes without a better loss of held-out environments that end learning; the best weights are kept."""
    value_coefficient: float = 0.5
    """Weight of the critic's error about the returns that followed; 0 teaches it nothing."""
    entropy_coefficient: float = 0.0
    """Weight of the mean normalised entropy of the heads, which keeps a policy from becoming too sure to explore."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        for name in ("passes", "minibatch_envs", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "max_gradient_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("value_coefficient", "entropy_coefficient"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out must be a share from 0 to below 1, got {self.held_out}")


@dataclass(frozen=True, kw_only=True)
class IQLConfig:
    """How a policy learns from recorded episodes."""

    steps: int = 3000
    """Gradient steps."""
    minibatch_envs: int = 16
    """Environments per gradient step, with their whole sequences."""
    learning_rate: float = 1e-3
    """Adam's step size."""
    expectile: float = 0.8
    """What V aims at among the worths of recorded actions: 0.5 is their mean, towards 1 the best of them."""
    inverse_temperature: float = 3.0
    """How much likelier the policy makes an action that is better by a deviation of returns: 0 imitates, more picks."""
    weight_limit: float = 100.0
    """The most that one decision counts."""
    target_rate: float = 0.01
    """Share of the way that the Q which V learns from goes towards the one that learns, each step."""
    value_coefficient: float = 0.5
    """Weight of V's loss beside the policy's; they share a trunk."""
    max_gradient_norm: float = 1.0
    """Gradients are scaled down to this norm: those of Q, and those of policy and V."""

    def __post_init__(self) -> None:
        for name in ("steps", "minibatch_envs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "weight_limit", "value_coefficient", "max_gradient_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.expectile < 1:
            raise ValueError(f"expectile must be between 0 and 1, both excluded, got {self.expectile}")
        if not self.inverse_temperature >= 0:
            raise ValueError(f"inverse_temperature must be at least 0, got {self.inverse_temperature}")
        if not 0 < self.target_rate <= 1:
            raise ValueError(f"target_rate must be above 0 and at most 1, got {self.target_rate}")


def _check(config: object, name: str, low: float, high: float = float("inf")) -> None:
    if not low <= getattr(config, name) <= high:
        limit = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limit}, got {getattr(config, name)}")


def _check_choice(config: object, name: str, allowed: object) -> None:
    choices = getattr(allowed, "__args__")  # noqa: B009 - a Literal's choices are not in its type
    if getattr(config, name) not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(config, name)!r}")

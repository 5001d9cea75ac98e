"""Settings of PPO, and of imitation and implicit Q-learning (IQL) from recorded episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

Surrogate = Literal["joint", "per_head"]
LearningRateSchedule = Literal["constant", "linear", "kl"]


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO."""

    gamma: float = 0.99
    """Discount factor, also of reward shaping."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation: 0 is the one-step TD error, 1 the Monte Carlo return."""
    learning_rate: float = 3e-4
    """Initial learning rate of Adam."""
    learning_rate_schedule: LearningRateSchedule = "constant"
    """constant; linear: to 0 over anneal_updates; kl: adapted after each update to keep the KL near target_kl."""
    ppo_epochs: int = 4
    """Passes over a rollout."""
    num_minibatches: int = 4
    """Minibatches, and so gradient steps, per PPO epoch; each holds whole environments."""
    micro_batches: int = 1
    """Parts of a minibatch that are computed one after the other to save memory; the gradient is the same."""
    sequence_length: int | None = None
    """Truncated backpropagation through time: cut sequences into pieces of at most this many steps, each of which
    starts from its state before the update. None sends gradients back to the beginning of every episode."""
    surrogate: Surrogate = "joint"
    """Clip the probability ratio of whole actions (joint) or of each head (per_head)."""
    clip_range: float = 0.2
    """Clip range of the probability ratio."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    value_clip_range: float | None = None
    """Clip range of the value around its old prediction; None does not clip."""
    entropy_coefficient: float = 0.01
    """Weight of the entropy bonus, the mean normalized entropy of the heads."""
    final_entropy_coefficient: float | None = None
    """Entropy coefficient after anneal_updates, reached linearly; None keeps entropy_coefficient."""
    head_entropy: dict[str, float] = field(default_factory=dict)
    """Relative weight of each head in the entropy bonus; empty weighs all heads equally."""
    entropy_floor: float = 0.0
    """Normalized entropy of a head below which its entropy bonus is multiplied by floor_boost."""
    floor_boost: float = 10.0
    """Factor on the entropy bonus of heads below entropy_floor."""
    anneal_updates: int | None = None
    """Updates over which the linear schedules run; None in a run's settings means all of its updates."""
    auxiliary_coefficient: float = 0.1
    """Weight of the auxiliary loss of predicted contributions."""
    target_kl: float | None = 0.02
    """End an update early when its KL divergence exceeds 1.5 times this; None never does."""
    max_gradient_norm: float = 0.5
    """Gradient clipping: maximum norm over all parameters."""
    max_head_gradient_norm: float | None = None
    """Gradient clipping: maximum norm over the parameters of each head, applied first; None does not clip heads."""
    adam_epsilon: float = 1e-5
    """Epsilon of Adam."""
    critic_weight_decay: float = 0.0
    """Weight decay of the critic; other parameters have none."""
    normalize_values: bool = True
    """Train the critic on value targets with mean 0 and standard deviation 1 (PopArt)."""
    scale_rewards: bool = True
    """Divide rewards by the running standard deviation of the returns."""
    recompute_advantages: bool = False
    """Recompute values and advantages at the start of each PPO epoch."""
    max_skipped_steps: int = 10
    """Consecutive non-finite gradient steps after which the run ends as diverged."""

    def __post_init__(self) -> None:
        _check(self, "gamma gae_lambda entropy_floor", *SHARE)
        _check(self, "ppo_epochs num_minibatches micro_batches max_skipped_steps floor_boost anneal_updates", *FROM_ONE)
        _check(self, "sequence_length", *FROM_ONE)
        _check(self, "learning_rate clip_range max_gradient_norm adam_epsilon", *POSITIVE)
        _check(self, "value_clip_range target_kl max_head_gradient_norm", *POSITIVE)
        _check(
            self, "value_coefficient entropy_coefficient final_entropy_coefficient auxiliary_coefficient", *FROM_ZERO
        )
        _check(self, "critic_weight_decay", *FROM_ZERO)
        for head, weight in self.head_entropy.items():
            if not weight >= 0:
                raise ValueError(f"head_entropy must not be negative, got {weight} for {head}")
        for name, kind in (("surrogate", Surrogate), ("learning_rate_schedule", LearningRateSchedule)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if self.learning_rate_schedule == "kl" and self.target_kl is None:
            raise ValueError("learning_rate_schedule 'kl' needs a target_kl, got None")


@dataclass(frozen=True, kw_only=True)
class ImitationConfig:
    """Settings of imitation (behaviour cloning) from recorded episodes."""

    passes: int = 100
    """Maximum number of passes over the recorded episodes."""
    minibatch_envs: int = 16
    """Environments per minibatch, each with its whole sequence."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    held_out: float = 0.1
    """Share of environments held out for early stopping; 0 holds out none and makes all passes."""
    patience: int = 10
    """Early stopping: passes without a lower held-out loss; the best weights are kept."""
    value_coefficient: float = 0.5
    """Weight of the value loss against the recorded returns; 0 does not train the critic."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, which keeps the policy exploring."""
    max_gradient_norm: float = 1.0
    """Gradient clipping: maximum norm."""

    def __post_init__(self) -> None:
        _check(self, "passes minibatch_envs patience", *FROM_ONE)
        _check(self, "learning_rate max_gradient_norm", *POSITIVE)
        _check(self, "value_coefficient entropy_coefficient", *FROM_ZERO)
        _check(self, "held_out", "at least 0 and below 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True, kw_only=True)
class IQLConfig:
    """Settings of implicit Q-learning from recorded episodes."""

    steps: int = 3000
    """Gradient steps."""
    minibatch_envs: int = 16
    """Environments per minibatch, each with its whole sequence."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    expectile: float = 0.8
    """Expectile of the recorded actions' Q that V regresses to: 0.5 is their mean, towards 1 their maximum."""
    inverse_temperature: float = 3.0
    """Advantage weighting exp(inverse_temperature * advantage) of the policy loss; 0 is plain imitation."""
    weight_limit: float = 100.0
    """Upper limit of the advantage weight of a decision."""
    target_rate: float = 0.01
    """Rate of the moving average that updates the target Q network."""
    value_coefficient: float = 0.5
    """Weight of the loss of V, which shares the policy's trunk."""
    max_gradient_norm: float = 1.0
    """Gradient clipping: maximum norm, for Q and for policy and V together."""

    def __post_init__(self) -> None:
        _check(self, "steps minibatch_envs", *FROM_ONE)
        _check(self, "learning_rate weight_limit value_coefficient max_gradient_norm", *POSITIVE)
        _check(self, "inverse_temperature", *FROM_ZERO)
        _check(self, "expectile", "above 0 and below 1", lambda value: 0 < value < 1)
        _check(self, "target_rate", "above 0 and at most 1", lambda value: 0 < value <= 1)


Rule = tuple[str, Callable[[float], bool]]
SHARE: Rule = ("between 0 and 1", lambda value: 0 <= value <= 1)
FROM_ZERO: Rule = ("at least 0", lambda value: value >= 0)
FROM_ONE: Rule = ("at least 1", lambda value: value >= 1)
POSITIVE: Rule = ("above 0", lambda value: value > 0)


def _check(config: object, names: str, rule: str, valid: Callable[[float], bool]) -> None:
    """Raise unless each named setting is None or valid. NaN compares as False, so it is refused."""
    for name in names.split():
        value = getattr(config, name)
        if value is not None and not valid(value):
            raise ValueError(f"{name} must be {rule}, got {value}")

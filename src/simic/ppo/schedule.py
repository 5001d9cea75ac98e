"""Schedule: the learning rate and entropy coefficient of each update, and when the KL divergence ends one early."""

from __future__ import annotations

from simic.ppo.config import PPOConfig

KL_STOP = 1.5
"""An update ends before a gradient step whose KL exceeds this many times the target."""
KL_STEP = 1.5
"""Factor by which the learning rate is adapted to the KL."""
LEARNING_RATE_LIMITS = (1e-6, 1e-2)
"""Range of an adapted learning rate."""


class Schedule:
    """Pure functions of the config; the current learning rate is kept by the optimizer."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        anneals = config.learning_rate_schedule == "linear" or config.final_entropy_coefficient is not None
        if anneals and config.anneal_updates is None:
            raise ValueError("schedules need anneal_updates, the number of updates they run over, got None")

    def progress(self, update: int) -> float:
        """Position of the linear schedules at an update, from 0 to 1."""
        return min(1.0, update / self.config.anneal_updates) if self.config.anneal_updates else 0.0

    def entropy_coefficient(self, update: int) -> float:
        """The entropy coefficient of an update."""
        first, last = self.config.entropy_coefficient, self.config.final_entropy_coefficient
        return first if last is None else first + self.progress(update) * (last - first)

    def learning_rate(self, update: int, current: float) -> float:
        """The learning rate of an update; `current` is that of the last."""
        if self.config.learning_rate_schedule == "linear":
            return self.config.learning_rate * (1 - self.progress(update))
        return current

    def adapted_learning_rate(self, current: float, kl: float) -> float:
        """The learning rate after an update that moved the policy by `kl`: higher if far below the target, or lower."""
        if self.config.learning_rate_schedule != "kl" or self.config.target_kl is None:
            return current
        low, high = LEARNING_RATE_LIMITS
        if kl > 2 * self.config.target_kl:
            return max(low, current / KL_STEP)
        # A KL of exactly 0 means that no step was taken.
        return min(high, current * KL_STEP) if 0 < kl < self.config.target_kl / 2 else current

    def should_stop(self, kl: float) -> bool:
        """Whether the KL ends the update before the next gradient step."""
        return self.config.target_kl is not None and kl > KL_STOP * self.config.target_kl

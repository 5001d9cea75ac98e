"""Running scales of rewards and values; the learner updates them before each update."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.normalization import RunningMoments
from simic.ppo import losses


class ReturnScale(nn.Module):
    """The running standard deviation of discounted returns, by which rewards are divided; they are never centered.

    It stays on the CPU, where rollouts are made.
    """

    _running: Tensor

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.moments = RunningMoments(1)
        self.register_buffer("_running", torch.zeros(0, dtype=torch.float64))  # (N,) returns of unfinished episodes

    @torch.no_grad()
    def update(self, reward: Tensor, first: Tensor, valid: Tensor) -> None:
        """Add the rewards (T, N) of a rollout; `first` is True where an episode begins."""
        rewards = (reward * valid).double().numpy()  # numpy is faster than torch for a loop of tiny steps
        discount = self.gamma * ~first.numpy()
        running = np.zeros(reward.shape[1])
        if self._running.shape == running.shape:
            running = self._running.numpy()
        returns = np.empty_like(rewards)
        for step in range(len(rewards)):
            running = returns[step] = running * discount[step] + rewards[step]
        self._running = torch.from_numpy(running.copy())
        self.moments.update(torch.from_numpy(returns)[valid].unsqueeze(1))

    @property
    def scale(self) -> Tensor:
        """The divisor of rewards; 1 before the first update."""
        return torch.where(self.moments.count > 0, (self.moments.variance[0] + 1e-8).sqrt(), 1.0).float()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # The number of environments may differ from the saved one: torch would refuse the shape.
        self._running = torch.zeros_like(state_dict[f"{prefix}_running"], device="cpu")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class ValueScale(RunningMoments):
    """Mean and standard deviation of the value targets, by which the critic's output is normalized."""

    def __init__(self) -> None:
        super().__init__(1, decay=0.9)

    def mean_std(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation."""
        return self.mean[0].float(), (self.variance[0] + 1e-8).sqrt().float()

    def denormalize(self, value: Tensor) -> Tensor:
        """Values on the scale of rewards, from the critic's normalized output."""
        mean, std = self.mean_std()
        return value * std + mean

    @torch.no_grad()
    def pop_art_update(self, targets: Tensor, valid: Tensor, critic: nn.Sequential) -> None:
        """Add the value targets where `valid`, and rescale the critic's last layer so that every value is preserved.

        Otherwise each change of scale would disturb a trained critic (van Hasselt et al. 2016).
        """
        old_mean, old_std = self.mean_std()
        mean, variance = losses.mean_variance(targets.to(self.mean), valid)
        self.merge(mean.view(1), variance.view(1), valid.sum().to(self.count))
        mean, std = self.mean_std()
        last = critic[-1]
        assert isinstance(last, nn.Linear)
        last.weight.mul_(old_std / std)
        last.bias.mul_(old_std).add_(old_mean - mean).div_(std)

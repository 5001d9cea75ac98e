"""The units that rewards and values are told in: running scales, updated by the learner before it learns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from simic.policy.moments import RunningMoments
from simic.ppo import losses


class ReturnScale(nn.Module):
    """The running deviation of discounted returns, which rewards are divided by; they are never centred.

    It stays on the CPU, where rollouts are made.
    """

    _running: Tensor

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.moments = RunningMoments(1)
        self.register_buffer("_running", torch.zeros(0, dtype=torch.float64))  # (N,) returns of episodes under way

    @torch.no_grad()
    def update(self, reward: Tensor, first: Tensor, valid: Tensor) -> None:
        """Take in the rewards (T, N) of a rollout; `first` is True where an episode begins."""
        paid = (reward * valid).double().numpy()  # numpy: a loop of tiny steps
        goes_on = self.gamma * ~first.numpy()
        running = np.zeros(reward.shape[1])
        if self._running.shape == running.shape:
            running = self._running.numpy()
        returns = np.empty_like(paid)
        for step in range(len(paid)):
            running = returns[step] = running * goes_on[step] + paid[step]
        self._running = torch.from_numpy(running.copy())
        self.moments.update(torch.from_numpy(returns)[valid].unsqueeze(1))

    @property
    def scale(self) -> Tensor:
        """What to divide rewards by; 1 until something was seen."""
        return torch.where(self.moments.count > 0, (self.moments.variance[0] + 1e-8).sqrt(), 1.0).float()


class ValueScale(RunningMoments):
    """Mean and deviation of returns: the units in which the critic speaks (van Hasselt et al. 2016)."""

    def __init__(self) -> None:
        super().__init__(1, decay=0.9)

    def mean_std(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation."""
        return self.mean[0].float(), (self.variance[0] + 1e-8).sqrt().float()

    def denormalize(self, value: Tensor) -> Tensor:
        """Values in units of reward, from what the critic said."""
        mean, std = self.mean_std()
        return value * std + mean

    @torch.no_grad()
    def learn(self, returns: Tensor, valid: Tensor, critic: nn.Sequential) -> None:
        """New units from the returns where `valid`; the critic's last layer is adapted so that every value stays."""
        old_mean, old_deviation = self.mean_std()
        mean, variance = losses.moments(returns.to(self.mean), valid)
        self._merge(mean.view(1), variance.view(1), valid.sum().to(self.count))
        mean, std = self.mean_std()
        last = critic[-1]
        assert isinstance(last, nn.Linear)
        last.weight.mul_(old_deviation / std)
        last.bias.mul_(old_deviation).add_(old_mean - mean).div_(std)

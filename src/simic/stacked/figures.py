"""Losses and metrics of N hosts at once.

Shapes: N hosts, B samples, K classes. Outputs are (N, B, ...), targets (N, B, ...), results (N,).

A task's functions take one host, so they run under vmap. Those of simic have a stacked form, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from simic.stacked.check import check_figure
from simic.stacked.compiled.instructions import IGNORED
from simic.tasks.task import accuracy, explained_variance, mean_cross_entropy, mean_squared_error

Figure = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a number, or a number per host."""


class Figures:
    """Loss and metric of N hosts; the first use checks on two hosts that both functions can run stacked."""

    def __init__(self, loss: Figure, metric: Figure) -> None:
        self._loss, self._metric = loss, metric
        self._losses, self._metrics = stacked_figure(loss), stacked_figure(metric)
        self._checked = False

    def __call__(self, outputs: Tensor, targets: Tensor, num_hosts: int) -> tuple[Tensor, Tensor]:
        """The losses of the first `num_hosts` rows, and the metrics of all."""
        if not self._checked and outputs.device.type != "meta":
            check_figure("loss", self._loss, self._losses, outputs[:2], targets[:2])
            check_figure("metric", self._metric, self._metrics, outputs[:2], targets[:2])
            self._checked = True
        return self._losses(outputs[:num_hosts], targets[:num_hosts]), self._metrics(outputs, targets)


def stacked_figure(figure: Figure) -> Figure:
    """A function of one host as a function of N hosts."""
    return STACKED.get(figure) or vmap(figure)


def _cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    losses = _CrossEntropy.apply(logits.flatten(1, -2).transpose(1, 2), targets.flatten(1))
    assert isinstance(losses, Tensor)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of logits (N, K, B) and targets (N, B); samples last, so that a few classes cost little."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        counted, target = targets != IGNORED, targets.clamp(min=0).unsqueeze(1)
        count = counted.sum(1)
        shifted = logits - logits.amax(1, keepdim=True)
        exponential = shifted.exp()
        total = exponential.sum(1, keepdim=True)
        ctx.save_for_backward(exponential, total, target, counted, count)
        losses = (total.log() - shifted.gather(1, target)).squeeze(1)
        # Not a product with the mask: an ignored sample may have an infinite loss.
        return torch.where(counted, losses, 0.0).sum(1) / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        exponential, total, target, counted, count = ctx.saved_tensors
        weight = ((grad / count.clamp(min=1)).unsqueeze(1) * counted).unsqueeze(1)  # (N, 1, B)
        return (exponential * (weight / total)).scatter_add_(1, target, -weight), None


def _accuracies(logits: Tensor, targets: Tensor) -> Tensor:
    """A target counts if no class beats it; of equal logits the first wins, as in argmax, which is far slower."""
    logits, target = logits.flatten(1, -2).transpose(1, 2), targets.flatten(1).unsqueeze(1)
    own = logits.gather(1, target.clamp(min=0))
    earlier = torch.arange(logits.shape[1], device=logits.device).view(1, -1, 1) < target
    # Not `logits > own`: a NaN beats every target.
    beaten = (logits <= own).logical_not_().logical_or_((logits == own).logical_and_(earlier)).any(1)
    return (beaten.logical_not_() & (targets.flatten(1) >= 0)).float().mean(1)


def _squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)


def _explained(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - _squared_errors(outputs, targets)).clamp(0, 1)


STACKED: dict[Figure, Figure] = {
    mean_cross_entropy: _cross_entropies,
    accuracy: _accuracies,
    mean_squared_error: _squared_errors,
    explained_variance: _explained,
}

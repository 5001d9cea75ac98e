"""Batch norms of N networks at once, each with the statistics of its own batch.

Shapes: N networks, B samples, C channels. Inputs are (N, B, C, *space). To torch they are one batch norm of N C
channels with a single sample of (*space, B) values: with samples last in memory, as the layers before leave them,
nothing is copied.

    training     normalizes by mean and variance of the batch, and updates the running statistics (N, C) in place
    evaluation   normalizes by the running statistics

The mode is the module's; see `Structure.training`. Without running statistics there is only the first.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from simic.stacked.parameters import Parameters


def batch_norm(module: nn.BatchNorm1d | nn.BatchNorm2d, parameters: Parameters, x: Tensor) -> Tensor:
    """The normalized inputs of N networks; running statistics are among the parameters, unless they keep none."""
    rows = x.movedim(1, -1)  # (N, C, *space, B)
    flat = rows.reshape(1, x.shape[0] * x.shape[2], -1)
    weight, bias = (own if own is None else own.flatten() for own in map(parameters.get, ("weight", "bias")))
    running = parameters.get("running_mean")
    if running is not None and not module.training:
        mean, variance = running.flatten(), parameters["running_var"].flatten()
        out = F.batch_norm(flat, mean, variance, weight, bias, eps=module.eps)
    else:
        if flat.shape[2] < 2:
            raise ValueError(
                "batch norm needs at least two values per channel and batch in training, got one: increase batch_size"
            )
        like = flat if running is None else running
        mean, variance = like.new_zeros(2, flat.shape[1])
        # With momentum 1 torch writes the statistics of the batch itself here.
        out = F.batch_norm(flat, mean, variance, weight, bias, training=True, momentum=1.0, eps=module.eps)
        if running is not None:
            _update(module, parameters, mean, variance)
    return out.view(rows.shape).movedim(-1, 1)


def _update(module: nn.BatchNorm1d | nn.BatchNorm2d, parameters: Parameters, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics towards those of the batch, (N C,) each."""
    count = parameters["num_batches_tracked"].add_(1)  # differs between hosts: some began anew
    for name, found in (("running_mean", mean), ("running_var", variance)):
        running = parameters[name]
        share = count.to(running.dtype).reciprocal().view(-1, 1) if module.momentum is None else module.momentum
        running.lerp_(found.view_as(running), share)

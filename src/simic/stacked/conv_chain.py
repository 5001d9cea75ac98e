"""Convolutions, norms and activations in a row, of N small networks, with samples innermost.

Shapes: N networks, B samples, C channels. Inputs and outputs are (N, B, C, *space); in between, parts of some networks
(and, if one alone is large, of some samples) are (n, C, H, W, B). Windows of a convolution are copied in long runs that
way, a norm adds up whole rows, and outputs stay in that order in memory, so that the next chain need not copy them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from simic.growth.blueprints import Scale
from simic.stacked.chain_steps import Convolution, Step, Wanted, steps_of
from simic.stacked.convolution import runs_samples_last
from simic.stacked.parameters import Parameters

PART_BYTES = 1 << 22
"""Size of a part's largest activation: more leave the cache, less is dominated by the cost of a call."""
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.Tanh)

Link = tuple[nn.Module, Parameters]
"""A layer of the chain and its parameters."""


def is_chain(modules: Iterable[nn.Module], x: Tensor) -> bool:
    """Whether `run_chain` runs these layers, and faster than one by one."""
    found = False
    for module in modules:
        if isinstance(module, nn.Conv1d | nn.Conv2d) and type(module) in (nn.Conv1d, nn.Conv2d):
            if not runs_samples_last(module) or len(module.kernel_size) != x.dim() - 3:
                return False
            found = True
        elif type(module) is Scale:
            found |= x.dim() > 3
        elif not ((type(module) is nn.GroupNorm and module.num_groups == 1) or type(module) in ELEMENTWISE):
            return False
    return found and len(x) > 1 and x.device.type in ("cpu", "meta")


def run_chain(links: Sequence[Link], x: Tensor) -> Tensor:
    """The outputs (N, B, C, *space) of a chain."""
    flat = x.dim() == 4
    x = x.unsqueeze(3) if flat else x
    steps = steps_of([module for module, _ in links])
    names = [name for step in steps for name in step.names]
    parameters = [links[index][1][name] for index, name in names]
    # Under autocast, too, a chain runs in the precision of its parameters: a lower one is not faster on CPUs.
    x = x.to(parameters[0].dtype)
    channels = max([x.shape[2], *(m.out_channels for m, _ in links if isinstance(m, nn.Conv1d | nn.Conv2d))])
    size = channels * math.prod(x.shape[3:]) * x.element_size()  # of one sample
    networks = max(1, PART_BYTES // (size * x.shape[1]))
    samples = max(1, min(x.shape[1], PART_BYTES // size))
    if networks >= len(x) and samples == x.shape[1]:
        out = _run_part(steps, x, parameters)
    else:
        # `split` rather than slices: its backward pass is one concatenation.
        values = zip(*(value.split(networks) for value in parameters), strict=True)
        parts = zip(x.split(networks), values, strict=True)
        outs = [_join([_run_part(steps, some, own) for some in part.split(samples, 1)], 1) for part, own in parts]
        out = _join(outs, 0)
    return out.squeeze(3) if flat else out


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _run_part(steps: Sequence[Step], x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    out = _Chain.apply(x.movedim(1, -1).contiguous(), steps, *parameters)
    assert isinstance(out, Tensor)
    return out.movedim(-1, 1)


class _Chain(torch.autograd.Function):
    """All steps as one: a step may overwrite what the one before put out, and costs no bookkeeping of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: Sequence[Step], *parameters: Tensor) -> Tensor:
        values, kept, overwrite = iter(parameters), list[Tensor](), False
        ctx.steps, ctx.num_saved = steps, []
        for step in steps:
            x, saved = step.forward(x, tuple(islice(values, len(step.names))), overwrite=overwrite)
            overwrite = isinstance(step, Convolution)  # other steps need their output in the backward pass
            kept += saved
            ctx.num_saved.append(len(saved))
        ctx.save_for_backward(*parameters, *kept)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wants_input, wants_parameters = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        values = iter(ctx.saved_tensors)
        parameters = [tuple(islice(values, len(step.names))) for step in ctx.steps]
        saved = [tuple(islice(values, count)) for count in ctx.num_saved]
        own, found = grad.contiguous(), list[Tensor | None]()
        for index in reversed(range(len(ctx.steps))):
            wanted = Wanted(input=wants_input or index > 0, parameters=wants_parameters)
            own, gradients = ctx.steps[index].backward(own, parameters[index], saved[index], wanted)
            found[:0] = gradients
        return own, None, *found

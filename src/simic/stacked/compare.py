"""The stacked program against the lone modules on a probe: output and gradient, and what a lone module does besides.

Shapes: N networks, B samples. Probes are (N, B, *their own shape): every network has inputs and weights of its own, so
that rows that were mixed up would show.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.isolation import evaluating, preserve_state, rng_state
from simic.growth.slot_discovery import Site
from simic.stacked.parameters import Parameters, StackedParameters

TOLERANCE = 1e-5
"""Greatest difference between stacked and alone, relative to the largest value."""
ROUNDING = 32
"""Units of rounding of the largest gradient that all may be off by: those that are zero in theory are noise."""
DOUBT = 1e-2
"""Relative difference up to which rounding may be the cause; double precision then decides."""

Program = Callable[[Parameters, Tensor, Sequence[Tensor]], Tensor]
"""(stacked parameters by name, inputs, what is added behind each slot) -> the outputs of N networks."""


class Fault(Exception):
    """Why networks cannot be stacked: the end of a sentence whose subject is the module."""


class Unusable(Fault):
    """The module does not run on its example at all."""


class Difference(Fault):
    """Stacked and alone give different numbers."""

    def __init__(self, what: str, size: float) -> None:
        by = f" (they differ by {size:.2g} of the largest value)" if math.isfinite(size) else ""
        super().__init__(f"{what} when stacked than alone{by}")
        self.size = size


@dataclass(frozen=True)
class _Trial:
    """What both sides compute with."""

    weights: StackedParameters
    x: Tensor  # (N, B, ...)
    slots: list[str]
    shifts: list[Tensor]  # (N, B, ...), added behind each slot as a seed would


@dataclass(frozen=True)
class _Result:
    """What networks computed, and the gradients of those that were asked for them."""

    outputs: Tensor  # (N, B, ...)
    gradients: dict[int, list[Tensor]]  # of the inputs, then of each parameter


def compare(
    modules: Sequence[nn.Module],
    program_of: Callable[[nn.Module], Program],
    example: Tensor,
    sites: Sequence[Site] = (),
) -> None:
    """Raise a fault unless the program does with stacked parameters what the modules do one by one."""
    try:
        _compare_once(modules, program_of(modules[0]), example, sites)
    except Difference as difference:
        if difference.size > DOUBT:
            raise
        # An ill-conditioned network magnifies rounding. Double precision tells whether anything else differs.
        exact = [copy.deepcopy(module).to("cpu", torch.float64) for module in modules]
        example = example.cpu().double() if example.is_floating_point() else example.cpu()
        _compare_once(exact, program_of(exact[0]), example, sites)


def _compare_once(modules: Sequence[nn.Module], program: Program, example: Tensor, sites: Sequence[Site]) -> None:
    trial, alone = _first_sound_trial(modules, example, sites)
    together = _run_together(modules[0], program, trial, rows=list(alone.gradients))
    if (together.outputs.shape, together.outputs.dtype) != (alone.outputs.shape, alone.outputs.dtype):
        raise Fault(
            f"outputs {tuple(together.outputs.shape[1:])} of {together.outputs.dtype} when stacked, "
            f"{tuple(alone.outputs.shape[1:])} of {alone.outputs.dtype} alone"
        )
    if (size := relative_difference(together.outputs, alone.outputs)) > TOLERANCE:
        raise Difference("computes something else", size)
    names = ["its input", *(repr(name) for name in trial.weights.leaves)]
    for row, gradients in alone.gradients.items():
        largest = max((float(gradient.abs().max()) for gradient in gradients if gradient.numel()), default=0.0)
        for name, one, another in zip(names, together.gradients[row], gradients, strict=True):
            noise = ROUNDING * torch.finfo(one.dtype).eps * largest / TOLERANCE
            if (size := relative_difference(one, another, noise)) > TOLERANCE:
                raise Difference(f"has another gradient of {name}", size)


def relative_difference(one: Tensor, another: Tensor, noise: float = 0.0) -> float:
    """The greatest difference relative to the largest value, to which `noise` is added."""
    same = (one == another) | (one.isnan() & another.isnan())
    if bool(same.all()):
        return 0.0
    gap = float(torch.where(same, 0.0, (one - another).abs()).max())
    scale = float(another.abs().max()) + noise
    return gap / scale if math.isfinite(gap) and math.isfinite(scale) and scale > 0 else math.inf


def _first_sound_trial(modules: Sequence[nn.Module], example: Tensor, sites: Sequence[Site]) -> tuple[_Trial, _Result]:
    """A trial with the modules' results: with drawn numbers, or, where modules cannot take them, with their own."""
    trial = _draw_trial(modules, example, sites, spread=1.0)
    with suppress(Unusable):  # for instance inputs that must be positive
        alone = _run_alone(modules, trial)
        if bool(alone.outputs.isfinite().all()):
            return trial, alone
    trial = _draw_trial(modules, example, sites, spread=0.0)
    return trial, _run_alone(modules, trial)


def _draw_trial(modules: Sequence[nn.Module], example: Tensor, sites: Sequence[Site], *, spread: float) -> _Trial:
    """Inputs like the example (N, B, ...) and weights near the modules' own; both as they are if `spread` is 0.

    Weights are moved because those that are born zero would hide whatever they multiply. Integers are what some sample
    has at the same place, since every place may have a range of its own.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return spread * torch.randn(like.shape, generator=generator).to(like)

    x = example.clone()
    if spread:
        x = x.gather(1, torch.randint(x.shape[1], x.shape, generator=generator).to(x.device))
    if x.is_floating_point():
        x += noise(x) * (float(x.std().nan_to_num()) or 1.0)
    weights = StackedParameters.of_modules(modules, next(modules[0].parameters(), x))
    with torch.no_grad():
        for leaf in weights.leaves.values():
            leaf += noise(leaf) * (0.2 * float(leaf.square().mean().sqrt()) or 0.1)
    shifts = [0.1 * noise(weights.rows.new_zeros(len(modules), *site.example_shape)) for site in sites]
    return _Trial(weights, x, [site.name for site in sites], shifts)


def _run_alone(modules: Sequence[nn.Module], trial: _Trial) -> _Result:
    """Every module by itself; the first and the last also learn, and are watched for what stacking would lose."""
    outputs, gradients = [], {}
    for row, module in enumerate(modules):
        with _prepared(module, trial, row):
            if row not in (0, len(modules) - 1):
                with torch.no_grad():
                    outputs.append(_output(module, trial.x[row].clone()))
                continue
            x = _leaf(trial.x[row])
            out = _watched_output(module, x.clone())
            gradients[row] = _gradients(_weighted(out, row), [x, *module.parameters()])
            outputs.append(out.detach())
    return _Result(torch.stack(outputs), gradients)


def _output(module: nn.Module, x: Tensor) -> Tensor:
    try:
        out = module(x)
    except Exception as error:
        raise Unusable(f"fails on the example input ({first_sentence(error)})") from error
    if not isinstance(out, Tensor):
        raise Fault(f"outputs a {type(out).__name__}, not a tensor")
    return out


def _watched_output(module: nn.Module, x: Tensor) -> Tensor:
    """The output in training mode, if computing it leaves no trace and evaluation mode gives the same."""
    streams, buffers = _random_streams(), {name: buffer.clone() for name, buffer in module.named_buffers()}
    given = x.detach().clone()
    out = _output(module, x)
    if _random_streams() != streams:
        raise Fault("draws random numbers in its forward pass")
    for name, buffer in module.named_buffers():
        if name not in buffers or not torch.equal(buffer, buffers[name]):
            raise Fault(f"changes its buffer {name!r} in its forward pass")
    with evaluating(module):
        again = _output(module, given)
    if again.shape != out.shape or relative_difference(again, out.detach()) > TOLERANCE:
        raise Fault("computes something else in evaluation mode, or when it is called again")
    return out


def _run_together(module: nn.Module, program: Program, trial: _Trial, rows: Sequence[int]) -> _Result:
    x = _leaf(trial.x)
    try:
        with _prepared(module, None, 0):
            out = program(trial.weights.by_name, x.clone(), trial.shifts)
        total = sum((_weighted(out[row], row) for row in rows), torch.zeros((), dtype=out.dtype, device=out.device))
        found = _gradients(total, [x, *trial.weights.leaves.values()])
    except Exception as error:
        raise Fault(f"fails when it is stacked ({first_sentence(error)})") from error
    return _Result(out.detach(), {row: [gradient[row] for gradient in found] for row in rows})


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _weighted(out: Tensor, row: int) -> Tensor:
    """A sum whose gradient depends on every output of a network."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(row))
    return (out * weights.to(out.device, out.dtype)).sum()


def _gradients(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(
        torch.autograd.grad(total, learning, allow_unused=True) if total.requires_grad else [None] * len(learning)
    )
    gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
    return [
        torch.zeros_like(leaf, dtype=total.dtype) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)
    ]


@contextmanager
def _prepared(module: nn.Module, trial: _Trial | None, row: int) -> Iterator[None]:
    """A module in training mode, with a row of the trial's weights and shifts; afterwards it is as it was."""
    modes = [(part, part.training) for part in module.modules()]
    own = [(parameter, parameter.data) for parameter in module.parameters()]
    handles = []
    module.train()
    try:
        if trial is not None:
            for (parameter, _), leaf in zip(own, trial.weights.leaves.values(), strict=True):
                parameter.data = leaf.detach()[row]
            for name, shift in zip(trial.slots, trial.shifts, strict=True):
                hook = partial(_add_shift, shift[row])
                handles.append(module.get_submodule(name).register_forward_hook(hook))
        with preserve_state(module):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in own:
            parameter.data = data
        for part, training in modes:
            part.training = training


def _add_shift(shift: Tensor, module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
    return output + shift


def _random_streams() -> list:
    """Where the random streams stand that a module may draw from, as values that can be compared."""
    now = rng_state()
    parts = {**now.numpy, **now.numpy["state"], "state": None}
    arrays = [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts.values()]
    return [now.python, arrays, *(state.cpu().numpy().tobytes() for state in (now.cpu, *now.cuda))]


def first_sentence(error: Exception) -> str:
    """The beginning of an error's text, which may run over many lines."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__).split(". ")[0]
    return text if len(text) <= 160 else text[:160] + "..."

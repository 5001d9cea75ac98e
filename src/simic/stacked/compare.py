"""Numeric comparison of the stacked program with the modules run one by one: outputs, gradients, side effects.

Shapes: N networks, B samples. Inputs are (N, B, *their own shape). Every network gets inputs and weights of its own, so
that a mix-up of rows shows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from simic.growth.isolation import evaluating, preserve_state, rng_state
from simic.growth.slot_discovery import Site
from simic.stacked.parameters import Parameters, StackedParameters, batch_norms, statistics_of

TOLERANCE = 1e-5
"""Maximum difference between stacked and alone, relative to the largest value."""
ROUNDING = 32
"""Further tolerance of gradients, in rounding errors of the largest one: those that are zero in theory are noise."""
DOUBT = 1e-2
"""Relative difference up to which rounding may be the cause, so that the comparison is repeated in double precision."""
NORM_REPEATS = 4
"""Copies of the example that batch norms see: from two samples alone they keep little but signs."""

Program = Callable[[Parameters, Tensor, Sequence[Tensor]], Tensor]
"""(stacked parameters by name, inputs, what is added in each slot) -> the outputs of N networks."""


class Fault(Exception):
    """Why networks cannot be stacked: the predicate of a sentence whose subject is the module."""


class Unusable(Fault):
    """The module does not run on its example input at all."""


class Difference(Fault):
    """Stacked and alone give different numbers."""

    def __init__(self, what: str, size: float) -> None:
        by = f" (by {size:.2g} of the largest value)" if math.isfinite(size) else ""
        super().__init__(f"{what} when stacked than alone{by}")
        self.size = size


class _Trial(NamedTuple):
    """The numbers that both sides compute with."""

    weights: StackedParameters
    x: Tensor  # (N, B, ...)
    slots: list[str]
    shifts: list[Tensor]  # (N, B, ...) per slot, added to its activation as a seed would
    statistics: Parameters  # (N, ...) of batch norms, which a pass may update


class _Result(NamedTuple):
    outputs: Tensor  # (N, B, ...)
    gradients: dict[int, list[Tensor]]  # of some networks: with respect to the input, then each parameter
    statistics: Parameters  # (N, ...) after that pass
    evaluated: Tensor | None  # (N, B, ...) outputs in evaluation mode; None without statistics


def compare(
    modules: Sequence[nn.Module],
    program_of: Callable[[nn.Module], Program],
    example: Tensor,
    sites: Sequence[Site] = (),
    *,
    statistics: bool = False,
) -> None:
    """Raise a Fault unless the program gives with stacked parameters what the modules give one by one.

    With `statistics`, batch norms may update theirs.
    """
    if statistics and batch_norms(modules[0]):
        example = example.repeat(1, NORM_REPEATS, *[1] * (example.dim() - 2))
    try:
        _compare_once(modules, program_of(modules[0]), example, sites, statistics=statistics)
    except Difference as difference:
        if difference.size > DOUBT:
            raise
        # An ill-conditioned network magnifies rounding errors. Double precision shows whether anything else differs.
        exact = [copy.deepcopy(module).to("cpu", torch.float64) for module in modules]
        example = example.cpu().double() if example.is_floating_point() else example.cpu()
        _compare_once(exact, program_of(exact[0]), example, sites, statistics=statistics)


def _compare_once(
    modules: Sequence[nn.Module], program: Program, example: Tensor, sites: Sequence[Site], *, statistics: bool
) -> None:
    trial, alone = _first_sound_trial(modules, example, sites, statistics=statistics)
    stacked = _run_stacked(modules[0], program, trial, rows=list(alone.gradients))
    if (stacked.outputs.shape, stacked.outputs.dtype) != (alone.outputs.shape, alone.outputs.dtype):
        raise Fault(
            f"outputs {tuple(stacked.outputs.shape[1:])} of {stacked.outputs.dtype} when stacked, "
            f"{tuple(alone.outputs.shape[1:])} of {alone.outputs.dtype} alone"
        )
    if (size := relative_difference(stacked.outputs, alone.outputs)) > TOLERANCE:
        raise Difference("computes other outputs", size)
    names = ["its input", *(repr(name) for name in trial.weights.leaves)]
    for row, gradients in alone.gradients.items():
        largest = max((float(gradient.abs().max()) for gradient in gradients if gradient.numel()), default=0.0)
        for name, one, other in zip(names, stacked.gradients[row], gradients, strict=True):
            noise = ROUNDING * torch.finfo(one.dtype).eps * largest / TOLERANCE
            if (size := relative_difference(one, other, noise)) > TOLERANCE:
                raise Difference(f"has another gradient of {name}", size)
    for name, kept in alone.statistics.items():
        if (size := relative_difference(stacked.statistics[name], kept)) > TOLERANCE:
            raise Difference(f"updates {name!r} otherwise", size)
    if alone.evaluated is None or stacked.evaluated is None:
        return
    if (size := relative_difference(stacked.evaluated, alone.evaluated)) > TOLERANCE:
        raise Difference("computes other outputs in evaluation mode", size)


def relative_difference(one: Tensor, other: Tensor, noise: float = 0.0) -> float:
    """The largest absolute difference divided by the largest value of `other` plus `noise`; NaN equals NaN."""
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return 0.0
    gap = float(torch.where(same, 0.0, (one - other).abs()).max())
    scale = float(other.abs().max()) + noise
    return gap / scale if math.isfinite(gap) and math.isfinite(scale) and scale > 0 else math.inf


def _first_sound_trial(
    modules: Sequence[nn.Module], example: Tensor, sites: Sequence[Site], *, statistics: bool
) -> tuple[_Trial, _Result]:
    """A trial with random numbers or, where modules cannot process these, with their own; and its results alone."""
    trial = _draw_trial(modules, example, sites, spread=1.0, statistics=statistics)
    with suppress(Unusable):  # for instance inputs that must be positive
        alone = _run_alone(modules, trial)
        if bool(alone.outputs.isfinite().all()):
            return trial, alone
    trial = _draw_trial(modules, example, sites, spread=0.0, statistics=statistics)
    return trial, _run_alone(modules, trial)


def _draw_trial(
    modules: Sequence[nn.Module], example: Tensor, sites: Sequence[Site], *, spread: float, statistics: bool
) -> _Trial:
    """Random inputs similar to the example (N, B, ...) and weights near the modules' own; unchanged if `spread` is 0.

    Weights are perturbed because zeros, as in the last layer of a new seed, hide errors in whatever they multiply.
    Integer inputs are permuted among the samples only, since every position may have its own range of values.
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
    shifts = [0.1 * noise(weights.rows.new_zeros(*x.shape[:2], *site.example_shape[1:])) for site in sites]
    return _Trial(weights, x, [site.name for site in sites], shifts, weights.statistics if statistics else {})


def _run_alone(modules: Sequence[nn.Module], trial: _Trial) -> _Result:
    """Run every module by itself; gradients and side effects are examined for the first and the last only."""
    outputs, gradients, evaluated = [], {}, []
    statistics: dict[str, list[Tensor]] = {name: [] for name in trial.statistics}
    for row, module in enumerate(modules):
        with _prepared(module, trial, row):
            if row not in (0, len(modules) - 1):
                with torch.no_grad():
                    outputs.append(_output(module, trial.x[row].clone()))
            else:
                x = _leaf(trial.x[row])
                out = _output_without_side_effects(module, x.clone(), updates=trial.statistics)
                gradients[row] = _gradients(_weighted_sum(out, row), [x, *module.parameters()])
                outputs.append(out.detach())
            if statistics:
                own = statistics_of(module)
                for name, kept in statistics.items():
                    kept.append(own[name].clone())
                with evaluating(module):
                    evaluated.append(_output(module, trial.x[row].clone()))
    after = {name: torch.stack(kept) for name, kept in statistics.items()}
    return _Result(torch.stack(outputs), gradients, after, torch.stack(evaluated) if evaluated else None)


def _run_stacked(module: nn.Module, program: Program, trial: _Trial, rows: Sequence[int]) -> _Result:
    x, evaluated = _leaf(trial.x), None
    try:
        with _prepared(module):
            out = program(trial.weights.by_name, x.clone(), trial.shifts)
            if trial.statistics:
                for norm in batch_norms(module).values():
                    norm.eval()
                with torch.no_grad():
                    unchanged = {name: value.clone() for name, value in trial.weights.by_name.items()}
                    evaluated = program(unchanged, trial.x.clone(), trial.shifts)
        total = sum((_weighted_sum(out[row], row) for row in rows), torch.zeros((), dtype=out.dtype, device=out.device))
        found = _gradients(total, [x, *trial.weights.leaves.values()])
    except Exception as error:
        raise Fault(f"fails when stacked ({first_sentence(error)})") from error
    gradients = {row: [gradient[row] for gradient in found] for row in rows}
    return _Result(out.detach(), gradients, trial.statistics, evaluated)


def _output(module: nn.Module, x: Tensor) -> Tensor:
    try:
        out = module(x)
    except Exception as error:
        raise Unusable(f"fails on the example input ({first_sentence(error)})") from error
    if not isinstance(out, Tensor):
        raise Fault(f"outputs a {type(out).__name__}, not a tensor")
    return out


def _output_without_side_effects(module: nn.Module, x: Tensor, *, updates: Collection[str]) -> Tensor:
    """The output in training mode; raise if that changes any state or differs from evaluation mode.

    The buffers `updates` may change; with any of them, evaluation mode is another function, compared by itself.
    """
    streams, buffers = _random_streams(), {name: buffer.clone() for name, buffer in module.named_buffers()}
    given = x.detach().clone()
    out = _output(module, x)
    if _random_streams() != streams:
        raise Fault("draws random numbers in its forward pass")
    for name, buffer in module.named_buffers():
        if name not in updates and (name not in buffers or not torch.equal(buffer, buffers[name])):
            raise Fault(f"changes its buffer {name!r} in its forward pass")
    if updates:
        return out
    with evaluating(module):
        again = _output(module, given)
    if again.shape != out.shape or relative_difference(again, out.detach()) > TOLERANCE:
        raise Fault("computes other outputs in evaluation mode, or when called again")
    return out


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _weighted_sum(out: Tensor, row: int) -> Tensor:
    """A sum with random weights, so that its gradient depends on every output."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(row))
    return (out * weights.to(out.device, out.dtype)).sum()


def _gradients(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of each leaf; zeros for those that take no gradient (integer inputs) or are not used."""
    learning = [leaf for leaf in leaves if leaf.requires_grad and total.requires_grad]
    found = torch.autograd.grad(total, learning, allow_unused=True) if learning else ()
    by_id = {id(leaf): gradient for leaf, gradient in zip(learning, found, strict=True)}
    gradients = [by_id.get(id(leaf)) for leaf in leaves]
    return [
        torch.zeros_like(leaf, dtype=total.dtype) if g is None else g for g, leaf in zip(gradients, leaves, strict=True)
    ]


@contextmanager
def _prepared(module: nn.Module, trial: _Trial | None = None, row: int = 0) -> Iterator[None]:
    """Put a module into training mode, with the weights and shifts of a trial's row; restore it afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    own = [(parameter, parameter.data) for parameter in module.parameters()]
    handles = []
    module.train()
    try:
        if trial is not None:
            for (parameter, _), leaf in zip(own, trial.weights.leaves.values(), strict=True):
                parameter.data = leaf.detach()[row]
            for name, shift in zip(trial.slots, trial.shifts, strict=True):
                hook = module.get_submodule(name).register_forward_hook(lambda _, x, out, shift=shift[row]: out + shift)
                handles.append(hook)
        with preserve_state(module):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in own:
            parameter.data = data
        for part, training in modes:
            part.training = training


def _random_streams() -> list:
    """The state of all global random generators, as values that can be compared."""
    now = rng_state()
    parts = {**now.numpy, **now.numpy["state"], "state": None}
    arrays = [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts.values()]
    return [now.python, arrays, *(state.cpu().numpy().tobytes() for state in (now.cpu, *now.cuda))]


def first_sentence(error: Exception) -> str:
    """The beginning of an error text that may have many lines."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__).split(". ")[0]
    return text if len(text) <= 160 else text[:160] + "..."

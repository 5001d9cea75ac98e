"""An LSTM for one thread of a CPU: torch multiplies for all steps at once, a compiled loop runs the steps.

Sequences may have any lengths: `Levels` says which steps run side by side, and nothing is padded. With the few rows of
a minibatch of episodes it is faster than torch's fused kernel; `can_run` says where it stands in for it.

Shapes: E steps of all sequences, S states, I inputs, H hidden; a state is h and c side by side (S, 2H).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from simic.compiled.lstm import run_steps, run_steps_back
from simic.compiled.product import COLUMN_UNIT


class Levels(NamedTuple):
    """An order of E steps in which each comes after the one before it in its sequence."""

    starts: np.ndarray
    """Where each level of steps that run side by side begins, and the end (levels + 1,)."""
    previous: np.ndarray
    """What each step starts from: >= 0 is the position of a step, -1 is 0, -2 - s is row s of the states (E,)."""
    source: Tensor | None = None
    """The step at each position (E,); None leaves the order as it is."""
    back: Tensor | None = None
    """The position of each step (E,)."""


def side_by_side(num_steps: int, num_envs: int) -> Levels:
    """Sequences of equal length, whose steps lie one after the other, each from its own state."""
    previous = np.arange(-num_envs, (num_steps - 1) * num_envs)
    previous[:num_envs] = -2 - np.arange(num_envs)
    return Levels(np.arange(0, num_steps * num_envs + 1, num_envs), previous)


def can_run(x: Tensor, weights: list[Tensor]) -> bool:
    """Whether inputs and weights are of a kind that the compiled loop knows, and it is the fastest."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.dtype == weights[0].dtype
        and weights[1].shape[1] % COLUMN_UNIT == 0
        and torch.get_num_threads() == 1  # torch's kernel uses all of them
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Scratch(threading.local):
    """Memory for what is forgotten at the end of a call; new memory would cost a tenth of its time."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def rows(self, name: str, num_rows: int, like: Tensor) -> Tensor:
        """Uninitialized rows, as wide as the last axis of a tensor."""
        size = num_rows * like.shape[-1]
        buffer = self.buffers.get((name, like.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name, like.dtype] = torch.empty(size, dtype=like.dtype)
        return buffer[:size].view(num_rows, like.shape[-1])


_scratch = _Scratch()


class _Passed(NamedTuple):
    """What a forward pass leaves, by position."""

    x: Tensor  # (E, I)
    first: Tensor  # (2, S, H) the states as h and c
    gates: Tensor  # (E, 4H) after their functions
    cells: Tensor  # (E, H)
    squashed: Tensor  # (E, H) tanh of the cells
    before: Tensor  # (E, H) h before each step


def run_lstm(x: Tensor, state: Tensor, weights: list[Tensor], levels: Levels) -> tuple[Tensor, Tensor]:
    """Outputs and cells (E, H) for inputs (E, I) and states (S, 2H); `weights` are those of `torch.nn.LSTM`."""
    if torch.is_grad_enabled():
        return _LSTM.apply(x, state, *weights, levels)  # pyright: ignore[reportReturnType]
    return _run(x, state, weights, levels, keep=False)[:2]


def _run(
    x: Tensor, state: Tensor, weights: Sequence[Tensor], levels: Levels, *, keep: bool
) -> tuple[Tensor, Tensor, _Passed]:
    """Outputs and cells by steps, and what the backward pass needs, which the next call overwrites unless kept."""
    of_input, of_state, input_bias, state_bias = weights
    x, first = _reorder(x, levels.source), torch.stack(state.split(of_state.shape[1], 1))
    widths = {"gates": of_input.t(), "squashed": of_state, "before": of_state}
    gates, squashed, before = (
        like.new_empty(len(x), like.shape[-1]) if keep else _scratch.rows(name, len(x), like)
        for name, like in widths.items()
    )
    torch.addmm(input_bias + state_bias, x, of_input.t(), out=gates)
    out, cells = torch.empty_like(before), torch.empty_like(before)
    packed = _scratch.rows("packed", len(of_state), of_state)
    run_steps(*_arrays(gates, of_state, packed, first), *levels[:2], *_arrays(out, cells, squashed, before))
    passed = _Passed(x, first, gates, cells, squashed, before)
    return _reorder(out, levels.back), _reorder(cells, levels.back), passed


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, state: Tensor, of_input: Tensor, of_state: Tensor, input_bias: Tensor, state_bias: Tensor,
        levels: Levels,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, cells, passed = _run(x, state, (of_input, of_state, input_bias, state_bias), levels, keep=True)
        ctx.save_for_backward(of_input, of_state, *passed)
        ctx.levels = levels
        ctx.set_materialize_grads(False)
        return out, cells

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_cells: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_input, of_state, *rest = ctx.saved_tensors
        passed, levels, needed = _Passed(*rest), ctx.levels, ctx.needs_input_grad
        d_own = [_own_gradient(d, passed.cells, levels.source) for d in (d_out, d_cells)]
        d_gates, d_state = _scratch.rows("d_gates", len(passed.x), passed.gates), torch.zeros_like(passed.first)
        packed = _scratch.rows("packed", len(of_state), of_state)
        run_steps_back(
            *_arrays(passed.gates, of_state, packed, passed.first), *levels[:2],
            *_arrays(passed.cells, passed.squashed, *d_own, d_gates, d_state),
        )  # fmt: skip
        d_bias = d_gates.sum(0) if needed[4] or needed[5] else None
        return (
            _reorder(d_gates @ of_input, levels.back) if needed[0] else None,
            torch.cat([*d_state], 1) if needed[1] else None,
            d_gates.t() @ passed.x if needed[2] else None,
            d_gates.t() @ passed.before if needed[3] else None,
            d_bias if needed[4] else None,
            d_bias if needed[5] else None,
            None,
        )


def _own_gradient(gradient: Tensor | None, like: Tensor, source: Tensor | None) -> Tensor:
    """A gradient by positions that may be changed; 0 without one."""
    if gradient is None:
        return torch.zeros_like(like)
    return gradient.clone(memory_format=torch.contiguous_format) if source is None else _reorder(gradient, source)


def _reorder(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.detach().contiguous().numpy() for tensor in tensors]

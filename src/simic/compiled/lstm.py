"""The steps of an LSTM, forward and backward: the loop between two large matrix products over all steps.

Shapes: E steps of all sequences, S states, H hidden, a multiple of `COLUMN_UNIT`. Gates lie in torch's order: input,
forget, cell, output. Steps that can run side by side are a level: those from starts[l] to starts[l + 1]. `previous`
(E,) says from what a step starts: >= 0 is a step of an earlier level, -1 is 0, and -2 - s is row s of the states.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simic.compiled.cache import entry, part
from simic.compiled.product import add_product, pack
from simic.compiled.vector_math import sigmoid, tanh, typed


@entry
def run_steps(
    gates: Any,
    weights: Any,
    packed: Any,
    state: Any,
    starts: Any,
    previous: Any,
    out: Any,
    cells: Any,
    squashed: Any,
    before: Any,
) -> None:
    """Run all steps; `gates` (E, 4H) holds what inputs and biases give, and then the values of the gates.

    Weights (4H, H) are those of the state, `packed` is memory of their size; `state` (2, S, H) is h and c. Results
    (E, H): outputs, cells, tanh of the cells, and the h from which each step starts.
    """
    size = out.shape[1]
    packed, nothing = packed.reshape(-1), np.zeros_like(out[0])
    pack(weights.T, packed)
    for level in range(len(starts) - 1):
        first, last = starts[level], starts[level + 1]
        for step in range(first, last):
            before[step] = _start(state[0], out, nothing, previous[step])
        add_product(gates[first:last].reshape(-1), before[first:last].reshape(-1), packed, last - first, 4 * size, size)
        for step in range(first, last):
            old = _start(state[1], cells, nothing, previous[step])
            _run_cell(gates[step], old, cells[step], squashed[step], out[step])


@entry
def run_steps_back(
    gates: Any, weights: Any, packed: Any, state: Any, starts: Any, previous: Any, cells: Any, squashed: Any,
    d_out: Any, d_cells: Any, d_gates: Any, d_state: Any,
) -> None:  # fmt: skip
    """The gradient d_gates (E, 4H) before the gates' functions, and that of the states, added to `d_state` (2, S, H).

    To d_out and d_cells (E, H), the gradients from outside, is added what comes from later steps.
    """
    size, zero = cells.shape[1], typed(cells[0, 0], 0.0)
    packed, nothing, widest = packed.reshape(-1), np.zeros_like(cells[0]), np.diff(starts).max()
    pack(weights, packed)
    d_before, d_ignored = np.empty_like(cells[:widest]), np.empty_like(cells[0])
    for level in range(len(starts) - 2, -1, -1):
        first, last = starts[level], starts[level + 1]
        for step in range(first, last):
            old = _start(state[1], cells, nothing, previous[step])
            d_old = _start(d_state[1], d_cells, d_ignored, previous[step])
            _run_cell_back(gates[step], old, squashed[step], d_out[step], d_cells[step], d_gates[step], d_old)
        own = d_before[: last - first]
        own[:] = zero
        add_product(own.reshape(-1), d_gates[first:last].reshape(-1), packed, last - first, size, 4 * size)
        for step in range(first, last):
            d_old, d = _start(d_state[0], d_out, d_ignored, previous[step]), own[step - first]
            for j in range(size):
                d_old[j] += d[j]


@part
def _start(states: Any, steps: Any, nothing: Any, previous: int) -> Any:
    """The row that a step starts from (H,)."""
    if previous >= 0:
        return steps[previous]
    return nothing if previous == -1 else states[-2 - previous]


# Every loop below has few arrays, which the compiler can show not to overlap: so it becomes vector instructions.


@part
def _run_cell(gates: Any, old: Any, cell: Any, squashed: Any, out: Any) -> None:
    """The gates' functions in place, the cell, its tanh, and the output (H,) of one step."""
    size = old.size
    keep, new, show = gates[size : 2 * size], gates[2 * size : 3 * size], gates[3 * size :]
    for j in range(2 * size):
        gates[j] = sigmoid(gates[j])
    for j in range(size):
        new[j] = tanh(new[j])
    for j in range(size):
        show[j] = sigmoid(show[j])
    for j in range(size):
        cell[j] = gates[j] * new[j] + keep[j] * old[j]
    for j in range(size):
        squashed[j] = tanh(cell[j])
    for j in range(size):
        out[j] = show[j] * squashed[j]


@part
def _run_cell_back(gates: Any, old: Any, squashed: Any, d_out: Any, d_cell: Any, d_gates: Any, d_old: Any) -> None:
    """The gradient of one step's gates before their functions (4H,); that of the old cell is added to d_old."""
    size, one = old.size, typed(old[0], 1.0)
    keep, new, show = gates[size : 2 * size], gates[2 * size : 3 * size], gates[3 * size :]
    d_keep, d_new, d_show = d_gates[size : 2 * size], d_gates[2 * size : 3 * size], d_gates[3 * size :]
    for j in range(size):
        d_cell[j] += d_out[j] * show[j] * (one - squashed[j] * squashed[j])
    for j in range(size):
        d_show[j] = d_out[j] * squashed[j] * show[j] * (one - show[j])
    for j in range(size):
        d_gates[j] = d_cell[j] * new[j] * gates[j] * (one - gates[j])
    for j in range(size):
        d_new[j] = d_cell[j] * gates[j] * (one - new[j] * new[j])
    for j in range(size):
        d_keep[j] = d_cell[j] * old[j] * keep[j] * (one - keep[j])
    for j in range(size):
        d_old[j] += d_cell[j] * keep[j]

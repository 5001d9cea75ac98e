"""Activation functions, products, pooling and the blending of seeds, forward and backward.

Names as in `layers`.
"""

from __future__ import annotations

from typing import Any

from simic.compiled.cache import part
from simic.compiled.vector_math import exp, sigmoid, tanh, typed, upper_tail
from simic.stacked.compiled.instructions import (
    ADD_TO,
    AUX,
    DST,
    GATE,
    GELU,
    MODE,
    MULTIPLY,
    NOTHING,
    RELU,
    ROWS,
    SET,
    SPACE,
    SRC,
    TANH,
)
from simic.stacked.compiled.layers import axpy


@part
def activate(op: int, x: Any, y: Any, aux: Any) -> None:
    """y = f(x); `aux` keeps f'(x)."""
    if op == RELU:
        for j in range(y.size):
            y[j] = typed(x[0], 0.0) if x[j] <= 0 else x[j]
            aux[j] = typed(x[0], 1.0) if x[j] > 0 else typed(x[0], 0.0)
    elif op == GELU:
        for j in range(y.size):
            density = exp(-typed(x[0], 0.5) * x[j] * x[j])
            tail = upper_tail(abs(x[j]), density)
            below = typed(x[0], 1.0) - tail if x[j] >= 0 else tail
            y[j] = x[j] * below
            aux[j] = below + x[j] * density * typed(x[0], 0.3989422804014327)
    elif op == TANH:
        for j in range(y.size):
            y[j] = tanh(x[j])
            aux[j] = typed(x[0], 1.0) - y[j] * y[j]
    else:
        for j in range(y.size):
            y[j] = sigmoid(x[j])
            aux[j] = y[j] * (typed(x[0], 1.0) - y[j])


@part
def store_product(dx: Any, a: Any, b: Any, mode: int) -> None:
    """dx = a b, or dx += a b."""
    if mode == SET:
        for j in range(dx.size):
            dx[j] = a[j] * b[j]
    elif mode == ADD_TO:
        for j in range(dx.size):
            dx[j] += a[j] * b[j]


@part
def blend(code: Any, alpha: Any, values: Any, samples: int) -> None:
    """h + alpha y, h + alpha h tanh(y), or h + alpha gate y. GATE is the first row of the gates,
    one for all positions or SPACE of them, or where tanh(y) is kept.
    """
    n = code[ROWS] * samples
    h, out = values[code[SRC] * samples :][:n], values[code[DST] * samples :][:n]
    if alpha == 0:
        out[:] = h
        return
    y = values[code[AUX] * samples :][:n]
    if code[MULTIPLY]:
        bounded = values[code[GATE] * samples :][:n]
        for j in range(n):
            bounded[j] = tanh(y[j])
            out[j] = h[j] + alpha * h[j] * bounded[j]
    elif code[GATE] >= 0:
        for r in range(code[ROWS]):
            gate = values[(code[GATE] + r % code[SPACE]) * samples :][:samples]
            own, source = y[r * samples : (r + 1) * samples], h[r * samples : (r + 1) * samples]
            result = out[r * samples : (r + 1) * samples]
            for j in range(samples):
                result[j] = source[j] + alpha * gate[j] * own[j]
    else:
        for j in range(n):
            out[j] = h[j] + alpha * y[j]


@part
def blend_backward(code: Any, alpha: Any, values: Any, grads: Any, samples: int) -> None:
    """It is the last reader of h, so it sets the gradient of h; the seed adds its own."""
    n = code[ROWS] * samples
    dh, d = grads[code[SRC] * samples :][:n], grads[code[DST] * samples :][:n]
    dh[:] = d
    if alpha == 0:
        return
    y, dy = values[code[AUX] * samples :][:n], grads[code[AUX] * samples :][:n]
    if code[MULTIPLY]:
        h, bounded = values[code[SRC] * samples :][:n], values[code[GATE] * samples :][:n]
        for j in range(n):
            dh[j] += alpha * d[j] * bounded[j]
            dy[j] = alpha * d[j] * h[j] * (typed(alpha, 1.0) - bounded[j] * bounded[j])
    elif code[GATE] >= 0:
        grads[code[GATE] * samples :][: code[SPACE] * samples] = typed(alpha, 0.0)
        for r in range(code[ROWS]):
            at = (code[GATE] + r % code[SPACE]) * samples
            gate, dgate = values[at : at + samples], grads[at : at + samples]
            own, down = y[r * samples : (r + 1) * samples], dy[r * samples : (r + 1) * samples]
            source = d[r * samples : (r + 1) * samples]
            for j in range(samples):
                down[j] = alpha * source[j] * gate[j]
                dgate[j] += alpha * source[j] * own[j]
    else:
        for j in range(n):
            dy[j] = alpha * d[j]


@part
def pool(x: Any, y: Any, channels: int, space: int, samples: int) -> None:
    share = typed(x[0], 1.0) / typed(x[0], space)
    for c in range(channels):
        row = y[c * samples : (c + 1) * samples]
        row[:] = typed(x[0], 0.0)
        for s in range(c * space, (c + 1) * space):
            axpy(share, x[s * samples : (s + 1) * samples], row)


@part
def pool_backward(dx: Any, dy: Any, channels: int, space: int, samples: int, mode: int) -> None:
    share = typed(dx[0], 1.0) / typed(dx[0], space)
    for r in range(channels * space):
        row, d = dx[r * samples : (r + 1) * samples], dy[(r // space) * samples :][:samples]
        if mode == SET:
            row[:] = typed(dx[0], 0.0)
        if mode != NOTHING:
            axpy(share, d, row)


@part
def channel_scale_backward(code: Any, x: Any, factor: Any, dx: Any, dfactor: Any, dy: Any, samples: int) -> None:
    space, mode = code[SPACE], code[MODE]
    for r in range(code[ROWS]):
        own, d = x[r * samples : (r + 1) * samples], dy[r * samples : (r + 1) * samples]
        channel = r // space * samples
        store_product(dfactor[channel : channel + samples], d, own, SET if r % space == 0 else ADD_TO)
        store_product(dx[r * samples : (r + 1) * samples], d, factor[channel : channel + samples], mode)


@part
def add_backward(da: Any, db: Any, d: Any, mode: int) -> None:
    db[:] = d
    if mode == SET:
        da[:] = d
    elif mode == ADD_TO:
        for j in range(d.size):
            da[j] += d[j]

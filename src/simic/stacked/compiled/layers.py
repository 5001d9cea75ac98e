"""Linear layers, convolutions and norms, forward and backward, in loops over rows of numbers.

Names: w and b are weights and biases, x and y input and output, and d* their gradients. An activation of C channels is
rows of n numbers, one channel behind the other; n is positions times samples.
"""

from __future__ import annotations

import math
from typing import Any

from simic.compiled.cache import part
from simic.compiled.vector_math import typed
from simic.stacked.compiled.instructions import (
    EPSILON,
    GROUPS,
    HEIGHT,
    IN,
    KERNEL_H,
    KERNEL_W,
    MEAN,
    MODE,
    MOMENTUM,
    NOTHING,
    OUT,
    OUT_HEIGHT,
    OUT_WIDTH,
    PAD_H,
    PAD_W,
    ROWS,
    SET,
    SPACE,
    STRIDE_H,
    STRIDE_W,
    VARIANCE,
    WIDTH,
)

TILE = 512
"""Numbers of a row that are worked on at a time, so that all rows of a layer stay in the cache."""


@part
def linear(w: Any, b: Any, x: Any, y: Any, outputs: int, inputs: int, n: int) -> None:
    """y = W x + b"""
    for start in range(0, n, TILE):
        size = min(TILE, n - start)
        for o in range(outputs):
            row = y[o * n + start : o * n + start + size]
            row[:] = b[o] if b.size else typed(w[0], 0.0)
            add_rows(row, x[start:], w[o * inputs : (o + 1) * inputs], 1, inputs, n)


@part
def add_rows(row: Any, x: Any, weights: Any, step: int, count: int, n: int) -> None:
    """row += the sum of `count` rows of x, each times its weight; weights lie `step` apart, rows of x n.

    Four rows at a time, because writing the sum costs more than multiplying.
    """
    i, size = 0, row.size
    while i + 4 <= count:
        w0, w1, w2, w3 = weights[i * step], weights[(i + 1) * step], weights[(i + 2) * step], weights[(i + 3) * step]
        x0, x1 = x[i * n : i * n + size], x[(i + 1) * n : (i + 1) * n + size]
        x2, x3 = x[(i + 2) * n : (i + 2) * n + size], x[(i + 3) * n : (i + 3) * n + size]
        for j in range(size):
            row[j] += w0 * x0[j] + w1 * x1[j] + w2 * x2[j] + w3 * x3[j]
        i += 4
    while i < count:
        axpy(weights[i * step], x[i * n : i * n + size], row)
        i += 1


@part
def linear_backward(
    w: Any, x: Any, dw: Any, db: Any, dx: Any, dy: Any, outputs: int, inputs: int, n: int, mode: int
) -> None:
    for start in range(0, n, TILE):
        size = min(TILE, n - start)
        for o in range(outputs):
            d = dy[o * n + start : o * n + start + size]
            add_products(d, x[start:], dw[o * inputs : (o + 1) * inputs], n)
            if db.size:
                db[o] += total(d)
        if mode != NOTHING:
            for i in range(inputs):
                row = dx[i * n + start : i * n + start + size]
                if mode == SET:
                    row[:] = typed(w[0], 0.0)
                add_rows(row, dy[start:], w[i:], inputs, outputs, n)


@part
def add_products(d: Any, x: Any, result: Any, n: int) -> None:
    """result[i] += d times row i of x; rows lie n apart."""
    i, size, zero = 0, d.size, typed(d[0], 0.0)
    while i + 4 <= result.size:
        s0, s1, s2, s3 = zero, zero, zero, zero
        x0, x1 = x[i * n : i * n + size], x[(i + 1) * n : (i + 1) * n + size]
        x2, x3 = x[(i + 2) * n : (i + 2) * n + size], x[(i + 3) * n : (i + 3) * n + size]
        for j in range(size):
            s0 += d[j] * x0[j]
            s1 += d[j] * x1[j]
            s2 += d[j] * x2[j]
            s3 += d[j] * x3[j]
        result[i] += s0
        result[i + 1] += s1
        result[i + 2] += s2
        result[i + 3] += s3
        i += 4
    while i < result.size:
        result[i] += dot(d, x[i * n : i * n + size])
        i += 1


@part
def dot(a: Any, b: Any) -> Any:
    result = typed(a[0], 0.0)
    for j in range(a.size):
        result += a[j] * b[j]
    return result


@part
def total(a: Any) -> Any:
    result = typed(a[0], 0.0)
    for j in range(a.size):
        result += a[j]
    return result


@part
def axpy(w: Any, x: Any, y: Any) -> None:
    """y += w x"""
    for j in range(y.size):
        y[j] += w * x[j]


@part
def reached(code: Any, k: int) -> tuple[int, int]:
    """The output columns that tap k of a row of the kernel reaches: the first, and the one behind the last."""
    stride, pad = code[STRIDE_W], code[PAD_W]
    first = 0 if k >= pad else (pad - k + stride - 1) // stride
    last = min(code[OUT_WIDTH], (code[WIDTH] - 1 + pad - k) // stride + 1)
    return first, max(first, last)


@part
def conv(code: Any, w: Any, b: Any, x: Any, y: Any, samples: int) -> None:
    """A convolution of one or two dimensions: for each tap a row of the image is added to a row of the output."""
    outputs, inputs = code[OUT], code[IN] // code[GROUPS]
    height, out_height, out_row = code[HEIGHT], code[OUT_HEIGHT], code[OUT_WIDTH] * samples
    kernel = code[KERNEL_H] * code[KERNEL_W]
    for o in range(outputs):
        channels = x[(o // (outputs // code[GROUPS])) * inputs * height * code[WIDTH] * samples :]
        for h in range(out_height):
            row = y[(o * out_height + h) * out_row : (o * out_height + h + 1) * out_row]
            row[:] = b[o] if b.size else typed(w[0], 0.0)
            for i in range(inputs):
                for kh in range(code[KERNEL_H]):
                    at = h * code[STRIDE_H] + kh - code[PAD_H]
                    if 0 <= at < height:
                        source = channels[(i * height + at) * code[WIDTH] * samples :]
                        taps = w[(o * inputs + i) * kernel + kh * code[KERNEL_W] :]
                        conv_row(code, taps, source, row, samples)


@part
def conv_row(code: Any, taps: Any, source: Any, row: Any, samples: int) -> None:
    """Add what a row of the kernel makes of a row of the image. Columns that three taps reach are written once."""
    stride, pad = code[STRIDE_W], code[PAD_W]
    inner_first, inner_last = reached(code, 0)[0], reached(code, code[KERNEL_W] - 1)[1]
    together = code[KERNEL_W] == 3 and inner_last > inner_first
    if together:
        w0, w1, w2 = taps[0], taps[1], taps[2]
        # With stride 1 all columns at once, else one at a time.
        width = inner_last - inner_first if stride == 1 else 1
        n = width * samples
        for column in range(inner_first, inner_last, width):
            begin = (column * stride - pad) * samples
            x0, x1 = source[begin : begin + n], source[begin + samples : begin + samples + n]
            x2, out = (
                source[begin + 2 * samples : begin + 2 * samples + n],
                row[column * samples : column * samples + n],
            )
            for j in range(n):
                out[j] += w0 * x0[j] + w1 * x1[j] + w2 * x2[j]
    for k in range(code[KERNEL_W]):
        first, last = reached(code, k)
        for column in range(first, last):
            if together and inner_first <= column < inner_last:
                continue
            begin = (column * stride + k - pad) * samples
            axpy(taps[k], source[begin : begin + samples], row[column * samples : (column + 1) * samples])


@part
def conv_backward(code: Any, w: Any, x: Any, dw: Any, db: Any, dx: Any, dy: Any, samples: int) -> None:
    outputs, inputs, mode = code[OUT], code[IN] // code[GROUPS], code[MODE]
    height, out_height, out_row = code[HEIGHT], code[OUT_HEIGHT], code[OUT_WIDTH] * samples
    kernel, in_row = code[KERNEL_H] * code[KERNEL_W], code[WIDTH] * samples
    zero = typed(w[0], 0.0)
    if mode == SET:
        dx[: code[IN] * height * in_row] = zero
    for o in range(outputs):
        own = (o // (outputs // code[GROUPS])) * inputs * height * in_row
        if db.size:
            db[o] += total(dy[o * out_height * out_row : (o + 1) * out_height * out_row])
        for i in range(inputs):
            taps, dtaps = w[(o * inputs + i) * kernel :], dw[(o * inputs + i) * kernel : (o * inputs + i + 1) * kernel]
            for h in range(out_height):
                row = dy[(o * out_height + h) * out_row : (o * out_height + h + 1) * out_row]
                for kh in range(code[KERNEL_H]):
                    at = h * code[STRIDE_H] + kh - code[PAD_H]
                    if 0 <= at < height:
                        start, tap = own + (i * height + at) * in_row, kh * code[KERNEL_W]
                        source, dsource = x[start : start + in_row], dx[start : start + in_row]
                        conv_row_backward(code, taps[tap:], source, dtaps[tap:], dsource, row, samples)


@part
def conv_row_backward(code: Any, taps: Any, source: Any, dtaps: Any, dsource: Any, row: Any, samples: int) -> None:
    stride, mode = code[STRIDE_W], code[MODE]
    for k in range(code[KERNEL_W]):
        first, last = reached(code, k)
        # With stride 1 all columns at once, else one at a time.
        width = last - first if stride == 1 else 1
        for column in range(first, last, max(width, 1)):
            begin = (column * stride + k - code[PAD_W]) * samples
            d = row[column * samples : (column + width) * samples]
            dtaps[k] += dot(d, source[begin : begin + width * samples])
            if mode != NOTHING:
                axpy(taps[k], d, dsource[begin : begin + width * samples])


@part
def norm(code: Any, w: Any, b: Any, eps: Any, x: Any, y: Any, aux: Any, samples: int) -> None:
    """Normalize over ROWS rows of n numbers. Features are their own rows, and so are those of a position of a sequence;
    of images all positions of all channels are rows. `aux` keeps the normalized rows, and 1 / std.
    """
    rows, space, n = code[ROWS], code[SPACE], code[GROUPS] * samples
    inverse, mean = aux[rows * n : (rows + 1) * n], aux[(rows + 1) * n : (rows + 2) * n]
    zero, share = typed(eps, 0.0), typed(eps, 1.0) / typed(eps, rows)
    mean[:] = zero
    inverse[:] = zero
    for r in range(rows):
        axpy(share, x[r * n : (r + 1) * n], mean)
    for r in range(rows):
        own, source = aux[r * n : (r + 1) * n], x[r * n : (r + 1) * n]
        for j in range(n):
            own[j] = source[j] - mean[j]
            inverse[j] += own[j] * own[j]
    for j in range(n):
        inverse[j] = typed(eps, 1.0) / math.sqrt(inverse[j] * share + eps)
    for r in range(rows):
        own, out = aux[r * n : (r + 1) * n], y[r * n : (r + 1) * n]
        factor = w[r // space] if w.size else typed(eps, 1.0)
        bias = b[r // space] if b.size else zero
        for j in range(n):
            own[j] *= inverse[j]
            out[j] = own[j] * factor + bias


@part
def norm_backward(code: Any, w: Any, dw: Any, db: Any, aux: Any, dx: Any, dy: Any, scratch: Any, samples: int) -> None:
    rows, space, mode, n = code[ROWS], code[SPACE], code[MODE], code[GROUPS] * samples
    inverse = aux[rows * n : (rows + 1) * n]
    mean, product = scratch[:n], scratch[n : 2 * n]
    zero, share = typed(dy[0], 0.0), typed(dy[0], 1.0) / typed(dy[0], rows)
    mean[:] = zero
    product[:] = zero
    for r in range(rows):
        own, d, factor = aux[r * n : (r + 1) * n], dy[r * n : (r + 1) * n], share
        if w.size:
            dw[r // space] += dot(d, own)
            factor *= w[r // space]
        if db.size:
            db[r // space] += total(d)
        for j in range(n):
            mean[j] += factor * d[j]
            product[j] += factor * d[j] * own[j]
    if mode != NOTHING:
        for r in range(rows):
            own, d = aux[r * n : (r + 1) * n], dy[r * n : (r + 1) * n]
            out = dx[r * n : (r + 1) * n]
            factor = w[r // space] if w.size else typed(dy[0], 1.0)
            for j in range(n):
                value = inverse[j] * (factor * d[j] - mean[j] - own[j] * product[j])
                out[j] = value if mode == SET else out[j] + value


@part
def batch_norm(
    code: Any, numbers: Any, w: Any, b: Any, x: Any, y: Any, aux: Any, kept: Any, samples: int, learns: bool
) -> None:
    """Normalize every channel: in training by the batch, which moves the statistics that are kept, else by these.

    `aux` keeps the normalized channels, then 1 / std, one row per channel.
    """
    channels, n, one = code[OUT], code[SPACE] * samples, typed(x[0], 1.0)
    for c in range(channels):
        own, source, out = aux[c * n : (c + 1) * n], x[c * n : (c + 1) * n], y[c * n : (c + 1) * n]
        mean, variance = kept[code[MEAN] + c], kept[code[VARIANCE] + c]
        if learns:
            mean, share = total(source) / typed(one, n), numbers[MOMENTUM]
            for j in range(n):
                own[j] = source[j] - mean
            squares = dot(own, own)
            variance = squares / typed(one, n)
            kept[code[MEAN] + c] += share * (mean - kept[code[MEAN] + c])
            kept[code[VARIANCE] + c] += share * (squares / typed(one, n - 1) - kept[code[VARIANCE] + c])
        inverse = one / math.sqrt(variance + numbers[EPSILON])
        aux[channels * n + c * samples] = inverse
        factor = w[c] if w.size else one
        bias = b[c] if b.size else typed(one, 0.0)
        for j in range(n):
            own[j] = (source[j] - mean) * inverse
            out[j] = own[j] * factor + bias


@part
def batch_norm_backward(code: Any, w: Any, dw: Any, db: Any, aux: Any, dx: Any, dy: Any, samples: int) -> None:
    channels, n, mode, one = code[OUT], code[SPACE] * samples, code[MODE], typed(dy[0], 1.0)
    for c in range(channels):
        own, d, out = aux[c * n : (c + 1) * n], dy[c * n : (c + 1) * n], dx[c * n : (c + 1) * n]
        product, whole = dot(d, own), total(d)
        if w.size:
            dw[c] += product
        if db.size:
            db[c] += whole
        factor = aux[channels * n + c * samples] * (w[c] if w.size else one)
        product, whole = product / typed(one, n), whole / typed(one, n)
        if mode != NOTHING:
            for j in range(n):
                value = factor * (d[j] - whole - own[j] * product)
                out[j] = value if mode == SET else out[j] + value

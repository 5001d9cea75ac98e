"""The compiled functions: they interpret the programs of hosts, forward and backward, and step the optimizer.

Shapes: N hosts, S slots, B samples, C channels, E elements of all parameters. An activation is rows of B samples, in
memory (C, positions, B): samples last, so that every inner loop runs over adjacent numbers, whatever the layer.

Hosts of a few hundred parameters spend their time around kernels, not in them. Here one call trains all hosts for a
step: each host has a program, a table with one instruction per row, so hosts may hold different seeds at no cost. The
memory of activations is used by one host after the other and stays in the cache. Row r of it begins at r B; its
gradient lies at the same place of a second array. A host with a GELU and a seed in its first slot:

    op      SRC -> DST     what else it says
    LINEAR  0      2       UNIT 0 (the host), WEIGHT 0, BIAS 12, IN 2, OUT 6
    GELU    2      8       AUX 14: where the derivative is kept
    SKIP                   SLOT 0: where its alpha is zero, go on at TARGET
    LINEAR  8      20      UNIT 1 (the seed of slot 0) ...
    BLEND   8      30      AUX 24: what the seed puts out

Parameters are elements of one vector: `bases` says where each unit of a host (itself, its seeds, their gates) begins.
MODE says what the backward pass does to the gradient of SRC: nothing, set it, or add to it.
The programs of all hosts lie one behind the other; `begin` and `end` say where that of each host is.
"""

from __future__ import annotations

from typing import Any

from simic.compiled.cache import entry, part
from simic.compiled.vector_math import typed
from simic.stacked.compiled.elementwise import (
    activate,
    add_backward,
    blend,
    blend_backward,
    channel_scale_backward,
    pool,
    pool_backward,
    store_product,
)
from simic.stacked.compiled.instructions import (
    ADD,
    ATTEND,
    AUX,
    BATCH_NORM,
    BIAS,
    BLEND,
    CHANNEL_SCALE,
    CLEAR,
    CONV,
    CROSS_ENTROPY,
    DST,
    EMBED,
    EPSILON,
    IGNORED,
    IN,
    LINEAR,
    MODE,
    NORM,
    OP,
    OUT,
    POOL,
    PRODUCT,
    ROWS,
    SCALE,
    SET,
    SIGMOID,
    SKIP,
    SKIPPED,
    SLOT,
    SPACE,
    SRC,
    TARGET,
    UNIT,
    WEIGHT,
)
from simic.stacked.compiled.layers import (
    batch_norm,
    batch_norm_backward,
    conv,
    conv_backward,
    dot,
    linear,
    linear_backward,
    norm,
    norm_backward,
)
from simic.stacked.compiled.losses import cross_entropy, squared_error
from simic.stacked.compiled.sequences import attend, attend_backward, embed, embed_backward


@part
def forward(
    program: Any, first: int, values: Any, parameters: Any, bases: Any, numbers: Any, kept: Any, alpha: Any,
    samples: int, learns: bool,
) -> None:  # fmt: skip
    """Run a program from the instruction `first` on; where it `learns`, batch norms use the statistics of the batch."""
    at = first
    while at < len(program):
        code = program[at]
        op, n = code[OP], code[ROWS] * samples
        base = bases[code[UNIT]]
        x, y, aux = values[code[SRC] * samples :], values[code[DST] * samples :], values[code[AUX] * samples :]
        w, b = parameters[base + code[WEIGHT] :], parameters[base + code[BIAS] :]
        if code[BIAS] < 0:
            b = parameters[:0]
        if code[WEIGHT] < 0:
            w = parameters[:0]
        if op == LINEAR:
            linear(w, b, x, y, code[OUT], code[IN], code[SPACE] * samples)
        elif op == CONV:
            conv(code, w, b, x, y, samples)
        elif op == NORM:
            norm(code, w, b, numbers[at, EPSILON], x, y, aux, samples)
        elif op <= SIGMOID:
            activate(op, x[:n], y[:n], aux[:n])
        elif op == PRODUCT:
            for j in range(n):
                y[j] = x[j] * aux[j]
        elif op == SCALE:
            for j in range(n):
                y[j] = x[j] * w[0]
        elif op == POOL:
            pool(x, y, code[OUT], code[SPACE], samples)
        elif op == CHANNEL_SCALE:
            for r in range(code[ROWS]):
                own, result = x[r * samples : (r + 1) * samples], y[r * samples : (r + 1) * samples]
                factor = aux[(r // code[SPACE]) * samples :][:samples]
                for j in range(samples):
                    result[j] = own[j] * factor[j]
        elif op == ADD:
            for j in range(n):
                y[j] = x[j] + aux[j]
        elif op == BLEND:
            blend(code, alpha[code[SLOT]], values, samples)
        elif op == EMBED:
            embed(code, w, b, x, y, samples)
        elif op == ATTEND:
            attend(code, x, y, aux, samples)
        elif op == BATCH_NORM:
            batch_norm(code, numbers[at], w, b, x, y, aux, kept, samples, learns)
        elif op == SKIP and alpha[code[SLOT]] == 0:
            at = code[TARGET] - 1
        at += 1


@part
def backward(
    program: Any, values: Any, grads: Any, parameters: Any, gradient: Any, bases: Any, alpha: Any, samples: int
) -> None:
    """The gradient of all parameters of a host, given that of its outputs; `gradient` begins with zeros."""
    at = len(program) - 1
    while at >= 0:
        code = program[at]
        op, mode, n, base = code[OP], code[MODE], code[ROWS] * samples, bases[code[UNIT]]
        x, aux = values[code[SRC] * samples :], values[code[AUX] * samples :]
        dx, dy, daux = grads[code[SRC] * samples :], grads[code[DST] * samples :], grads[code[AUX] * samples :]
        w, dw = parameters[base + code[WEIGHT] :], gradient[base + code[WEIGHT] :]
        db = gradient[:0] if code[BIAS] < 0 else gradient[base + code[BIAS] :]
        if code[WEIGHT] < 0:
            w = parameters[:0]
        if op == LINEAR:
            linear_backward(w, x, dw, db, dx, dy, code[OUT], code[IN], code[SPACE] * samples, mode)
        elif op == CONV:
            conv_backward(code, w, x, dw, db, dx, dy, samples)
        elif op == NORM:
            norm_backward(code, w, dw, db, aux, dx, dy, daux, samples)
        elif op == BATCH_NORM:
            batch_norm_backward(code, w, dw, db, aux, dx, dy, samples)
        elif op <= SIGMOID:
            store_product(dx[:n], dy[:n], aux[:n], mode)
        elif op == PRODUCT:
            store_product(dx[:n], dy[:n], aux[:n], SET)
            store_product(daux[:n], dy[:n], x[:n], SET)
        elif op == SCALE:
            dw[0] += dot(dy[:n], x[:n])
            for j in range(n):
                dx[j] = dy[j] * w[0]
        elif op == POOL:
            pool_backward(dx, dy, code[OUT], code[SPACE], samples, mode)
        elif op == CHANNEL_SCALE:
            channel_scale_backward(code, x, aux, dx, daux, dy, samples)
        elif op == ADD:
            add_backward(dx[:n], daux[:n], dy[:n], mode)
        elif op == BLEND:
            blend_backward(code, alpha[code[SLOT]], values, grads, samples)
        elif op == EMBED:
            embed_backward(code, dw, db, x, dy, samples)
        elif op == ATTEND:
            attend_backward(code, x, dx, dy, aux, daux, samples)
        elif op == SKIPPED and alpha[code[SLOT]] == 0:
            at = code[TARGET]
        elif op == CLEAR:
            dx[:n] = typed(dy[0], 0.0)
        at -= 1


@part
def load(source: Any, values: Any, start: int, samples: int) -> None:
    """Copy the samples from `start` on of rows (R, B) to the first rows of the activations."""
    for r in range(len(source)):
        values[r * samples : (r + 1) * samples] = source[r, start : start + samples]


@part
def counted(classes: Any) -> int:
    """The targets that are not to be ignored."""
    count = 0
    for row in classes:
        for j in range(row.size):
            count += row[j] != IGNORED
    return count


@entry
def differentiate(
    programs: Any, begin: Any, end: Any, bases: Any, numbers: Any, blocks: Any, kept: Any, alpha: Any, parameters: Any,
    gradient: Any, x: Any, classes: Any, targets: Any, loss: int, outputs: Any, values: Any, grads: Any, losses: Any,
) -> None:  # fmt: skip
    """Losses (N,) of batches x (N, R, B) and the gradient (E,) of their sum.

    Targets are `classes` (N, L, B) of a cross entropy, L per sample, or `targets` (N, R, B) of a squared error.
    `outputs` is (first row, number of rows) of each host's outputs (N, 2). A host takes `blocks` (N,) samples at a
    time, which stay in the cache; with batch norms, whose statistics `kept` (N, F) are moved, all at once.
    """
    gradient[:] = typed(gradient[0], 0.0)
    places = classes.shape[1]
    for host in range(len(x)):
        program, own = programs[begin[host] : end[host]], numbers[begin[host] : end[host]]
        first, rows = outputs[host]
        count = counted(classes[host]) if loss == CROSS_ENTROPY else targets[host].size
        share = typed(values[0], 1.0) / typed(values[0], count)
        total = typed(values[0], 0.0)
        for start in range(0, x.shape[2], blocks[host]):
            samples = min(blocks[host], x.shape[2] - start)
            load(x[host], values, start, samples)
            forward(program, 0, values, parameters, bases[host], own, kept[host], alpha[host], samples, True)
            out, gradient_out = values[first * samples :], grads[first * samples :]
            if loss == CROSS_ENTROPY:
                chosen = classes[host, :, start : start + samples].copy().ravel()
                total += cross_entropy(out, chosen, gradient_out, share, rows // places, places * samples)
            else:
                wanted = targets[host, :, start : start + samples].copy().ravel()
                total += squared_error(out, wanted, gradient_out, share, rows * samples)
            backward(program, values, grads, parameters, gradient, bases[host], alpha[host], samples)
        losses[host] = total


@entry
def evaluate(
    programs: Any, begin: Any, end: Any, bases: Any, numbers: Any, blocks: Any, kept: Any, alpha: Any, parameters: Any,
    x: Any, starts: Any, rows: Any, switched: Any, outputs: Any, values: Any, out: Any,
) -> None:  # fmt: skip
    """Outputs (rows, R, B) of all hosts, and of hosts with one seed switched, in the row that `rows` (N, S) says.

    `switched` (N, S) is the alpha of the seed then, `starts` (N, S) the instruction where its slot begins. Slots are
    switched from the last to the first: what lies before a slot is still there when that slot is run again.
    """
    for host in range(len(x)):
        program, own = programs[begin[host] : end[host]], numbers[begin[host] : end[host]]
        now, (first, number) = alpha[host].copy(), outputs[host]
        for start in range(0, x.shape[2], blocks[host]):
            samples = min(blocks[host], x.shape[2] - start)
            load(x[host], values, start, samples)
            forward(program, 0, values, parameters, bases[host], own, kept[host], now, samples, False)
            result = values[first * samples : (first + number) * samples].reshape(number, samples)
            out[host, :, start : start + samples] = result
            for slot in range(len(now) - 1, -1, -1):
                row = rows[host, slot]
                if row >= 0:
                    before, now[slot] = now[slot], switched[host, slot]
                    again = starts[host, slot]
                    forward(program, again, values, parameters, bases[host], own, kept[host], now, samples, False)
                    out[row, :, start : start + samples] = result
                    now[slot] = before

"""Embeddings and attention, forward and backward.

Shapes: C features, L positions, B samples; activations are (C, L, B). Queries, keys and values are the first, second
and third C rows of one activation; a head has D of them. A row of weights says how much position i takes of the others:

    weights (heads, L, L, B), of which causal attention uses (i, 0) to (i, i)
"""

from __future__ import annotations

import math
from typing import Any

from simic.compiled.cache import part
from simic.compiled.vector_math import exp, typed
from simic.stacked.compiled.instructions import CAUSAL, HEADS, OUT, SPACE


@part
def embed(code: Any, tokens: Any, positions: Any, x: Any, y: Any, samples: int) -> None:
    """Rows of the tables of tokens and positions, added; tokens are whole numbers among the activations."""
    features, length = code[OUT], code[SPACE]
    for c in range(features):
        for place in range(length):
            own, row = x[place * samples :][:samples], y[(c * length + place) * samples :][:samples]
            here = positions[place * features + c]
            for j in range(samples):
                row[j] = tokens[int(own[j]) * features + c] + here


@part
def embed_backward(code: Any, dtokens: Any, dpositions: Any, x: Any, dy: Any, samples: int) -> None:
    features, length = code[OUT], code[SPACE]
    for c in range(features):
        for place in range(length):
            own, row = x[place * samples :][:samples], dy[(c * length + place) * samples :][:samples]
            total = typed(dy[0], 0.0)
            for j in range(samples):
                dtokens[int(own[j]) * features + c] += row[j]
                total += row[j]
            dpositions[place * features + c] += total


@part
def add_outer(out: Any, own: Any, rows: Any, count: int, n: int) -> None:
    """out += own times rows, for each of `count` rows of n numbers."""
    for r in range(count):
        row, source = out[r * n : (r + 1) * n], rows[r * n : (r + 1) * n]
        for j in range(n):
            row[j] += own[j] * source[j]


@part
def add_inner(out: Any, a: Any, b: Any, count: int, n: int) -> None:
    """out += the sum over `count` rows of a times b."""
    for r in range(count):
        one, other = a[r * n : (r + 1) * n], b[r * n : (r + 1) * n]
        for j in range(n):
            out[j] += one[j] * other[j]


@part
def attend(code: Any, qkv: Any, y: Any, weights: Any, samples: int) -> None:
    """Softmax attention; two rows behind the weights are scratch."""
    heads, features, length = code[HEADS], code[OUT], code[SPACE]
    size, channel = features // heads, length * samples
    scale, zero = typed(qkv[0], 1.0 / math.sqrt(size)), typed(qkv[0], 0.0)
    scratch = weights[heads * length * channel :]
    largest, mass = scratch[:samples], scratch[samples : 2 * samples]
    for h in range(heads):
        for i in range(length):
            seen = i + 1 if code[CAUSAL] else length
            own = weights[(h * length + i) * channel :][: seen * samples]
            own[:] = zero
            for d in range(h * size, (h + 1) * size):
                q = qkv[d * channel + i * samples :][:samples]
                add_outer(own, q, qkv[(features + d) * channel :], seen, samples)
            largest[:] = own[:samples]
            for r in range(1, seen):
                row = own[r * samples : (r + 1) * samples]
                for j in range(samples):
                    largest[j] = max(largest[j], row[j])
            mass[:] = zero
            for r in range(seen):
                row = own[r * samples : (r + 1) * samples]
                for j in range(samples):
                    row[j] = exp(scale * (row[j] - largest[j]))
                    mass[j] += row[j]
            for r in range(seen):
                row = own[r * samples : (r + 1) * samples]
                for j in range(samples):
                    row[j] /= mass[j]
            for d in range(h * size, (h + 1) * size):
                out = y[d * channel + i * samples :][:samples]
                out[:] = zero
                add_inner(out, own, qkv[(2 * features + d) * channel :], seen, samples)


@part
def attend_backward(code: Any, qkv: Any, dqkv: Any, dy: Any, weights: Any, dweights: Any, samples: int) -> None:
    heads, features, length = code[HEADS], code[OUT], code[SPACE]
    size, channel = features // heads, length * samples
    scale, zero = typed(qkv[0], 1.0 / math.sqrt(size)), typed(qkv[0], 0.0)
    total = dweights[heads * length * channel :][:samples]
    dqkv[: 3 * features * channel] = zero
    for h in range(heads):
        for i in range(length):
            seen = i + 1 if code[CAUSAL] else length
            own = weights[(h * length + i) * channel :][: seen * samples]
            d_own = dweights[(h * length + i) * channel :][: seen * samples]
            d_own[:] = zero
            for d in range(h * size, (h + 1) * size):
                grad = dy[d * channel + i * samples :][:samples]
                add_outer(d_own, grad, qkv[(2 * features + d) * channel :], seen, samples)
                add_outer(dqkv[(2 * features + d) * channel :], grad, own, seen, samples)
            total[:] = zero
            add_inner(total, own, d_own, seen, samples)
            for r in range(seen):
                row, weight = d_own[r * samples : (r + 1) * samples], own[r * samples : (r + 1) * samples]
                for j in range(samples):
                    row[j] = scale * weight[j] * (row[j] - total[j])
            for d in range(h * size, (h + 1) * size):
                at = d * channel + i * samples
                add_inner(dqkv[at : at + samples], d_own, qkv[(features + d) * channel :], seen, samples)
                add_outer(dqkv[(features + d) * channel :], qkv[at : at + samples], d_own, seen, samples)

"""Functions of one number, written so that loops over them become vector instructions in float32.

In float64 they are those of the C library: exact, and slower.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from simic.compiled.cache import OPTIONS, part

_JIT: Any = OPTIONS


def _make_float(typing_context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_float_of_bits: Any = intrinsic(_make_float)


def typed(x: Any, number: float) -> Any:
    """A number in the precision of x: in numba an int makes a float64 of a float32."""
    return number


@overload(typed, inline="always")
def _overload_typed(x, number):
    if x is types.float32:
        return lambda x, number: np.float32(number)
    return lambda x, number: np.float64(number)


def exp(x: Any) -> Any:
    return math.exp(x)


@overload(exp, jit_options=_JIT)
def _overload_exp(x):
    if x is not types.float32:
        return lambda x: math.exp(x)

    def fast(x):
        # exp(x) = 2^n exp(r) with |r| <= ln(2) / 2; the polynomial is exact to 1e-8.
        bounded = min(max(x, np.float32(-87.0)), np.float32(88.0))
        n = np.floor(bounded * np.float32(1.44269504) + np.float32(0.5))
        r = (bounded - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
        p = np.float32(0.00836318) + r * np.float32(0.00139336)
        p = np.float32(0.16666577) + r * (np.float32(0.04166646) + r * p)
        p = np.float32(1) + r + r * r * (np.float32(0.5) + r * p)
        scaled = p * _float_of_bits(np.int32(n * np.float32(8388608)) + np.int32(1065353216))
        return scaled if x == x else x

    return fast


def upper_tail(x: Any, density: Any) -> Any:
    """P(a normal number > x) for x >= 0, given exp(-x^2 / 2)."""
    return 0.5 * math.erfc(x * math.sqrt(0.5))


@overload(upper_tail, jit_options=_JIT)
def _overload_upper_tail(x, density):
    if x is not types.float32:
        return lambda x, density: 0.5 * math.erfc(x * 0.7071067811865476)

    def fast(x, density):
        # erfc(z) exp(z^2) is a polynomial in 1 / (1 + 0.4 z), fitted for z >= 0: erfc is exact to 1e-9.
        t = np.float32(1) / (np.float32(1) + np.float32(0.28284271) * x)
        p = np.float32(-0.40787832) + t * np.float32(0.07744283)
        p = np.float32(-0.39235962) + t * (np.float32(0.7068116) + t * p)
        p = np.float32(0.13978968) + t * (np.float32(0.41541416) + t * p)
        p = np.float32(0.22510281) + t * (np.float32(0.23567687) + t * p)
        return np.float32(0.5) * density * t * p

    return fast


@part
def tanh(x: Any) -> Any:
    one, two = typed(x, 1.0), typed(x, 2.0)
    value = one - two / (exp(two * abs(x)) + one)
    return value if x >= 0 else -value


@part
def sigmoid(x: Any) -> Any:
    one = typed(x, 1.0)
    return one / (one + exp(-x))

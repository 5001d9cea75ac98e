"""A matrix product for few rows, with the sums in vector registers.

The library's product serves large matrices; for the ten rows of a recurrent step its preparations take longer than the
work. Here the sums of up to six rows and four vectors (of 64 bytes) stay in registers while the inner index runs:

    columns     quarter 0      quarter 1      quarter 2      quarter 3          w is packed in the order in which
              |u....         |u....         |u....         |u....           |   it is read: tile u, inner index,
    6 rows    |vector 0      |vector 1      |vector 2      |vector 3        |   quarter, lane

A tile takes its vectors from the four quarters of the columns, which are the gates of an LSTM.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from simic.compiled.cache import part

VECTOR_BYTES = 64
QUARTERS = 4
COLUMN_UNIT = 64
"""The number of columns must be a multiple: four vectors of float32, eight of float64."""
MAX_ROWS = 6
"""24 sums, four vectors of weights and one of x fit into 32 registers."""
INNER_CHUNK = 128
"""Inner indices at a time, so that the weights of a tile stay in the nearest cache for all blocks of rows."""


def _make_block(rows: int) -> Any:
    """y += x w for `rows` rows and one tile, as an intrinsic: loops do not become this by themselves."""

    def block(
        typing_context: Any, y: Any, y_at: Any, y_row: Any, quarter: Any, x: Any, x_at: Any, x_row: Any, w: Any,
        w_at: Any, inner: Any,
    ) -> Any:  # fmt: skip
        size = y.dtype.bitwidth // 8
        lanes = VECTOR_BYTES // size

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word, vector = ir.IntType(64), ir.VectorType(context.get_value_type(y.dtype), lanes)
            fused = {"flags": ("contract",)}  # a product and a sum may become one instruction

            def place(array: int, *offsets: Any) -> Any:
                pointer = context.make_array(signature.args[array])(context, builder, arguments[array]).data
                return builder.gep(pointer, [_total(builder, offsets)])

            def as_vector(pointer: Any) -> Any:
                return builder.bitcast(pointer, vector.as_pointer())

            places, sums = [], []
            for row in range(rows):
                for column in range(QUARTERS):
                    offsets = builder.mul(arguments[2], word(row)), builder.mul(arguments[3], word(column))
                    places.append(as_vector(place(0, arguments[1], *offsets)))
                    sums.append(cgutils.alloca_once(builder, vector))
                    builder.store(builder.load(places[-1], align=size), sums[-1])
            starts = [place(4, arguments[5], builder.mul(arguments[6], word(row))) for row in range(rows)]
            with cgutils.for_range(builder, arguments[9]) as loop:
                here = builder.mul(loop.index, word(QUARTERS * lanes))
                weights = [
                    builder.load(as_vector(place(7, arguments[8], here, word(column * lanes))), align=size)
                    for column in range(QUARTERS)
                ]
                for row in range(rows):
                    wide = _spread(builder, builder.load(builder.gep(starts[row], [loop.index])), vector)
                    for column in range(QUARTERS):
                        own = sums[row * QUARTERS + column]
                        product = builder.fmul(wide, weights[column], **fused)
                        builder.store(builder.fadd(builder.load(own), product, **fused), own)
            for pointer, own in zip(places, sums, strict=True):
                builder.store(builder.load(own), pointer, align=size)
            return context.get_dummy_value()

        at = types.int64
        return types.none(y, at, at, at, x, at, at, w, at, at), generate

    return intrinsic(block)


def _total(builder: Any, numbers: Any) -> Any:
    result = numbers[0]
    for number in numbers[1:]:
        result = builder.add(result, number)
    return result


def _spread(builder: Any, number: Any, vector: Any) -> Any:
    """A vector whose lanes all hold the number."""
    nothing, lane = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    first = builder.insert_element(nothing, number, lane(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(lane, vector.count), [0] * vector.count))


_block_1, _block_2, _block_3, _block_4, _block_5, _block_6 = (_make_block(rows) for rows in range(1, MAX_ROWS + 1))


def _lanes(array: Any) -> int:
    """Numbers in a vector; known when a function is compiled, so that loops over them need no counter."""
    return VECTOR_BYTES // array.itemsize


@overload(_lanes, inline="always")
def _overload_lanes(array):
    lanes = VECTOR_BYTES // (array.dtype.bitwidth // 8)
    return lambda array: lanes


@part
def add_product(y: Any, x: Any, w: Any, rows: int, columns: int, inner: int) -> None:
    """y (rows, columns) += x (rows, inner) w, all flat and without gaps, with packed w."""
    lanes, quarter, blocks = _lanes(y), columns // QUARTERS, -(-rows // MAX_ROWS)
    for tile in range(0, quarter, lanes):
        for k in range(0, inner, INNER_CHUNK):
            size = min(INNER_CHUNK, inner - k)
            for block in range(blocks):
                first, last = block * rows // blocks, (block + 1) * rows // blocks
                y_at, x_at, w_at = first * columns + tile, first * inner + k, (tile * inner + k * lanes) * QUARTERS
                if last - first == 6:
                    _block_6(y, y_at, columns, quarter, x, x_at, inner, w, w_at, size)
                elif last - first == 5:
                    _block_5(y, y_at, columns, quarter, x, x_at, inner, w, w_at, size)
                elif last - first == 4:
                    _block_4(y, y_at, columns, quarter, x, x_at, inner, w, w_at, size)
                elif last - first == 3:
                    _block_3(y, y_at, columns, quarter, x, x_at, inner, w, w_at, size)
                elif last - first == 2:
                    _block_2(y, y_at, columns, quarter, x, x_at, inner, w, w_at, size)
                else:
                    _block_1(y, y_at, columns, quarter, x, x_at, inner, w, w_at, size)


@part
def pack(w: Any, packed: Any) -> None:
    """Weights (inner, columns), in any layout, to the order in which `add_product` reads them."""
    inner, columns = w.shape
    lanes, quarter = _lanes(w), columns // QUARTERS
    for tile in range(0, quarter, lanes):
        for start in range(0, inner, lanes):  # of a transposed matrix, a square is read line by line
            for column in range(QUARTERS):
                for k in range(start, start + lanes):
                    place = (tile * inner + k * lanes) * QUARTERS + column * lanes
                    for lane in range(lanes):
                        packed[place + lane] = w[k, column * quarter + tile + lane]

"""Sum whole lines of memory, for rates: rows side by side as products read them, with almost no arithmetic.

A function for use inside numba code. Addresses and counts are int64, in bytes. Bytes moved: each row once.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from transfer.simd.emission import I64, NEAR, int64, prefetch
from transfer.simd.features import LANES
from transfer.simd.vectors import LINE_BYTES

_WORDS = LANES // 2  # int64 of a vector
_VECTOR = ir.VectorType(I64, _WORDS)


def sum_block(rows: int) -> Any:
    """Return a numba function: the sum of all int64 of `rows` adjacent rows of `row_bytes` each, in whole lines."""

    @intrinsic
    def add(typing_context, first, row_bytes, ahead):
        def emit(context, builder, signature, arguments):
            first, row_bytes, ahead = arguments
            row_at = [builder.add(first, builder.mul(row_bytes, int64(row))) for row in range(rows)]
            zero = ir.Constant(_VECTOR, [0] * _WORDS)
            sums = [cgutils.alloca_once_value(builder, zero) for _ in range(rows)]
            lines = builder.udiv(row_bytes, int64(LINE_BYTES))
            with cgutils.for_range(builder, lines, intp=I64) as line:
                at = builder.mul(line.index, int64(LINE_BYTES))
                for address in row_at:
                    prefetch(builder, builder.add(builder.add(address, at), ahead), NEAR)
                for part in range(0, LINE_BYTES, 8 * _WORDS):
                    for address, total in zip(row_at, sums, strict=True):
                        place = builder.add(builder.add(address, at), int64(part))
                        value = builder.load(builder.inttoptr(place, _VECTOR.as_pointer()), align=8)
                        builder.store(builder.add(builder.load(total), value), total)
            found = int64(0)
            for total in sums:
                for word in range(_WORDS):
                    lane = builder.extract_element(builder.load(total), ir.Constant(ir.IntType(32), word))
                    found = builder.add(found, lane)
            return found

        return types.int64(*[types.int64] * 3), emit

    return add

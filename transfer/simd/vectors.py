"""Emit vector code of the compiled decode step as LLVM IR: products of weight rows, weighted sums, prefetch.

Functions for use inside numba code. Addresses, strides and counts are int64; strides count elements, `ahead` counts
bytes. A result depends on its own row and vector only, and not on how many others share the block: each result has one
accumulator, which is summed over lanes by one fixed tree. Bytes moved: each row once per block, widened in registers if
it is bf16 (uint16 with the upper half of a float32) or int8.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from transfer.simd.emission import (
    F32,
    I8,
    I16,
    I32,
    I64,
    NEAR,
    VECTOR,
    accumulate,
    addresses,
    broadcast,
    int64,
    lane_sums,
    prefetch,
    store_part,
    widened,
    zero,
)
from transfer.simd.features import LANES

LINE_BYTES = 64


def item_bytes(kind: Any) -> int:
    """Return the bytes of a weight of the numba type `kind`: float32, uint16 for bf16, or int8."""
    if kind not in (types.float32, types.uint16, types.int8):
        raise TypeError(f"weights: numba type {kind}; wanted float32, uint16 for bf16, or int8")
    return int(kind.bitwidth // 8)


def emit_dots(
    builder: ir.IRBuilder, size: int, rows: int, vectors: int, weights: Any, weight_stride: Any, x: Any, x_stride: Any,
    inner: Any, out: Any, out_stride: Any, ahead: Any,
) -> None:  # fmt: skip
    """Emit `out[v, r] = sum(weights[r, :] * x[v, :])` for numbers of rows and vectors that are powers of two. size:
    bytes of a weight. The inner length is whole lines of 64 bytes of weights.
    """
    row_at = list(addresses(builder, weights, weight_stride, size, rows))
    vector_at = list(addresses(builder, x, x_stride, 4, vectors))
    sums = [cgutils.alloca_once_value(builder, zero()) for _ in range(rows * vectors)]
    lines = builder.udiv(inner, int64(LINE_BYTES // size))
    with cgutils.for_range(builder, lines, intp=I64) as line:
        at = builder.mul(line.index, int64(LINE_BYTES))
        x_line = builder.mul(line.index, int64(LINE_BYTES // size * 4))
        for address in row_at:
            prefetch(builder, builder.add(builder.add(address, at), ahead), NEAR)
        for part in range(LINE_BYTES // size // LANES):
            ours = [widened(builder, builder.add(row, at), part * LANES, size) for row in row_at]
            for vector, address in enumerate(vector_at):
                theirs = widened(builder, builder.add(address, x_line), part * LANES, 4)
                for row in range(rows):
                    accumulate(builder, sums[vector * rows + row], ours[row], theirs)
    totals = lane_sums(builder, [builder.load(total) for total in sums])
    for vector, address in enumerate(addresses(builder, out, out_stride, 4, vectors)):
        store_part(builder, totals, vector * rows, rows, address)


def weighted_sum(members: int, columns: int) -> Any:
    """Return a numba function: `out[m, :] += sum(weights[m, t] * rows[t, :])` over tokens, for `columns * LANES`
    columns.
    """

    @intrinsic
    def add(typing_context, kind, rows, row_stride, weights, weight_stride, tokens, out, out_stride, ahead):
        size = item_bytes(kind)

        def emit(context, builder, signature, arguments):
            _, rows, row_stride, weights, weight_stride, tokens, out, out_stride, ahead = arguments
            weights_at = list(addresses(builder, weights, weight_stride, 4, members))
            out_at = list(addresses(builder, out, out_stride, 4, members))
            places = [(address, column) for address in out_at for column in range(columns)]
            sums = [
                cgutils.alloca_once_value(builder, widened(builder, address, column * LANES, 4))
                for address, column in places
            ]
            row_bytes = builder.mul(row_stride, int64(size))
            with cgutils.for_range(builder, tokens, intp=I64) as token:
                row = builder.add(rows, builder.mul(token.index, row_bytes))
                for byte in range(0, columns * LANES * size, LINE_BYTES):
                    prefetch(builder, builder.add(builder.add(row, ahead), int64(byte)), NEAR)
                values = [widened(builder, row, column * LANES, size) for column in range(columns)]
                for member, address in enumerate(weights_at):
                    weight = broadcast(builder, builder.add(address, builder.mul(token.index, int64(4))))
                    for column, value in enumerate(values):
                        accumulate(builder, sums[member * columns + column], weight, value)
            for (address, column), total in zip(places, sums, strict=True):
                target = builder.add(address, int64(4 * column * LANES))
                builder.store(builder.load(total), builder.inttoptr(target, VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 8), emit

    return add


@intrinsic
def size_of(typing_context, kind):
    """Return the bytes of a weight: a constant of the compiled code."""
    size = item_bytes(kind)

    def emit(context, builder, signature, arguments):
        return int64(size)

    return types.int64(kind), emit


@intrinsic
def load(typing_context, kind, address, index):
    """Load the weight number `index` from `address` on, as float32."""
    size = item_bytes(kind)

    def emit(context, builder, signature, arguments):
        _, address, index = arguments
        at = builder.add(address, builder.mul(index, int64(size)))
        if size == 4:
            return builder.load(builder.inttoptr(at, F32.as_pointer()), align=4)
        if size == 1:
            return builder.sitofp(builder.load(builder.inttoptr(at, I8.as_pointer()), align=1), F32)
        half = builder.load(builder.inttoptr(at, I16.as_pointer()), align=2)
        return builder.bitcast(builder.shl(builder.zext(half, I32), ir.Constant(I32, 16)), F32)

    return types.float32(kind, types.int64, types.int64), emit


@intrinsic
def store(typing_context, kind, address, index, value):
    """Write a float32 as a weight: as it is, or rounded to the nearest bf16, ties to even; NaN stays NaN. For int8 it
    must be a whole number in [-128, 127].
    """
    size = item_bytes(kind)

    def emit(context, builder, signature, arguments):
        _, address, index, value = arguments
        at = builder.add(address, builder.mul(index, int64(size)))
        if size == 4:
            builder.store(value, builder.inttoptr(at, F32.as_pointer()), align=4)
        elif size == 1:
            builder.store(builder.fptosi(value, I8), builder.inttoptr(at, I8.as_pointer()), align=1)
        else:
            bits = builder.bitcast(value, I32)
            upper = builder.lshr(bits, ir.Constant(I32, 16))
            odd = builder.and_(upper, ir.Constant(I32, 1))
            rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(I32, 0x7FFF))), ir.Constant(I32, 16))
            quiet = builder.or_(upper, ir.Constant(I32, 0x40))
            chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
            builder.store(builder.trunc(chosen, I16), builder.inttoptr(at, I16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.float32), emit


@intrinsic
def power_of_two(typing_context, shifted):
    """Return 2**n, where n is the integer in the low bits of the float32 `n + 1.5 * 2**23`; n in [-126, 127]."""

    def emit(context, builder, signature, arguments):
        bits = builder.add(builder.bitcast(arguments[0], I32), ir.Constant(I32, 127))
        return builder.bitcast(builder.shl(bits, ir.Constant(I32, 23)), F32)

    return types.float32(types.float32), emit


@intrinsic
def address_of(typing_context, array):
    """Return the address of an array's first element."""

    def emit(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, I64)

    return types.int64(array), emit

"""Vector code of the compiled decode step, emitted as LLVM IR: products of weight rows, weighted sums, prefetch.

Functions for use inside numba code. Addresses, strides and counts are int64; strides count elements, `ahead` counts
bytes. It refuses to know what a row is. Invariant: a result depends on its own row and vector only, never on how many
others share the block: one accumulator a result, summed over lanes by one fixed tree. Bytes moved: each row once a
block, widened in registers where it is bf16 (uint16 with the upper half of a float32).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = llvm.get_host_cpu_features()
HAS_VECTORS = bool(_FEATURES.get("avx2") and _FEATURES.get("fma"))
LANES = 16 if _FEATURES.get("avx512f") else 8
LINE_BYTES = 64

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_F32, LANES)
_Emit = Callable[..., Any]


def item_bytes(kind: Any) -> int:
    """Of a weight: 4 where the numba type `kind` is float32, 2 where it is uint16 (bf16)."""
    if kind not in (types.float32, types.uint16):
        raise TypeError(f"weights: numba type {kind}; wanted float32, or uint16 for bf16")
    return int(kind.bitwidth // 8)


def dot_block(rows: int, vectors: int) -> Any:
    """A numba function: `out[v, r] = sum(weights[r, :] * x[v, :])` for so many rows and vectors.

    Both are powers of two. The inner length is whole lines of 64 bytes of weights.
    """

    @intrinsic
    def dot(typing_context, kind, weights, weight_stride, x, x_stride, inner, out, out_stride, ahead):  # type: ignore[no-untyped-def]
        size = item_bytes(kind)

        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, weights, weight_stride, x, x_stride, inner, out, out_stride, ahead = arguments
            row_at = list(_addresses(builder, weights, weight_stride, size, rows))
            vector_at = list(_addresses(builder, x, x_stride, 4, vectors))
            sums = [cgutils.alloca_once_value(builder, _zero()) for _ in range(rows * vectors)]
            lines = builder.udiv(inner, _int(LINE_BYTES // size))
            with cgutils.for_range(builder, lines, intp=_I64) as line:
                at = builder.mul(line.index, _int(LINE_BYTES))
                x_line = builder.mul(line.index, _int(LINE_BYTES // size * 4))
                for address in row_at:
                    _prefetch(builder, builder.add(builder.add(address, at), ahead))
                for part in range(LINE_BYTES // size // LANES):
                    ours = [_widened(builder, builder.add(row, at), part * LANES, size) for row in row_at]
                    for vector, address in enumerate(vector_at):
                        theirs = _widened(builder, builder.add(address, x_line), part * LANES, 4)
                        for row in range(rows):
                            _accumulate(builder, sums[vector * rows + row], ours[row], theirs)
            totals = _lane_sums(builder, [builder.load(total) for total in sums])
            for vector, address in enumerate(_addresses(builder, out, out_stride, 4, vectors)):
                _store_part(builder, totals, vector * rows, rows, address)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 8), emit

    return dot


def weighted_sum(members: int, columns: int) -> Any:
    """A numba function: `out[m, :] += sum(weights[m, t] * rows[t, :])` over tokens, for `columns * LANES` columns."""

    @intrinsic
    def add(typing_context, kind, rows, row_stride, weights, weight_stride, tokens, out, out_stride, ahead):  # type: ignore[no-untyped-def]
        size = item_bytes(kind)

        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, rows, row_stride, weights, weight_stride, tokens, out, out_stride, ahead = arguments
            weights_at = list(_addresses(builder, weights, weight_stride, 4, members))
            out_at = list(_addresses(builder, out, out_stride, 4, members))
            places = [(address, column) for address in out_at for column in range(columns)]
            sums = [
                cgutils.alloca_once_value(builder, _widened(builder, address, column * LANES, 4))
                for address, column in places
            ]
            row_bytes = builder.mul(row_stride, _int(size))
            with cgutils.for_range(builder, tokens, intp=_I64) as token:
                row = builder.add(rows, builder.mul(token.index, row_bytes))
                for byte in range(0, columns * LANES * size, LINE_BYTES):
                    _prefetch(builder, builder.add(builder.add(row, ahead), _int(byte)))
                values = [_widened(builder, row, column * LANES, size) for column in range(columns)]
                for member, address in enumerate(weights_at):
                    weight = _broadcast(builder, builder.add(address, builder.mul(token.index, _int(4))))
                    for column, value in enumerate(values):
                        _accumulate(builder, sums[member * columns + column], weight, value)
            for (address, column), total in zip(places, sums, strict=True):
                target = builder.add(address, _int(4 * column * LANES))
                builder.store(builder.load(total), builder.inttoptr(target, _VECTOR.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 8), emit

    return add


@intrinsic
def size_of(typing_context, kind):  # type: ignore[no-untyped-def]
    """Bytes of a weight: a constant of the compiled code."""
    size = item_bytes(kind)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _int(size)

    return types.int64(kind), emit


@intrinsic
def load(typing_context, kind, address, index):  # type: ignore[no-untyped-def]
    """The weight number `index` from `address` on, as float32."""
    size = item_bytes(kind)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, address, index = arguments
        at = builder.add(address, builder.mul(index, _int(size)))
        if size == 4:
            return builder.load(builder.inttoptr(at, _F32.as_pointer()), align=4)
        half = builder.load(builder.inttoptr(at, _I16.as_pointer()), align=2)
        return builder.bitcast(builder.shl(builder.zext(half, _I32), ir.Constant(_I32, 16)), _F32)

    return types.float32(kind, types.int64, types.int64), emit


@intrinsic
def store(typing_context, kind, address, index, value):  # type: ignore[no-untyped-def]
    """Write a float32 as a weight: as it is, or rounded to the nearest bf16, ties to even; NaN stays NaN."""
    size = item_bytes(kind)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, address, index, value = arguments
        at = builder.add(address, builder.mul(index, _int(size)))
        if size == 4:
            builder.store(value, builder.inttoptr(at, _F32.as_pointer()), align=4)
        else:
            bits = builder.bitcast(value, _I32)
            upper = builder.lshr(bits, ir.Constant(_I32, 16))
            odd = builder.and_(upper, ir.Constant(_I32, 1))
            rounded = builder.lshr(
                builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF))), ir.Constant(_I32, 16)
            )
            quiet = builder.or_(upper, ir.Constant(_I32, 0x40))
            chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
            builder.store(builder.trunc(chosen, _I16), builder.inttoptr(at, _I16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.float32), emit


@intrinsic
def power_of_two(typing_context, shifted):  # type: ignore[no-untyped-def]
    """2**n, where n is the integer in the low bits of the float32 `n + 1.5 * 2**23`; n in [-126, 127]."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        bits = builder.add(builder.bitcast(arguments[0], _I32), ir.Constant(_I32, 127))
        return builder.bitcast(builder.shl(bits, ir.Constant(_I32, 23)), _F32)

    return types.float32(types.float32), emit


@intrinsic
def address_of(typing_context, array):  # type: ignore[no-untyped-def]
    """Where an array's first element lies."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, _I64)

    return types.int64(array), emit


def _int(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _zero() -> ir.Constant:
    return ir.Constant(_VECTOR, [0.0] * LANES)


def _addresses(builder: ir.IRBuilder, first: Any, stride: Any, size: int, count: int) -> Iterator[Any]:
    step = builder.mul(stride, _int(size))
    for index in range(count):
        yield builder.add(first, builder.mul(step, _int(index)))


def _widened(builder: ir.IRBuilder, address: Any, element: int, size: int) -> Any:
    """LANES elements of `size` bytes as float32."""
    at = builder.add(address, _int(element * size))
    if size == 4:
        return builder.load(builder.inttoptr(at, _VECTOR.as_pointer()), align=4)
    halves = builder.load(builder.inttoptr(at, ir.VectorType(_I16, LANES).as_pointer()), align=2)
    words = ir.VectorType(_I32, LANES)
    return builder.bitcast(builder.shl(builder.zext(halves, words), ir.Constant(words, [16] * LANES)), _VECTOR)


def _broadcast(builder: ir.IRBuilder, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, _F32.as_pointer()), align=4)
    alone = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_I32, 0))
    return _shuffle(builder, alone, alone, [0] * LANES)


def _accumulate(builder: ir.IRBuilder, total: Any, first: Any, second: Any) -> None:
    function_type = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(fma, [first, second, builder.load(total)]), total)


def _prefetch(builder: ir.IRBuilder, address: Any) -> None:
    pointer = builder.inttoptr(address, _I8.as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    to_read, near, data = 0, 3, 1
    builder.call(function, [pointer, *(ir.Constant(_I32, flag) for flag in (to_read, near, data))])


def _shuffle(builder: ir.IRBuilder, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))


def _lane_sums(builder: ir.IRBuilder, vectors: list[Any]) -> list[Any]:
    """Each vector's sum over its lanes, as lanes of as few vectors as hold them: lane i plus lane i + width / 2, ..."""
    width = LANES  # partial sums of one vector that are left
    while width > 1:
        half = width // 2
        alone = len(vectors) == 1
        pairs = [(vectors[0], None)] if alone else list(zip(vectors[::2], vectors[1::2], strict=True))
        vectors = [_halved(builder, first, second, width, half) for first, second in pairs]
        width = half
    return vectors


def _halved(builder: ir.IRBuilder, first: Any, second: Any | None, width: int, half: int) -> Any:
    count = first.type.count * (1 if second is None else 2)
    lower = [begin + lane for begin in range(0, count, width) for lane in range(half)]
    other = first if second is None else second
    upper = [lane + half for lane in lower]
    return builder.fadd(_shuffle(builder, first, other, lower), _shuffle(builder, first, other, upper))


def _store_part(builder: ir.IRBuilder, totals: list[Any], begin: int, count: int, address: Any) -> None:
    """Store results `begin .. begin + count` of `_lane_sums` side by side."""
    width = totals[0].type.count
    source = totals[begin // width]
    part = _shuffle(builder, source, source, [begin % width + lane for lane in range(count)])
    builder.store(part, builder.inttoptr(address, part.type.as_pointer()), align=4)

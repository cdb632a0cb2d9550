"""Emit the building blocks of vector kernels: constants, widening loads, fused products, sums over lanes, prefetch.

Python functions that write LLVM IR through a builder; `address` is an int64 value, sizes are bytes. A sum over lanes
is made by one fixed tree, whatever else is summed with it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from transfer.simd.features import LANES

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
NEAR, MIDDLE = 3, 2  # prefetch into the first or the second cache


def int64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def zero() -> ir.Constant:
    return ir.Constant(VECTOR, [0.0] * LANES)


def addresses(builder: ir.IRBuilder, first: Any, stride: Any, size: int, count: int) -> Iterator[Any]:
    step = builder.mul(stride, int64(size))
    for index in range(count):
        yield builder.add(first, builder.mul(step, int64(index)))


def widened(builder: ir.IRBuilder, address: Any, element: int, size: int) -> Any:
    """Return LANES elements of `size` bytes as float32: of float32, of bf16, or of int8."""
    at = builder.add(address, int64(element * size))
    if size == 4:
        return builder.load(builder.inttoptr(at, VECTOR.as_pointer()), align=4)
    words = ir.VectorType(I32, LANES)
    if size == 1:
        codes = builder.load(builder.inttoptr(at, ir.VectorType(I8, LANES).as_pointer()), align=1)
        return builder.sitofp(builder.sext(codes, words), VECTOR)
    halves = builder.load(builder.inttoptr(at, ir.VectorType(I16, LANES).as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(halves, words), ir.Constant(words, [16] * LANES)), VECTOR)


def broadcast(builder: ir.IRBuilder, address: Any) -> Any:
    return splat(builder, builder.load(builder.inttoptr(address, F32.as_pointer()), align=4))


def splat(builder: ir.IRBuilder, value: Any) -> Any:
    """Return a float32 in all lanes."""
    alone = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, ir.Constant(I32, 0))
    return shuffle(builder, alone, alone, [0] * LANES)


def fused(builder: ir.IRBuilder, first: Any, second: Any, third: Any) -> Any:
    """Return `first * second + third`, rounded once."""
    function_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.v{LANES}f32")
    return builder.call(fma, [first, second, third])


def accumulate(builder: ir.IRBuilder, total: Any, first: Any, second: Any) -> None:
    builder.store(fused(builder, first, second, builder.load(total)), total)


def prefetch(builder: ir.IRBuilder, address: Any, where: int) -> None:
    pointer = builder.inttoptr(address, I8.as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    to_read, data = 0, 1
    builder.call(function, [pointer, *(ir.Constant(I32, flag) for flag in (to_read, where, data))])


def shuffle(builder: ir.IRBuilder, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def lane_sums(builder: ir.IRBuilder, vectors: list[Any]) -> list[Any]:
    """Return each vector's sum over its lanes, packed into the lanes of as few vectors as possible. Each step adds
    lanes i and i + width / 2.
    """
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
    return builder.fadd(shuffle(builder, first, other, lower), shuffle(builder, first, other, upper))


def store_part(builder: ir.IRBuilder, totals: list[Any], begin: int, count: int, address: Any) -> None:
    """Store results `[begin, begin + count)` of `lane_sums` side by side."""
    width = totals[0].type.count
    source = totals[begin // width]
    part = shuffle(builder, source, source, [begin % width + lane for lane in range(count)])
    builder.store(part, builder.inttoptr(address, part.type.as_pointer()), align=4)

"""Access single numbers at addresses: loads, stores, prefetch, and the counters and bit masks of a table lookup.

Functions for use inside numba code; an address is an int64 that the caller vouches for. Integers come out as int64.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from transfer.simd.emission import F32, I8, I16, I32, I64, MIDDLE, NEAR, prefetch

COUNTERS = 64  # uint8 that `take_pairs` looks at together
_COUNTERS = ir.VectorType(I8, COUNTERS)


def _pointer(builder: ir.IRBuilder, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _loader(kind: Any, bytes_: int, widen: Callable[..., Any] | None) -> Any:
    returned = types.float32 if kind is F32 else types.int64

    @intrinsic
    def load(typing_context, address):
        def emit(context, builder, signature, arguments):
            value = builder.load(_pointer(builder, arguments[0], kind), align=bytes_)
            return value if widen is None else widen(builder, value)

        return returned(types.int64), emit

    return load


load_float32 = _loader(F32, 4, None)
load_uint8 = _loader(I8, 1, lambda builder, value: builder.zext(value, I64))
load_uint16 = _loader(I16, 2, lambda builder, value: builder.zext(value, I64))
load_int32 = _loader(I32, 4, lambda builder, value: builder.sext(value, I64))
load_int64 = _loader(I64, 8, None)


@intrinsic
def store_float32(typing_context, address, value):
    def emit(context, builder, signature, arguments):
        builder.store(arguments[1], _pointer(builder, arguments[0], F32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@intrinsic
def store_int16(typing_context, address, value):
    """Store the low 16 bits of an int64."""

    def emit(context, builder, signature, arguments):
        builder.store(builder.trunc(arguments[1], I16), _pointer(builder, arguments[0], I16), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def store_int32(typing_context, address, value):
    """Store the low 32 bits of an int64."""

    def emit(context, builder, signature, arguments):
        builder.store(builder.trunc(arguments[1], I32), _pointer(builder, arguments[0], I32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def store_int64(typing_context, address, value):
    def emit(context, builder, signature, arguments):
        builder.store(arguments[1], _pointer(builder, arguments[0], I64), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def load_acquire_int32(typing_context, address):
    """Load the int32 at `address` anew each time; later reads are not reordered before it."""

    def emit(context, builder, signature, arguments):
        return builder.sext(builder.load_atomic(_pointer(builder, arguments[0], I32), "acquire", 4, typ=I32), I64)

    return types.int64(types.int64), emit


@intrinsic
def store_release_int32(typing_context, address, value):
    """Store the low 32 bits of an int64; a thread that sees them sees all earlier stores."""

    def emit(context, builder, signature, arguments):
        pointer = _pointer(builder, arguments[0], I32)
        builder.store_atomic(builder.trunc(arguments[1], I32), pointer, "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def copy_bytes(typing_context, to, source, count):
    """Copy so many bytes between places that do not overlap."""

    def emit(context, builder, signature, arguments):
        to, source, count = arguments
        cgutils.raw_memcpy(builder, _pointer(builder, to, I8), _pointer(builder, source, I8), count, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def clear_bytes(typing_context, address, count):
    """Set so many bytes to 0."""

    def emit(context, builder, signature, arguments):
        address, count = arguments
        cgutils.memset(builder, _pointer(builder, address, I8), count, 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _prefetcher(where: int) -> Any:
    @intrinsic
    def fetch(typing_context, address):
        def emit(context, builder, signature, arguments):
            prefetch(builder, arguments[0], where)
            return context.get_dummy_value()

        return types.void(types.int64), emit

    return fetch


prefetch_near = _prefetcher(NEAR)
prefetch_middle = _prefetcher(MIDDLE)


@intrinsic
def count_up(typing_context, address):
    """Add 1 to the uint8 there; 255 becomes 0."""

    def emit(context, builder, signature, arguments):
        pointer = _pointer(builder, arguments[0], I8)
        builder.store(builder.add(builder.load(pointer, align=1), ir.Constant(I8, 1)), pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def take_pairs(typing_context, address):
    """Return a bit for each of COUNTERS uint8 that is 2 or more, the first lowest, and clear the counters."""

    def emit(context, builder, signature, arguments):
        pointer = _pointer(builder, arguments[0], _COUNTERS)
        counts = builder.load(pointer, align=1)
        builder.store(ir.Constant(_COUNTERS, [0] * COUNTERS), pointer, align=1)
        return builder.bitcast(builder.icmp_unsigned(">", counts, ir.Constant(_COUNTERS, [1] * COUNTERS)), I64)

    return types.uint64(types.int64), emit


@intrinsic
def cap_pairs(typing_context, address):
    """Cap COUNTERS uint8 at 2."""

    def emit(context, builder, signature, arguments):
        pointer = _pointer(builder, arguments[0], _COUNTERS)
        counts, two = builder.load(pointer, align=1), ir.Constant(_COUNTERS, [2] * COUNTERS)
        builder.store(builder.select(builder.icmp_unsigned("<", counts, two), counts, two), pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def lowest_bit(typing_context, mask):
    """Return the place of a mask's lowest bit that is set; 64 if none is."""

    def emit(context, builder, signature, arguments):
        function_type = ir.FunctionType(I64, [I64, ir.IntType(1)])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.cttz.i64")
        return builder.call(function, [arguments[0], ir.Constant(ir.IntType(1), 0)])

    return types.int64(types.uint64), emit


@intrinsic
def count_bits(typing_context, mask):
    def emit(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, [I64]), "llvm.ctpop.i64")
        return builder.call(function, [arguments[0]])

    return types.int64(types.uint64), emit

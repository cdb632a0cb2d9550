"""Define vectors of LANES float32 or int32 as values of numba code: `+ - * /` between them, and the functions below.

One source serves every vector width. Comparisons are ordered, so that a NaN lane never passes for the greater or the
lesser: `greater(x, y)` and `lesser(x, y)` give y where x is NaN.
"""

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from transfer.simd.emission import I8, I32, VECTOR, lane_sums, shuffle, zero
from transfer.simd.features import LANES, SIMD
from transfer.simd.inner import inner

_WORDS = ir.VectorType(I32, LANES)
_GATHER = {"avx512": "llvm.x86.avx512.mask.gather.dps.512", "avx2": "llvm.x86.avx2.gather.d.ps.256"}[SIMD]


class _Floats(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


class _Integers(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"int32x{LANES}")


FLOATS, INTEGERS = _Floats(), _Integers()


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


@register_model(_Integers)
class _IntegersModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORDS)


def _operator(function: Any, instruction: str) -> None:
    @infer_global(function)
    class _Typed(ConcreteTemplate):
        cases = [signature(FLOATS, FLOATS, FLOATS)]

    @lower_builtin(function, FLOATS, FLOATS)
    def _emit(context, builder, signature, arguments):
        return getattr(builder, instruction)(*arguments)


for _function, _instruction in (
    (operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv"),
):  # fmt: skip
    _operator(_function, _instruction)


@intrinsic
def load_lanes(typing_context, address):
    """Load LANES float32 from an address on; no alignment needed."""

    def emit(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], VECTOR.as_pointer()), align=4)

    return FLOATS(types.int64), emit


@intrinsic
def store_lanes(typing_context, address, lanes):
    def emit(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, FLOATS), emit


@intrinsic
def spread(typing_context, number):
    """Return a float32 in every lane."""

    def emit(context, builder, signature, arguments):
        alone = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), arguments[0], ir.Constant(I32, 0))
        return shuffle(builder, alone, alone, [0] * LANES)

    return FLOATS(types.float32), emit


@intrinsic
def multiply_add(typing_context, x, y, z):
    """Return x * y + z, rounded once."""

    def emit(context, builder, signature, arguments):
        function_type = ir.FunctionType(VECTOR, [VECTOR] * 3)
        fma = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.v{LANES}f32")
        return builder.call(fma, arguments)

    return FLOATS(FLOATS, FLOATS, FLOATS), emit


@intrinsic
def square_root(typing_context, x):
    def emit(context, builder, signature, arguments):
        function_type = ir.FunctionType(VECTOR, [VECTOR])
        root = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.sqrt.v{LANES}f32")
        return builder.call(root, arguments)

    return FLOATS(FLOATS), emit


def _chooser(comparison: str) -> Any:
    @intrinsic
    def choose(typing_context, x, y):
        def emit(context, builder, signature, arguments):
            x, y = arguments
            return builder.select(builder.fcmp_ordered(comparison, x, y), x, y)

        return FLOATS(FLOATS, FLOATS), emit

    return choose


greater, lesser = _chooser(">"), _chooser("<")


@intrinsic
def zero_below(typing_context, x, border, y):
    """Return y, but 0 where x is below the border; a NaN is below nothing."""

    def emit(context, builder, signature, arguments):
        x, border, y = arguments
        return builder.select(builder.fcmp_ordered("<", x, border), zero(), y)

    return FLOATS(FLOATS, FLOATS, FLOATS), emit


@intrinsic
def first_lanes(typing_context, count, x, other):
    """Return x in the first `count` lanes (an int64; LANES or more: all of them), `other` in the rest."""

    def emit(context, builder, signature, arguments):
        count, x, other = arguments
        alone = builder.insert_element(
            ir.Constant(_WORDS, ir.Undefined), builder.trunc(count, I32), ir.Constant(I32, 0)
        )
        is_first = builder.icmp_signed(
            "<", ir.Constant(_WORDS, list(range(LANES))), shuffle(builder, alone, alone, [0] * LANES)
        )
        return builder.select(is_first, x, other)

    return FLOATS(types.int64, FLOATS, FLOATS), emit


@intrinsic
def truncated(typing_context, x):
    """Convert to int32, towards zero; x within its range and not NaN."""

    def emit(context, builder, signature, arguments):
        return builder.fptosi(arguments[0], _WORDS)

    return INTEGERS(FLOATS), emit


@intrinsic
def as_floats(typing_context, x):
    def emit(context, builder, signature, arguments):
        return builder.sitofp(arguments[0], VECTOR)

    return FLOATS(INTEGERS), emit


@intrinsic
def gather(typing_context, address, index):
    """Return the float32 number `index[lane]` from an address on, for each lane."""

    def emit(context, builder, signature, arguments):
        address, index = arguments
        base = builder.inttoptr(address, I8.as_pointer())
        if SIMD == "avx512":
            mask = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1] * LANES)
            four: Any = ir.Constant(I32, 4)
        else:
            mask = builder.bitcast(ir.Constant(_WORDS, [-1] * LANES), VECTOR)
            four = ir.Constant(I8, 4)
        kinds = [VECTOR, base.type, _WORDS, mask.type, four.type]
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, kinds), _GATHER)
        return builder.call(function, [zero(), base, index, mask, four])

    return FLOATS(types.int64, INTEGERS), emit


@intrinsic
def lane_sum(typing_context, x):
    def emit(context, builder, signature, arguments):
        return builder.extract_element(lane_sums(builder, [arguments[0]])[0], ir.Constant(I32, 0))

    return types.float32(FLOATS), emit


@intrinsic
def lane_max(typing_context, x):
    """Return the greatest lane that is not NaN; -inf if all are."""

    def emit(context, builder, signature, arguments):
        lanes = builder.select(
            builder.fcmp_ordered("ord", arguments[0], arguments[0]),
            arguments[0],
            ir.Constant(VECTOR, [float("-inf")] * LANES),
        )
        width = LANES
        while width > 1:
            width //= 2
            first = shuffle(builder, lanes, lanes, range(width))
            second = shuffle(builder, lanes, lanes, range(width, 2 * width))
            lanes = builder.select(builder.fcmp_ordered(">", first, second), first, second)
        return builder.extract_element(lanes, ir.Constant(I32, 0))

    return types.float32(FLOATS), emit


@intrinsic
def _powers_of_two(typing_context, shifted):
    """Return `vectors.power_of_two` for each lane."""

    def emit(context, builder, signature, arguments):
        bits = builder.add(builder.bitcast(arguments[0], _WORDS), ir.Constant(_WORDS, [127] * LANES))
        return builder.bitcast(builder.shl(bits, ir.Constant(_WORDS, [23] * LANES)), VECTOR)

    return FLOATS(FLOATS), emit


_LOWEST = np.float32(-87.0)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693145751953125), np.float32(-1.42860682030941723212e-6)
_TO_INTEGER = np.float32(1.5 * 2**23)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))


@inner(fastmath=False)
def exp_lanes(x):
    """Return exp of arguments up to 0: as `exp.exp`, but 0 below -87; NaN stays NaN."""
    clamped = zero_below(x, spread(_LOWEST), x)
    shifted = multiply_add(clamped, spread(_LOG2_E), spread(_TO_INTEGER))
    n = shifted - spread(_TO_INTEGER)
    r = multiply_add(n, spread(_LN2_LOW), multiply_add(n, spread(_LN2_HIGH), clamped))
    tail = multiply_add(multiply_add(spread(_C7), r, spread(_C6)), r, spread(_C5))
    tail = multiply_add(multiply_add(multiply_add(tail, r, spread(_C4)), r, spread(_C3)), r, spread(_C2))
    one = spread(np.float32(1.0))
    power = multiply_add(multiply_add(tail, r, one), r, one) * _powers_of_two(shifted)
    return zero_below(x, spread(_LOWEST), power)

"""Emit vector code for rows of keys and values in their four types: scores of rows, weighted sums of rows.

Functions for use inside numba code. `kind` is a scalar whose numba type is that of the rows: uint16 (bf16), int8,
uint8 (int4) or float32. `columns` is a tuple of dim // 32 members, so that dim is a constant of the compiled code. All
other arguments are int64: addresses, strides in bytes, counts. Bytes moved: each row once per call.

A bf16 row is split into its even and its odd columns, and queries and sums for such rows have that order too
(`place_of`). An int8 row of keys is multiplied in integers, with a query rounded to int16. An int4 row is widened to
float32: byte b of 16 bytes has columns b and b + 16 of a group of 32. Behind the codes of all groups there is a word
for each group: its scale and offset in bf16.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
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
    MIDDLE,
    NEAR,
    VECTOR,
    accumulate,
    broadcast,
    fused,
    int64,
    lane_sums,
    prefetch,
    splat,
    store_part,
)
from transfer.simd.features import HAS_PAIRS, LANES, SIMD
from transfer.simd.trial import compiles
from transfer.tier_shape import INT4_GROUP, int4_row_bytes

COLUMNS = 32  # columns of a row for each member of `columns`
TOGETHER = 4  # rows scored together: they share the query's loads and the sums over lanes
BLOCK_ROWS = 64  # rows between two looks at the maximum
AHEAD_ROWS = 16  # how many rows before its use a sampled row is prefetched
AHEAD_BYTES = 4096  # the same in bytes for rows that are read in order, in one pass over a block
LINE_BYTES = 64
INT4 = 0  # stands for the bytes of a column, which has half a byte

_WORDS, _HALVES = ir.VectorType(I32, LANES), ir.VectorType(I16, 2 * LANES)
_MADD = {"avx512": "llvm.x86.avx512.pmaddw.d.512", "avx2": "llvm.x86.avx2.pmadd.wd"}[SIMD]
_SUMS_AT_ONCE = LANES  # vectors of sums that stay in registers


def row_bytes(kind: Any) -> int:
    """Return the bytes of a column: 1, 2 or 4, or INT4 for half a byte."""
    if kind not in (types.int8, types.uint8, types.uint16, types.float32):
        raise TypeError(f"rows: numba type {kind}; wanted uint16 for bf16, int8, uint8 for int4, or float32")
    return INT4 if kind == types.uint8 else int(kind.bitwidth // 8)


def bytes_of_row(size: int, dim: int) -> int:
    """Return the bytes of a row of columns of `size` bytes."""
    return int4_row_bytes(dim) if size == INT4 else size * dim


@intrinsic
def stored_bytes(typing_context, kind, columns):  # type: ignore[no-untyped-def]
    """Return the bytes of a row, as a constant of the compiled code."""
    num_bytes = bytes_of_row(row_bytes(kind), COLUMNS * len(columns))

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return int64(num_bytes)

    return types.int64(kind, columns), emit


@intrinsic
def column_bytes(typing_context, kind):  # type: ignore[no-untyped-def]
    """Return the bytes of a column, as a constant of the compiled code that tells the types apart."""
    size = row_bytes(kind)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return int64(size)

    return types.int64(kind), emit


@intrinsic
def place_of(typing_context, kind, column):  # type: ignore[no-untyped-def]
    """Return the place of a column in queries and sums for rows of that kind."""
    size = row_bytes(kind)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        column = arguments[1]
        if size != 2:
            return column
        whole = builder.and_(column, int64(-2 * LANES))
        half = builder.lshr(builder.and_(column, int64(2 * LANES - 1)), int64(1))
        odd = builder.mul(builder.and_(column, int64(1)), int64(LANES))
        return builder.add(whole, builder.add(half, odd))

    return types.int64(kind, types.int64), emit


def _load(builder: ir.IRBuilder, address: Any, kind: Any, byte: int) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, int64(byte)), kind.as_pointer()), align=1)


def _floats(builder: ir.IRBuilder, row: Any, size: int, dim: int, begin: int, end: int) -> list[Any]:
    """Load columns `[begin, end)` of a row of `dim` as vectors of float32, in the order of `place_of`. The range is in
    whole steps of 2 * LANES.
    """
    vectors = []
    for column in range(begin, end, 2 * LANES):
        if size == 4:
            vectors += [_load(builder, row, VECTOR, 4 * (column + half)) for half in (0, LANES)]
        elif size == 2:
            pairs = _load(builder, row, _WORDS, 2 * column)
            even = builder.shl(pairs, ir.Constant(_WORDS, [16] * LANES))
            odd = builder.and_(pairs, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
            vectors += [builder.bitcast(part, VECTOR) for part in (even, odd)]
        elif size == INT4:
            vectors += [_int4_floats(builder, row, dim, column + half) for half in (0, LANES)]
        else:
            for half in (0, LANES):
                narrow = _load(builder, row, ir.VectorType(I8, LANES), column + half)
                vectors.append(builder.sitofp(builder.sext(narrow, _WORDS), VECTOR))
    return vectors


def _int4_floats(builder: ir.IRBuilder, row: Any, dim: int, column: int) -> Any:
    """Load LANES columns of an int4 row."""
    group, within = divmod(column, INT4_GROUP)
    is_high, byte = divmod(within, INT4_GROUP // 2)
    codes = builder.zext(
        _load(builder, row, ir.VectorType(I8, LANES), group * (INT4_GROUP // 2) + byte), _WORDS
    )  # fmt: skip
    fours, fifteens = (ir.Constant(_WORDS, [number] * LANES) for number in (4, 15))
    codes = builder.lshr(codes, fours) if is_high else builder.and_(codes, fifteens)
    word = _load(builder, row, I32, dim // 2 + 4 * group)
    scale, offset = builder.shl(word, ir.Constant(I32, 16)), builder.and_(word, ir.Constant(I32, 0xFFFF0000))
    wide = [splat(builder, builder.bitcast(one, F32)) for one in (scale, offset)]
    return fused(builder, builder.sitofp(codes, VECTOR), *wide)


def _products(
    builder: ir.IRBuilder, rows: Sequence[Any], query: Sequence[Any], size: int, dim: int, square: bool
) -> Any:
    """Return vectors whose lanes add up to row times query, for each query and each of its rows. With `square`, vectors
    follow that add up to the squared norms of the rows.
    """
    integers = size == 1
    kind, step = (_WORDS, 2 * LANES) if integers else (VECTOR, 2 * LANES)
    start = ir.Constant(kind, [0 if integers else 0.0] * LANES)
    products = [[start for _ in rows] for _ in query]
    squares = [start for _ in rows]
    for column in range(0, dim, step):
        if integers:
            ours = [[builder.sext(_load(builder, row, ir.VectorType(I8, 2 * LANES), column), _HALVES)] for row in rows]
            theirs = [[_load(builder, one, _HALVES, 2 * column)] for one in query]
        else:
            ours = [_floats(builder, row, size, dim, column, column + step) for row in rows]
            theirs = [_floats(builder, one, 4, dim, column, column + step) for one in query]
        for index, parts in enumerate(ours):
            for number, others in enumerate(theirs):
                for part, other in zip(parts, others, strict=True):
                    products[number][index] = _add_product(builder, products[number][index], part, other)
            if square:
                for part in parts:
                    squares[index] = _add_product(builder, squares[index], part, part)
    vectors = [vector for one in products for vector in one] + (squares if square else [])
    return [builder.sitofp(vector, VECTOR) for vector in vectors] if integers else vectors


def _add_product(builder: ir.IRBuilder, total: Any, first: Any, second: Any) -> Any:
    if first.type == VECTOR:
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )
        return builder.call(fma, [first, second, total])
    pairs = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_WORDS, [_HALVES] * 2), _MADD)
    return builder.add(total, builder.call(pairs, [first, second]))


def _add_pairs(builder: ir.IRBuilder, total: Any, first: Any, second: Any) -> Any:
    """Add products of pairs of bf16, each lane its own two: exact products, rounded as they are added."""
    kind = ir.FunctionType(VECTOR, [VECTOR, _WORDS, _WORDS])
    pairs = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(pairs, [total, first, second])


def _pair_products(builder: ir.IRBuilder, rows: Sequence[Any], query: Sequence[Any], dim: int) -> Any:
    """Return what `_products` returns, for rows and queries in bf16, both in the order of their columns."""
    products = [[ir.Constant(VECTOR, [0.0] * LANES) for _ in rows] for _ in query]
    for column in range(0, dim, 2 * LANES):
        ours = [_load(builder, row, _WORDS, 2 * column) for row in rows]
        theirs = [_load(builder, one, _WORDS, 2 * column) for one in query]
        for number, other in enumerate(theirs):
            for index, part in enumerate(ours):
                products[number][index] = _add_pairs(builder, products[number][index], part, other)
    return [vector for one in products for vector in one]


@intrinsic
def multiplies_pairs(typing_context, kind, query_kind):  # type: ignore[no-untyped-def]
    """Return whether keys are multiplied with queries as pairs of bf16, as a constant of the compiled code. They are
    not if LLVM aborts on such products.
    """
    is_asked = HAS_PAIRS and kind == types.uint16 and query_kind == types.uint16
    is_paired = is_asked and compiles(__name__, compile_pairs.__name__)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return int64(int(is_paired))

    return types.int64(kind, query_kind), emit


def _at_most(builder: ir.IRBuilder, index: Any, last: Any) -> Any:
    return builder.select(builder.icmp_signed("<", index, last), index, last)


def _sample(builder: ir.IRBuilder, ids: Any, index: Any, first: Any, stride: Any) -> Any:
    """Return the address of the row whose uint16 id stands at place `index` of `ids`."""
    at = builder.add(ids, builder.mul(index, int64(2)))
    row = builder.zext(builder.load(builder.inttoptr(at, I16.as_pointer()), align=2), I64)
    return builder.add(first, builder.mul(row, stride))


def _fetch(builder: ir.IRBuilder, row: Any, num_bytes: int, where: int) -> None:
    for byte in range(0, num_bytes, LINE_BYTES):
        prefetch(builder, builder.add(row, int64(byte)), where)


def _fetch_ahead(builder: ir.IRBuilder, row: Any, ahead: Any, lines: Any) -> None:
    """Prefetch `lines` cache lines, from `ahead` bytes behind the begin of a row."""
    first = builder.add(row, ahead)
    with cgutils.for_range(builder, lines, intp=I64) as line:
        prefetch(builder, builder.add(first, builder.mul(line.index, int64(LINE_BYTES))), NEAR)


@intrinsic
def fetch_sample(typing_context, kind, columns, keys, key_row, values, value_row, ids, index):  # type: ignore[no-untyped-def]
    """Prefetch the key and the value of sample `index`."""
    num_bytes = bytes_of_row(row_bytes(kind), COLUMNS * len(columns))

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, _, keys, key_row, values, value_row, ids, index = arguments
        _fetch(builder, _sample(builder, ids, index, keys, key_row), num_bytes, NEAR)
        _fetch(builder, _sample(builder, ids, index, values, value_row), num_bytes, MIDDLE)
        return context.get_dummy_value()

    return types.void(kind, columns, *[types.int64] * 6), emit


@intrinsic
def score_samples(typing_context, kind, columns, keys, key_row, values, value_row, ids, begin, end, limit, query, out):  # type: ignore[no-untyped-def]
    """Write products of sampled keys `[begin, end)` (at most BLOCK_ROWS) with the query to `out`, float32
    `[BLOCK_ROWS]`, and their squared norms behind it. Prefetch keys and values of the next AHEAD_ROWS samples below
    `limit`.
    """
    size, dim = row_bytes(kind), COLUMNS * len(columns)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, _, keys, key_row, values, value_row, ids, begin, end, limit, query, out = arguments
        last, steps = builder.sub(limit, int64(1)), builder.sub(end, begin)
        steps = builder.udiv(builder.add(steps, int64(TOGETHER - 1)), int64(TOGETHER))
        with cgutils.for_range(builder, steps, intp=I64) as step:
            at = builder.add(begin, builder.mul(step.index, int64(TOGETHER)))
            for number in range(TOGETHER):
                ahead = _at_most(builder, builder.add(at, int64(number + AHEAD_ROWS)), last)
                _fetch(builder, _sample(builder, ids, ahead, keys, key_row), bytes_of_row(size, dim), NEAR)
                _fetch(builder, _sample(builder, ids, ahead, values, value_row), bytes_of_row(size, dim), MIDDLE)
            rows = [
                _sample(builder, ids, _at_most(builder, builder.add(at, int64(number)), last), keys, key_row)
                for number in range(TOGETHER)
            ]
            totals = lane_sums(builder, _products(builder, rows, [query], size, dim, True))
            target = builder.add(out, builder.mul(step.index, int64(4 * TOGETHER)))
            store_part(builder, totals, 0, TOGETHER, target)
            store_part(builder, totals, TOGETHER, TOGETHER, builder.add(target, int64(4 * BLOCK_ROWS)))
        return context.get_dummy_value()

    return types.void(kind, columns, *[types.int64] * 10), emit


def _band(dim: int, most: int) -> int:
    """Return the largest width, in steps of 2 * LANES and at most `most`, that divides a row of `dim` evenly."""
    return max(band for band in range(2 * LANES, most + 1, 2 * LANES) if dim % band == 0)


def _weighted(
    builder: ir.IRBuilder, size: int, dim: int, members: int, count: Any, row_at: Callable[[Any], Any],
    weights: Any, rescale: Any, sums: Any, ahead: Any = None, lines: Any = None,
) -> None:  # fmt: skip
    """Compute `sums[m] = sums[m] * rescale[m] + sum(weights[m, i] * row_i)`, a band of columns at a time.

    ahead, lines: arguments of `_fetch_ahead`, called in the first band; None: nothing is prefetched.
    """
    band = _band(dim, _SUMS_AT_ONCE // members * LANES)
    for begin in range(0, dim, band):
        places = [(member, column) for member in range(members) for column in range(begin, begin + band, LANES)]
        targets = [builder.add(sums, int64(4 * (member * dim + column))) for member, column in places]
        factors = [broadcast(builder, builder.add(rescale, int64(4 * member))) for member in range(members)]
        totals = [
            cgutils.alloca_once_value(builder, builder.fmul(_load(builder, target, VECTOR, 0), factors[member]))
            for target, (member, _) in zip(targets, places, strict=True)
        ]
        with cgutils.for_range(builder, count, intp=I64) as step:
            row = row_at(step.index)
            if ahead is not None and begin == 0:
                _fetch_ahead(builder, row, ahead, lines)
            vectors = _floats(builder, row, size, dim, begin, begin + band)
            for member in range(members):
                at = builder.add(weights, builder.mul(step.index, int64(4)))
                weight = broadcast(builder, builder.add(at, int64(4 * BLOCK_ROWS * member)))
                for index, vector in enumerate(vectors):
                    accumulate(builder, totals[member * len(vectors) + index], weight, vector)
        for target, total in zip(targets, totals, strict=True):
            builder.store(builder.load(total), builder.inttoptr(target, VECTOR.as_pointer()), align=4)


@intrinsic
def add_samples(typing_context, kind, columns, values, value_row, ids, begin, end, weights, rescale, sums):  # type: ignore[no-untyped-def]
    """Compute `sums = sums * rescale + sum(weights[i] * value of sample begin + i)`; float32 `[BLOCK_ROWS]`, `[1]`,
    `[dim]`.
    """
    size, dim = row_bytes(kind), COLUMNS * len(columns)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, _, values, value_row, ids, begin, end, weights, rescale, sums = arguments

        def row_at(index):  # type: ignore[no-untyped-def]
            return _sample(builder, ids, builder.add(begin, index), values, value_row)

        _weighted(builder, size, dim, 1, builder.sub(end, begin), row_at, weights, rescale, sums)
        return context.get_dummy_value()

    return types.void(kind, columns, *[types.int64] * 8), emit


def score_rows(members: int, is_paired: bool = False) -> Any:
    """Return a numba function that multiplies `count` keys in order (1 to BLOCK_ROWS) with `members` queries.

    query: `[members, dim]`, query_bytes apart; out: float32 `[members, BLOCK_ROWS]`; ahead, lines: see `_fetch_ahead`.
    is_paired: multiply pairs of bf16 (`multiplies_pairs`); then queries are bf16.
    """
    together = 2 if members * TOGETHER > LANES else TOGETHER

    @intrinsic
    def score(typing_context, kind, columns, keys, key_row, count, query, query_bytes, out, ahead, lines):  # type: ignore[no-untyped-def]
        size, dim = row_bytes(kind), COLUMNS * len(columns)

        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, _, keys, key_row, count, query, query_bytes, out, ahead, lines = arguments
            queries = [builder.add(query, builder.mul(query_bytes, int64(member))) for member in range(members)]
            last = builder.sub(count, int64(1))
            steps = builder.udiv(builder.add(count, int64(together - 1)), int64(together))
            with cgutils.for_range(builder, steps, intp=I64) as step:
                at = builder.mul(step.index, int64(together))
                rows = [
                    builder.add(keys, builder.mul(key_row, _at_most(builder, builder.add(at, int64(number)), last)))
                    for number in range(together)
                ]
                for row in rows:
                    _fetch_ahead(builder, row, ahead, lines)
                products = (
                    _pair_products(builder, rows, queries, dim)
                    if is_paired and size == 2 and HAS_PAIRS
                    else _products(builder, rows, queries, size, dim, False)
                )
                totals = lane_sums(builder, products)
                for member in range(members):
                    target = builder.add(out, builder.mul(at, int64(4)))
                    target = builder.add(target, int64(4 * BLOCK_ROWS * member))
                    store_part(builder, totals, member * together, together, target)
            return context.get_dummy_value()

        return types.void(kind, columns, *[types.int64] * 8), emit

    return score


def compile_pairs() -> None:
    """Compile products of pairs of bf16, without running them, to see whether LLVM can (`transfer.simd.trial`)."""
    score, columns = score_rows(4, True), (0, 0)

    def products(keys, count, query, out):  # type: ignore[no-untyped-def]
        score(np.uint16(0), columns, keys, 128, count, query, 128, out, 0, 0)

    numba.njit("void(int64, int64, int64, int64)")(products)


def add_rows(members: int) -> Any:
    """Return a numba function: `sums[m] = sums[m] * rescale[m] + sum(weights[m, i] * value i)` over `count` values in
    order.

    weights: float32 `[members, BLOCK_ROWS]`; rescale: `[members]`; sums: `[members, dim]`; ahead, lines: see
    `_fetch_ahead`.
    """

    @intrinsic
    def add(typing_context, kind, columns, values, value_row, count, weights, rescale, sums, ahead, lines):  # type: ignore[no-untyped-def]
        size, dim = row_bytes(kind), COLUMNS * len(columns)

        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, _, values, value_row, count, weights, rescale, sums, ahead, lines = arguments

            def row_at(index):  # type: ignore[no-untyped-def]
                return builder.add(values, builder.mul(index, value_row))

            _weighted(builder, size, dim, members, count, row_at, weights, rescale, sums, ahead, lines)
            return context.get_dummy_value()

        return types.void(kind, columns, *[types.int64] * 8), emit

    return add

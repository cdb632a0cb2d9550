"""Emit products of tiles of bf16 (AMX), for attention that reads a block of rows once for many queries. Codes of int8
rows become bf16 without rounding.

There are eight tiles of 16 rows of 64 bytes. `multiply` adds products to 16 by 16 float32: of 16 rows of 32 bf16 in the
first tile, and of pairs of bf16 in the second, which has numbers 2k and 2k + 1 in row k. Functions for use inside numba
code; the type of `columns` chooses the implementation (`Products`). Where tiles are emulated, `registers` is the
address of 8 KiB in place of them. Arguments without a type are int64, addresses and bytes.
"""

import ctypes
import logging
import os
from enum import Enum
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from transfer.simd.emission import F32, I8, I16, I32, int64, shuffle
from transfer.simd.features import SIMD
from transfer.simd.inner import inner
from transfer.simd.memory import clear_bytes, copy_bytes, load_float32, store_float32
from transfer.simd.trial import compiles
from transfer.simd.vectors import load

log = logging.getLogger(__name__)

ROWS = 16  # of a tile, and its columns of four bytes
LINE = 64
TILE = ROWS * LINE
REGISTERS = 8 * TILE
_PAIRS = ir.VectorType(I32, ROWS)
_FLOATS = ir.VectorType(F32, ROWS)
_CODES, _CODE_PAIRS = ir.VectorType(I8, ROWS), ir.VectorType(I16, ROWS)
_HIGH, _ROUND = 0xFFFF0000, 0x8000  # of a float32's bits: those that bf16 has, and half of their last place
_SMALLEST = np.float32(2.0**-126)  # smaller numbers count as 0 in such products
_SYS_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA = 158, 0x1023, 18


class Products(Enum):
    """How rows of bf16 or int8 are multiplied with bf16 queries. The value is the numba type of `columns`' members."""

    VECTORS = types.int64
    TILES = types.uint8
    EMULATED = types.int8  # tiles in software, for tests on a processor without them

    def columns(self, count: int) -> tuple[Any, ...]:
        """Return `columns` for this implementation: `count` zeros of its type."""
        kinds = {Products.VECTORS: int, Products.TILES: np.uint8, Products.EMULATED: np.int8}
        return (kinds[self](0),) * count


def _products(columns: Any) -> Products:
    return Products(columns.dtype)


@cache
def best_products() -> Products:
    """Return the fastest implementation on this processor, and log it: tiles, if a child process could use them."""
    host = llvm.get_host_cpu_features()
    has_tiles = SIMD == "avx512" and all(host.get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16"))
    if has_tiles and (compiles(__name__, try_tiles.__name__) and _allow_tiles()):
        log.info("kernels event=chosen what=%s products=tiles", __name__)
        return Products.TILES
    log.info("kernels event=chosen what=%s products=vectors has_tiles=%s", __name__, has_tiles)
    return Products.VECTORS


def _allow_tiles() -> bool:
    """Ask the operating system to let this process use tiles. Return whether it does, and log the reason if not."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.syscall(_SYS_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA)
    if refused:
        reason = os.strerror(ctypes.get_errno())
        log.warning("kernels event=replaced what=%s.%s reason=%r", __name__, _allow_tiles.__name__, reason)
    return not refused


def _call(builder: ir.IRBuilder, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _pointer(builder: ir.IRBuilder, address: Any) -> Any:
    return builder.inttoptr(address, I8.as_pointer())


def where_tiled(function: Any) -> Any:
    """Return a numba function that calls `function(columns, ...)`, which returns an int64, if products are of tiles.
    Otherwise it returns 0, and `function` is not compiled.
    """

    def called(*arguments):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    @overload(called, jit_options={"no_cpython_wrapper": True, "no_cfunc_wrapper": True})
    def choose(columns, *others):  # type: ignore[no-untyped-def]
        if _products(columns) is Products.VECTORS:
            return lambda columns, *others: np.int64(0)
        return lambda columns, *others: function(columns, *others)

    return called


@intrinsic
def multiplies_tiles(typing_context, columns):  # type: ignore[no-untyped-def]
    """Return whether products are of tiles, as a constant of the compiled code."""
    is_tiled = _products(columns) is not Products.VECTORS

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return int64(int(is_tiled))

    return types.int64(columns), emit


@intrinsic
def open_tiles(typing_context, columns, room):  # type: ignore[no-untyped-def]
    """Configure the thread's tiles, until `close_tiles`. Does nothing without tiles. room: address of 64 bytes."""
    products = _products(columns)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if products is Products.TILES:
            palette = [1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8]  # bytes of a row; rows
            whole = ir.Constant(ir.ArrayType(I8, LINE), palette)
            builder.store(whole, builder.inttoptr(arguments[1], whole.type.as_pointer()), align=1)
            _call(builder, "ldtilecfg", _pointer(builder, arguments[1]))
        return context.get_dummy_value()

    return types.void(columns, types.int64), emit


@intrinsic
def close_tiles(typing_context, columns):  # type: ignore[no-untyped-def]
    """Release the thread's tiles."""
    products = _products(columns)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if products is Products.TILES:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(columns), emit


def _operation(num_tiles: int, num_numbers: int, emulated: Any, name: str) -> Any:
    """Return a numba function of `columns`, registers, tile numbers and int64 arguments. name: of LLVM's intrinsic.
    emulated: the function that replaces it without tiles.
    """

    def declare(typing_context: Any, columns: Any, tiles: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
        products, places = _products(columns), [tile.literal_value for tile in tiles]

        def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            _, registers, *others = arguments
            numbers = others[num_tiles:]
            if products is Products.TILES:
                immediate = [ir.Constant(I8, place) for place in places]
                memory = [_pointer(builder, numbers[0]), *numbers[1:]] if numbers else []
                _call(builder, name, *immediate, *memory)
            else:
                given = [builder.add(registers, int64(TILE * place)) for place in places] + numbers
                kind = types.void(*[types.int64] * len(given))
                context.compile_internal(builder, emulated, kind, given)
            return context.get_dummy_value()

        return types.void(columns, types.int64, *tiles, *numbers), emit

    if (num_tiles, num_numbers) == (1, 2):

        @intrinsic(prefer_literal=True)
        def moved(typing_context, columns, registers, tile, address, stride):  # type: ignore[no-untyped-def]
            return declare(typing_context, columns, (tile,), (types.int64, types.int64))

        return moved
    if num_tiles == 1:

        @intrinsic(prefer_literal=True)
        def changed(typing_context, columns, registers, tile):  # type: ignore[no-untyped-def]
            return declare(typing_context, columns, (tile,), ())

        return changed

    @intrinsic(prefer_literal=True)
    def combined(typing_context, columns, registers, into, first, second):  # type: ignore[no-untyped-def]
        return declare(typing_context, columns, (into, first, second), ())

    return combined


def _emulated_load(tile, address, stride):  # type: ignore[no-untyped-def]
    for row in range(ROWS):
        copy_bytes(tile + LINE * row, address + stride * row, LINE)


def _emulated_store(tile, address, stride):  # type: ignore[no-untyped-def]
    for row in range(ROWS):
        copy_bytes(address + stride * row, tile + LINE * row, LINE)


def _emulated_zero(tile):  # type: ignore[no-untyped-def]
    clear_bytes(tile, TILE)


@inner
def _flushed(address, column):
    value = load(np.uint16(0), address, column)
    return np.float32(0.0) if abs(value) < _SMALLEST else value


def _emulated_multiply(into, first, second):  # type: ignore[no-untyped-def]
    for row in range(ROWS):
        for column in range(ROWS):
            even = odd = np.float32(0.0)
            for pair in range(ROWS):
                ours, theirs = first + LINE * row, second + LINE * pair
                even += _flushed(ours, 2 * pair) * _flushed(theirs, 2 * column)
                odd += _flushed(ours, 2 * pair + 1) * _flushed(theirs, 2 * column + 1)
            at = into + LINE * row + 4 * column
            store_float32(at, load_float32(at) + (even + odd))


load_tile = _operation(1, 2, _emulated_load, "tileloadd64")
store_tile = _operation(1, 2, _emulated_store, "tilestored64")
zero_tile = _operation(1, 0, _emulated_zero, "tilezero")
multiply = _operation(3, 0, _emulated_multiply, "tdpbf16ps")


def _transposed(builder: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """Return 16 vectors of 16 words transposed, by swapping blocks of 1, 2, 4 and 8 between pairs of vectors."""
    for step in (1, 2, 4, 8):
        first = [lane if not lane & step else ROWS + lane - step for lane in range(ROWS)]
        second = [lane + step if not lane & step else ROWS + lane for lane in range(ROWS)]
        for row in range(ROWS):
            if not row & step:
                pair = rows[row], rows[row + step]
                rows[row], rows[row + step] = shuffle(builder, *pair, first), shuffle(builder, *pair, second)
    return rows


def _loads(builder: ir.IRBuilder, kind: Any, address: Any, stride: Any, count: int) -> list[Any]:
    places = [builder.add(address, builder.mul(stride, int64(row))) for row in range(count)]
    return [builder.load(builder.inttoptr(place, kind.as_pointer()), align=1) for place in places]


def _stores(builder: ir.IRBuilder, vectors: list[Any], address: Any) -> None:
    for row, vector in enumerate(vectors):
        place = builder.add(address, int64(LINE * row))
        builder.store(vector, builder.inttoptr(place, vector.type.as_pointer()), align=4)


@intrinsic
def transpose_tile(typing_context, source, stride, to):  # type: ignore[no-untyped-def]
    """Write 16 rows of 16 words, transposed, as a tile."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        source, stride, to = arguments
        _stores(builder, _transposed(builder, _loads(builder, _PAIRS, source, stride, ROWS)), to)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def pair_rows(typing_context, kind, columns, first, second, to):  # type: ignore[no-untyped-def]
    """Write two rows of bf16 or int8 as one row of tiles of pairs. Each 32 columns make two tiles, with columns in the
    order of `row_products.place_of`.
    """
    count, is_coded = len(columns), kind == types.int8

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, _, first, second, to = arguments
        shift, high = (ir.Constant(_PAIRS, [number] * ROWS) for number in (16, _HIGH))
        low = ir.Constant(_PAIRS, [_HIGH ^ 0xFFFFFFFF] * ROWS)
        if is_coded:
            ours, theirs = (
                [_bits(builder, codes) for codes in _loads(builder, _CODES, row, int64(ROWS), 2 * count)]
                for row in (first, second)
            )
            tiles = [_joined(builder, one, other) for one, other in zip(ours, theirs, strict=True)]
        else:
            ours, theirs = (_loads(builder, _PAIRS, row, int64(LINE), count) for row in (first, second))
            tiles = []
            for one, other in zip(ours, theirs, strict=True):
                tiles.append(builder.or_(builder.and_(one, low), builder.shl(other, shift)))
                tiles.append(builder.or_(builder.lshr(one, shift), builder.and_(other, high)))
        for number, tile in enumerate(tiles):
            _stores(builder, [tile], builder.add(to, int64(TILE * number)))
        return context.get_dummy_value()

    return types.void(kind, columns, *[types.int64] * 3), emit


def _bits(builder: ir.IRBuilder, codes: Any) -> Any:
    """Return 16 integers of 8 to 32 bits as the bits of float32, of which the upper half is bf16."""
    words = codes if codes.type == _PAIRS else builder.sext(codes, _PAIRS)
    return builder.bitcast(builder.sitofp(words, _FLOATS), _PAIRS)


def _joined(builder: ir.IRBuilder, first: Any, second: Any) -> Any:
    """Return pairs of the upper halves of two vectors of words."""
    shift, high = (ir.Constant(_PAIRS, [number] * ROWS) for number in (16, _HIGH))
    return builder.or_(builder.lshr(first, shift), builder.and_(second, high))


@intrinsic
def widen_codes(typing_context, columns, row, to):  # type: ignore[no-untyped-def]
    """Write a row of int8 as bf16."""
    count = len(columns)

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, row, to = arguments
        shift, byte = (ir.Constant(_PAIRS, [number] * ROWS) for number in (24, 8))
        for number, codes in enumerate(_loads(builder, _CODE_PAIRS, row, int64(2 * ROWS), count)):
            pairs = builder.sext(codes, _PAIRS)
            even, odd = builder.ashr(builder.shl(pairs, shift), shift), builder.ashr(pairs, byte)
            widened = _joined(builder, _bits(builder, even), _bits(builder, odd))
            _stores(builder, [widened], builder.add(to, int64(LINE * number)))
        return context.get_dummy_value()

    return types.void(columns, *[types.int64] * 2), emit


@intrinsic
def split_weights(typing_context, weights, to):  # type: ignore[no-untyped-def]
    """Write weights of 32 rows and 16 queries, float32 `[32, 16]`, as two tiles `[16, 32]` of bf16: the rounded
    weights, and the rounded rest.
    """

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weights, to = arguments
        high, half = ir.Constant(_PAIRS, [_HIGH] * ROWS), ir.Constant(_PAIRS, [_ROUND] * ROWS)
        shift = ir.Constant(_PAIRS, [16] * ROWS)

        def rounded(value: Any) -> Any:
            return builder.and_(builder.add(builder.bitcast(value, _PAIRS), half), high)

        wholes = _loads(builder, _FLOATS, weights, int64(LINE), 2 * ROWS)
        for part in range(2):
            words = [rounded(whole) for whole in wholes]
            pairs = [
                builder.or_(builder.lshr(even, shift), odd) for even, odd in zip(words[::2], words[1::2], strict=True)
            ]
            _stores(builder, _transposed(builder, pairs), builder.add(to, int64(TILE * part)))
            wholes = [
                builder.fsub(whole, builder.bitcast(word, _FLOATS)) for whole, word in zip(wholes, words, strict=True)
            ]
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def compile_tiles() -> Any:
    """Return a product of two tiles, compiled for the processor that numba compiles for. Raises where the machine code
    has none.
    """
    columns = Products.TILES.columns(1)

    def product(first, second, out, room):  # type: ignore[no-untyped-def]
        open_tiles(columns, room)
        zero_tile(columns, 0, 0)
        load_tile(columns, 0, 1, first, LINE)
        load_tile(columns, 0, 2, second, LINE)
        multiply(columns, 0, 0, 1, 2)
        store_tile(columns, 0, 0, out, LINE)
        close_tiles(columns)

    compiled = numba.njit("void(int64, int64, int64, int64)")(product)
    (text,) = compiled.inspect_asm().values()
    assert "tdpbf16ps" in text, "tiles: no product of tiles in the machine code"
    return compiled


def try_tiles() -> None:
    """Multiply two tiles, and raise if tiles are not allowed or the product is wrong (`transfer.simd.trial`)."""
    if not _allow_tiles():
        raise OSError("tiles: the kernel gives this process no room for them")
    generator = np.random.default_rng(0)
    first, second = (generator.integers(-8, 8, (ROWS, 2 * ROWS)).astype(np.float32) for _ in range(2))
    pairs = second.reshape(ROWS, ROWS, 2).transpose(0, 2, 1).reshape(2 * ROWS, ROWS)
    bits = [(one.view(np.uint32) >> 16).astype(np.uint16) for one in (first, second)]
    out, room = np.empty((ROWS, ROWS), np.float32), np.empty(LINE, np.uint8)
    compile_tiles()(bits[0].ctypes.data, bits[1].ctypes.data, out.ctypes.data, room.ctypes.data)
    if (out != first @ pairs).any():
        raise ArithmeticError("tiles: a product is wrong")

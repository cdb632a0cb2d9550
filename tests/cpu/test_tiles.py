"""Products of tiles of bf16, by an emulation of the processor's three operations: blocks of rows equal float64, and
processors that have tiles get machine code with them.
"""

import logging

import numba
import numpy as np
import pytest

from cpu import tile_products
from cpu.pieces import COLUMNS, KEY_ROW, VALUE_ROW
from cpu.row_products import place_of
from cpu.tile_attention import ROOM_BYTES, TILE_ROWS, attend_tiles, prepare_tiles, room_at
from cpu.tile_products import ROWS, Products, best_products, split_weights, transpose_tile
from cpu.workspace import MOST_MEMBERS, Shape
from tests.cpu.rows_model import from_bf16, to_bf16
from tests.tolerances import HOST_ATTENTION_FLOAT32
from transfer.simd.features import LANES
from transfer.simd.trial import compiles

pytestmark = pytest.mark.skipif(LANES < ROWS, reason="vectors of 512 bits alone stand beside tiles")
DIM = 96  # three steps of 32 columns
TILES_OF = Products.EMULATED.columns(DIM // 32)


@numba.njit
def _attend(shape, room, piece, keys, values, tokens, members, query, sums, state, scale):  # type: ignore[no-untyped-def]
    own = room_at(room)
    room_for = prepare_tiles(TILES_OF, own, query, 4 * DIM, members, state, scale)
    for at in range(0, tokens, TILE_ROWS):
        key, value = keys + piece[KEY_ROW] * at, values + piece[VALUE_ROW] * at
        count = min(TILE_ROWS, tokens - at)
        attend_tiles(TILES_OF, shape, piece, key, value, count, members, sums, state, own)
    return room_for


@numba.njit
def _places(kind, out):  # type: ignore[no-untyped-def]
    for column in range(DIM):
        out[column] = place_of(kind, column)


@pytest.mark.parametrize("row_type", [np.uint16, np.int8])
@pytest.mark.parametrize(("tokens", "members"), [(1, 1), (64, 16), (65, 5), (333, 32), (150, 128), (130, 33)])
def test_blocks_of_rows_equal_the_oracle_and_read_nothing_behind_the_last_row(
    tokens: int, members: int, row_type: type
) -> None:
    """Rows are apart by more than their length, with NaN or 127 between and behind them; maxima rise from block to
    block.
    """
    generator, is_bf16 = np.random.default_rng(tokens), row_type is np.uint16
    rows = np.full((2, tokens + 1, DIM + 32), 0x7FC0 if is_bf16 else 127, row_type)
    rise, unit = np.linspace(-9, 9, tokens, dtype=np.float32), 1.0 if is_bf16 else 1 / 40
    if is_bf16:
        rows[:, :tokens, :DIM] = to_bf16(generator.standard_normal((2, tokens, DIM)).astype(np.float32))
        rows[0, :tokens, 0] = to_bf16(rise)
    else:
        rows[:, :tokens, :DIM] = generator.integers(-128, 128, (2, tokens, DIM))
        rows[0, :tokens, 0] = 14 * rise
    queries = to_bf16(generator.standard_normal((members, DIM)).astype(np.float32))
    query, sums = (np.full((MOST_MEMBERS, DIM), np.nan, np.float32) for _ in range(2))
    query.view(np.uint16).reshape(MOST_MEMBERS, 2 * DIM)[:members, :DIM] = queries
    state, piece = np.full((4, MOST_MEMBERS), np.nan, np.float32), np.zeros(COLUMNS, np.int64)
    piece[[KEY_ROW, VALUE_ROW]] = rows.strides[1]
    shape = Shape(row_type(0), np.uint16(0), 1, 1, DIM, 1, 1, np.float32(1.0))
    room, sums[:] = np.empty(ROOM_BYTES, np.uint8), 0.0
    room_for = _attend(
        shape, room.ctypes.data, piece, *(one.ctypes.data for one in rows), tokens, members, query.ctypes.data,
        sums.ctypes.data, state, np.float32(unit * DIM**-0.5),
    )  # fmt: skip
    assert room_for == -(-members // ROWS) * ROWS
    keys, values = unit * (from_bf16(rows) if is_bf16 else rows).astype(np.float64)[:, :tokens, :DIM]
    real = from_bf16(queries).astype(np.float64)
    logits = real @ keys.T * DIM**-0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    places = np.empty(DIM, np.int64)
    _places(row_type(0), places)
    out = unit * sums[:members, places] / state[1, :members, None]
    lse = state[0, :members] + np.log(state[1, :members])
    mass = weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, weights @ values / mass, rtol=0, atol=HOST_ATTENTION_FLOAT32)
    np.testing.assert_allclose(lse, logits.max(-1) + np.log(mass[:, 0]), rtol=0, atol=HOST_ATTENTION_FLOAT32)


def test_the_rest_of_a_rounded_weight_is_needed_for_that_tolerance() -> None:
    @numba.njit
    def split(weights, to):  # type: ignore[no-untyped-def]
        split_weights(weights, to)

    weights = np.random.default_rng(0).random((2 * ROWS, ROWS)).astype(np.float32)
    tiles = np.empty((2, ROWS, 2 * ROWS), np.uint16)
    split(weights.ctypes.data, tiles.ctypes.data)
    whole, rest = from_bf16(tiles).astype(np.float64)
    assert np.abs(whole + rest - weights.T).max() < HOST_ATTENTION_FLOAT32 < np.abs(whole - weights.T).max()


def test_a_tile_is_transposed_by_words() -> None:
    @numba.njit
    def transpose(source, stride, to):  # type: ignore[no-untyped-def]
        transpose_tile(source, stride, to)

    rows, tile = np.arange(ROWS * 20, dtype=np.int32).reshape(ROWS, 20), np.empty((ROWS, ROWS), np.int32)
    transpose(rows.ctypes.data, rows.strides[0], tile.ctypes.data)
    np.testing.assert_array_equal(tile, rows[:, :ROWS].T)


@pytest.mark.parametrize(("processor", "has_tiles"), [("sapphirerapids", True), ("znver4", False)])
def test_products_of_tiles_compile_for_processors_that_have_them_and_an_abort_stays_in_the_child(
    processor: str, has_tiles: bool
) -> None:
    assert compiles(tile_products.__name__, tile_products.compile_tiles.__name__, processor) == has_tiles


@pytest.mark.parametrize("features", [{}, {"amx-tile": True, "amx-bf16": True, "avx512bf16": True}])
@pytest.mark.parametrize("is_tried", [False, True])
@pytest.mark.parametrize("is_allowed", [False, True])
def test_tiles_are_chosen_where_the_processor_has_them_a_child_has_used_them_and_the_kernel_allows_it(
    features: dict[str, bool], is_tried: bool, is_allowed: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(tile_products.llvm, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(tile_products, "compiles", lambda *_: is_tried)
    monkeypatch.setattr(tile_products, "_allow_tiles", lambda: is_allowed)
    with caplog.at_level(logging.INFO, tile_products.__name__):
        chosen = best_products.__wrapped__()
    assert chosen is (Products.TILES if features and is_tried and is_allowed else Products.VECTORS)
    assert f"products={chosen.name.lower()}" in caplog.text

"""Attend to blocks of rows of bf16 or int8 with many bf16 queries, as products of tiles (`cpu.tile_products`).

Scores of a block of 64 keys are products of the keys as they are in memory with queries in pairs, 16 queries a tile.
Weights are split into two bf16 parts, and their products with values in pairs are added to float32 sums. A query's
numbers depend on no other query. Bytes moved: each row once for all queries.
"""

import numpy as np

from cpu.pieces import KEY_ROW, VALUE_ROW
from cpu.row_products import LINE_BYTES, column_bytes, stored_bytes
from cpu.tile_products import (
    LINE,
    REGISTERS,
    ROWS,
    TILE,
    load_tile,
    multiply,
    pair_rows,
    split_weights,
    store_tile,
    transpose_tile,
    widen_codes,
    zero_tile,
)
from transfer.simd.inner import inner
from transfer.simd.memory import clear_bytes, copy_bytes, load_float32, prefetch_middle
from transfer.simd.values import exp_lanes, greater, lane_max, load_lanes, spread, store_lanes
from transfer.simd.vectors import address_of

TILE_ROWS = 64  # rows of a block
_GROUPS = TILE_ROWS // (2 * ROWS)  # groups of 32 rows, which one product of weights and values takes
_MOST_STEPS = 8  # steps of 32 columns
_MOST_TILES = 8  # tiles of queries: `cpu.workspace.MOST_MEMBERS`
_SCORES = TILE_ROWS * LINE  # bytes of a block's scores with one tile of queries
_WEIGHTS = 2 * _GROUPS * TILE
# A thread's room begins at a multiple of LINE: emulated tiles; queries; then, for two tiles of queries, scores and
# weights; a block's values in pairs; and copies of a block's keys and values that cannot be read in place.
_QUERIES = REGISTERS
_SCORES_AT = _QUERIES + _MOST_TILES * _MOST_STEPS * TILE
_WEIGHTS_AT = _SCORES_AT + 2 * _SCORES
_VALUES_AT = _WEIGHTS_AT + 2 * _WEIGHTS
_ROWS_AT = _VALUES_AT + _GROUPS * 2 * _MOST_STEPS * TILE
ROOM_BYTES = _ROWS_AT + 2 * TILE_ROWS * _MOST_STEPS * LINE + LINE


@inner
def room_at(address):
    """Return the aligned begin of a thread's room within its ROOM_BYTES at `address`."""
    return (address + LINE - 1) // LINE * LINE


@inner
def prepare_tiles(columns, room, query, query_bytes, members, state, scale):
    """Write queries, bf16 `[members, dim]`, query_bytes apart, as whole tiles filled up with zeros, and initialise
    their state. Return how many queries the tiles have room for.
    """
    steps = len(columns)
    for member in range((members + ROWS - 1) // ROWS * ROWS):
        state[0, member], state[1, member], state[2, member] = -np.inf, 0.0, scale
        if member >= members:
            clear_bytes(query + query_bytes * member, LINE * steps)
    for tile in range((members + ROWS - 1) // ROWS):
        for step in range(steps):
            source = query + query_bytes * ROWS * tile + LINE * step
            transpose_tile(source, query_bytes, room + _QUERIES + TILE * (steps * tile + step))
    return (members + ROWS - 1) // ROWS * ROWS


@inner
def attend_tiles(columns, shape, piece, keys, values, count, members, sums, state, room):
    """Add `count` rows, at most TILE_ROWS, to the sums of the `members` queries in the room. keys, values: addresses of
    the first key and value. Returns `members`.
    """
    kind, steps, key_row, value_row = shape.kind, len(columns), piece[KEY_ROW], piece[VALUE_ROW]
    lines = (2 * stored_bytes(kind, columns) + LINE_BYTES - 1) // LINE_BYTES  # of two rows
    next_keys, own_row = keys + key_row * TILE_ROWS, key_row
    next_values, next_row = values + value_row * TILE_ROWS, 2 * value_row
    if column_bytes(kind) == 1:
        keys, own_row = _widen(columns, room, keys, key_row, count), np.int64(LINE * steps)
    elif count < TILE_ROWS:
        keys, own_row = _pad(kind, columns, room, keys, key_row, count, 0), np.int64(LINE * steps)
    if count < TILE_ROWS:
        values, value_row = _pad(kind, columns, room, values, value_row, count, 1), stored_bytes(kind, columns)
    for pair in range(TILE_ROWS // 2):
        row = values + value_row * 2 * pair
        to = room + _VALUES_AT + TILE * 2 * steps * (pair // ROWS) + LINE * (pair % ROWS)
        pair_rows(kind, columns, row, row + value_row, to)
        for line in range(lines):
            prefetch_middle(next_values + next_row * pair + LINE_BYTES * line)
    tiles = (members + ROWS - 1) // ROWS
    for tile in range(0, tiles, 2):
        is_two = tile + 1 < tiles
        _score(columns, room, keys, own_row, tile, is_two)
        for which in range(2 if is_two else 1):
            fetched = next_keys if tile + which == 0 else np.int64(0)
            _weigh(columns, room, which, state, tile + which, count, sums, fetched, 2 * key_row, lines)
        _add(columns, room, tile, is_two, sums)
    return members


@inner
def _widen(columns, room, rows, row_bytes, count):
    """Write rows of int8 to the room as bf16, filled up with zero rows, and return their address."""
    width, to = LINE * len(columns), room + _ROWS_AT
    for row in range(count):
        widen_codes(columns, rows + row_bytes * row, to + width * row)
    clear_bytes(to + width * count, width * (TILE_ROWS - count))
    return to


@inner
def _pad(kind, columns, room, rows, row_bytes, count, which):
    """Copy rows to the room, filled up with zero rows, and return their address. which: 0 for keys, 1 for values."""
    width, to = stored_bytes(kind, columns), room + _ROWS_AT + TILE_ROWS * LINE * len(columns) * which
    for row in range(count):
        copy_bytes(to + width * row, rows + row_bytes * row, width)
    clear_bytes(to + width * count, width * (TILE_ROWS - count))
    return to


@inner
def _score(columns, room, keys, key_row, tile, is_two):
    """Write products of a block's keys with one or two tiles of queries, float32 `[TILE_ROWS, 16]` each."""
    steps, scores = len(columns), room + _SCORES_AT
    queries = room + _QUERIES + TILE * steps * tile
    for group in range(_GROUPS):
        rows, out = keys + key_row * 2 * ROWS * group, scores + 2 * TILE * group
        zero_tile(columns, room, 0)
        zero_tile(columns, room, 1)
        zero_tile(columns, room, 2)
        zero_tile(columns, room, 3)
        for step in range(steps):
            load_tile(columns, room, 4, rows + LINE * step, key_row)
            load_tile(columns, room, 5, rows + key_row * ROWS + LINE * step, key_row)
            load_tile(columns, room, 6, queries + TILE * step, LINE)
            multiply(columns, room, 0, 4, 6)
            multiply(columns, room, 1, 5, 6)
            if is_two:
                load_tile(columns, room, 7, queries + TILE * (steps + step), LINE)
                multiply(columns, room, 2, 4, 7)
                multiply(columns, room, 3, 5, 7)
        store_tile(columns, room, 0, out, LINE)
        store_tile(columns, room, 1, out + TILE, LINE)
        if is_two:
            store_tile(columns, room, 2, out + _SCORES, LINE)
            store_tile(columns, room, 3, out + _SCORES + TILE, LINE)


@inner
def _weigh(columns, room, which, state, tile, count, sums, fetched, row_bytes, lines):
    """Turn products into weights of a tile of queries, in two bf16 parts, and rescale its sums if a maximum grew.

    fetched: address of rows to prefetch meanwhile, `lines` lines for each two rows, row_bytes apart; 0: none.
    """
    steps, scores, at = len(columns), room + _SCORES_AT + _SCORES * which, LINE * tile
    tops, masses = address_of(state[0]) + at, address_of(state[1]) + at
    scale, before, zero = load_lanes(address_of(state[2]) + at), load_lanes(tops), spread(np.float32(0.0))
    top = before
    for row in range(count):
        top = greater(load_lanes(scores + LINE * row) * scale, top)
    mass = load_lanes(masses)
    if lane_max(greater(top - before, zero)) > np.float32(0.0):
        factor = exp_lanes(before - top)
        mass = mass * factor
        store_lanes(tops, top)
        store_lanes(address_of(state[3]) + at, factor)
        for member in range(ROWS):
            own = spread(load_float32(address_of(state[3]) + at + 4 * member))
            first = sums + 2 * LINE * steps * (ROWS * tile + member)
            for line in range(2 * steps):
                store_lanes(first + LINE * line, load_lanes(first + LINE * line) * own)
    for row in range(count):
        weight = exp_lanes(load_lanes(scores + LINE * row) * scale - top)
        store_lanes(scores + LINE * row, weight)
        mass = mass + weight
        if fetched != 0 and row % 2 == 0:
            for line in range(lines):
                prefetch_middle(fetched + row_bytes * (row // 2) + LINE_BYTES * line)
    store_lanes(masses, mass)
    clear_bytes(scores + LINE * count, LINE * (TILE_ROWS - count))
    for group in range(_GROUPS):
        split_weights(scores + 2 * TILE * group, room + _WEIGHTS_AT + _WEIGHTS * which + 2 * TILE * group)


@inner
def _add(columns, room, tile, is_two, sums):
    """Add products of weights and values to the sums of one or two tiles of queries."""
    steps, values, weights = len(columns), room + _VALUES_AT, room + _WEIGHTS_AT
    row_bytes = 2 * LINE * steps
    for step in range(steps):
        first = sums + row_bytes * ROWS * tile + 2 * LINE * step
        second = first + row_bytes * ROWS
        load_tile(columns, room, 0, first, row_bytes)
        load_tile(columns, room, 1, first + LINE, row_bytes)
        if is_two:
            load_tile(columns, room, 2, second, row_bytes)
            load_tile(columns, room, 3, second + LINE, row_bytes)
        for group in range(_GROUPS):
            load_tile(columns, room, 6, values + TILE * 2 * (steps * group + step), LINE)
            load_tile(columns, room, 7, values + TILE * 2 * (steps * group + step) + TILE, LINE)
            for part in range(2):
                own = weights + TILE * (2 * group + part)
                load_tile(columns, room, 4, own, LINE)
                multiply(columns, room, 0, 4, 6)
                multiply(columns, room, 1, 4, 7)
                if is_two:
                    load_tile(columns, room, 5, own + _WEIGHTS, LINE)
                    multiply(columns, room, 2, 5, 6)
                    multiply(columns, room, 3, 5, 7)
        store_tile(columns, room, 0, first, row_bytes)
        store_tile(columns, room, 1, first + LINE, row_bytes)
        if is_two:
            store_tile(columns, room, 2, second, row_bytes)
            store_tile(columns, room, 3, second + LINE, row_bytes)

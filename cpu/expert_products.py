"""Compute a layer's experts for a few tokens on the CPU: gate and up, activation, down, and each row's weighted sum.

Each host request is one parallel region, in three stages, or five where tokens are rounded for products of integers
(`transfer.simd.rounded_rows`). Pairs of a row and an expert are sorted by expert, so an expert's rows are read once for
all tokens routed to it: four of its rows stay in the cache while they are multiplied with pair after pair. Addresses
are passed in a context, an int64 array, because a region's function takes one address.

A number is one dot product over its own row and pair in a fixed order, and a row's sum is over its places in order. So
results depend neither on other rows nor on the number of threads. Bytes moved: each expert that is used, once. Packed
experts are multiplied as stored (`transfer.simd.packed_rows`); the scales of a few rows are widened before these rows
are read (`transfer.simd.packed_gains`), once for all pairs.
"""

import numba
import numpy as np

from transfer.model_constants import CLAMPED_GAIN, CLAMPED_LIMIT, ExpertActivation
from transfer.simd.exp import exp
from transfer.simd.inner import inner
from transfer.simd.memory import load_float32, load_int32, load_int64, store_float32, store_int32
from transfer.simd.packed_gains import GAINS, MATRIX_COLUMNS, ROW_BYTES, ROWS, fill_gains
from transfer.simd.packed_rows import is_packed
from transfer.simd.region import pointer_to
from transfer.simd.rounded_rows import any_products, group_of, is_rounded, unit_of
from transfer.simd.row_tiles import round_token
from transfer.simd.team import COUNTER_INT64, Team, claim, end_stage

BLOCK = 4  # rows of a matrix that are multiplied together
ITEM_BYTES = 32_768  # bytes of a matrix that a thread claims at a time
AHEAD_BYTES = 6144  # how far before its use a weight is prefetched
SUM_COLUMNS = 512  # columns of a row's sum that a thread claims at a time
ROUND_ROWS, MAKE_GATED, ROUND_GATED, MAKE_DOWN, SUM_UP, STAGES = range(6)
GAIN_ROWS = 16  # rows whose scales are widened together: loops over them are long enough to be vector code
PAIRS_AT_ONCE = 4  # of `down`; of gate and up two, whose tokens may lie anywhere
TILE_FLOATS = 2 * BLOCK * 4  # of a thread: gates and ups of two pairs, and a line to itself; gains are behind them

# Columns of the context. From the model: widths, and the address of a table of layers, LAYER_COLUMNS each. From the
# slot: addresses. From the request: numbers of rows, pairs and experts, and the layer's matrices. From the workspace:
# addresses of arrays by expert (number, first pair), by pair (row), and by place of a row (its pair, or -1); the bytes
# of a thread's tile; and where rounded pairs are, and how many float32 apart.
HIDDEN, INTERMEDIATE, PER_TOKEN, LAYERS = range(4)
X, EXPERTS, SHARES, OUT = range(4, 8)
NUM_ROWS, NUM_PAIRS, NUM_TAKEN = range(8, 11)
TAKEN, BEGINS, ROW_OF_PAIR, PAIR_OF_PLACE, FOUND, GATED, MADE, TILES, COUNTERS, TILE_BYTES = range(11, 21)
ROUNDED, ROUNDED_STRIDE = 21, 22
GATE_UP, DOWN = 23, 23 + MATRIX_COLUMNS
GATE_UP_BIAS, DOWN_BIAS, ACTIVATION, CONTEXT_INT64 = range(DOWN + MATRIX_COLUMNS, DOWN + MATRIX_COLUMNS + 4)
LAYERS_OWN = CONTEXT_INT64 - GATE_UP  # columns that a layer has in the context
# Columns of a layer: how many experts, the C function that computes them, the bytes of one, and the layer's columns of
# the context: both matrices, their biases (0: none), and the activation.
LAYER_COUNT, LAYER_WORK, LAYER_EXPERT_BYTES, LAYER_MATRICES = range(4)
LAYER_COLUMNS = LAYER_MATRICES + LAYERS_OWN
ACTIVATIONS: dict[ExpertActivation, int] = {"silu": 0, "clamped_swiglu": 1}
SILU = ACTIVATIONS["silu"]
_GAIN, _LIMIT = np.float32(CLAMPED_GAIN), np.float32(CLAMPED_LIMIT)

_dot_four = any_products(BLOCK, PAIRS_AT_ONCE)
_dot_two = any_products(BLOCK, 2)
_dot_one = any_products(BLOCK, 1)


@inner
def open_row(context):
    return numba.carray(pointer_to(context), (CONTEXT_INT64,), np.int64)


@inner
def plan(context, layer, rows, threads):
    """List the experts that the slot's rows are routed to, in rising order, with their pairs by row. Return how many
    there are. Numbers that name no expert of the layer are left out.
    """
    c = open_row(context)
    at = c[LAYERS] + 8 * LAYER_COLUMNS * layer
    count, places = load_int64(at + 8 * LAYER_COUNT), rows * c[PER_TOKEN]
    for column in range(LAYERS_OWN):
        c[GATE_UP + column] = load_int64(at + 8 * (LAYER_MATRICES + column))
    for expert in range(count):
        store_int32(c[FOUND] + 4 * expert, 0)
    for place in range(places):
        expert = load_int32(c[EXPERTS] + 4 * place)
        if 0 <= expert < count:
            store_int32(c[FOUND] + 4 * expert, load_int32(c[FOUND] + 4 * expert) + 1)
    taken, pairs = 0, 0
    for expert in range(count):
        own = load_int32(c[FOUND] + 4 * expert)
        if own > 0:
            store_int32(c[TAKEN] + 4 * taken, expert)
            store_int32(c[BEGINS] + 4 * taken, pairs)
            store_int32(c[FOUND] + 4 * expert, pairs)  # where its next pair goes
            taken += 1
            pairs += own
    store_int32(c[BEGINS] + 4 * taken, pairs)
    for place in range(places):
        expert, pair = load_int32(c[EXPERTS] + 4 * place), -1
        if 0 <= expert < count:
            pair = load_int32(c[FOUND] + 4 * expert)
            store_int32(c[FOUND] + 4 * expert, pair + 1)
            store_int32(c[ROW_OF_PAIR] + 4 * pair, place // c[PER_TOKEN])
        store_int32(c[PAIR_OF_PLACE] + 4 * place, pair)
    c[NUM_ROWS], c[NUM_PAIRS], c[NUM_TAKEN] = rows, pairs, taken
    counters = numba.carray(pointer_to(c[COUNTERS]), (STAGES * (threads + 1) * COUNTER_INT64,), np.int64)
    for index in range(len(counters)):
        counters[index] = 0
    return taken


@inner
def _rows_an_item(row_bytes):
    return max(BLOCK, ITEM_BYTES // row_bytes // BLOCK * BLOCK)


@numba.njit(nogil=True, inline="always")
def _round_pairs(team, c, stage, kind):
    """Round the inputs of pairs, if rows of this kind need it: rows, or the outputs of gate and up."""
    if not is_rounded(kind):
        return
    columns = c[HIDDEN] if stage == ROUND_ROWS else c[INTERMEDIATE]
    items, done = c[NUM_PAIRS], 0
    pair = claim(team, stage, items)
    while pair >= 0:
        number = load_int32(c[ROW_OF_PAIR] + 4 * pair) if stage == ROUND_ROWS else pair
        x = c[X if stage == ROUND_ROWS else GATED] + 4 * columns * number
        round_token(x, columns, unit_of(kind), group_of(kind), c[ROUNDED] + 4 * c[ROUNDED_STRIDE] * pair)
        done += 1
        pair = claim(team, stage, items)
    end_stage(team, stage, items, done)


@inner
def _row_of_pair(c, kind, pair):
    """Return the address of a pair's row, rounded if rows of this kind need it."""
    if is_rounded(kind):
        return c[ROUNDED] + 4 * c[ROUNDED_STRIDE] * pair
    return c[X] + 4 * c[HIDDEN] * load_int32(c[ROW_OF_PAIR] + 4 * pair)


@numba.njit(nogil=True, inline="always")
def _gate_up(team, c, kind):
    """Compute `gated[pair]` of its gate and up."""
    inner, width, m = c[HIDDEN], c[INTERMEDIATE], c[GATE_UP:DOWN]
    row_bytes, room = m[ROW_BYTES], m[GAINS]
    step = _rows_an_item(2 * row_bytes)
    items_each = -(-width // step)
    items, done = c[NUM_TAKEN] * items_each, 0
    gates_at = c[TILES] + c[TILE_BYTES] * team.me
    ups_at = gates_at + 4 * 2 * BLOCK
    all_gains, gains_bytes = gates_at + 4 * TILE_FLOATS, 4 * room * GAIN_ROWS
    item = claim(team, MAKE_GATED, items)
    while item >= 0:
        place, part = item // items_each, item % items_each
        first, last = load_int32(c[BEGINS] + 4 * place), load_int32(c[BEGINS] + 4 * (place + 1))
        expert, begin, end = load_int32(c[TAKEN] + 4 * place) * 2 * width, part * step, min(width, (part + 1) * step)
        for row in range(begin, end, BLOCK):
            gates, ups = m[ROWS] + (expert + row) * row_bytes, m[ROWS] + (expert + width + row) * row_bytes
            if is_packed(kind) and (row - begin) % GAIN_ROWS == 0:
                count = min(GAIN_ROWS, end - row)
                fill_gains(m, expert + row, count, all_gains, all_gains + gains_bytes)
                fill_gains(m, expert + width + row, count, all_gains + 2 * gains_bytes, all_gains + 3 * gains_bytes)
            gate_gains = all_gains + 4 * room * ((row - begin) % GAIN_ROWS)
            gate_offsets, up_gains = gate_gains + gains_bytes, gate_gains + 2 * gains_bytes
            up_offsets = up_gains + gains_bytes
            for pair in range(first, last, 2):
                x = _row_of_pair(c, kind, pair)
                if pair + 1 < last:
                    apart = (_row_of_pair(c, kind, pair + 1) - x) // 4  # the next pair's row, as a stride
                    _dot_two(kind, gates, gate_gains, gate_offsets, room, x, apart, inner, gates_at, BLOCK, AHEAD_BYTES)
                    _dot_two(kind, ups, up_gains, up_offsets, room, x, apart, inner, ups_at, BLOCK, AHEAD_BYTES)
                    _gate(c, expert + row, gates_at + 4 * BLOCK, ups_at + 4 * BLOCK, (pair + 1) * width + row)
                else:
                    _dot_one(kind, gates, gate_gains, gate_offsets, room, x, 0, inner, gates_at, BLOCK, AHEAD_BYTES)
                    _dot_one(kind, ups, up_gains, up_offsets, room, x, 0, inner, ups_at, BLOCK, AHEAD_BYTES)
                _gate(c, expert + row, gates_at, ups_at, pair * width + row)
        done += 1
        item = claim(team, MAKE_GATED, items)
    end_stage(team, MAKE_GATED, items, done)


@inner
def _gate(c, row, gates_at, ups_at, out):
    """Write BLOCK numbers of `gated`, for the matrix's rows from `row` on. A NaN stays a NaN."""
    for r in range(BLOCK):
        gate, up = load_float32(gates_at + 4 * r), load_float32(ups_at + 4 * r)
        if c[GATE_UP_BIAS] != 0:
            gate += load_float32(c[GATE_UP_BIAS] + 4 * (row + r))
            up += load_float32(c[GATE_UP_BIAS] + 4 * (c[INTERMEDIATE] + row + r))
        if c[ACTIVATION] == SILU:
            made = gate / (np.float32(1.0) + exp(-gate)) * up
        else:
            gate = _LIMIT if gate > _LIMIT else gate
            up = _LIMIT if up > _LIMIT else -_LIMIT if up < -_LIMIT else up
            made = gate / (np.float32(1.0) + exp(-_GAIN * gate)) * (up + np.float32(1.0))
        store_float32(c[GATED] + 4 * (out + r), made)


@numba.njit(nogil=True, inline="always")
def _down(team, c, kind):
    """Compute `made[pair] = down @ gated[pair]`."""
    inner, width, m = c[INTERMEDIATE], c[HIDDEN], c[DOWN:GATE_UP_BIAS]
    row_bytes, room = m[ROW_BYTES], m[GAINS]
    all_gains, gains_bytes = c[TILES] + c[TILE_BYTES] * team.me + 4 * TILE_FLOATS, 4 * room * GAIN_ROWS
    first_x, stride = (c[ROUNDED], c[ROUNDED_STRIDE]) if is_rounded(kind) else (c[GATED], inner)
    step = _rows_an_item(row_bytes)
    items_each = -(-width // step)
    items, done = c[NUM_TAKEN] * items_each, 0
    item = claim(team, MAKE_DOWN, items)
    while item >= 0:
        place, part = item // items_each, item % items_each
        first, last = load_int32(c[BEGINS] + 4 * place), load_int32(c[BEGINS] + 4 * (place + 1))
        expert, begin, end = load_int32(c[TAKEN] + 4 * place) * width, part * step, min(width, (part + 1) * step)
        for row in range(begin, end, BLOCK):
            rows, pair = m[ROWS] + (expert + row) * row_bytes, first
            if is_packed(kind) and (row - begin) % GAIN_ROWS == 0:
                fill_gains(m, expert + row, min(GAIN_ROWS, end - row), all_gains, all_gains + gains_bytes)
            gains = all_gains + 4 * room * ((row - begin) % GAIN_ROWS)
            offsets = gains + gains_bytes
            while pair < last:
                x, out = first_x + 4 * pair * stride, c[MADE] + 4 * (pair * width + row)
                if last - pair >= PAIRS_AT_ONCE:
                    _dot_four(kind, rows, gains, offsets, room, x, stride, inner, out, width, AHEAD_BYTES)
                    pair += PAIRS_AT_ONCE
                elif last - pair >= 2:
                    _dot_two(kind, rows, gains, offsets, room, x, stride, inner, out, width, AHEAD_BYTES)
                    pair += 2
                else:
                    _dot_one(kind, rows, gains, offsets, room, x, stride, inner, out, width, AHEAD_BYTES)
                    pair += 1
        done += 1
        item = claim(team, MAKE_DOWN, items)
    end_stage(team, MAKE_DOWN, items, done)


@numba.njit(nogil=True, inline="always")
def _sum_up(team, c):
    """Compute `out[row]` over its places in order; zero for a row that is routed to none of these experts."""
    width, per_token = c[HIDDEN], c[PER_TOKEN]
    items_each = -(-width // SUM_COLUMNS)
    items, done = c[NUM_ROWS] * items_each, 0
    item = claim(team, SUM_UP, items)
    while item >= 0:
        row, part = item // items_each, item % items_each
        begin, end = part * SUM_COLUMNS, min(width, (part + 1) * SUM_COLUMNS)
        out = numba.carray(pointer_to(c[OUT] + 4 * (row * width + begin)), (end - begin,), np.float32)
        for column in range(end - begin):
            out[column] = 0.0
        for place in range(row * per_token, (row + 1) * per_token):
            pair = load_int32(c[PAIR_OF_PLACE] + 4 * place)
            if pair >= 0:
                share = load_float32(c[SHARES] + 4 * place)
                made = numba.carray(pointer_to(c[MADE] + 4 * (pair * width + begin)), (end - begin,), np.float32)
                for column in range(end - begin):
                    out[column] += share * made[column]
                if c[DOWN_BIAS] != 0:
                    first = load_int32(c[EXPERTS] + 4 * place) * width + begin
                    bias = numba.carray(pointer_to(c[DOWN_BIAS] + 4 * first), (end - begin,), np.float32)
                    for column in range(end - begin):
                        out[column] += share * bias[column]
        done += 1
        item = claim(team, SUM_UP, items)
    end_stage(team, SUM_UP, items, done)


@numba.njit(nogil=True, inline="always")
def compute(me, threads, context, gate_up, down):
    """Run thread `me`'s share of a planned request. gate_up, down: the kinds of their rows, see `any_products`."""
    c = open_row(context)
    shape = (STAGES, threads + 1, COUNTER_INT64)
    team = Team(numba.carray(pointer_to(c[COUNTERS]), shape, np.int64), me, threads)
    _round_pairs(team, c, ROUND_ROWS, gate_up)
    _gate_up(team, c, gate_up)
    _round_pairs(team, c, ROUND_GATED, down)
    _down(team, c, down)
    _sum_up(team, c)

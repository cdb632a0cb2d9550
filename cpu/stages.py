"""What a thread does of one layer's attention over pieces: lookups and exact parts, then sampled parts, then the merge.

It refuses to know segments and requests beyond the table of pieces. Invariants: a piece and a head's partial depend on
its samples alone, and partials are merged in the order of the table, so results do not depend on the threads. Bytes
moved: for a sampled head, its buckets and then a key and a value a sample; for an exact piece, each key and value once
for all heads of a group; for heads that are not wanted and rows that are excluded, nothing.
"""

import math
from typing import NamedTuple

import numba
import numpy as np

from cpu.exclusions import bits_at, count_excluded, next_covered
from cpu.lookup import COUNTER_MARGIN, count_bytes, fetch_bucket, fetch_offsets, find_samples
from cpu.pieces import (
    BEGIN,
    CENTRE,
    END,
    KEY_HEAD,
    KEY_ROW,
    KEY_SCALE,
    KEYS,
    MODE,
    REQUEST,
    RUN_BEGIN,
    SAMPLED,
    VALUE_HEAD,
    VALUE_ROW,
    VALUE_SCALE,
    VALUES,
)
from cpu.rows import (
    AHEAD_ROWS,
    BLOCK_ROWS,
    add_rows,
    add_samples,
    column_bytes,
    fetch_sample,
    score_rows,
    score_samples,
)
from cpu.softmax import exponentiate, prepare_query, scale_scores, shrink, weigh_samples, write_partial
from transfer.simd.memory import load_float32, load_uint8, store_float32, store_int32, store_release_int32
from transfer.simd.team import Team, atomic_add, atomic_load, claim, end_stage, now_ns
from transfer.simd.vectors import address_of, load

STAGES = 3
SLOTS_TAKEN, ROWS_READ, BEGAN_NS, LOOKED_UP_NS, SAMPLED_NS, WAITED_NS = 0, 8, 9, 10, 11, 12
KEYS_SCORED, INDEX_BYTES, TOKENS_COVERED, TOTALS = 13, 14, 15, 16  # two lines
STATE = 16  # float32 between the rows of a thread's state: more than the largest group
PART_SAMPLES = 512  # of a head and piece: what one thread claims
PART_ROWS = 512  # of an exact piece and KV head, the same

_score_four, _score_two, _score_one = score_rows(4), score_rows(2), score_rows(1)
_add_four, _add_two, _add_one = add_rows(4), add_rows(2), add_rows(1)


class Shape(NamedTuple):
    """kind, query_kind: scalars of the rows' and the queries' type; mask: buckets - 1. Beside it goes
    `columns`, `dim // 64` zeros."""

    kind: np.uint16 | np.int8 | np.float32
    query_kind: np.uint16 | np.float32
    heads: int
    kv_heads: int
    dim: int
    tables: int
    mask: int
    scale: np.float32


class Batch(NamedTuple):
    """Addresses of arrays `[requests, heads, ..]`: queries `dim`, codes uint16 `tables`; out, lse, covered (or 0), and
    wanted uint8 (or 0: all heads). excluded: address of int32 `[requests, kv_heads, words]`, or 0. logs: of
    `collision.log_weights`. pieces: int64 `[pieces, COLUMNS]`. answered: where the stamp goes in the end, or 0."""

    pieces: np.ndarray
    requests: int
    queries: int
    codes: int
    wanted: int
    excluded: int
    words: int
    logs: int
    out: int
    lse: int
    covered: int
    stamp: int
    answered: int


class Plan(NamedTuple):
    """What is to be done. first_piece: int32 `[requests + 1]`; ordinals: int32 `[pieces]`, of a piece among the
    sampled, or its first exact part; sampled: int32 `[sampled]`, pieces; ids_at: int64 `[sampled, 2]`: first id and ids
    a head; parts: int32 `[exact parts, 4]`: piece, KV head, begin, end.
    """

    first_piece: np.ndarray
    ordinals: np.ndarray
    sampled: np.ndarray
    ids_at: np.ndarray
    parts: np.ndarray


class Buffers(NamedTuple):
    """Shared: ids uint16; found, first_slot int32 `[sampled * heads]`; slots int32 `[slots, 2]`: sampled head and
    begin; out float32 `[slots, dim]`, lse `[slots]`; totals int64 `[TOTALS]`; counters.
    A thread's: counts uint8, spans int64, query and sums float32 `[group, dim]`, scores float32 `[4, BLOCK_ROWS]`,
    state float32 `[4, STATE]`: maxima, masses, factors of products, rescaling.
    """

    ids: np.ndarray
    found: np.ndarray
    first_slot: np.ndarray
    slots: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    totals: np.ndarray
    counters: np.ndarray
    counts: np.ndarray
    spans: np.ndarray
    query: np.ndarray
    sums: np.ndarray
    scores: np.ndarray
    state: np.ndarray


@numba.njit(nogil=True)
def _codes_at(shape, batch, piece, head):
    return batch.codes + 2 * shape.tables * (piece[REQUEST] * shape.heads + head)


@numba.njit(nogil=True)
def _is_wanted(shape, batch, request, head):
    return batch.wanted == 0 or load_uint8(batch.wanted + request * shape.heads + head) != 0


@numba.njit(nogil=True)
def _excluded_at(shape, batch, request, kv_head):
    return bits_at(batch.excluded, batch.words, request * shape.kv_heads + kv_head)


@numba.njit(nogil=True)
def _wanted_heads(shape, batch, plan, item):
    """How many heads want an item of the first stage: a lookup's own, or those that an exact part's rows are for."""
    lookups, group = len(plan.sampled) * shape.heads, shape.heads // shape.kv_heads
    if item < lookups:
        piece, first, heads = batch.pieces[plan.sampled[item // shape.heads]], item % shape.heads, 1
    else:
        part = plan.parts[item - lookups]
        piece, first, heads = batch.pieces[part[0]], np.int64(part[1]) * group, group
    wanted = 0
    for head in range(first, first + heads):
        wanted += _is_wanted(shape, batch, piece[REQUEST], head)
    return wanted


@numba.njit(nogil=True)
def _claim_wanted(team, shape, batch, plan, items):
    """(the next item of the first stage that is this thread's to do, or -1; how many nobody wanted before it)."""
    passed, item = 0, claim(team, 0, items)
    while item >= 0 and _wanted_heads(shape, batch, plan, item) == 0:
        passed += 1
        item = claim(team, 0, items)
    return item, passed


@numba.njit(nogil=True)
def _look_up(team, shape, batch, plan, buffers, item, following):
    """Lookup `item` = sampled piece and head; its samples are cut into parts. following: the next lookup's, or -1.

    Returns how many it found, and the bytes of the index that it read."""
    group = shape.heads // shape.kv_heads
    order, head = item // shape.heads, item % shape.heads
    piece = batch.pieces[plan.sampled[order]]
    next_piece, next_head, next_codes = piece, 0, 0
    if following >= 0:
        next_piece = batch.pieces[plan.sampled[following // shape.heads]]
        next_head = following % shape.heads
        next_codes = _codes_at(shape, batch, next_piece, next_head)
    found = find_samples(
        piece, head // group, _codes_at(shape, batch, piece, head),
        _excluded_at(shape, batch, piece[REQUEST], head // group), batch.words,
        next_piece, next_head // group, next_codes, shape.tables, shape.mask,
        address_of(buffers.counts[team.me]) + COUNTER_MARGIN, buffers.spans[team.me],
        address_of(buffers.ids) + 2 * (plan.ids_at[order, 0] + plan.ids_at[order, 1] * head),
    )  # fmt: skip
    parts = (found + PART_SAMPLES - 1) // PART_SAMPLES
    slot = atomic_add(address_of(buffers.totals), parts) if parts else 0
    buffers.found[item] = found
    buffers.first_slot[item] = slot
    for part in range(parts):
        buffers.slots[slot + part, 0] = item
        buffers.slots[slot + part, 1] = part * PART_SAMPLES
    return found, count_bytes(piece, shape.tables, buffers.spans[team.me])


@numba.njit(nogil=True)
def _warm_lookup(shape, batch, plan, item):
    piece = batch.pieces[plan.sampled[item // shape.heads]]
    head = item % shape.heads
    codes, kv_head = _codes_at(shape, batch, piece, head), head // (shape.heads // shape.kv_heads)
    fetch_offsets(piece, kv_head, codes, shape.tables, shape.mask)
    for table in range(shape.tables):
        fetch_bucket(piece, kv_head, codes, table, shape.mask)


@numba.njit(nogil=True)
def _first_stage(team, shape, columns, batch, plan, buffers):
    """Lookups and exact parts, and what they and the samples read: see `cpu.attention.Attended`."""
    lookups, group = len(plan.sampled) * shape.heads, shape.heads // shape.kv_heads
    items, rows, keys, index_bytes = lookups + len(plan.parts), 0, 0, 0
    item, done = _claim_wanted(team, shape, batch, plan, items)
    if 0 <= item < lookups:
        _warm_lookup(shape, batch, plan, item)
    while item >= 0:
        following, passed = _claim_wanted(team, shape, batch, plan, items)
        if item < lookups:
            next_lookup = following if following < lookups else -1
            found, looked_at = _look_up(team, shape, batch, plan, buffers, item, next_lookup)
            rows += found
            keys += found
            index_bytes += looked_at
        else:
            part = plan.parts[item - lookups]
            read, heads = _exact_part(team, shape, columns, batch, buffers, part, (item - lookups) * group)
            rows += read
            keys += read * heads
        done += 1 + passed
        item = following
    totals = address_of(buffers.totals)
    atomic_add(totals + 8 * ROWS_READ, rows)
    atomic_add(totals + 8 * KEYS_SCORED, keys)
    atomic_add(totals + 8 * INDEX_BYTES, index_bytes)
    end_stage(team, 0, items, done)


@numba.njit(nogil=True)
def _sampled_part(team, shape, columns, batch, plan, buffers, slot):
    """Attention of one head over one part of its samples in a piece."""
    kind = shape.kind
    item, begin = np.int64(buffers.slots[slot, 0]), np.int64(buffers.slots[slot, 1])
    order, head = item // shape.heads, item % shape.heads
    end = min(np.int64(buffers.found[item]), begin + PART_SAMPLES)
    piece = batch.pieces[plan.sampled[order]]
    kv_head = head // (shape.heads // shape.kv_heads)
    keys, key_row = piece[KEYS] + kv_head * piece[KEY_HEAD], piece[KEY_ROW]
    values, value_row = piece[VALUES] + kv_head * piece[VALUE_HEAD], piece[VALUE_ROW]
    ids = address_of(buffers.ids) + 2 * (plan.ids_at[order, 0] + plan.ids_at[order, 1] * head)
    for index in range(begin, min(begin + AHEAD_ROWS, end)):
        fetch_sample(kind, columns, keys, key_row, values, value_row, ids, index)
    query, sums = address_of(buffers.query[team.me]), address_of(buffers.sums[team.me])
    scores, rescale = address_of(buffers.scores[team.me]), address_of(buffers.state[team.me])
    to_unit, inverse_norm = prepare_query(
        kind, shape.query_kind, _query_at(shape, batch, piece, head), shape.dim, query
    )
    to_logit = to_unit * shape.scale
    if column_bytes(kind) == 1:
        to_logit *= load_float32(piece[KEY_SCALE] + 4 * kv_head)
    buffers.sums[team.me, 0, :] = np.float32(0.0)
    top, mass = np.float32(-np.inf), np.float32(0.0)
    for at in range(begin, end, BLOCK_ROWS):
        to = min(at + BLOCK_ROWS, end)
        score_samples(kind, columns, keys, key_row, values, value_row, ids, at, to, end, query, scores)
        highest = weigh_samples(scores, to - at, batch.logs, to_logit, to_unit * inverse_norm)
        factor = np.float32(1.0)
        if highest > top:
            factor = shrink(top, highest)
            top = highest
        mass = mass * factor + exponentiate(scores, to - at, top)
        store_float32(rescale, factor)
        add_samples(kind, columns, values, value_row, ids, at, to, scores, rescale, sums)
    write_partial(
        kind, sums, mass, top, piece[VALUE_SCALE] + 4 * shape.dim * kv_head, shape.dim,
        address_of(buffers.out[slot]), address_of(buffers.lse) + 4 * slot,
    )  # fmt: skip


@numba.njit(nogil=True)
def _query_at(shape, batch, piece, head):
    bytes_ = column_bytes(shape.query_kind) * shape.dim
    return batch.queries + bytes_ * (piece[REQUEST] * shape.heads + head)


@numba.njit(nogil=True)
def _second_stage(team, shape, columns, batch, plan, buffers):
    exact = len(plan.parts) * (shape.heads // shape.kv_heads)
    items, done = atomic_load(address_of(buffers.totals)) - exact, 0
    item = claim(team, 1, items)
    while item >= 0:
        _sampled_part(team, shape, columns, batch, plan, buffers, exact + item)
        done += 1
        item = claim(team, 1, items)
    end_stage(team, 1, items, done)


@numba.njit(nogil=True)
def _exact_part(team, shape, columns, batch, buffers, part, first_slot):
    """Attention of the wanted heads of a group over rows of an exact piece that are not excluded, in blocks that stay
    in the first cache. Returns how many rows it read, and for how many heads."""
    kind, dim = shape.kind, shape.dim
    group, piece, kv_head = shape.heads // shape.kv_heads, batch.pieces[part[0]], np.int64(part[1])
    keys, values = piece[KEYS] + kv_head * piece[KEY_HEAD], piece[VALUES] + kv_head * piece[VALUE_HEAD]
    query, sums = address_of(buffers.query[team.me]), address_of(buffers.sums[team.me])
    scores, state = address_of(buffers.scores[team.me]), buffers.state[team.me]
    top, mass, to_logit = state[0], state[1], state[2]
    key_scale = load_float32(piece[KEY_SCALE] + 4 * kv_head) if column_bytes(kind) == 1 else np.float32(1.0)
    members = 0
    for head in range(kv_head * group, kv_head * group + group):
        if _is_wanted(shape, batch, piece[REQUEST], head):
            at = _query_at(shape, batch, piece, head)
            to_unit, _ = prepare_query(kind, shape.query_kind, at, dim, query + 4 * dim * members)
            to_logit[members] = to_unit * shape.scale * key_scale
            top[members] = -np.inf
            mass[members] = 0.0
            members += 1
    buffers.sums[team.me, :, :] = np.float32(0.0)
    excluded, to_run = _excluded_at(shape, batch, piece[REQUEST], kv_head), piece[RUN_BEGIN] - piece[BEGIN]
    read, begin, last = 0, np.int64(part[2]), np.int64(part[3])
    while begin < last:
        begin, end = next_covered(excluded, batch.words, begin + to_run, last + to_run)
        begin, end = begin - to_run, end - to_run
        read += end - begin
        for at in range(begin, end, BLOCK_ROWS):
            key, value = keys + at * piece[KEY_ROW], values + at * piece[VALUE_ROW]
            count = min(BLOCK_ROWS, end - at)
            _exact_block(shape, columns, piece, key, value, count, members, query, sums, scores, state)
        begin = end
    member = 0
    for head in range(kv_head * group, kv_head * group + group):
        slot = first_slot + head % group
        if read == 0:
            buffers.lse[slot] = -np.inf
        elif _is_wanted(shape, batch, piece[REQUEST], head):
            write_partial(
                kind, sums + 4 * dim * member, mass[member], top[member], piece[VALUE_SCALE] + 4 * dim * kv_head, dim,
                address_of(buffers.out[slot]), address_of(buffers.lse) + 4 * slot,
            )  # fmt: skip
            member += 1
    return read, members


@numba.njit(nogil=True)
def _exact_block(shape, columns, piece, key, value, count, members, query, sums, scores, state):
    """Add `count` rows, from the addresses of the first key and value on, to what `members` queries have so far."""
    kind, dim, member = shape.kind, shape.dim, 0
    while member < members:
        left, query_at, sums_at = members - member, query + 4 * dim * member, sums + 4 * dim * member
        rescale = address_of(state[3]) + 4 * member
        if left >= 4:
            _score_four(kind, columns, key, piece[KEY_ROW], count, query_at, 4 * dim, scores)
            _weigh(state, member, 4, scores, count)
            _add_four(kind, columns, value, piece[VALUE_ROW], count, scores, rescale, sums_at)
            member += 4
        elif left >= 2:
            _score_two(kind, columns, key, piece[KEY_ROW], count, query_at, 4 * dim, scores)
            _weigh(state, member, 2, scores, count)
            _add_two(kind, columns, value, piece[VALUE_ROW], count, scores, rescale, sums_at)
            member += 2
        else:
            _score_one(kind, columns, key, piece[KEY_ROW], count, query_at, 4 * dim, scores)
            _weigh(state, member, 1, scores, count)
            _add_one(kind, columns, value, piece[VALUE_ROW], count, scores, rescale, sums_at)
            member += 1


@numba.njit(nogil=True)
def _weigh(state, first, members, scores, count):
    """Products of a block of rows to weights, for some members of a group."""
    for member in range(members):
        at, head = scores + 4 * BLOCK_ROWS * member, first + member
        highest = scale_scores(at, count, state[2, head])
        state[3, head] = np.float32(1.0)
        if highest > state[0, head]:
            state[3, head] = shrink(state[0, head], highest)
            state[0, head] = highest
        state[1, head] = state[1, head] * state[3, head] + exponentiate(at, count, state[0, head])


@numba.njit(nogil=True)
def _slots_of(shape, plan, buffers, pieces, index, head):
    """(first slot, slots, step between them) of a piece's partials of a head."""
    group, piece = shape.heads // shape.kv_heads, pieces[index]
    if piece[MODE] == SAMPLED:
        item = plan.ordinals[index] * shape.heads + head
        return np.int64(buffers.first_slot[item]), (buffers.found[item] + PART_SAMPLES - 1) // PART_SAMPLES, 1
    parts = (piece[END] - piece[BEGIN] + PART_ROWS - 1) // PART_ROWS
    return (plan.ordinals[index] + head // group * parts) * group + head % group, parts, group


@numba.njit(nogil=True)
def _centre_logit(shape, batch, piece, head):
    """What centring took from every logit of the piece: the query times the mean key."""
    if piece[CENTRE] == 0:
        return np.float32(0.0)
    query = _query_at(shape, batch, piece, head)
    centre = piece[CENTRE] + 4 * shape.dim * (head // (shape.heads // shape.kv_heads))
    product = 0.0
    for column in range(shape.dim):
        product += np.float64(load(shape.query_kind, query, column)) * load_float32(centre + 4 * column)
    return np.float32(product * shape.scale)


@numba.njit(nogil=True)
def _merge(team, shape, batch, plan, buffers, request, head):
    """Merge the partials of a request's pieces, for one head; none, if it is not wanted. Returns the tokens covered."""
    item, covered = request * shape.heads + head, 0
    first, last = plan.first_piece[request], plan.first_piece[request + 1]
    if not _is_wanted(shape, batch, request, head):
        last = first
    excluded = _excluded_at(shape, batch, request, head // (shape.heads // shape.kv_heads))
    top = np.float32(-np.inf)
    for index in range(first, last):
        piece = batch.pieces[index]
        tokens, run_begin = piece[END] - piece[BEGIN], piece[RUN_BEGIN]
        covered += tokens - count_excluded(excluded, batch.words, run_begin, run_begin + tokens)
        slot, slots, step = _slots_of(shape, plan, buffers, batch.pieces, index, head)
        shift = _centre_logit(shape, batch, piece, head)
        for at in range(slot, slot + slots * step, step):
            buffers.lse[at] += shift
            if buffers.lse[at] > top:
                top = buffers.lse[at]
    sums, mass, parts = buffers.sums[team.me, 0], 0.0, 0
    sums[:] = np.float32(0.0)
    for index in range(first, last):
        slot, slots, step = _slots_of(shape, plan, buffers, batch.pieces, index, head)
        for at in range(slot, slot + slots * step, step):
            if buffers.lse[at] == -np.inf:  # of rows that are all excluded
                continue
            parts += 1
            weight = math.exp(np.float64(buffers.lse[at]) - top)
            mass += weight
            values, weight32 = buffers.out[at], np.float32(weight)
            for column in range(shape.dim):
                sums[column] += weight32 * values[column]
    inverse = np.float32(1.0 / mass) if parts else np.float32(0.0)
    for column in range(shape.dim):
        store_float32(batch.out + 4 * (shape.dim * item + column), sums[column] * inverse)
    store_float32(batch.lse + 4 * item, np.float32(top + math.log(mass)) if parts else top)
    if batch.covered != 0:
        store_int32(batch.covered + 4 * item, covered)
    return covered


@numba.njit(nogil=True)
def _note_time(totals, column):
    """The first thread past a stage says when; a thread that comes late finds it said."""
    if totals[column] == 0:
        totals[column] = now_ns()


@numba.njit(nogil=True)
def attend_as(me, threads, shape, columns, batch, plan, buffers):
    """All that thread `me` does."""
    team = Team(buffers.counters, me, threads)
    _first_stage(team, shape, columns, batch, plan, buffers)
    _note_time(buffers.totals, LOOKED_UP_NS)
    _second_stage(team, shape, columns, batch, plan, buffers)
    _note_time(buffers.totals, SAMPLED_NS)
    items, done, covered = batch.requests * shape.heads, 0, 0
    item = claim(team, 2, items)
    while item >= 0:
        covered += _merge(team, shape, batch, plan, buffers, item // shape.heads, item % shape.heads)
        done += 1
        item = claim(team, 2, items)
    atomic_add(address_of(buffers.totals) + 8 * TOKENS_COVERED, covered)
    if end_stage(team, 2, items, done) and batch.answered != 0:  # not at the region's end, which waits for all to leave
        store_release_int32(batch.answered, batch.stamp)

"""Attend over one part: some samples of a head in a piece, or some rows of an exact piece for all heads of a group.

A part is what one thread claims at a time. Its partial depends on its own rows alone, and a head's partial on no other
query, except for rounding: many queries of a group are multiplied as tiles where the processor has them, few as
vectors. Bytes moved: a key and a value for each sample; of an exact part, each row that is not excluded once, for all
queries of a group and of the requests that share it.
"""

import numpy as np

from cpu.exclusions import excludes_alike, next_covered
from cpu.pieces import (
    BEGIN,
    FOLLOWERS,
    KEY_HEAD,
    KEY_ROW,
    KEY_SCALE,
    KEYS,
    REQUEST,
    RUN_BEGIN,
    VALUE_HEAD,
    VALUE_ROW,
    VALUE_SCALE,
    VALUES,
)
from cpu.row_products import (
    AHEAD_BYTES,
    AHEAD_ROWS,
    BLOCK_ROWS,
    LINE_BYTES,
    add_rows,
    add_samples,
    column_bytes,
    fetch_sample,
    multiplies_pairs,
    score_rows,
    score_samples,
    stored_bytes,
)
from cpu.sample_errors import add_deviations, add_variances, keep_products, note_top
from cpu.softmax import exponentiate, prepare_query, scale_scores, shrink, weigh_samples, write_partial
from cpu.tile_attention import attend_tiles, prepare_tiles, room_at
from cpu.tile_products import multiplies_tiles, where_tiled
from cpu.workspace import PART_SAMPLES, excluded_at, is_full, is_wanted, query_at
from transfer.simd.inner import inner
from transfer.simd.memory import copy_bytes, load_float32, store_float32
from transfer.simd.vectors import address_of

FEW_MEMBERS = 4  # up to so many queries vectors are faster than tiles, which cost the same for 16
SPREAD_PASSES = 4  # from so many passes over a block on, each pass prefetches a share of the next block

_score_four, _score_two, _score_one = score_rows(4), score_rows(2), score_rows(1)
_pair_four, _pair_two, _pair_one = score_rows(4, True), score_rows(2, True), score_rows(1, True)
_add_four, _add_two, _add_one = add_rows(4), add_rows(2), add_rows(1)
_prepare_tiles, _attend_tiles = where_tiled(prepare_tiles), where_tiled(attend_tiles)


@inner
def attend_samples(team, shape, columns, batch, plan, buffers, slot):
    """Attend with one head over one part of its samples in a piece."""
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
        kind, shape.query_kind, query_at(shape, batch, piece[REQUEST], head), shape.dim, query
    )  # fmt: skip
    to_logit = to_unit * shape.scale
    if column_bytes(kind) == 1:
        to_logit *= load_float32(piece[KEY_SCALE] + 4 * kv_head)
    buffers.sums[team.me, 0, :] = np.float32(0.0)
    top, mass, in_full = np.float32(-np.inf), np.float32(0.0), is_full(shape, batch, piece[REQUEST], head)
    first_id, to_product = plan.ids_at[order, 0] + plan.ids_at[order, 1] * head, np.float32(0.0)
    if batch.errors != 0:
        to_product = _aim(team, shape, buffers, piece, kv_head)
        buffers.deviations[slot] = np.float32(0.0)
    for at in range(begin, end, BLOCK_ROWS):
        to, before = min(at + BLOCK_ROWS, end), top
        score_samples(kind, columns, keys, key_row, values, value_row, ids, at, to, end, query, scores)
        if in_full:
            keep_products(scores)
            highest = scale_scores(scores, to - at, to_logit)
        else:
            highest = weigh_samples(scores, to - at, batch.logs, to_logit, to_unit * inverse_norm)
        factor = np.float32(1.0)
        if highest > top:
            factor = shrink(top, highest)
            top = highest
        mass = mass * factor + exponentiate(scores, to - at, top)
        store_float32(rescale, factor)
        add_samples(kind, columns, values, value_row, ids, at, to, scores, rescale, sums)
        if batch.errors != 0:
            noted, count, third = buffers.deviations[slot], to - at, scores + 8 * BLOCK_ROWS
            aim, fifth = address_of(buffers.aims[team.me, 1]), scores + 16 * BLOCK_ROWS
            if top > before:
                note_top(noted, before, top)
                if in_full:
                    note_top(noted, before, top)  # squares
            score_samples(kind, columns, values, value_row, values, value_row, ids, at, to, to, aim, fifth)
            if in_full:
                weigh_samples(third, count, batch.logs, to_logit, to_unit * inverse_norm)
                exponentiate(third, count, top)
                add_variances(noted, scores, third, fifth, count, to_product)
            else:
                add_deviations(noted, buffers.marks, first_id + at, scores, fifth, count, to_product)
    write_partial(
        kind, sums, mass, top, piece[VALUE_SCALE] + 4 * shape.dim * kv_head, shape.dim,
        address_of(buffers.out[slot]), address_of(buffers.lse) + 4 * slot,
    )  # fmt: skip


@inner
def _aim(team, shape, buffers, piece, kv_head):
    """Prepare the direction for a piece's values; return the factor of products with it."""
    aims = buffers.aims[team.me]
    for column in range(shape.dim):
        aims[0, column] = buffers.direction[column]
        if column_bytes(shape.kind) == 1:
            aims[0, column] *= load_float32(piece[VALUE_SCALE] + 4 * (shape.dim * kv_head + column))
    to_unit, _ = prepare_query(shape.kind, np.float32(0.0), address_of(aims[0]), shape.dim, address_of(aims[1]))
    return to_unit


@inner
def attend_rows(team, shape, columns, batch, buffers, part):
    """Attend over rows of an exact piece, in blocks that stay in the first cache, with the wanted heads of a group of
    all requests that share it. Neighbouring requests that exclude the same blocks read them together. Return how many
    rows were read, and how many keys were scored.
    """
    piece, kv_head = batch.pieces[part[0]], np.int64(part[1])
    group, first = shape.heads // shape.kv_heads, piece[REQUEST]
    to_run = piece[RUN_BEGIN] - piece[BEGIN]
    begin, end = np.int64(part[2]) + to_run, np.int64(part[3]) + to_run
    last = first + piece[FOLLOWERS] + 1
    request, rows, keys = first, 0, 0
    while request < last:
        following, excluded = request + 1, excluded_at(shape, batch, request, kv_head)
        while following < last and excludes_alike(
            excluded, excluded_at(shape, batch, following, kv_head), batch.words, begin, end
        ):
            following += 1
        slot = np.int64(part[4]) + (request - first) * group
        read, members = _attend_together(team, shape, columns, batch, buffers, part, request, following, slot)
        rows += read
        keys += read * members
        request = following
    return rows, keys


@inner
def _attend_together(team, shape, columns, batch, buffers, part, first, last, first_slot):
    """Attend with the wanted heads of a group of requests `[first, last)`, which exclude the same blocks. Return how
    many rows were read, and for how many heads.
    """
    kind, dim = shape.kind, shape.dim
    group, piece, kv_head = shape.heads // shape.kv_heads, batch.pieces[part[0]], np.int64(part[1])
    keys, values = piece[KEYS] + kv_head * piece[KEY_HEAD], piece[VALUES] + kv_head * piece[VALUE_HEAD]
    query, sums = address_of(buffers.query[team.me]), address_of(buffers.sums[team.me])
    scores, state = address_of(buffers.scores[team.me]), buffers.state[team.me]
    top, mass, to_logit = state[0], state[1], state[2]
    key_scale = load_float32(piece[KEY_SCALE] + 4 * kv_head) if column_bytes(kind) == 1 else np.float32(1.0)
    num_wanted = 0
    for request in range(first, last):
        for head in range(kv_head * group, kv_head * group + group):
            num_wanted += is_wanted(shape, batch, request, head)
    is_tiled = multiplies_tiles(columns) != 0 and num_wanted > FEW_MEMBERS
    members = np.int64(0)  # not a literal, for which numba would compile the callees once more
    for request in range(first, last):
        for head in range(kv_head * group, kv_head * group + group):
            if is_wanted(shape, batch, request, head):
                at, to = query_at(shape, batch, request, head), query + 4 * dim * members
                to_unit = np.float32(1.0)
                if is_tiled or multiplies_pairs(kind, shape.query_kind):
                    copy_bytes(to, at, 2 * dim)
                else:
                    to_unit, _ = prepare_query(kind, shape.query_kind, at, dim, to)
                to_logit[members] = to_unit * shape.scale * key_scale
                top[members] = -np.inf
                mass[members] = 0.0
                members += 1
    room = room_at(address_of(buffers.room[team.me]))
    room_for = members
    if is_tiled:
        room_for = _prepare_tiles(columns, room, query, 4 * dim, members, state, shape.scale * key_scale)
    buffers.sums[team.me, :room_for, :] = np.float32(0.0)
    excluded, to_run = excluded_at(shape, batch, first, kv_head), piece[RUN_BEGIN] - piece[BEGIN]
    read, begin, end_of_part = 0, np.int64(part[2]), np.int64(part[3])
    while members > 0 and begin < end_of_part:
        begin, end = next_covered(excluded, batch.words, begin + to_run, end_of_part + to_run)
        begin, end = begin - to_run, end - to_run
        read += end - begin
        for at in range(begin, end, BLOCK_ROWS):
            key, value = keys + at * piece[KEY_ROW], values + at * piece[VALUE_ROW]
            count = min(BLOCK_ROWS, end - at)
            if is_tiled:
                _attend_tiles(columns, shape, piece, key, value, count, members, sums, state, room)
            else:
                _exact_block(columns, shape, piece, key, value, count, members, query, sums, scores, state)
        begin = end
    member = 0
    for request in range(first, last):
        for head in range(kv_head * group, kv_head * group + group):
            slot = first_slot + (request - first) * group + head % group
            if read == 0:
                buffers.lse[slot] = -np.inf
            elif is_wanted(shape, batch, request, head):
                write_partial(
                    kind, sums + 4 * dim * member, mass[member], top[member], piece[VALUE_SCALE] + 4 * dim * kv_head,
                    dim, address_of(buffers.out[slot]), address_of(buffers.lse) + 4 * slot,
                )  # fmt: skip
                member += 1
    return read, members


@inner
def _exact_block(columns, shape, piece, key, value, count, members, query, sums, scores, state):
    """Add `count` rows to the sums of `members` queries. key, value: addresses of the first key and value.

    Each pass over the block serves four queries, and prefetches rows. With few passes, the first one prefetches rows
    that follow soon. With more, each pass prefetches a share of the next block's lines, so that memory is always busy.
    """
    kind, dim, member = shape.kind, shape.dim, np.int64(0)
    all_lines = (stored_bytes(kind, columns) + LINE_BYTES - 1) // LINE_BYTES
    passes, lines, ahead, first_line = (members + 3) // 4, all_lines, np.int64(AHEAD_BYTES), np.int64(0)
    if passes >= SPREAD_PASSES:
        lines, ahead = (all_lines + passes - 1) // passes, BLOCK_ROWS * piece[KEY_ROW]
    while member < members:
        left, own_query, own_sums = members - member, query + 4 * dim * member, sums + 4 * dim * member
        rescale, at = address_of(state[3]) + 4 * member, ahead + LINE_BYTES * first_line
        lines = min(lines, all_lines - first_line)
        first_line += lines
        if left >= 4:
            if multiplies_pairs(kind, shape.query_kind):
                _pair_four(kind, columns, key, piece[KEY_ROW], count, own_query, 4 * dim, scores, at, lines)
            else:
                _score_four(kind, columns, key, piece[KEY_ROW], count, own_query, 4 * dim, scores, at, lines)
            _weigh(state, member, 4, scores, count)
            _add_four(kind, columns, value, piece[VALUE_ROW], count, scores, rescale, own_sums, at, lines)
            member += 4
        elif left >= 2:
            if multiplies_pairs(kind, shape.query_kind):
                _pair_two(kind, columns, key, piece[KEY_ROW], count, own_query, 4 * dim, scores, at, lines)
            else:
                _score_two(kind, columns, key, piece[KEY_ROW], count, own_query, 4 * dim, scores, at, lines)
            _weigh(state, member, 2, scores, count)
            _add_two(kind, columns, value, piece[VALUE_ROW], count, scores, rescale, own_sums, at, lines)
            member += 2
        else:
            if multiplies_pairs(kind, shape.query_kind):
                _pair_one(kind, columns, key, piece[KEY_ROW], count, own_query, 4 * dim, scores, at, lines)
            else:
                _score_one(kind, columns, key, piece[KEY_ROW], count, own_query, 4 * dim, scores, at, lines)
            _weigh(state, member, 1, scores, count)
            _add_one(kind, columns, value, piece[VALUE_ROW], count, scores, rescale, own_sums, at, lines)
            member += 1


@inner
def _weigh(state, first, members, scores, count):
    """Turn products of a block of rows into weights, for some members of a group."""
    for member in range(members):
        at, head = scores + 4 * BLOCK_ROWS * member, first + member
        highest = scale_scores(at, count, state[2, head])
        state[3, head] = np.float32(1.0)
        if highest > state[0, head]:
            state[3, head] = shrink(state[0, head], highest)
            state[0, head] = highest
        state[1, head] = state[1, head] * state[3, head] + exponentiate(at, count, state[0, head])

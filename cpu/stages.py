"""Run one thread's share of a layer's attention over pieces: lookups and exact parts, then sampled parts, then the
merge.

The partial of a piece and a head depends on its samples alone, and partials are merged in the order of the table, so
results do not depend on the number of threads. Bytes moved: for a sampled head, its buckets and then a key and a value
for each sample; for an exact piece, each key and value once for all heads of a group and all requests that share it.
Heads that are not wanted and rows that are excluded are not read.
"""

import math

import numba
import numpy as np

from cpu.exclusions import count_excluded
from cpu.lookup import COUNTER_MARGIN, count_bytes, fetch_bucket, fetch_offsets, find_samples, list_covered
from cpu.part_attention import attend_rows, attend_samples
from cpu.pieces import BEGIN, CENTRE, END, FOLLOWERS, MODE, REQUEST, RUN_BEGIN, SAMPLED
from cpu.sample_errors import ERRORS, MASSES, add_part, mark_groups, write_errors
from cpu.tile_attention import room_at
from cpu.tile_products import close_tiles, open_tiles
from cpu.workspace import (
    EXACT_SLOTS,
    INDEX_BYTES,
    KEYS_SCORED,
    LOOKED_UP_NS,
    PART_ROWS,
    PART_SAMPLES,
    ROWS_READ,
    SAMPLED_NS,
    TOKENS_COVERED,
    WORK_ITEMS,
    excluded_at,
    is_full,
    is_wanted,
    query_at,
)
from transfer.simd.inner import inner
from transfer.simd.memory import load_float32, store_float32, store_int32, store_release_int32
from transfer.simd.team import Team, atomic_add, atomic_load, claim, claim_own, end_stage, now_ns
from transfer.simd.vectors import address_of, load


@inner
def _codes_at(shape, batch, piece, head):
    return batch.codes + 2 * shape.tables * (piece[REQUEST] * shape.heads + head)


@inner
def _look_up(team, shape, batch, plan, buffers, item, following):
    """Look up the samples of `item`, a sampled piece and head, and cut them into parts. following: the item of this
    thread's next lookup, or -1. Return the number of samples, and the bytes of the index that were read.
    """
    group = shape.heads // shape.kv_heads
    order, head = item // shape.heads, item % shape.heads
    piece = batch.pieces[plan.sampled[order]]
    first_id = plan.ids_at[order, 0] + plan.ids_at[order, 1] * head
    ids, excluded = address_of(buffers.ids) + 2 * first_id, excluded_at(shape, batch, piece[REQUEST], head // group)
    next_piece, next_head, next_codes = piece, 0, 0
    if following >= 0:
        next_piece = batch.pieces[plan.sampled[following // shape.heads]]
        next_head = following % shape.heads
        next_codes = _codes_at(shape, batch, next_piece, next_head)
    looked_at = 0
    if is_full(shape, batch, piece[REQUEST], head):
        found = list_covered(piece, excluded, batch.words, ids)
    else:
        found = find_samples(
            piece, head // group, _codes_at(shape, batch, piece, head), excluded, batch.words,
            next_piece, next_head // group, next_codes, shape.tables, shape.mask,
            address_of(buffers.counts[team.me]) + COUNTER_MARGIN, buffers.spans[team.me], ids,
        )  # fmt: skip
        looked_at = count_bytes(piece, shape.tables, buffers.spans[team.me])
        if batch.errors != 0:
            digits, spans = address_of(buffers.digits[team.me]), buffers.spans[team.me]
            mark_groups(piece, shape.tables, spans, digits, ids, found, buffers.marks, first_id)
    parts = (found + PART_SAMPLES - 1) // PART_SAMPLES
    slot = atomic_add(address_of(buffers.totals), parts) if parts else 0
    buffers.found[item] = found
    buffers.first_slot[item] = slot
    for part in range(parts):
        buffers.slots[slot + part, 0] = item
        buffers.slots[slot + part, 1] = part * PART_SAMPLES
    return found, looked_at


@inner
def _warm_lookup(shape, batch, plan, item):
    piece = batch.pieces[plan.sampled[item // shape.heads]]
    head = item % shape.heads
    codes, kv_head = _codes_at(shape, batch, piece, head), head // (shape.heads // shape.kv_heads)
    fetch_offsets(piece, kv_head, codes, shape.tables, shape.mask)
    for table in range(shape.tables):
        fetch_bucket(piece, kv_head, codes, table, shape.mask)


@inner
def _claim_work(team, plan, items):
    """Claim the next lookup or exact part of this thread, or one of a slower thread; -1: none is left."""
    at = claim(team, 0, items)
    return np.int64(plan.work[at]) if at >= 0 else at


@inner
def _claim_own_work(team, plan, items):
    """Claim the next item of this thread alone; -1: none is left."""
    at = claim_own(team, 0, items)
    return np.int64(plan.work[at]) if at >= 0 else at


@numba.njit(nogil=True, inline="always")
def _first_stage(team, shape, columns, batch, plan, buffers):
    """Run lookups and exact parts, and add up rows, keys and index bytes for `cpu.host_attention.HostPartial`."""
    lookups = len(plan.sampled) * shape.heads
    items, rows, keys, index_bytes = buffers.totals[WORK_ITEMS], 0, 0, 0
    item, done = _claim_work(team, plan, items), 0
    is_cold = True
    while item >= 0:
        if is_cold and item < lookups:
            _warm_lookup(shape, batch, plan, item)
        following = _claim_own_work(team, plan, items)
        if item < lookups:
            next_lookup = following if following < lookups else -1
            found, looked_at = _look_up(team, shape, batch, plan, buffers, item, next_lookup)
            rows += found
            keys += found
            index_bytes += looked_at
        else:
            read, scored = attend_rows(team, shape, columns, batch, buffers, plan.parts[item - lookups])
            rows += read
            keys += scored
        done += 1
        is_cold, item = following < 0, following
        if item < 0:
            item = _claim_work(team, plan, items)
    totals = address_of(buffers.totals)
    atomic_add(totals + 8 * ROWS_READ, rows)
    atomic_add(totals + 8 * KEYS_SCORED, keys)
    atomic_add(totals + 8 * INDEX_BYTES, index_bytes)
    end_stage(team, 0, items, done)


@numba.njit(nogil=True, inline="always")
def _second_stage(team, shape, columns, batch, plan, buffers):
    exact = buffers.totals[EXACT_SLOTS]
    items, done = atomic_load(address_of(buffers.totals)) - exact, 0
    item = claim(team, 1, items)
    while item >= 0:
        attend_samples(team, shape, columns, batch, plan, buffers, exact + item)
        done += 1
        item = claim(team, 1, items)
    end_stage(team, 1, items, done)


@inner
def _slots_of(shape, plan, buffers, pieces, index, place, head):
    """Return (first slot, number of slots, step between them) of a head's partials in a piece. place: the request's
    index among those that share the piece.
    """
    group, piece = shape.heads // shape.kv_heads, pieces[index]
    if piece[MODE] == SAMPLED:
        item = plan.ordinals[index] * shape.heads + head
        return np.int64(buffers.first_slot[item]), (buffers.found[item] + PART_SAMPLES - 1) // PART_SAMPLES, 1
    parts = (piece[END] - piece[BEGIN] + PART_ROWS - 1) // PART_ROWS
    members = group * (piece[FOLLOWERS] + 1)
    return plan.ordinals[index] + head // group * parts * members + place * group + head % group, parts, members


@inner
def _centre_logit(shape, batch, piece, request, head):
    """Return the product of the query and the piece's centre, which stored keys lack in each logit."""
    if piece[CENTRE] == 0:
        return np.float32(0.0)
    query = query_at(shape, batch, request, head)
    centre = piece[CENTRE] + 4 * shape.dim * (head // (shape.heads // shape.kv_heads))
    product = 0.0
    for column in range(shape.dim):
        product += np.float64(load(shape.query_kind, query, column)) * load_float32(centre + 4 * column)
    return np.float32(product * shape.scale)


@numba.njit(nogil=True, inline="always")
def _merge(team, shape, batch, plan, buffers, request, head):
    """Merge the partials of a request's pieces for one head, if it is wanted. Return the tokens covered."""
    item, covered = request * shape.heads + head, 0
    first, last, place = np.int64(plan.reads[request, 0]), np.int64(plan.reads[request, 1]), plan.reads[request, 2]
    if not is_wanted(shape, batch, request, head):
        last = first
    excluded = excluded_at(shape, batch, request, head // (shape.heads // shape.kv_heads))
    top = np.float32(-np.inf)
    for index in range(first, last):
        piece = batch.pieces[index]
        tokens, run_begin = piece[END] - piece[BEGIN], piece[RUN_BEGIN]
        covered += tokens - count_excluded(excluded, batch.words, run_begin, run_begin + tokens)
        slot, slots, step = _slots_of(shape, plan, buffers, batch.pieces, index, place, head)
        shift = _centre_logit(shape, batch, piece, request, head)
        for at in range(slot, slot + slots * step, step):
            buffers.lse[at] += shift
            if batch.errors != 0 and piece[MODE] == SAMPLED:
                buffers.deviations[at, MASSES, 0] += shift
            if buffers.lse[at] > top:
                top = buffers.lse[at]
    sums, mass, parts = buffers.sums[team.me, 0], 0.0, 0
    sums[:] = np.float32(0.0)
    for index in range(first, last):
        slot, slots, step = _slots_of(shape, plan, buffers, batch.pieces, index, place, head)
        for at in range(slot, slot + slots * step, step):
            if buffers.lse[at] == -np.inf:  # all its rows are excluded
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
    if batch.errors != 0:
        _note_errors(team, shape, batch, plan, buffers, request, head, first, last, top, mass)
    return covered


@inner
def _note_errors(team, shape, batch, plan, buffers, request, head, first, last, top, mass):
    """Write the errors of an answer whose weights add up to `mass` under the maximum `top`; zeros if no piece of it is
    sampled.
    """
    item, totals, in_full = request * shape.heads + head, buffers.noted[team.me], is_full(shape, batch, request, head)
    errors, parts = batch.errors + 4 * ERRORS * item, 0
    totals[:] = np.float32(0.0)
    for column in range(ERRORS):
        store_float32(errors + 4 * column, np.float32(0.0))
    for index in range(first, last):
        if batch.pieces[index][MODE] != SAMPLED:
            continue
        slot, slots, step = _slots_of(shape, plan, buffers, batch.pieces, index, 0, head)
        for at in range(slot, slot + slots * step, step):
            scale = np.float32(math.exp(np.float64(buffers.deviations[at, MASSES, 0]) - top))
            add_part(totals, buffers.deviations[at], scale, in_full)
            parts += 1
    if parts > 0:
        out = batch.out + 4 * shape.dim * item
        write_errors(totals, mass, out, buffers.direction, shape.dim, in_full, shape.tables, errors)


@inner
def _note_time(totals, column):
    """Write the time at which the first thread passes a stage; later threads change nothing."""
    if totals[column] == 0:
        totals[column] = now_ns()


@numba.njit(nogil=True, inline="always")
def attend_as(me, threads, shape, columns, batch, plan, buffers):
    """Run all of thread `me`'s share."""
    team = Team(buffers.counters, me, threads)
    open_tiles(columns, room_at(address_of(buffers.room[me])))
    _first_stage(team, shape, columns, batch, plan, buffers)
    _note_time(buffers.totals, LOOKED_UP_NS)
    close_tiles(columns)
    _second_stage(team, shape, columns, batch, plan, buffers)
    _note_time(buffers.totals, SAMPLED_NS)
    items, done, covered = batch.requests * shape.heads, 0, 0
    item = claim(team, 2, items)
    while item >= 0:
        covered += _merge(team, shape, batch, plan, buffers, item // shape.heads, item % shape.heads)
        done += 1
        item = claim(team, 2, items)
    atomic_add(address_of(buffers.totals) + 8 * TOKENS_COVERED, covered)
    if end_stage(team, 2, items, done) and batch.answered != 0:  # earlier than the region's end, which awaits all
        store_release_int32(batch.answered, batch.stamp)

"""Plan one layer's attention: its lookups and exact parts, and where their results go.

The leading thread makes the plan from the table of pieces, in a microsecond or two, before it waits for the device's
request. The plan has the order of the table, so partials merge in one order whichever thread computes them.
"""

import numpy as np

from cpu.context import (
    CODES,
    FLAGS,
    HEADS,
    KV_HEADS,
    NUM_IDS,
    NUM_PARTS,
    NUM_PIECES,
    NUM_SAMPLED,
    NUM_SLOTS,
    REQUESTS,
    ROOM_HEADS,
    ROOM_IDS,
    ROOM_PARTS,
    ROOM_PIECES,
    ROOM_REQUESTS,
    ROOM_SAMPLED,
    ROOM_SLOTS,
    STAMP,
    open_context,
    open_row,
)
from cpu.lookup import room_for
from cpu.pieces import BEGIN, END, FOLLOWERS, MODE, REQUEST, SAMPLED, TOKENS
from cpu.workspace import (
    BEGAN_NS,
    EXACT_SLOTS,
    MOST_MEMBERS,
    PART_ROWS,
    PART_SAMPLES,
    SLOTS_TAKEN,
    STAGES,
    WAITED_NS,
    WORK_ITEMS,
    is_wanted,
)
from transfer.exchange import LOOKS, await_rows
from transfer.simd.inner import inner
from transfer.simd.team import now_ns

PLANNED, NO_TABLE, NO_ROOM, NO_CODES, NOT_REQUESTED = range(5)  # outcomes of `make_plan`


@inner
def make_plan(context, kind, query_kind):
    """Write the room that the pieces need and, if there is as much, the plan's arrays (`cpu.workspace.Plan`). Return
    the outcome.

    Resets totals and counters of the region. With flags, waits for the host request; the outcome is NOT_REQUESTED if it
    has not come after LOOKS looks.
    """
    row = open_row(context)
    if not _count(row, open_context(context, kind, query_kind)[1].pieces):
        return NO_TABLE
    if row[NUM_SAMPLED] > 0 and row[CODES] == 0:
        return NO_CODES
    if not (
        row[REQUESTS] <= row[ROOM_REQUESTS]
        and row[NUM_PIECES] <= row[ROOM_PIECES]
        and row[NUM_SAMPLED] <= row[ROOM_SAMPLED]
        and row[NUM_PARTS] <= row[ROOM_PARTS]
        and row[NUM_IDS] <= row[ROOM_IDS]
        and row[NUM_SAMPLED] * row[HEADS] <= row[ROOM_HEADS]
        and row[NUM_SLOTS] <= row[ROOM_SLOTS]
    ):
        return NO_ROOM
    shape, batch, plan, buffers = open_context(context, kind, query_kind)
    exact_slots = _fill(shape, batch, plan)
    buffers.totals[:] = 0
    buffers.totals[SLOTS_TAKEN] = buffers.totals[EXACT_SLOTS] = exact_slots
    for counter in range(STAGES):
        buffers.counters[counter, :, 0] = 0
    planned_ns = now_ns()
    if row[FLAGS] != 0 and await_rows(row[FLAGS], row[REQUESTS], row[STAMP], LOOKS) >= 0:
        return NOT_REQUESTED
    buffers.totals[BEGAN_NS] = now_ns()
    buffers.totals[WAITED_NS] = buffers.totals[BEGAN_NS] - planned_ns
    buffers.totals[WORK_ITEMS] = _list_work(shape, batch, plan)
    return PLANNED


@inner
def _list_work(shape, batch, plan):
    """List the lookups and exact parts that some head wants, and return how many. The host request must be there."""
    count, lookups, group = 0, len(plan.sampled) * shape.heads, shape.heads // shape.kv_heads
    for order in range(len(plan.sampled)):
        request = batch.pieces[plan.sampled[order]][REQUEST]
        for head in range(shape.heads):
            if is_wanted(shape, batch, request, head):
                plan.work[count] = order * shape.heads + head
                count += 1
    for part in range(len(plan.parts)):
        piece, first = batch.pieces[plan.parts[part, 0]], np.int64(plan.parts[part, 1]) * group
        wanted = 0
        for request in range(piece[REQUEST], piece[REQUEST] + piece[FOLLOWERS] + 1):
            for head in range(first, first + group):
                wanted += is_wanted(shape, batch, request, head)
        if wanted > 0:
            plan.work[count] = lookups + part
            count += 1
    return count


@inner
def _count(row, pieces):
    """Count what a table needs: sampled pieces, exact parts, ids, slots of partials. Return False if requests are not
    in rising order, share pieces that cannot be shared, or have a range outside of its segment.
    """
    heads, kv_heads = row[HEADS], row[KV_HEADS]
    sampled, parts, ids, slots, last, last_followers = 0, 0, 0, 0, 0, -1
    for index in range(len(pieces)):
        piece = pieces[index]
        begin, end = piece[BEGIN], piece[END]
        request, followers = piece[REQUEST], piece[FOLLOWERS]
        if not (last <= request < row[REQUESTS] - followers and 0 <= begin <= end <= piece[TOKENS]):
            return False
        if last_followers >= 0 and (
            followers != last_followers if request == last else request <= last + last_followers
        ):
            return False
        if followers < 0 or (piece[MODE] == SAMPLED and followers > 0):
            return False
        if (1 + followers) * (heads // kv_heads) > MOST_MEMBERS:
            return False
        last, last_followers = request, followers
        if piece[MODE] == SAMPLED:
            sampled += 1
            ids += room_for(begin, end) * heads
            slots += (end - begin + PART_SAMPLES - 1) // PART_SAMPLES * heads
        else:
            own = (end - begin + PART_ROWS - 1) // PART_ROWS
            parts += own * kv_heads
            slots += own * heads * (1 + followers)
    row[NUM_SAMPLED], row[NUM_PARTS] = sampled, parts
    row[NUM_IDS], row[NUM_SLOTS] = ids, slots
    return True


@inner
def _fill(shape, batch, plan):
    """Write the plan's arrays. Return the number of slots of exact parts."""
    pieces, group = batch.pieces, shape.heads // shape.kv_heads
    order, ids, part, slots = 0, 0, 0, 0
    plan.reads[:] = 0
    for index in range(len(pieces)):
        piece = pieces[index]
        for place in range(piece[FOLLOWERS] + 1):
            read = plan.reads[piece[REQUEST] + place]
            if read[1] == 0:
                read[0], read[2] = index, place
            read[1] = index + 1
        begin, end = piece[BEGIN], piece[END]
        if piece[MODE] == SAMPLED:
            plan.ordinals[index], plan.sampled[order] = order, index
            plan.ids_at[order, 0], plan.ids_at[order, 1] = ids, room_for(begin, end)
            ids += room_for(begin, end) * shape.heads
            order += 1
            continue
        plan.ordinals[index] = slots
        for kv_head in range(shape.kv_heads):
            for at in range(begin, end, PART_ROWS):
                plan.parts[part, 0], plan.parts[part, 1] = index, kv_head
                plan.parts[part, 2], plan.parts[part, 3] = at, min(at + PART_ROWS, end)
                plan.parts[part, 4] = slots
                slots += group * (piece[FOLLOWERS] + 1)
                part += 1
    return slots

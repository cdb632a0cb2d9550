"""Run the host requests of a step in one parallel region: one thread leads, and all of them attend, request after
request.

The leader plans a host request, waits until the device has sent it, opens a turn, attends with the others, and closes
the turn. The others attend in each turn that they find open and poll for the next one, so no thread has to be woken
between two layers. The leader writes the plan only while the turn is closed and no thread is inside. A turn ends when
its work is done, however many threads have joined; the leader alone would finish it. When the leader stops (a request
did not come, or its plan has no room), it marks the board as ended and the others leave.
"""

import numba

from cpu.context import (
    ALL_ATTENDED_NS,
    ALL_COVERED,
    ALL_INDEX_BYTES,
    ALL_KEYS,
    ALL_ROWS,
    ALL_WAITED_NS,
    BOARD,
    FLAGS,
    HOST_REQUEST_COLUMNS,
    HOST_REQUESTS,
    LIMIT_NS,
    NEXT_HOST_REQUEST,
    NUM_HOST_REQUESTS,
    OUTCOME,
    REQUESTS,
    STAMP,
    open_context,
    open_row,
)
from cpu.piece_plan import NOT_REQUESTED, PLANNED, make_plan
from cpu.stages import attend_as
from cpu.workspace import BEGAN_NS, INDEX_BYTES, KEYS_SCORED, ROWS_READ, TOKENS_COVERED, WAITED_NS
from transfer.exchange import LOOKS, await_rows
from transfer.simd.inner import inner
from transfer.simd.memory import load_int64
from transfer.simd.region import start
from transfer.simd.team import atomic_add, atomic_load, now_ns, spin_or_yield

TURN, INSIDE, BOARD_INT64 = 0, 8, 16  # the turn (odd: open) and, a line further, how many threads are inside it
ENDED = 1 << 40  # added to the turn when no more turns will come
_INSIDE_BYTES = 8 * INSIDE


@inner
def _open_turn(context, kind, query_kind):
    """Plan the next host request, wait for it and open its turn (leader). Return False, and let the others leave, if
    there is none.
    """
    row = open_row(context)
    if row[NEXT_HOST_REQUEST] < row[NUM_HOST_REQUESTS]:
        for column in range(HOST_REQUEST_COLUMNS):
            row[REQUESTS + column] = load_int64(
                row[HOST_REQUESTS] + 8 * (row[NEXT_HOST_REQUEST] * HOST_REQUEST_COLUMNS + column)
            )
        began_ns = now_ns()
        tried_ns = began_ns
        row[OUTCOME] = make_plan(context, kind, query_kind)
        while row[OUTCOME] == NOT_REQUESTED and now_ns() - began_ns < row[LIMIT_NS]:
            tried_ns = now_ns()
            row[OUTCOME] = make_plan(context, kind, query_kind)
        row[ALL_WAITED_NS] += tried_ns - began_ns
        if row[OUTCOME] == PLANNED:
            atomic_add(row[BOARD], 1)
            return True
    atomic_add(row[BOARD], ENDED)
    return False


@inner
def _close_turn(context, totals):
    """Close the turn (leader): wait until all threads have left it, and add up the cost of the host request."""
    row = open_row(context)
    atomic_add(row[BOARD], 1)
    row[ALL_ATTENDED_NS] += now_ns() - totals[BEGAN_NS]
    row[ALL_WAITED_NS] += totals[WAITED_NS]
    row[NEXT_HOST_REQUEST] += 1
    looks = 0
    while atomic_load(row[BOARD] + _INSIDE_BYTES) > 0:
        looks = spin_or_yield(looks)
    row[ALL_ROWS] += totals[ROWS_READ]
    row[ALL_KEYS] += totals[KEYS_SCORED]
    row[ALL_INDEX_BYTES] += totals[INDEX_BYTES]
    row[ALL_COVERED] += totals[TOKENS_COVERED]


@inner
def _enter_turn(context, seen):
    """Enter the next open turn that is not `seen` (follower), and return it; -1 if no more turns will come."""
    board, looks = open_row(context)[BOARD], 0
    while True:
        turn = atomic_load(board)
        if turn >= ENDED:
            return -1
        if turn % 2 == 1 and turn != seen:
            atomic_add(board + _INSIDE_BYTES, 1)
            if atomic_load(board) == turn:
                return turn
            atomic_add(board + _INSIDE_BYTES, -1)
        looks = spin_or_yield(looks)


@numba.njit(nogil=True, inline="always")
def take_turns(me, threads, context, kind, query_kind, columns):
    """Run thread `me`'s share in a region over the remaining host requests of a context; thread 0 leads."""
    turn = -1
    while True:
        if me == 0:
            if not _open_turn(context, kind, query_kind):
                return
        else:
            turn = _enter_turn(context, turn)
            if turn < 0:
                return
        shape, batch, plan, buffers = open_context(context, kind, query_kind)
        attend_as(me, threads, shape, columns, batch, plan, buffers)
        if me == 0:
            _close_turn(context, buffers.totals)
        else:
            atomic_add(open_row(context)[BOARD] + _INSIDE_BYTES, -1)


@inner
def start_when_requested(work, threads, context, gate):
    """Wait for a context's next host request on one thread; then shut the gate and start the region `work` as
    `transfer.simd.region.start` does. One thread waits, because a whole prefill unit may come before the request.

    gate: address of an int64. If no host request comes, the gate is shut as well, and the outcome is NOT_REQUESTED. No
    Python runs between the host request and its answer. Returns the nanoseconds of the wait.
    """
    row = open_row(context)
    host_request = row[HOST_REQUESTS] + 8 * HOST_REQUEST_COLUMNS * row[NEXT_HOST_REQUEST]
    flags, rows, stamp = (
        load_int64(host_request + 8 * (FLAGS - REQUESTS)),
        load_int64(host_request),
        load_int64(host_request + 8 * (STAMP - REQUESTS)),
    )
    began_ns, is_late = now_ns(), False
    while not is_late and await_rows(flags, rows, stamp, LOOKS) >= 0:
        is_late = now_ns() - began_ns > row[LIMIT_NS]
    waited_ns = now_ns() - began_ns
    atomic_add(gate, 1)
    if is_late:
        row[OUTCOME] = NOT_REQUESTED
    else:
        start(work, threads, context)
    return waited_ns

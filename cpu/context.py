"""Pack everything that the threads of a region need into one int64 row of numbers and addresses.

A parallel region takes one address in microseconds, and thirty arrays in most of a millisecond. `open_context` names
each column once. The code that fills the row keeps the arrays alive.
"""

import numba
import numpy as np

from cpu.lookup import COUNTER_MARGIN, SPANS
from cpu.pieces import COLUMNS as PIECE_COLUMNS
from cpu.row_products import BLOCK_ROWS
from cpu.sample_errors import COLUMNS as SUM_COLUMNS
from cpu.tile_attention import ROOM_BYTES
from cpu.workspace import MOST_MEMBERS, SCORE_BLOCKS, STATE, TOTALS, Batch, Buffers, Plan, Shape
from transfer.host_memory import STRIPE_TOKENS
from transfer.simd.inner import inner
from transfer.simd.region import pointer_to
from transfer.simd.team import COUNTER_INT64

# Columns: the shape; the current request (REQUESTS to NUM_PIECES: a row of `new_host_requests`); what its plan needs
# (from NUM_SAMPLED on); what there is room for; all requests, their progress and their cost
# (`cpu.host_request_turns`).
(
    HEADS, KV_HEADS, DIM, TABLES, MASK, SCALE, MAX_THREADS, LOGS,
    REQUESTS, QUERIES, CODES, WANTED, EXCLUDED, EXCLUDED_WORDS, OUT, LSE, COVERED, FLAGS, STAMP, ANSWERED,
    ERRORS_AT, FULL, PIECES, NUM_PIECES,
    NUM_SAMPLED, NUM_PARTS, NUM_IDS, NUM_SLOTS,
    ROOM_REQUESTS, ROOM_PIECES, ROOM_SAMPLED, ROOM_PARTS, ROOM_IDS, ROOM_HEADS, ROOM_SLOTS,
    HOST_REQUESTS, NUM_HOST_REQUESTS, NEXT_HOST_REQUEST, OUTCOME, LIMIT_NS, BOARD,
    ALL_ROWS, ALL_COVERED, ALL_KEYS, ALL_INDEX_BYTES, ALL_WAITED_NS, ALL_ATTENDED_NS, PLAN,
) = range(48)  # fmt: skip
HOST_REQUEST_COLUMNS = NUM_PIECES + 1 - REQUESTS
BUFFERS = PLAN + len(Plan._fields)
CONTEXT = BUFFERS + len(Buffers._fields)


def new_context() -> np.ndarray:
    return np.zeros(CONTEXT, np.int64)


def new_host_requests(count: int) -> np.ndarray:
    """Return int64 `[count, HOST_REQUEST_COLUMNS]` of zeros: the context's columns REQUESTS to NUM_PIECES, from 0 on.

    They hold addresses of queries, codes (0: none), the mask of wanted heads (0: all), exclusions (0: none) with their
    words per row and KV head, out, lse and covered (0: not counted); of flags and the answer's stamp (0: nobody waits),
    with the stamp; of errors and the mask of heads that read all keys (0: none); and of a table of pieces.
    """
    return np.zeros((count, HOST_REQUEST_COLUMNS), np.int64)


def set_shape(context: np.ndarray, shape: Shape, max_threads: int) -> None:
    """Write a shape to the context, without its types. The scale is written as the bits of a float64."""
    context[HEADS : MASK + 1] = shape.heads, shape.kv_heads, shape.dim, shape.tables, shape.mask
    context.view(np.float64)[SCALE] = shape.scale
    context[MAX_THREADS] = max_threads


def set_arrays(context: np.ndarray, first: int, arrays: Plan | Buffers) -> None:
    """Write the addresses of a plan's or of the buffers' arrays. first: PLAN or BUFFERS."""
    context[first : first + len(arrays)] = [array.ctypes.data for array in arrays]


@inner
def open_row(address):
    """Return the context as an array."""
    return numba.carray(pointer_to(address), (CONTEXT,), np.int64)


@inner
def open_context(address, kind, query_kind):
    """Return (shape, batch, plan, buffers) of `cpu.workspace`. kind, query_kind: scalars of the rows' and the queries'
    types.
    """
    c = open_row(address)
    scale = np.float32(numba.carray(pointer_to(address), (CONTEXT,), np.float64)[SCALE])
    shape = Shape(kind, query_kind, c[HEADS], c[KV_HEADS], c[DIM], c[TABLES], c[MASK], scale)
    pieces = numba.carray(pointer_to(c[PIECES]), (c[NUM_PIECES], PIECE_COLUMNS), np.int64)
    batch = Batch(
        pieces, c[REQUESTS], c[QUERIES], c[CODES], c[WANTED], c[EXCLUDED], c[EXCLUDED_WORDS], c[LOGS], c[OUT], c[LSE],
        c[COVERED], c[STAMP], c[ANSWERED], c[ERRORS_AT], c[FULL],
    )  # fmt: skip
    plan = Plan(
        numba.carray(pointer_to(c[PLAN]), (c[REQUESTS], 3), np.int32),
        numba.carray(pointer_to(c[PLAN + 1]), (c[NUM_PIECES],), np.int32),
        numba.carray(pointer_to(c[PLAN + 2]), (c[NUM_SAMPLED],), np.int32),
        numba.carray(pointer_to(c[PLAN + 3]), (c[NUM_SAMPLED], 2), np.int64),
        numba.carray(pointer_to(c[PLAN + 4]), (c[NUM_PARTS], 5), np.int32),
        numba.carray(pointer_to(c[PLAN + 5]), (c[NUM_SAMPLED] * c[HEADS] + c[NUM_PARTS],), np.int32),
    )
    threads, dim = c[MAX_THREADS], c[DIM]
    at, unknown = BUFFERS, 1  # the first axis of a flat buffer, whose length is not used here
    buffers = Buffers(
        numba.carray(pointer_to(c[at]), (unknown,), np.uint16),
        numba.carray(pointer_to(c[at + 1]), (unknown,), np.int32),
        numba.carray(pointer_to(c[at + 2]), (unknown,), np.int32),
        numba.carray(pointer_to(c[at + 3]), (unknown, 2), np.int32),
        numba.carray(pointer_to(c[at + 4]), (unknown, dim), np.float32),
        numba.carray(pointer_to(c[at + 5]), (unknown,), np.float32),
        numba.carray(pointer_to(c[at + 6]), (TOTALS,), np.int64),
        numba.carray(pointer_to(c[at + 7]), (unknown, threads + 1, COUNTER_INT64), np.int64),
        numba.carray(pointer_to(c[at + 8]), (threads, STRIPE_TOKENS + 2 * COUNTER_MARGIN), np.uint8),
        numba.carray(pointer_to(c[at + 9]), (threads, c[TABLES] * SPANS), np.int64),
        numba.carray(pointer_to(c[at + 10]), (threads, MOST_MEMBERS, dim), np.float32),
        numba.carray(pointer_to(c[at + 11]), (threads, MOST_MEMBERS, dim), np.float32),
        numba.carray(pointer_to(c[at + 12]), (threads, SCORE_BLOCKS, BLOCK_ROWS), np.float32),
        numba.carray(pointer_to(c[at + 13]), (threads, 4, STATE), np.float32),
        numba.carray(pointer_to(c[at + 14]), (unknown,), np.uint8),
        numba.carray(pointer_to(c[at + 15]), (unknown, 2, SUM_COLUMNS), np.float32),
        numba.carray(pointer_to(c[at + 16]), (dim,), np.float32),
        numba.carray(pointer_to(c[at + 17]), (threads, STRIPE_TOKENS), np.uint16),
        numba.carray(pointer_to(c[at + 18]), (threads, 2, dim), np.float32),
        numba.carray(pointer_to(c[at + 19]), (threads, 2, SUM_COLUMNS), np.float32),
        numba.carray(pointer_to(c[at + 20]), (threads, ROOM_BYTES), np.uint8),
    )
    return shape, batch, plan, buffers

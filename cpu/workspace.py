"""Define the data of a region's threads: the shape, the host request's arrays, its plan, and shared and own buffers.

A batch's arrays belong to the caller. Everything else belongs to the workspace and is void once the next host request
is planned.
"""

from typing import NamedTuple

import numpy as np

from cpu.exclusions import bits_at
from cpu.row_products import column_bytes
from transfer.simd.inner import inner
from transfer.simd.memory import load_uint8

STAGES = 3
SLOTS_TAKEN, WORK_ITEMS, EXACT_SLOTS, ROWS_READ, BEGAN_NS, LOOKED_UP_NS, SAMPLED_NS, WAITED_NS = (
    0,
    1,
    2,
    8,
    9,
    10,
    11,
    12,
)
KEYS_SCORED, INDEX_BYTES, TOKENS_COVERED, TOTALS = 13, 14, 15, 16  # two lines
MOST_MEMBERS = 128  # queries that read an exact piece together: a KV head's group, times requests
STATE = MOST_MEMBERS  # float32 between the rows of a thread's state
SCORE_BLOCKS = 6  # blocks of a thread: four of scores, two of values with a direction
PART_SAMPLES = 512  # samples of a head and piece that one thread claims at a time
PART_ROWS = 512  # rows of an exact piece and KV head that one thread claims at a time


class Shape(NamedTuple):
    """The shape of a model's attention. kind, query_kind: scalars of the rows' and the queries' type. mask: number of
    buckets - 1. Functions also take `columns`, a tuple of `dim // 32` zeros.
    """

    kind: np.uint16 | np.int8 | np.uint8 | np.float32
    query_kind: np.uint16 | np.float32
    heads: int
    kv_heads: int
    dim: int
    tables: int
    mask: int
    scale: np.float32


class Batch(NamedTuple):
    """Addresses of one host request's arrays.

    queries `[requests, heads, dim]`; codes uint16 `[requests, heads, tables]`; out, lse, covered (0: not counted) and
    wanted uint8 (0: all heads), all `[requests, heads, ..]`. excluded: int32 `[requests, kv_heads, words]`, or 0.
    logs: the table of `collision.log_weights`. pieces: int64 `[pieces, COLUMNS]`. answered: where the stamp is written
    at the end, or 0. errors: float32 `[requests, heads, ERRORS]`; 0: nothing is estimated. full: uint8 `[requests,
    heads]`, the heads that read all keys; 0: none.
    """

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
    errors: int
    full: int


class Plan(NamedTuple):
    """The work of one host request.

    reads: int32 `[requests, 3]`: begin and end of a request's pieces, and its index among the requests that share them.
    ordinals: int32 `[pieces]`: a sampled piece's index in `sampled`, or the first slot of an exact piece's parts.
    sampled: int32 `[sampled]`, the sampled pieces.
    ids_at: int64 `[sampled, 2]`: first id, and ids per head.
    parts: int32 `[exact parts, 5]`: piece, KV head, begin, end, first slot.
    work: int32 `[sampled * heads + exact parts]`, of which WORK_ITEMS are used: the items that some head wants. Numbers
        of lookups come first, and behind them those of exact parts.
    """

    reads: np.ndarray
    ordinals: np.ndarray
    sampled: np.ndarray
    ids_at: np.ndarray
    parts: np.ndarray
    work: np.ndarray


class Buffers(NamedTuple):
    """Memory for the results of parts.

    Shared: ids uint16; found, first_slot int32 `[sampled * heads]`; slots int32 `[slots, 2]`: sampled head and begin;
    out float32 `[slots, dim]`, lse `[slots]`; totals int64 `[TOTALS]`; counters. Per thread: counts uint8, spans int64,
    query and sums float32 `[MOST_MEMBERS, dim]`, scores float32 `[SCORE_BLOCKS, BLOCK_ROWS]`, state float32 `[4,
    STATE]`: maxima, masses, factors of products, rescaling.

    For errors, with one entry where there are none: marks uint8, one for each id; deviations float32 `[slots, 2,
    COLUMNS]`; direction float32 `[dim]`; per thread digits uint16 `[STRIPE_TOKENS]`, aims float32 `[2, dim]`: the
    direction in units of values, and in the form that their rows need; noted float32 `[2, COLUMNS]`. room: per thread,
    uint8 `[ROOM_BYTES]` of `cpu.tile_attention`, or one byte where nothing is multiplied as tiles.
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
    marks: np.ndarray
    deviations: np.ndarray
    direction: np.ndarray
    digits: np.ndarray
    aims: np.ndarray
    noted: np.ndarray
    room: np.ndarray


@inner
def is_wanted(shape, batch, request, head):
    return batch.wanted == 0 or load_uint8(batch.wanted + request * shape.heads + head) != 0


@inner
def is_full(shape, batch, request, head):
    """Return whether a head reads all keys instead of a sample."""
    return batch.full != 0 and load_uint8(batch.full + request * shape.heads + head) != 0


@inner
def excluded_at(shape, batch, request, kv_head):
    return bits_at(batch.excluded, batch.words, request * shape.kv_heads + kv_head)


@inner
def query_at(shape, batch, request, head):
    bytes_ = column_bytes(shape.query_kind) * shape.dim
    return batch.queries + bytes_ * (request * shape.heads + head)

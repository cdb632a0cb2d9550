"""Compute attention over rows in host memory for a ragged batch, sampled by LSH or exact, in one parallel region per
step.

Tables of pieces (`cpu.pieces`) hold the addresses of rows. The lse of sampled pieces estimates the mass of all tokens
that they cover (paper 2410.16179 eq. (11)), with centres added back. Results do not depend on the number of threads.
Buffers grow to the largest batch so far; later steps allocate nothing.
"""

import math
from ctypes import c_char
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
from torch import Tensor

from cpu import (
    collision,
    context,
    exclusions,
    host_request_turns,
    lookup,
    part_attention,
    piece_plan,
    pieces,
    row_products,
    sample_errors,
    softmax,
    stages,
    tile_attention,
    tile_products,
    workspace,
)
from cpu.collision import log_weights
from cpu.context import (
    ALL_ATTENDED_NS,
    ALL_ROWS,
    ANSWERED,
    BOARD,
    BUFFERS,
    CODES,
    COVERED,
    ERRORS_AT,
    EXCLUDED,
    EXCLUDED_WORDS,
    FLAGS,
    FULL,
    HOST_REQUESTS,
    LIMIT_NS,
    LOGS,
    LSE,
    NEXT_HOST_REQUEST,
    NUM_HOST_REQUESTS,
    NUM_IDS,
    NUM_PARTS,
    NUM_PIECES,
    NUM_SAMPLED,
    NUM_SLOTS,
    OUT,
    OUTCOME,
    PIECES,
    PLAN,
    QUERIES,
    REQUESTS,
    ROOM_IDS,
    ROOM_PARTS,
    ROOM_PIECES,
    ROOM_REQUESTS,
    ROOM_SLOTS,
    STAMP,
    WANTED,
    new_context,
    new_host_requests,
    set_arrays,
    set_shape,
)
from cpu.host_request_turns import BOARD_INT64, INSIDE, TURN, start_when_requested, take_turns
from cpu.lookup import COUNTER_MARGIN, SPANS
from cpu.piece_plan import NO_CODES, NO_ROOM, NO_TABLE, NOT_REQUESTED, PLANNED
from cpu.pieces import BEGIN, END, FOLLOWERS, PIECE, REQUEST, TOKENS
from cpu.row_products import BLOCK_ROWS, COLUMNS, INT4, bytes_of_row
from cpu.sample_errors import COLUMNS as SUM_COLUMNS
from cpu.sample_errors import ERRORS, draw_direction
from cpu.tile_attention import ROOM_BYTES
from cpu.tile_products import LINE, Products, best_products
from cpu.workspace import (
    BEGAN_NS,
    INDEX_BYTES,
    KEYS_SCORED,
    MOST_MEMBERS,
    ROWS_READ,
    SAMPLED_NS,
    SCORE_BLOCKS,
    STAGES,
    STATE,
    TOTALS,
    Buffers,
    Plan,
    Shape,
)
from transfer import exchange
from transfer.exchange import LAST_STAMP, ExchangeSlot
from transfer.host_memory import STRIPE_TOKENS
from transfer.simd import emission, memory, region, team, values, vectors
from transfer.simd.features import require_vectors
from transfer.simd.region import start, version
from transfer.simd.team import new_counters
from transfer.tier_shape import HOST_DIMS, MAX_HOST_GROUP

ROW_TYPES = (np.uint16, np.int8, np.uint8, np.float32)
QUERY_TYPES = (np.uint16, np.float32)
COMPILED = (take_turns, start_when_requested)


_MODULES = (
    host_request_turns, collision, context, emission, exchange, exclusions, lookup, memory, part_attention, piece_plan,
    pieces,
    region, row_products, sample_errors, softmax, stages, team, tile_attention, tile_products, values, vectors,
    workspace,
)  # fmt: skip


@lru_cache(maxsize=None, typed=True)  # a zero of one type equals that of another
def _compile(kind: Any, query_kind: Any, products: Products, num_columns: int, version: int) -> Any:
    """Compile `host_request_turns.take_turns` to a C function of the context's address. numba's file cache checks this
    file and captured variables only, so `version`, a digest of all callees' sources, is captured too.
    """
    columns = products.columns(num_columns)

    @numba.cfunc("void(int64, int64, int64)", cache=True)
    def work(me, threads, context):  # type: ignore[no-untyped-def]
        if version >= 0:
            take_turns(me, threads, context, kind, query_kind, columns)

    return work


@cache
def _compile_start(version: int) -> Any:
    """Compile `host_request_turns.start_when_requested` in the same way."""

    @numba.njit("int64(int64, int64, int64, int64)", nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def start_requested(work, threads, context, gate):  # type: ignore[no-untyped-def]
        return start_when_requested(work, threads, context, gate) if version >= 0 else 0

    return start_requested


class HostPartial(NamedTuple):
    """A partial on the host, and its cost. The next call overwrites the arrays.

    out: float32 `[requests, heads, dim]`.
    lse: float32 `[requests, heads]`, natural log.
    covered: int32 `[requests, heads]`, tokens that the partial covers.
    rows: keys read (and as many values). A row shared by a group, or by requests that share pieces, counts once.
    keys: keys scored, summed over heads.
    index_bytes: bytes read of hash tables.
    lookup_ns, sampled_ns: time of the first thread in the stage of lookups and exact parts, and in that of samples.
    errors: float32 `[requests, heads, ERRORS]` of `cpu.sample_errors`, or None.
    """

    out: np.ndarray
    lse: np.ndarray
    covered: np.ndarray
    rows: int
    keys: int
    index_bytes: int
    lookup_ns: int
    sampled_ns: int
    errors: np.ndarray | None


class AnswersCost(NamedTuple):
    """The cost of answering host requests.

    host_requests: how many were answered; fewer than given if one did not come.
    rows, covered, keys, index_bytes: sums over all answers, as in `HostPartial`; covered is summed over heads.
    waited_ns: time spent waiting for host requests.
    attended_ns: time from a host request's arrival to its answer.
    lookup_ns, sampled_ns: time of the last answer's stages.
    idle_ns: time spent waiting for the first host request before the region started.
    """

    host_requests: int
    rows: int
    covered: int
    keys: int
    index_bytes: int
    waited_ns: int
    attended_ns: int
    lookup_ns: int
    sampled_ns: int
    idle_ns: int


class Compiled(NamedTuple):
    """The parameters that an attention is compiled for. row_type: np.uint16 (bf16), np.int8, np.uint8 (int4) or
    np.float32. query_type: np.uint16 or np.float32. bits, tables: K and L of the paper. scale: factor of logits.
    """

    heads: int
    kv_heads: int
    dim: int
    row_type: type
    query_type: type
    bits: int
    tables: int
    scale: float


class HostAttention:
    """The compiled attention of one model, and its workspace. One thread calls it at a time."""

    def __init__(
        self, compiled: Compiled, threads: int, estimates: bool = False, products: Products | None = None
    ) -> None:
        """Compile the attention, or read it from numba's cache.

        threads: the most that a call may use. estimates: whether to estimate the errors of answers. products: how
        exact pieces of bf16 or int8 are multiplied with bf16 queries; None: the fastest on this processor.

        Raises RuntimeError without AVX2 and FMA, ValueError for a shape that the kernels do not support.
        """
        require_vectors()
        heads, kv_heads, dim, row_type, query_type, bits, tables, scale = compiled
        group = heads // kv_heads
        if dim not in HOST_DIMS or heads != kv_heads * group or not 1 <= group <= MAX_HOST_GROUP:
            raise ValueError(
                f"attention on the host: asked {heads} heads on {kv_heads} KV heads of dim {dim}, have groups of 1 to "
                f"{MAX_HOST_GROUP} and dims {HOST_DIMS}; serve this model without a host tier"
            )
        assert row_type in ROW_TYPES, "rows are bf16, int8, int4 or float32"
        assert query_type in QUERY_TYPES, "queries are bf16 or float32"
        most = int(numba.config.NUMBA_NUM_THREADS)
        if not 1 <= threads <= most:
            raise ValueError(f"threads: asked {threads}, have {most}; set NUMBA_NUM_THREADS or lower threads")
        self.row_type, self.query_type = np.dtype(row_type), np.dtype(query_type)
        size = INT4 if row_type is np.uint8 else self.row_type.itemsize
        self.row_bytes = 2 * bytes_of_row(size, dim)  # a key and a value
        self.most_sharing = MOST_MEMBERS // group  # the most requests that may share exact pieces
        self.estimates = estimates
        self._logs, self._direction = log_weights(bits, tables), draw_direction(dim)
        self._shape = Shape(
            row_type(0), query_type(0), heads, kv_heads, dim, tables, (1 << bits) - 1, np.float32(scale)
        )
        has_tiles = row_type in (np.uint16, np.int8) and query_type is np.uint16
        self._products = (products or best_products()) if has_tiles else Products.VECTORS
        work = _compile(row_type(0), query_type(0), self._products, dim // COLUMNS, version(*_MODULES))
        self._work, self._start_when_requested = int(work.address), _compile_start(version(*_MODULES))
        self._context, self._threads = new_context(), threads
        self._address, self._row = self._context.ctypes.data, memoryview(self._context)
        set_shape(self._context, self._shape, threads)
        self._context[LOGS] = self._logs.ctypes.data
        board = np.zeros(BOARD_INT64, np.int64)
        self._board, self._context[BOARD] = memoryview(board), board.ctypes.data
        self._lone_host_request = new_host_requests(1)
        self._plan = self._new_plan(1, 1, 1, 1)
        self._results = self._new_results(1)
        self._buffers = self._new_buffers(1, 1, 1)

    def attend(
        self, table: np.ndarray, queries: np.ndarray, codes: np.ndarray | None, threads: int,
        wanted: np.ndarray | None = None, excluded: np.ndarray | None = None, full: np.ndarray | None = None,
    ) -> HostPartial:  # fmt: skip
        """Attend with each request's query over its pieces.

        table: PIECE `[pieces]` of this row type.
        queries: `[requests, heads, dim]`, contiguous, of query_type.
        codes: uint16 `[requests, heads, tables]`, contiguous; None if no piece is sampled.
        wanted: uint8 `[requests, heads]`, as in an exchange slot; None: all heads.
        excluded: int32 `[requests, kv_heads, words]`, as in an exchange slot; None: nothing is excluded.
        full: uint8 `[requests, heads]`, the heads that read all keys instead of a sample, or None.

        A request without pieces, samples or wanted heads gets (0, -inf). A NaN in a query or key makes its own heads
        NaN. Raises ValueError if requests are not in rising order, share pieces that cannot be shared, or have a range
        outside of its segment.
        """
        shape, requests, host_request = self._shape, len(queries), self._lone_host_request[0]
        assert queries.shape == (requests, shape.heads, shape.dim), "queries: [requests, heads, dim]"
        assert queries.dtype == self.query_type, "queries: of the type that was compiled for"
        assert queries.flags.c_contiguous, "queries: contiguous"
        _put_pieces(self._lone_host_request, table[None])
        _put(host_request, REQUESTS, requests)
        _put(host_request, QUERIES, queries.ctypes.data)
        _put(host_request, CODES, 0)
        if codes is not None:
            assert codes.shape == (requests, shape.heads, shape.tables), "codes: [requests, heads, tables]"
            assert codes.dtype == np.uint16, "codes: uint16"
            assert codes.flags.c_contiguous, "codes: contiguous"
            _put(host_request, CODES, codes.ctypes.data)
        if wanted is not None:
            assert wanted.shape == (requests, shape.heads), "wanted: [requests, heads]"
            assert wanted.dtype == np.uint8, "wanted: uint8"
        if excluded is not None:
            assert excluded.shape[:2] == (requests, shape.kv_heads), "excluded: [requests, kv_heads, words]"
            assert excluded.dtype == np.int32, "excluded: int32"
        if full is not None:
            assert full.shape == (requests, shape.heads), "full: [requests, heads]"
            assert full.dtype == np.uint8, "full: uint8"
        errors = np.empty((requests, shape.heads, ERRORS), np.float32) if self.estimates else None
        for column, array in ((WANTED, wanted), (EXCLUDED, excluded), (FULL, full), (ERRORS_AT, errors)):
            assert array is None or array.flags.c_contiguous, "wanted, excluded, full: contiguous"
            _put(host_request, column, 0 if array is None else array.ctypes.data)
        _put(host_request, EXCLUDED_WORDS, 0 if excluded is None else excluded.shape[2])
        self._make_room_for(requests)
        out, lse, covered = self._results
        _put(host_request, OUT, out.ctypes.data)
        _put(host_request, LSE, lse.ctypes.data)
        _put(host_request, COVERED, covered.ctypes.data)
        self._run(self._lone_host_request, threads, 0, None)
        totals = self._buffers.totals
        rows_read, began_ns, looked_up_ns, sampled_ns = totals[ROWS_READ : SAMPLED_NS + 1].tolist()
        return HostPartial(
            out[:requests], lse[:requests], covered[:requests], rows_read, int(totals[KEYS_SCORED]),
            int(totals[INDEX_BYTES]), looked_up_ns - began_ns, sampled_ns - looked_up_ns, errors,
        )  # fmt: skip

    def host_requests_in(
        self, slot: ExchangeSlot, tables: np.ndarray, errors: np.ndarray | None, full: np.ndarray | None
    ) -> np.ndarray:
        """Return host requests for `answer`, one for each table of pieces.

        tables: PIECE `[host_requests, pieces]`. The first host request is the slot's current one. Row i of the slot is
        request i, with queries of query_type. errors: float32 `[host_requests, rows, heads, ERRORS]`, written by the
        answer, or None. full: uint8 `[host_requests, rows, heads]`, or None. The caller keeps all of these alive.
        """
        shape, queries, codes, excluded = self._shape, slot.queries, slot.codes, slot.excluded
        assert queries.shape[1:] == (shape.heads, shape.dim), "slot: queries [rows, heads, dim]"
        assert queries.element_size() == self.query_type.itemsize, "slot: queries of the type that was compiled for"
        assert codes is None or codes.shape[1:] == (shape.heads, shape.tables), "slot: codes [rows, heads, tables]"
        if excluded is not None:
            assert excluded.shape[1] == shape.kv_heads, "slot: excluded [rows, kv_heads, words]"
        host_requests = new_host_requests(len(tables))
        _put_pieces(host_requests, tables)
        for column, value in (
            (REQUESTS, slot.rows), (QUERIES, queries.data_ptr()), (CODES, _address(codes)),
            (WANTED, slot.wanted.data_ptr()), (EXCLUDED, _address(excluded)),
            (EXCLUDED_WORDS, 0 if excluded is None else excluded.shape[2]), (OUT, slot.out.data_ptr()),
            (LSE, slot.lse.data_ptr()), (COVERED, _address(slot.covered)), (FLAGS, slot.flags.data_ptr()),
            (ANSWERED, slot.answered.data_ptr()), (STAMP, (slot.stamp + np.arange(len(tables))) & LAST_STAMP),
        ):  # fmt: skip
            _put(host_requests, column, value)
        for column, array in ((ERRORS_AT, errors), (FULL, full)):
            if array is not None:
                assert array.shape[:3] == (len(tables), slot.rows, shape.heads), "errors, full: of every request"
                assert array.flags.c_contiguous, "errors, full: contiguous"
                _put(host_requests, column, array.ctypes.data + array.strides[0] * np.arange(len(tables)))
        return host_requests

    def answer(self, host_requests: np.ndarray, threads: int, limit_s: float, gate: np.ndarray | None) -> AnswersCost:
        """Answer host requests one after another in one parallel region: wait for each one's flags, attend, and write
        the stamp of the answer.

        host_requests: rows of `host_requests_in`, of one slot or of several slots in turns. The call ends at the first
        host request that does not come within `limit_s` seconds. gate: int64 `[1]` or None. With a gate, one thread
        waits for the first host request before the region starts, and the gate is one higher when this returns. No
        Python runs in between.
        """
        answered, idle_ns = self._run(host_requests, threads, limit_s, gate)
        began, looked_up, sampled = self._buffers.totals[BEGAN_NS : SAMPLED_NS + 1].tolist()
        sums = self._row[ALL_ROWS : ALL_ATTENDED_NS + 1].tolist()
        return AnswersCost(answered, *sums, looked_up - began, sampled - looked_up, idle_ns)

    def _run(self, host_requests: np.ndarray, threads: int, limit_s: float, gate: np.ndarray | None) -> tuple[int, int]:
        """Answer host requests. Return how many were answered, and with a gate the nanoseconds waited for the first.

        If not all were answered, the next one did not come. Raises ValueError for an invalid table. Caches are cold
        here, so each line of Python costs several times as much as elsewhere.
        """
        row, board = self._row, self._board
        assert host_requests.flags.c_contiguous, "host_requests: contiguous"
        assert 1 <= threads <= self._threads, "threads: no more than the workspace has room for"
        for column in range(ALL_ROWS, ALL_ATTENDED_NS + 1):
            row[column] = 0
        row[HOST_REQUESTS] = host_requests.__array_interface__["data"][
            0
        ]  # an address for a tenth of the time of host_requests.ctypes
        row[NUM_HOST_REQUESTS], row[NEXT_HOST_REQUEST], row[LIMIT_NS] = len(host_requests), 0, int(1e9 * limit_s)
        board[TURN], board[INSIDE] = 0, 0
        idle_ns = 0
        if gate is None:
            start(self._work, threads, self._address)
        else:
            idle_ns = self._start_when_requested(
                self._work, threads, self._address, gate.__array_interface__["data"][0]
            )
        while row[OUTCOME] == NO_ROOM:
            self._grow()
            board[TURN], board[INSIDE] = 0, 0
            start(self._work, threads, self._address)
        assert row[OUTCOME] != NO_CODES, "codes: sampled pieces need the query's"
        if row[OUTCOME] == NO_TABLE:
            listed = _pieces_at(row[PIECES], row[NUM_PIECES])
            raise ValueError(
                f"pieces: got requests {listed[:, REQUEST].tolist()}, ranges "
                f"{listed[:, [BEGIN, END, TOKENS]].tolist()}, followers {listed[:, FOLLOWERS].tolist()}; wanted "
                f"requests in rising order below {row[REQUESTS]}, up to {self.most_sharing} that share exact pieces, "
                "and 0 <= begin <= end <= tokens"
            )
        assert row[OUTCOME] in (PLANNED, NOT_REQUESTED), "plan: what comes of it"
        return int(row[NEXT_HOST_REQUEST]), idle_ns

    def _make_room_for(self, requests: int) -> None:
        if requests > self._row[ROOM_REQUESTS]:
            self._results = self._new_results(requests * 3 // 2)
            self._plan = self._new_plan(requests * 3 // 2, *self._context[ROOM_PIECES : ROOM_PARTS + 1].tolist())

    def _grow(self) -> None:
        """Enlarge the plan and the buffers where the request needs more than they hold, to 1.5 times its need."""
        row, heads = self._context, self._shape.heads
        self._make_room_for(int(row[REQUESTS]))
        sizes = _larger(row[NUM_PIECES : NUM_PARTS + 1].tolist(), row[ROOM_PIECES : ROOM_PARTS + 1].tolist())
        if sizes is not None:
            self._plan = self._new_plan(int(row[ROOM_REQUESTS]), *sizes)
        wanted = [int(row[NUM_IDS]), int(row[NUM_SAMPLED]) * heads, int(row[NUM_SLOTS])]
        sizes = _larger(wanted, row[ROOM_IDS : ROOM_SLOTS + 1].tolist())
        if sizes is not None:
            self._buffers = self._new_buffers(*sizes)

    def _new_buffers(self, ids: int, sampled_heads: int, slots: int) -> Buffers:
        s, threads = self._shape, self._threads
        buffers = Buffers(
            ids=np.empty(ids, np.uint16),
            found=np.empty(sampled_heads, np.int32),
            first_slot=np.empty(sampled_heads, np.int32),
            slots=np.empty((slots, 2), np.int32),
            out=np.empty((slots, s.dim), np.float32),
            lse=np.empty(slots, np.float32),
            totals=np.zeros(TOTALS, np.int64),
            counters=new_counters(STAGES, threads),
            counts=np.zeros((threads, STRIPE_TOKENS + 2 * COUNTER_MARGIN), np.uint8),
            spans=np.empty((threads, s.tables * SPANS), np.int64),
            query=np.empty((threads, MOST_MEMBERS, s.dim), np.float32),
            sums=_aligned((threads, MOST_MEMBERS, s.dim)),
            scores=np.empty((threads, SCORE_BLOCKS, BLOCK_ROWS), np.float32),
            state=np.empty((threads, 4, STATE), np.float32),
            marks=np.empty(ids if self.estimates else 1, np.uint8),
            deviations=np.empty((slots if self.estimates else 1, 2, SUM_COLUMNS), np.float32),
            direction=self._direction,
            digits=np.zeros((threads, STRIPE_TOKENS), np.uint16),
            aims=np.empty((threads, 2, s.dim), np.float32),
            noted=np.empty((threads, 2, SUM_COLUMNS), np.float32),
            room=np.empty(1 if self._products is Products.VECTORS else threads * ROOM_BYTES, np.uint8),
        )
        set_arrays(self._context, BUFFERS, buffers)
        self._context[ROOM_IDS : ROOM_SLOTS + 1] = ids, sampled_heads, slots
        return buffers

    def _new_plan(self, requests: int, num_pieces: int, sampled: int, parts: int) -> Plan:
        """Return a plan with room for so many entries, at least one of each kind."""
        step = Plan(
            reads=np.empty((requests, 3), np.int32),
            ordinals=np.empty(max(1, num_pieces), np.int32),
            sampled=np.empty(max(1, sampled), np.int32),
            ids_at=np.empty((max(1, sampled), 2), np.int64),
            parts=np.empty((max(1, parts), 5), np.int32),
            work=np.empty(max(1, sampled * self._shape.heads + parts), np.int32),
        )
        set_arrays(self._context, PLAN, step)
        self._context[ROOM_PIECES : ROOM_PARTS + 1] = num_pieces, sampled, parts
        return step

    def _new_results(self, requests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = (requests, self._shape.heads)
        results = (
            np.empty((*shape, self._shape.dim), np.float32),
            np.empty(shape, np.float32),
            np.empty(shape, np.int32),
        )
        self._context[ROOM_REQUESTS] = requests
        return results


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 array that begins on a cache line, because tiles are read slower across lines."""
    room = np.empty(4 * math.prod(shape) + LINE, np.uint8)
    begin = -room.ctypes.data % LINE
    return room[begin : begin + 4 * math.prod(shape)].view(np.float32).reshape(shape)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _put(host_requests: np.ndarray, column: int, value: Any) -> None:
    host_requests[..., column - REQUESTS] = value


def _put_pieces(host_requests: np.ndarray, tables: np.ndarray) -> None:
    """Write addresses of tables, PIECE `[host_requests, pieces]`."""
    assert tables.dtype == PIECE, "pieces: a table of cpu.pieces.PIECE"
    assert tables.flags.c_contiguous, "pieces: contiguous"
    _put(host_requests, PIECES, tables.ctypes.data + tables.strides[0] * np.arange(len(tables)))
    _put(host_requests, NUM_PIECES, tables.shape[1])


def _pieces_at(address: int, count: int) -> np.ndarray:
    return np.frombuffer((c_char * (count * PIECE.itemsize)).from_address(address), np.int64).reshape(count, -1)


def _larger(wanted: list[int], room: list[int]) -> list[int] | None:
    """Return sizes of which those below `wanted` are grown to 1.5 times it; None if all are large enough."""
    if all(size <= most for size, most in zip(wanted, room, strict=True)):
        return None
    return [most if size <= most else size + size // 2 for size, most in zip(wanted, room, strict=True)]

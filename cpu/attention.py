"""Attention of a ragged batch over rows in host memory: sampled by LSH or exact, one parallel region a layer.

It refuses to know layers, segments and devices: a table of pieces (`cpu.pieces`) says where rows lie. Invariants: the
lse of sampled pieces estimates the mass of all that they cover (paper 2410.16179 eq. (11)), with centres put back;
results do not depend on the number of threads; nothing is allocated once the largest batch has been seen.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np

from cpu import collision, context, lookup, pieces, plan, rows, softmax, stages
from cpu.collision import log_weights
from cpu.context import (
    ANSWERED,
    BUFFERS,
    CODES,
    COVERED,
    FLAGS,
    LOGS,
    LSE,
    NUM_IDS,
    NUM_PARTS,
    NUM_PIECES,
    NUM_SAMPLED,
    NUM_SLOTS,
    OUT,
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
    new_context,
    open_context,
    set_arrays,
    set_shape,
)
from cpu.lookup import SPANS
from cpu.pieces import BEGIN, END, PIECE, REQUEST, TOKENS, WINDOW_TOKENS, as_columns
from cpu.plan import NO_CODES, NO_ROOM, NO_TABLE, NOT_ASKED, PLANNED, make_plan
from cpu.rows import BLOCK_ROWS, COLUMNS
from cpu.stages import (
    ROWS_READ,
    SAMPLED_NS,
    STAGES,
    STATE,
    TOTALS,
    WAITED_NS,
    Buffers,
    Plan,
    Shape,
    attend_as,
)
from transfer import exchange
from transfer.exchange import ExchangeSlot
from transfer.simd import emission, memory, team, values, vectors
from transfer.simd.features import require_vectors
from transfer.simd.region import start, version
from transfer.simd.team import new_counters

MAX_GROUP = 8
DIMS = (64, 128)
ROW_TYPES = (np.uint16, np.int8, np.float32)
QUERY_TYPES = (np.uint16, np.float32)


_MODULES = (
    collision, context, emission, exchange, lookup, memory, pieces, plan, rows, softmax, stages, team, values, vectors,
)  # fmt: skip


@lru_cache(maxsize=None, typed=True)  # a zero of one type equals that of another
def _compile(kind: Any, query_kind: Any, columns: tuple[int, ...], version: int) -> tuple[Any, Any]:
    """`plan.make_plan` and `stages.attend_as` as C functions of the context's address. numba's file cache looks at this
    source file and at the arguments here; `version` stands for the sources of all that is called."""

    @numba.cfunc("int64(int64)", cache=True)
    def prepare(context):  # type: ignore[no-untyped-def]
        return make_plan(context, kind, query_kind) if version >= 0 else NO_TABLE

    @numba.cfunc("void(int64, int64, int64)", cache=True)
    def work(me, threads, context):  # type: ignore[no-untyped-def]
        if version >= 0:
            shape, batch, step, buffers = open_context(context, kind, query_kind)
            attend_as(me, threads, shape, columns, batch, step, buffers)

    return prepare, work


class Attended(NamedTuple):
    """A partial on the host, and what it cost. The arrays are overwritten by the workspace's next call.

    out: float32 `[requests, heads, dim]`; lse: float32 `[requests, heads]`, natural log; covered: int32 `[requests,
    heads]`, tokens that the partial stands for; rows: keys read (as many values), a row shared by a group once;
    lookup_ns, sampled_ns: of the first thread, in the stage of lookups and exact parts, and in that of samples.
    """

    out: np.ndarray
    lse: np.ndarray
    covered: np.ndarray
    rows: int
    lookup_ns: int
    sampled_ns: int


class Ask(NamedTuple):
    """Where the asks of a step stand in an exchange slot: its rows in use, and addresses. codes: 0 without."""

    rows: int
    queries: int
    codes: int
    flags: int
    out: int
    lse: int
    answered: int


class Answered(NamedTuple):
    """What an answer cost: rows and stages as in `Attended`; covered: tokens, of all heads; waited_ns: for the ask, in
    the last call alone; began_ns: of the monotonic clock, when it was there."""

    rows: int
    covered: int
    waited_ns: int
    began_ns: int
    lookup_ns: int
    sampled_ns: int


class HostAttention:
    """The compiled attention of one model and its workspace; for one thread of callers at a time."""

    def __init__(
        self, *, heads: int, kv_heads: int, dim: int, row_type: type, query_type: type, bits: int, tables: int,
        scale: float, threads: int,
    ) -> None:  # fmt: skip
        """row_type: np.uint16 (bf16), np.int8 or np.float32; query_type: np.uint16 or np.float32; paper: K = bits,
        L = tables; threads: the most that a call may use. Compiles, or reads numba's cache.

        Raises RuntimeError without AVX2 and FMA, ValueError for a shape that the kernels have no code for.
        """
        require_vectors()
        group = heads // kv_heads
        if dim not in DIMS or heads != kv_heads * group or not 1 <= group <= MAX_GROUP:
            raise ValueError(
                f"attention on the host: asked {heads} heads on {kv_heads} KV heads of dim {dim}, have groups of 1 to "
                f"{MAX_GROUP} and dims {DIMS}; serve this model without a host tier"
            )
        assert row_type in ROW_TYPES, "rows are bf16, int8 or float32"
        assert query_type in QUERY_TYPES, "queries are bf16 or float32"
        most = int(numba.config.NUMBA_NUM_THREADS)
        if not 1 <= threads <= most:
            raise ValueError(f"threads: asked {threads}, have {most}; set NUMBA_NUM_THREADS or lower threads")
        self.row_type, self.query_type = np.dtype(row_type), np.dtype(query_type)
        self._logs = log_weights(bits, tables)
        self._shape = Shape(
            row_type(0), query_type(0), heads, kv_heads, dim, tables, (1 << bits) - 1, np.float32(scale)
        )
        prepare, work = _compile(row_type(0), query_type(0), (0,) * (dim // COLUMNS), version(*_MODULES))
        self._prepare, self._work = int(prepare.address), int(work.address)
        self._context, self._threads = new_context(), threads
        self._address, self._row = self._context.ctypes.data, memoryview(self._context)
        set_shape(self._context, self._shape, threads)
        self._context[LOGS] = self._logs.ctypes.data
        self._plan = self._new_plan(1, 1, 1, 1)
        self._results = self._new_results(1)
        self._answer = self._results  # those of the requests of the last call
        self._buffers = self._new_buffers(1, 1, 1)

    def attend(self, table: np.ndarray, queries: np.ndarray, codes: np.ndarray | None, threads: int) -> Attended:
        """Attention of each request's query over its pieces.

        table: PIECE `[pieces]` of this row type; queries: `[requests, heads, dim]`, contiguous, of query_type; codes:
        uint16 `[requests, heads, tables]`, contiguous; None: no piece is sampled. A request without pieces, or whose
        samples are empty, gets (0, -inf). A NaN in a query or key makes its own heads NaN. Raises ValueError if
        requests do not rise or a range is not in its segment.

        Caches are cold here, so each line of Python costs several times what it does elsewhere.
        """
        shape, requests, row = self._shape, len(queries), self._row
        assert queries.shape == (requests, shape.heads, shape.dim), "queries: [requests, heads, dim]"
        assert queries.dtype == self.query_type, "queries: of the type that was compiled for"
        assert queries.flags.c_contiguous, "queries: contiguous"
        row[REQUESTS], row[QUERIES], row[CODES] = requests, queries.ctypes.data, 0
        if codes is not None:
            assert codes.shape == (requests, shape.heads, shape.tables), "codes: [requests, heads, tables]"
            assert codes.dtype == np.uint16, "codes: uint16"
            assert codes.flags.c_contiguous, "codes: contiguous"
            row[CODES] = codes.ctypes.data
        row[FLAGS], row[ANSWERED] = 0, 0
        row[OUT], row[LSE] = self._own
        self._start(table, threads)
        if len(self._answer[0]) != requests:
            out, lse, covered = self._results
            self._answer = out[:requests], lse[:requests], covered[:requests]
        rows_read, began_ns, looked_up_ns, sampled_ns = self._buffers.totals[ROWS_READ : SAMPLED_NS + 1].tolist()
        return Attended(*self._answer, rows_read, looked_up_ns - began_ns, sampled_ns - looked_up_ns)

    def asks_in(self, slot: ExchangeSlot) -> Ask:
        """For `answer`: the slot's rows in use, which it must keep. Its queries are of query_type."""
        shape, queries, codes = self._shape, slot.queries, slot.codes
        assert queries.shape[1:] == (shape.heads, shape.dim), "slot: queries [rows, heads, dim]"
        assert queries.element_size() == self.query_type.itemsize, "slot: queries of the type that was compiled for"
        assert codes is None or codes.shape[1:] == (shape.heads, shape.tables), "slot: codes [rows, heads, tables]"
        return Ask(
            slot.rows, queries.data_ptr(), codes.data_ptr() if codes is not None else 0, slot.flags.data_ptr(),
            slot.out.data_ptr(), slot.lse.data_ptr(), slot.answered.data_ptr(),
        )  # fmt: skip

    def answer(self, table: np.ndarray, ask: Ask, stamp: int, threads: int) -> Answered | None:
        """As `attend`, in one call from the slot's flags to the stamp of its answer; row i asks for request i.

        None: the flags did not have the stamp within `transfer.exchange.LOOKS` looks, and nothing was done.
        """
        row = self._row
        row[REQUESTS], row[QUERIES], row[CODES], row[FLAGS], row[OUT], row[LSE], row[ANSWERED] = ask
        row[STAMP] = stamp
        if not self._start(table, threads):
            return None
        covered = int(self._results[2][: ask.rows].sum())
        rows_read, began, looked_up, sampled, waited = self._buffers.totals[ROWS_READ : WAITED_NS + 1].tolist()
        return Answered(rows_read, covered, waited, began, looked_up - began, sampled - looked_up)

    def _start(self, table: np.ndarray, threads: int) -> bool:
        """The region over what stands in the context; False: nobody asked. Raises ValueError for a wrong table."""
        row = self._row
        assert table.dtype == PIECE, "pieces: a table of cpu.pieces.PIECE"
        assert table.flags.c_contiguous, "pieces: contiguous"
        assert 1 <= threads <= self._threads, "threads: no more than the workspace has room for"
        row[PIECES], row[NUM_PIECES] = table.ctypes.data, len(table)
        outcome = start(self._prepare, self._work, threads, self._address)
        if outcome == NO_ROOM:
            self._grow()
            outcome = start(self._prepare, self._work, threads, self._address)
        if outcome == NO_TABLE:
            listed = as_columns(table)
            raise ValueError(
                f"pieces: got requests {listed[:, REQUEST].tolist()}, ranges "
                f"{listed[:, [BEGIN, END, TOKENS]].tolist()}; wanted requests in rising order below {row[REQUESTS]}, "
                f"and 0 <= begin <= end <= tokens"
            )
        assert outcome != NO_CODES, "codes: sampled pieces need the query's"
        assert outcome in (PLANNED, NOT_ASKED), "plan: room for what the plan itself counted"
        return bool(outcome == PLANNED)

    def _grow(self) -> None:
        """Make room for a batch larger than any before, with half as much again to spare."""
        row, heads = self._context, self._shape.heads
        if row[REQUESTS] > row[ROOM_REQUESTS]:
            self._results = self._answer = self._new_results(int(row[REQUESTS]) * 3 // 2)
            if row[ANSWERED] == 0:
                row[OUT], row[LSE] = self._own
        sizes = _larger(row[NUM_PIECES : NUM_PARTS + 1].tolist(), row[ROOM_PIECES : ROOM_PARTS + 1].tolist())
        if sizes is not None or len(self._plan.first_piece) <= row[ROOM_REQUESTS]:
            self._plan = self._new_plan(int(row[ROOM_REQUESTS]), *(sizes or row[ROOM_PIECES : ROOM_PARTS + 1].tolist()))
        wanted = [int(row[NUM_IDS]), int(row[NUM_SAMPLED]) * heads, int(row[NUM_SLOTS])]
        sizes = _larger(wanted, row[ROOM_IDS : ROOM_SLOTS + 1].tolist())
        if sizes is not None:
            self._buffers = self._new_buffers(*sizes)

    def _new_buffers(self, ids: int, sampled_heads: int, slots: int) -> Buffers:
        s, threads, group = self._shape, self._threads, self._shape.heads // self._shape.kv_heads
        buffers = Buffers(
            ids=np.empty(ids, np.uint16),
            found=np.empty(sampled_heads, np.int32),
            first_slot=np.empty(sampled_heads, np.int32),
            slots=np.empty((slots, 2), np.int32),
            out=np.empty((slots, s.dim), np.float32),
            lse=np.empty(slots, np.float32),
            totals=np.zeros(TOTALS, np.int64),
            counters=new_counters(STAGES, threads),
            counts=np.zeros((threads, WINDOW_TOKENS), np.uint8),
            spans=np.empty((threads, s.tables * SPANS), np.int64),
            query=np.empty((threads, group, s.dim), np.float32),
            sums=np.empty((threads, group, s.dim), np.float32),
            scores=np.empty((threads, 4, BLOCK_ROWS), np.float32),
            state=np.empty((threads, 4, STATE), np.float32),
        )
        set_arrays(self._context, BUFFERS, buffers)
        self._context[ROOM_IDS : ROOM_SLOTS + 1] = ids, sampled_heads, slots
        return buffers

    def _new_plan(self, requests: int, num_pieces: int, sampled: int, parts: int) -> Plan:
        """Room for so many entries, one at least."""
        step = Plan(
            first_piece=np.empty(requests + 1, np.int32),
            ordinals=np.empty(max(1, num_pieces), np.int32),
            sampled=np.empty(max(1, sampled), np.int32),
            ids_at=np.empty((max(1, sampled), 2), np.int64),
            parts=np.empty((max(1, parts), 4), np.int32),
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
        self._own = results[0].ctypes.data, results[1].ctypes.data
        self._context[COVERED] = results[2].ctypes.data
        return results


def _larger(wanted: list[int], room: list[int]) -> list[int] | None:
    """Rooms of which those that are too small get half as much again as is wanted; None if none is."""
    if all(size <= most for size, most in zip(wanted, room, strict=True)):
        return None
    return [most if size <= most else size + size // 2 for size, most in zip(wanted, room, strict=True)]

"""Attention of a ragged batch over rows in host memory: sampled by LSH or exact, one parallel region a layer.

It refuses to know layers, segments and devices: a table of pieces (`cpu.pieces`) says where rows lie. Invariants: the
lse of sampled pieces estimates the mass of all that they cover (paper 2410.16179 eq. (11)), with centres put back;
results do not depend on the number of threads; nothing is allocated once the largest batch has been seen.
"""

import time
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np

from cpu import collision, context, lookup, pieces, plan, rows, softmax, stages
from cpu.collision import log_weights
from cpu.context import (
    BUFFERS,
    CODES,
    COVERED,
    LOGS,
    NUM_PARTS,
    OUT,
    PIECES,
    PLAN,
    REQUESTS,
    new_context,
    open_context,
    set_arrays,
    set_shape,
)
from cpu.lookup import SPANS
from cpu.pieces import WINDOW_TOKENS, as_columns
from cpu.plan import count_needs, fill_plan
from cpu.rows import BLOCK_ROWS, COLUMNS
from cpu.stages import (
    LOOKED_UP_NS,
    ROWS_READ,
    SAMPLED_NS,
    SLOTS_TAKEN,
    STAGES,
    STATE,
    TOTALS,
    Buffers,
    Plan,
    Shape,
    attend_as,
)
from transfer.simd import emission, memory, team, values, vectors
from transfer.simd.features import require_vectors
from transfer.simd.region import start, version
from transfer.simd.team import new_counters

MAX_GROUP = 8
DIMS = (64, 128)
ROW_TYPES = (np.uint16, np.int8, np.float32)
QUERY_TYPES = (np.uint16, np.float32)


_MODULES = (collision, context, emission, lookup, memory, pieces, plan, rows, softmax, stages, team, values, vectors)


@lru_cache(maxsize=None, typed=True)  # a zero of one type equals that of another
def _compile(kind: Any, query_kind: Any, columns: tuple[int, ...], version: int) -> Any:
    """`stages.attend_as` as a C function of the context's address. numba's file cache looks at this source file and at
    the arguments here; `version` stands for the sources of all that is called."""

    @numba.cfunc("void(int64, int64, int64)", cache=True)
    def work(me, threads, context):  # type: ignore[no-untyped-def]
        if version >= 0:
            shape, batch, step, buffers = open_context(context, kind, query_kind)
            attend_as(me, threads, shape, columns, batch, step, buffers)

    return work


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
        work = _compile(row_type(0), query_type(0), (0,) * (dim // COLUMNS), version(*_MODULES))
        self._work = int(work.address)
        self._context, self._threads = new_context(), threads
        set_shape(self._context, self._shape, threads)
        self._context[LOGS] = self._logs.ctypes.data
        self._plan = self._new_plan(1, 1, 1, 1)
        self._results = self._new_results(1)
        self._buffers = self._new_buffers(1, 1, 1)

    def attend(self, table: np.ndarray, queries: np.ndarray, codes: np.ndarray | None, threads: int) -> Attended:
        """Attention of each request's query over its pieces.

        table: PIECE `[pieces]` of this row type; queries: `[requests, heads, dim]`, contiguous, of query_type; codes:
        uint16 `[requests, heads, tables]`, contiguous; None: no piece is sampled. A request without pieces, or whose
        samples are empty, gets (0, -inf). A NaN in a query or key makes its own heads NaN.
        """
        shape, listed, requests = self._shape, as_columns(table), len(queries)
        assert queries.shape[1:] == (shape.heads, shape.dim), "queries: [requests, heads, dim]"
        assert queries.dtype == self.query_type, "queries: of the type that was compiled for"
        assert queries.flags.c_contiguous, "queries: contiguous"
        assert 1 <= threads <= self._threads, "threads: no more than the workspace has room for"
        needs = count_needs(listed, requests, shape.heads, shape.kv_heads)
        if codes is not None:
            assert codes.shape == (requests, shape.heads, shape.tables), "codes: [requests, heads, tables]"
            assert codes.dtype == np.uint16, "codes: uint16"
            assert codes.flags.c_contiguous, "codes: contiguous"
        assert codes is not None or needs.sampled == 0, "codes: sampled pieces need the query's"
        self._grow(needs, len(table), requests)
        fill_plan(listed, requests, shape.heads, shape.kv_heads, *self._plan)
        row, totals = self._context, self._buffers.totals
        row[REQUESTS : CODES + 1] = requests, queries.ctypes.data, 0 if codes is None else codes.ctypes.data
        row[PIECES : NUM_PARTS + 1] = listed.ctypes.data, len(listed), needs.sampled, needs.parts
        totals.fill(0)
        totals[SLOTS_TAKEN] = needs.parts * (shape.heads // shape.kv_heads)
        self._buffers.counters.fill(0)
        began_ns = time.monotonic_ns()
        start(self._work, threads, row.ctypes.data)
        looked_up_ns, sampled_ns = int(totals[LOOKED_UP_NS]), int(totals[SAMPLED_NS])
        out, lse, covered = (array[:requests] for array in self._results)
        return Attended(out, lse, covered, int(totals[ROWS_READ]), looked_up_ns - began_ns, sampled_ns - looked_up_ns)

    def _grow(self, needs: plan.Needs, num_pieces: int, requests: int) -> None:
        """Make room for a batch larger than any before, with half as much again to spare."""
        if len(self._results[0]) < requests:
            self._results = self._new_results(requests + requests // 2)
        have = self._plan
        wanted = (requests + 1, num_pieces, needs.sampled, needs.parts)
        if any(len(array) < n for array, n in zip((have[0], have[1], have[2], have[4]), wanted, strict=True)):
            self._plan = self._new_plan(*(n + n // 2 for n in wanted))
        buffers = self._buffers
        heads = needs.sampled * self._shape.heads
        if len(buffers.ids) < needs.ids or len(buffers.found) < heads or len(buffers.slots) < needs.slots:
            self._buffers = self._new_buffers(*(n + n // 2 for n in (needs.ids, heads, needs.slots)))

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
        return buffers

    def _new_plan(self, requests: int, num_pieces: int, sampled: int, parts: int) -> Plan:
        """Room for so many entries, one at least."""
        step = Plan(
            first_piece=np.empty(max(1, requests), np.int32),
            ordinals=np.empty(max(1, num_pieces), np.int32),
            sampled=np.empty(max(1, sampled), np.int32),
            ids_at=np.empty((max(1, sampled), 2), np.int64),
            parts=np.empty((max(1, parts), 4), np.int32),
        )
        set_arrays(self._context, PLAN, step)
        return step

    def _new_results(self, requests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape = (requests, self._shape.heads)
        results = (
            np.empty((*shape, self._shape.dim), np.float32),
            np.empty(shape, np.float32),
            np.empty(shape, np.int32),
        )
        self._context[OUT : COVERED + 1] = [array.ctypes.data for array in results]
        return results

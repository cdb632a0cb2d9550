"""Compute experts in host memory for a decode step, layer after layer, as the device asks for them.

A step is one compiled call without the GIL, from its first host request to its last answer. The thread waits for a
layer's flags, sorts its pairs, opens a region on all threads (`cpu.expert_products`), and stores the answer's stamp
after the answer. If a request does not come in time, the call ends and reports which one.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np

from cpu import expert_products
from cpu.decode_step import HOST_REQUEST_LIMIT_S
from cpu.expert_matrices import check_bias, check_matrix
from cpu.expert_products import (
    ACTIVATIONS,
    BEGINS,
    CONTEXT_INT64,
    COUNTERS,
    EXPERTS,
    FOUND,
    GAIN_ROWS,
    GATED,
    HIDDEN,
    INTERMEDIATE,
    LAYER_COLUMNS,
    LAYER_EXPERT_BYTES,
    LAYER_WORK,
    LAYERS,
    MADE,
    NUM_PAIRS,
    NUM_TAKEN,
    OUT,
    PAIR_OF_PLACE,
    PER_TOKEN,
    ROUNDED,
    ROUNDED_STRIDE,
    ROW_OF_PAIR,
    SHARES,
    STAGES,
    TAKEN,
    TILE_BYTES,
    TILE_FLOATS,
    TILES,
    X,
    compute,
    open_row,
    plan,
)
from transfer import exchange
from transfer.exchange import LAST_STAMP, LOOKS, await_rows, late
from transfer.expert_exchange import HOST_REQUEST_COLUMNS, ROWS, ExpertCounts, ExpertRequests, ExpertSlot, LayerExperts
from transfer.expert_exchange import LAYER as REQUESTED_LAYER
from transfer.host_tier import Answered
from transfer.matrix_rows import columns_of, inner_of, kind_of, num_gains
from transfer.simd import (
    emission,
    exp,
    memory,
    packed_gains,
    packed_rows,
    region,
    rounded_rows,
    row_tiles,
    team,
    values,
    vectors,
)
from transfer.simd.features import LANES, require_vectors
from transfer.simd.inner import inner
from transfer.simd.memory import load_int64, store_int64, store_release_int32
from transfer.simd.region import start, version
from transfer.simd.team import new_counters, now_ns
from transfer.slot_shape import expert_work_arrays

_MODULES = (emission, exchange, exp, expert_products, memory, packed_gains, packed_rows, region, rounded_rows,
            row_tiles, team, values, vectors)  # fmt: skip

# Columns of a step's call: its arguments, and the sums that it returns.
FLAGS, ANSWERED, STAMP, LIMIT_NS, WAITED_NS, COMPUTED_NS, NUM_EXPERTS, ALL_PAIRS, ALL_BYTES, STEP_INT64 = range(10)


@cache
def _compile(kinds: "_Kinds", version: int) -> Any:
    """Compile `expert_products.compute` to a C function of the context's address. `version` is a digest of all callees'
    sources, which numba's file cache does not check.
    """
    gate_up, down = kinds.gate_up, kinds.down

    @numba.cfunc("void(int64, int64, int64)", cache=True)
    def work(me, threads, context):  # type: ignore[no-untyped-def]
        if version >= 0:
            compute(me, threads, context, gate_up, down)

    return work


@cache
def _compile_answer(version: int) -> Any:
    """Compile the loop over all host requests of a step. It returns how many were answered; if that is not all, the
    next one did not come.
    """

    @numba.njit("int64(int64, int64, int64, int64, int64)", nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def answer(threads, context, step, host_requests, num_requests):  # type: ignore[no-untyped-def]
        if version < 0:
            return 0
        for place in range(num_requests):
            layer = load_int64(host_requests + 8 * (HOST_REQUEST_COLUMNS * place + REQUESTED_LAYER))
            rows = load_int64(host_requests + 8 * (HOST_REQUEST_COLUMNS * place + ROWS))
            stamp = (load_int64(step + 8 * STAMP) + place) & LAST_STAMP
            began_ns = now_ns()
            while await_rows(load_int64(step + 8 * FLAGS), rows, stamp, LOOKS) >= 0:
                if now_ns() - began_ns > load_int64(step + 8 * LIMIT_NS):
                    return place
            there_ns = now_ns()
            taken = plan(context, layer, rows, threads)
            own = open_row(context)[LAYERS] + 8 * LAYER_COLUMNS * layer
            start(load_int64(own + 8 * LAYER_WORK), threads if taken > 0 else 1, context)
            store_release_int32(load_int64(step + 8 * ANSWERED), stamp)
            _add(step, WAITED_NS, there_ns - began_ns)
            _add(step, COMPUTED_NS, now_ns() - there_ns)
            _add(step, NUM_EXPERTS, open_row(context)[NUM_TAKEN])
            _add(step, ALL_PAIRS, open_row(context)[NUM_PAIRS])
            _add(step, ALL_BYTES, taken * load_int64(own + 8 * LAYER_EXPERT_BYTES))
        return num_requests

    return answer


@inner
def _add(step, column, value):
    store_int64(step + 8 * column, load_int64(step + 8 * column) + value)


class HostExperts:
    """Computes a model's experts in host memory; has a workspace. One thread calls it at a time."""

    def __init__(
        self, layers: Sequence[LayerExperts | None], max_rows: int, per_token: int, threads: int,
        limit_s: float = HOST_REQUEST_LIMIT_S,
    ) -> None:  # fmt: skip
        """Compile the kernels, or read them from numba's cache.

        max_rows: the most rows of a host request. threads: the most that a region may use. limit_s: seconds that the
        device may take to a host request.

        Raises RuntimeError for a CPU without AVX2, ValueError for experts that the kernels do not support.
        """
        require_vectors()
        self._layers = layers  # they own the memory behind the addresses
        hidden, width = _check(layers)
        self._threads, self._limit_s = min(threads, int(numba.config.NUMBA_NUM_THREADS)), limit_s
        code = version(*_MODULES)
        self._answer = _compile_answer(code)
        self.counts = ExpertCounts()
        most_pairs, most = max_rows * per_token, max((one.count for one in layers if one is not None), default=0)
        lines = [one and _layer_columns(one, code) for one in layers]
        any_line = next(line for line in lines if line is not None)
        self._table = np.array([line or [0, *any_line[1:]] for line in lines], np.int64)
        gains = max(max(2 * num_gains(one.gate_up), num_gains(one.down)) for one in layers if one is not None)
        tile_floats = -(-(TILE_FLOATS + 2 * GAIN_ROWS * gains + LANES) // TILE_FLOATS) * TILE_FLOATS
        work = expert_work_arrays(max_rows, per_token, width, hidden)
        self._arrays = {
            LAYERS: self._table,
            TAKEN: np.zeros(most_pairs, np.int32),
            BEGINS: np.zeros(most_pairs + 1, np.int32),
            ROW_OF_PAIR: np.zeros(most_pairs, np.int32),
            PAIR_OF_PLACE: np.zeros(most_pairs, np.int32),
            FOUND: np.zeros(max(most, 1), np.int32),
            GATED: np.full(work["gated"].shape, np.nan, np.float32),
            MADE: np.full(work["made"].shape, np.nan, np.float32),
            ROUNDED: np.full(work["rounded"].shape, np.nan, np.float32),
            TILES: np.full((self._threads, tile_floats), np.nan, np.float32),
            COUNTERS: new_counters(STAGES, self._threads),
        }
        self._context = np.zeros(CONTEXT_INT64, np.int64)
        self._context[[HIDDEN, INTERMEDIATE, PER_TOKEN, TILE_BYTES]] = hidden, width, per_token, 4 * tile_floats
        self._context[ROUNDED_STRIDE] = work["rounded"].shape[1]
        for column, array in self._arrays.items():
            self._context[column] = array.ctypes.data
        self._step = np.zeros(STEP_INT64, np.int64)
        self._max_rows, self._hidden, self._per_token = max_rows, hidden, per_token

    def answer(self, parts: Sequence[tuple[Any, Any]]) -> Answered:
        """Answer all host requests of a step; see `transfer.expert_exchange.ExpertWorker`."""
        ((host_requests, slot),) = parts
        assert isinstance(host_requests, ExpertRequests), "experts: requests of a step"
        assert isinstance(slot, ExpertSlot), "experts: a slot of theirs"
        self._open(slot, host_requests.table)
        answered = self._answer(
            self._threads, self._context.ctypes.data, self._step.ctypes.data, host_requests.table.ctypes.data,
            len(host_requests.table),
        )  # fmt: skip
        waited, computed, experts, pairs, num_bytes = self._step[WAITED_NS : ALL_BYTES + 1].tolist()
        counts = self.counts
        counts.host_requests += answered
        counts.experts += experts
        counts.pairs += pairs
        counts.bytes_read += num_bytes
        counts.wait_s += waited / 1e9
        counts.compute_s += computed / 1e9
        last = min(answered, len(host_requests.table) - 1)
        slot.advance(int(host_requests.table[last, ROWS]), last)
        if answered < len(host_requests.table):
            raise late(slot, int(host_requests.table[answered, REQUESTED_LAYER]), self._limit_s)
        return Answered(waited / 1e9, computed / 1e9)

    def _open(self, slot: ExpertSlot, table: np.ndarray) -> None:
        shape = (self._max_rows, self._per_token)
        assert slot.experts.shape[1] == shape[1], "experts: as many of a token as were compiled for"
        assert slot.hidden.shape[1] == self._hidden, "experts: hidden states of the model"
        assert len(slot.flags) <= self._max_rows, "experts: no more rows than the workspace has room for"
        assert table.dtype == np.int64, "host requests: int64"
        assert table.shape[1] == HOST_REQUEST_COLUMNS, "host requests: [requests, HOST_REQUEST_COLUMNS]"
        assert table.flags.c_contiguous, "host requests: contiguous"
        for column, tensor in ((X, slot.hidden), (EXPERTS, slot.experts), (SHARES, slot.shares), (OUT, slot.out)):
            self._context[column] = tensor.data_ptr()
        self._step[:] = 0
        self._step[[FLAGS, ANSWERED, STAMP, LIMIT_NS]] = (
            slot.flags.data_ptr(), slot.answered.data_ptr(), slot.stamp, int(1e9 * self._limit_s),
        )  # fmt: skip


class _Kinds:
    """The kinds of both matrices' rows, compared by type: zeros of two types are equal as numbers."""

    def __init__(self, gate_up: Any, down: Any) -> None:
        self.gate_up, self.down = gate_up, down
        self._types = str(numba.typeof(gate_up)), str(numba.typeof(down))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kinds) and self._types == other._types

    def __hash__(self) -> int:
        return hash(self._types)


def _layer_columns(one: LayerExperts, code: int) -> list[int]:
    """Return a line of the context's table. A layer without experts gets another layer's line, with a count of 0."""
    matrices = (one.gate_up, one.down)
    work = _compile(_Kinds(*(kind_of(matrix, one.in_integers) for matrix in matrices)), code).address
    biases = [0 if bias is None else bias.data_ptr() for bias in (one.gate_up_bias, one.down_bias)]
    tables = [columns_of(matrix) for matrix in matrices]
    own = (*tables[0], *tables[1], *biases, ACTIVATIONS[one.activation])
    return [one.count, int(work), one.num_bytes // one.count, *own]


def _check(layers: Sequence[LayerExperts | None]) -> tuple[int, int]:
    """Return the widths of hidden states and of an expert, which must be the same in all layers."""
    found = {(inner_of(one.gate_up), inner_of(one.down)) for one in layers if one is not None}
    if len(found) != 1:
        raise ValueError(f"experts on the CPU: got layers of {len(found)} shapes; wanted one")
    ((hidden, width),) = found
    for one in layers:
        if one is not None:
            check_matrix("gate_up", one.gate_up, one.count * 2 * width, hidden)
            check_matrix("down", one.down, one.count * hidden, width)
            check_bias("gate_up's bias", one.gate_up_bias, one.count * 2 * width)
            check_bias("down's bias", one.down_bias, one.count * hidden)
    return hidden, width

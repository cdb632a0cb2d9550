"""Measure how fast attention on this host reads rows in a stream.

All rows are equal, so the answer is known and checked. Each row is read once for the heads of its group and for all
queries of a step.
"""

import math
import time
from collections.abc import Callable

import numpy as np

from cpu.host_attention import HostAttention
from cpu.pieces import EXACT, new_pieces
from cpu.segment import ROW_TYPES
from transfer.host_memory import SEGMENT_TOKENS
from transfer.tier_shape import TierShape

_ONE = {"bfloat16": 0x3F80, "int8": 1}
_HUGE_PAGE_BYTES = 2 * 2**20


def attend_alike_rows(
    kernel: HostAttention, shape: TierShape, threads: int, num_tokens: int, num_queries: int = 1
) -> tuple[Callable[[], None], int]:
    """Return a function that attends exactly to `num_tokens` equal rows and checks the answer, and the bytes it reads.

    num_queries: rows of a step that read them together.
    """
    sizes = [min(SEGMENT_TOKENS, num_tokens - begin) for begin in range(0, num_tokens, SEGMENT_TOKENS)]
    parts = [
        [_alike((shape.num_kv_heads, size, shape.dim), ROW_TYPES[shape.rows][0], _ONE[shape.rows]) for _ in range(2)]
        for size in sizes
    ]
    key_scale = np.ones(shape.num_kv_heads, np.float32)
    value_scale = np.ones((shape.num_kv_heads, shape.dim), np.float32)
    table = new_pieces(len(parts))
    table["run_begin"], table["followers"] = SEGMENT_TOKENS * np.arange(len(parts)), num_queries - 1
    for piece, arrays in zip(table, parts, strict=True):
        piece["mode"], piece["end"], piece["tokens"] = EXACT, arrays[0].shape[1], arrays[0].shape[1]
        for name, array in zip(("key", "value"), arrays, strict=True):
            piece[f"{name}s"] = array.ctypes.data
            piece[f"{name}_head_bytes"], piece[f"{name}_row_bytes"] = array.strides[:2]
        piece["key_scale"], piece["value_scale"] = key_scale.ctypes.data, value_scale.ctypes.data
    queries = np.zeros((num_queries, shape.num_heads, shape.dim), kernel.query_type)
    num_bytes = num_tokens * shape.num_kv_heads * kernel.row_bytes
    kept = parts, key_scale, value_scale  # the table holds addresses of these

    def attend() -> None:
        got = kernel.attend(table, queries, None, threads)
        assert kept
        assert got.rows * kernel.row_bytes == num_bytes, "a row is read once for the heads of a group"
        assert np.allclose(got.lse, math.log(num_tokens), atol=1e-3), "queries of zero count the rows"

    return attend, num_bytes


def best_seconds(call: Callable[[], None], repeats: int) -> float:
    """Return the seconds of the fastest of some calls, after one call to warm up."""
    call()
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def _alike(shape: tuple[int, ...], row_type: type, value: int) -> np.ndarray:
    """Return rows of one value that begin on a huge page, as slabs do: unaligned rows are read slower."""
    num_bytes = math.prod(shape) * np.dtype(row_type).itemsize
    room = np.empty(num_bytes + _HUGE_PAGE_BYTES, np.uint8)
    begin = -room.ctypes.data % _HUGE_PAGE_BYTES
    rows = room[begin : begin + num_bytes].view(row_type).reshape(shape)
    rows[:] = value
    return rows

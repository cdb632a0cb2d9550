"""Measure how fast attention on this host reads rows in a stream: what a step over host memory is held to."""

from collections.abc import Callable

import torch

from cpu import attend_rate
from cpu.decode_step import QUERY_TYPES
from cpu.host_attention import HostAttention
from cpu.memory_rates import GIB
from cpu.segment import ROW_TYPES
from transfer.tier_shape import TierShape

_REPEATS = 7


def measure_attend_rate(shape: TierShape, query_dtype: torch.dtype, threads: int, gib: float) -> float:
    """Return GB/s (1e9 bytes) of rows as the tier keeps them, at the best time of a step of one row.

    query_dtype: bfloat16 or float32; gib: of keys and values together, several times the last-level cache to be of
    memory. Compiles, or reads numba's cache.
    """
    row_bytes = _make_kernel(shape, query_dtype, threads).row_bytes
    num_tokens = max(1, int(gib * GIB) // (shape.num_kv_heads * row_bytes))
    attend, num_bytes = attend_alike_rows(shape, query_dtype, threads, num_tokens)
    return num_bytes / attend_rate.best_seconds(attend, _REPEATS) / 1e9


def attend_alike_rows(
    shape: TierShape, query_dtype: torch.dtype, threads: int, num_tokens: int, num_queries: int = 1
) -> tuple[Callable[[], None], int]:
    """Return what `cpu.attend_rate.attend_alike_rows` does, with a kernel of its own."""
    kernel = _make_kernel(shape, query_dtype, threads)
    return attend_rate.attend_alike_rows(kernel, shape, threads, num_tokens, num_queries)


def _make_kernel(shape: TierShape, query_dtype: torch.dtype, threads: int) -> HostAttention:
    return HostAttention(
        heads=shape.num_heads, kv_heads=shape.num_kv_heads, dim=shape.dim, row_type=ROW_TYPES[shape.rows][0],
        query_type=QUERY_TYPES[query_dtype], bits=max(shape.bits_per_table, 1), tables=max(shape.num_tables, 2),
        scale=shape.dim**-0.5, threads=threads,
    )  # fmt: skip

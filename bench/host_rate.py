"""Measure how fast attention on this host streams rows: the reference for steps over host memory."""

from collections.abc import Callable

import torch

from cpu import attend_rate
from cpu.cpu_tier import compiled_for
from cpu.host_attention import HostAttention
from cpu.memory_rates import GIB
from transfer.tier_shape import TierShape

_REPEATS = 7


def measure_attend_rate(shape: TierShape, query_dtype: torch.dtype, threads: int, gib: float) -> float:
    """Return GB/s (1e9 bytes) of rows in the tier's format, by the best time of a step of one row.

    query_dtype: bfloat16 or float32. gib: of keys and values together; several times the last-level cache, so that they
    are read from memory. Compiles the kernel, or loads it from numba's cache.
    """
    row_bytes = HostAttention(compiled_for(shape, query_dtype), threads).row_bytes
    num_tokens = max(1, int(gib * GIB) // (shape.num_kv_heads * row_bytes))
    attend, num_bytes = attend_alike_rows(shape, query_dtype, threads, num_tokens)
    return num_bytes / attend_rate.best_seconds(attend, _REPEATS) / 1e9


def attend_alike_rows(
    shape: TierShape, query_dtype: torch.dtype, threads: int, num_tokens: int, num_queries: int = 1
) -> tuple[Callable[[], None], int]:
    """Call `cpu.attend_rate.attend_alike_rows` with a kernel of its own."""
    kernel = HostAttention(compiled_for(shape, query_dtype), threads)
    return attend_rate.attend_alike_rows(kernel, shape, threads, num_tokens, num_queries)

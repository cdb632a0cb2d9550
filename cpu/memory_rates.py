"""Measure how fast this host's cores read memory: in a stream, and row by row at random.

Floors of operations on the CPU are computed from these rates. A read is a sum over int64 with all threads, in numba
without the GIL, and moves each byte of the buffer once. The buffer is several times the last-level cache, unless a
caller asks for a smaller one, because weights that stay in the cache are read at the cache's rate.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numba
import numpy as np
import psutil

from transfer.simd.sums import sum_block
from transfer.simd.threads import start_threads
from transfer.simd.vectors import address_of

GIB = 2**30
ROW_BYTES = 256  # one bf16 row of a head of 128: the unit in which sampled attention reads
CACHE_MULTIPLE = 4
_INT64_BYTES = 8
_BLOCK = 32_768  # int64 in a piece of work: 256 KiB
_MATRIX_ROW_BYTES = 4096  # bytes of each of four rows that are read side by side
_AHEAD_BYTES = 16_384
_REPEATS = 7

_sum_four = sum_block(4)


@numba.njit(parallel=True, nogil=True, cache=True)
def _sum_stream(values: np.ndarray) -> int:
    total = 0
    for block in numba.prange(len(values) // _BLOCK):
        part = 0
        for index in range(block * _BLOCK, (block + 1) * _BLOCK):
            part += values[index]
        total += part
    return total


@numba.njit(parallel=True, nogil=True, cache=True)
def _sum_eight_streams(values: np.ndarray) -> int:
    """Sum with each block read at eight places at once: more lines are in flight, which suits caches."""
    total = 0
    part = _BLOCK // 8
    for block in numba.prange(len(values) // _BLOCK):
        first = block * _BLOCK
        a = b = c = d = e = f = g = h = 0
        for index in range(first, first + part):
            a += values[index]
            b += values[index + part]
            c += values[index + 2 * part]
            d += values[index + 3 * part]
            e += values[index + 4 * part]
            f += values[index + 5 * part]
            g += values[index + 6 * part]
            h += values[index + 7 * part]
        total += a + b + c + d + e + f + g + h
    return total


@numba.njit(parallel=True, nogil=True, cache=True)
def _sum_fetched_ahead(values: np.ndarray) -> int:
    """Sum in the way products read matrices: four rows of 4 KiB side by side, each line prefetched well before its use.
    A core then has more lines in flight than its own prefetcher keeps, so few cores reach the memory's rate.
    """
    total, first = 0, address_of(values)
    for block in numba.prange(len(values) // _BLOCK):
        part, begin = 0, first + _INT64_BYTES * _BLOCK * block
        for rows in range(begin, begin + _INT64_BYTES * _BLOCK, 4 * _MATRIX_ROW_BYTES):
            part += _sum_four(rows, _MATRIX_ROW_BYTES, _AHEAD_BYTES)
        total += part
    return total


@numba.njit(parallel=True, nogil=True, cache=True)
def _sum_rows(rows: np.ndarray, order: np.ndarray) -> int:
    total = 0
    for position in numba.prange(len(order)):
        row = rows[order[position]]
        part = 0
        for index in range(rows.shape[1]):
            part += row[index]
        total += part
    return total


STREAM_WAYS = (_sum_stream, _sum_eight_streams, _sum_fetched_ahead)


def last_level_cache_bytes() -> int:
    """Return the size of the first core's last-level cache, as the kernel reports it; 32 MiB where it does not."""
    sizes = [
        int(path.read_text().strip().removesuffix("K")) * 1024
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=32 * 2**20)


def default_gib() -> float:
    """Return the buffer's size: several times the last-level cache, but at most a quarter of the free memory."""
    return min(max(1.0, CACHE_MULTIPLE * last_level_cache_bytes() / GIB), psutil.virtual_memory().available / 4 / GIB)


def measure_host_rates(threads: int, *, gib: float | None = None) -> dict[str, float]:
    """Return GB/s (1e9 bytes): `host_stream_gb_s` and `host_random_rows_gb_s` (rows of 256 bytes), the best of several
    runs.

    `gib`: size of the buffer; None: `default_gib()`. Takes a few seconds.
    """
    num_bytes = int((default_gib() if gib is None else gib) * GIB)
    buffer = _touched_buffer(num_bytes)
    rows = buffer.reshape(-1, ROW_BYTES // _INT64_BYTES)
    order = np.random.default_rng(0).permutation(len(rows)).astype(np.int32)
    start_threads()
    with_threads = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        return {
            "host_stream_gb_s": _stream_rate(buffer, _REPEATS),
            "host_random_rows_gb_s": _best_rate(lambda: _sum_rows(rows, order), buffer.nbytes, _REPEATS),
        }
    finally:
        numba.set_num_threads(with_threads)


def measure_read_rate(threads: int, num_bytes: int) -> float:
    """Return the GB/s of reading one buffer of `num_bytes` over and over: from the cache, if it fits there."""
    buffer = _touched_buffer(num_bytes)
    start_threads()
    with_threads = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        repeats = max(_REPEATS, min(200, GIB // buffer.nbytes))
        return _stream_rate(buffer, repeats)
    finally:
        numba.set_num_threads(with_threads)


def _touched_buffer(num_bytes: int) -> np.ndarray:
    """Return int64 ones, in whole blocks. Pages are written, because unwritten ones would share one page of zeros."""
    block_bytes = _BLOCK * _INT64_BYTES
    return np.ones(-(-num_bytes // block_bytes) * _BLOCK, np.int64)


def _stream_rate(buffer: np.ndarray, repeats: int) -> float:
    """Return the rate of the fastest way to read the buffer, which differs by machine, threads and caches. A rate below
    what some kernel reaches would make floors too high.
    """
    return max(_best_rate(partial(way, buffer), buffer.nbytes, repeats) for way in STREAM_WAYS)


def _best_rate(read: Callable[[], int], num_bytes: int, repeats: int) -> float:
    """Return the best run's rate: other programs can only slow a run."""
    read()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        total = read()
        best = min(best, time.perf_counter() - began)
        assert total == num_bytes // _INT64_BYTES, "the sum of a buffer of ones is its length"
    return num_bytes / best / 1e9

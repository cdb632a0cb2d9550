"""Hash tables of one KV head and layer of a segment: made from codes in place by a counting sort, and undone.

A table lists the segment's tokens by bucket, and within a bucket by window of WINDOW_TOKENS: entries are uint16 places
in the window. `offsets[bucket * windows + window]` is where such a list begins; the last offset is the token count.
Refuses to know what codes mean. Invariant: every token stands in every table once; lists rise. Bytes moved: a table of
entries twice (codes in, entries out) and its offsets once; the scatter goes to a private tile that stays in the cache.
"""

import numba
import numpy as np

from cpu.pieces import SEGMENT_TOKENS, WINDOW_TOKENS
from transfer.simd.team import Team, claim, new_counters

_STREAMS = 2  # histograms counted side by side: runs of equal codes do not wait for one another


def num_windows(tokens: int) -> int:
    return -(-tokens // WINDOW_TOKENS)


def num_offsets(bits: int, tokens: int) -> int:
    """Int32 of one table: one for each bucket and window, and the end."""
    return (num_windows(tokens) << bits) + 1


def check_tables(entries: np.ndarray, offsets: np.ndarray, bits: int) -> None:
    """Raises ValueError for arrays that are no tables; see `build_tables`."""
    tables, tokens = entries.shape
    if entries.dtype != np.uint16 or offsets.dtype != np.int32 or entries.strides[1] != 2 or offsets.strides[1] != 4:
        raise ValueError(f"tables: got {entries.dtype} and {offsets.dtype}; wanted rows of uint16 and of int32")
    if not 1 <= tokens <= SEGMENT_TOKENS:
        raise ValueError(f"tables: asked {tokens} tokens, have room for 1 to {SEGMENT_TOKENS}; make more segments")
    wanted = (tables, num_offsets(bits, tokens))
    if offsets.shape != wanted:
        raise ValueError(f"offsets: got shape {offsets.shape}; wanted {wanted} for {bits} bits and {tokens} tokens")


def build_tables(entries: np.ndarray, offsets: np.ndarray, bits: int, begin: int, end: int, threads: int) -> None:
    """Turn tables `begin .. end` from codes to entries, in place. paper (2410.16179) section 4.3: K = bits.

    entries: uint16 `[tables, tokens]`, codes below 2**bits on the way in; offsets: int32 `[tables, num_offsets]`,
    written. With one thread no region is started and the GIL is free: a table of 64K tokens takes some 0.2 ms.
    """
    check_tables(entries, offsets, bits)
    assert 0 <= begin <= end <= len(entries), "tables: a range of those there are"
    if threads == 1:
        _build(entries, offsets, bits, begin, end)
        return
    with_threads = numba.get_num_threads()
    numba.set_num_threads(threads)
    _build_together(entries, offsets, bits, begin, end, threads, new_counters(1, threads))
    numba.set_num_threads(with_threads)


def codes_from_tables(
    entries: np.ndarray, offsets: np.ndarray, bits: int, begin: int, end: int, codes: np.ndarray
) -> None:
    """The inverse: codes uint16 `[tables, tokens]`, rows may lie apart, get tables `begin .. end`."""
    check_tables(entries, offsets, bits)
    assert 0 <= begin <= end <= len(entries), "tables: a range of those there are"
    assert codes.shape == entries.shape, "codes: one for every entry"
    assert codes.dtype == np.uint16, "codes: uint16"
    _undo(entries, offsets, bits, begin, end, codes)


@numba.njit(nogil=True, cache=True)
def _sort_table(row, offsets, bits, places, tile):
    """places: int32 `[_STREAMS, num_offsets]`; tile: uint16 `[tokens]`."""
    tokens, mask = len(row), (1 << bits) - 1
    windows = (tokens + WINDOW_TOKENS - 1) // WINDOW_TOKENS
    lists = windows << bits
    first, second = places[0], places[1]
    for at in range(lists):
        first[at] = 0
        second[at] = 0
    for window in range(windows):
        begin, end = window * WINDOW_TOKENS, min(tokens, (window + 1) * WINDOW_TOKENS)
        for token in range(begin, end - 1, 2):
            first[np.uint64((row[token] & mask) * windows + window)] += 1
            second[np.uint64((row[token + 1] & mask) * windows + window)] += 1
        if (end - begin) % 2:
            first[np.uint64((row[end - 1] & mask) * windows + window)] += 1
    total = np.int32(0)
    for at in range(lists):
        count = first[at] + second[at]
        offsets[at] = total
        first[at] = total
        total += count
    offsets[lists] = total
    for window in range(windows):
        begin, end = window * WINDOW_TOKENS, min(tokens, (window + 1) * WINDOW_TOKENS)
        for token in range(begin, end):
            at = np.uint64((row[token] & mask) * windows + window)
            place = first[at]
            tile[np.uint64(place)] = token - begin
            first[at] = place + 1
    row[:] = tile


@numba.njit(nogil=True, cache=True)
def _build(entries, offsets, bits, begin, end):
    places = np.empty((_STREAMS, offsets.shape[1]), np.int32)
    tile = np.empty(entries.shape[1], np.uint16)
    for table in range(begin, end):
        _sort_table(entries[table], offsets[table], bits, places, tile)


@numba.njit(nogil=True, cache=True, parallel=True)
def _build_together(entries, offsets, bits, begin, end, threads, counters):
    for me in numba.prange(threads):
        team = Team(counters, np.int64(me), threads)
        places = np.empty((_STREAMS, offsets.shape[1]), np.int32)
        tile = np.empty(entries.shape[1], np.uint16)
        table = claim(team, 0, end - begin)
        while table >= 0:
            _sort_table(entries[begin + table], offsets[begin + table], bits, places, tile)
            table = claim(team, 0, end - begin)


@numba.njit(nogil=True, cache=True)
def _undo(entries, offsets, bits, begin, end, codes):
    tokens = entries.shape[1]
    windows = (tokens + WINDOW_TOKENS - 1) // WINDOW_TOKENS
    for table in range(begin, end):
        for bucket in range(1 << bits):
            for window in range(windows):
                at = bucket * windows + window
                for place in range(offsets[table, at], offsets[table, at + 1]):
                    codes[table, window * WINDOW_TOKENS + entries[table, place]] = bucket

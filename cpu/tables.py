"""Build hash tables of one KV head and layer of a segment from codes, in place by a counting sort, and recover codes.

A table lists the segment's tokens by bucket, and within a bucket by stripe of STRIPE_TOKENS: entries are uint16 places
in the stripe. `offsets[bucket * stripes + stripe]` is where such a list begins; the last offset is the token count.
Every token stands in every table once, and lists rise. Bytes moved: a table of entries twice (codes in, entries out)
and its offsets once; the scatter goes to a private tile that stays in the cache.
"""

import numba
import numpy as np

from transfer.host_memory import SEGMENT_TOKENS, STRIPE_TOKENS, num_offsets
from transfer.simd.inner import inner
from transfer.simd.memory import copy_bytes, load_int32, load_uint16, store_int16, store_int32
from transfer.simd.team import Team, claim, new_counters
from transfer.simd.vectors import address_of

_STREAMS = 4  # histograms counted side by side, so that equal codes in a row need not wait for one another


def check_tables(entries: np.ndarray, offsets: np.ndarray, bits: int) -> None:
    """Raise ValueError for arrays that are no tables; see `build_tables`."""
    tables, tokens = entries.shape
    if entries.dtype != np.uint16 or offsets.dtype != np.int32 or entries.strides[1] != 2 or offsets.strides[1] != 4:
        raise ValueError(f"tables: got {entries.dtype} and {offsets.dtype}; wanted rows of uint16 and of int32")
    if not 1 <= tokens <= SEGMENT_TOKENS:
        raise ValueError(f"tables: asked {tokens} tokens, have room for 1 to {SEGMENT_TOKENS}; make more segments")
    wanted = (tables, num_offsets(bits, tokens))
    if offsets.shape != wanted:
        raise ValueError(f"offsets: got shape {offsets.shape}; wanted {wanted} for {bits} bits and {tokens} tokens")


def build_tables(entries: np.ndarray, offsets: np.ndarray, bits: int, begin: int, end: int, threads: int) -> None:
    """Turn codes of tables `[begin, end)` into entries, in place. paper (2410.16179) section 4.3: K = bits.

    entries: uint16 `[tables, tokens]`, before the call codes below 2**bits. offsets: int32 `[tables, num_offsets]`,
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
    """Recover the codes of tables `[begin, end)`. codes: uint16 `[tables, tokens]`, written; rows may lie apart."""
    check_tables(entries, offsets, bits)
    assert 0 <= begin <= end <= len(entries), "tables: a range of those there are"
    assert codes.shape == entries.shape, "codes: one for every entry"
    assert codes.dtype == np.uint16, "codes: uint16"
    _undo(entries, offsets, bits, begin, end, codes)


@inner
def _sort_table(entries, tokens, offsets, bits, places, tile):
    """Sort one table. Addresses: entries uint16 `[tokens]`; offsets int32 `[num_offsets]`; places int32 `[stripes,
    _STREAMS, buckets]`; tile uint16 `[tokens]`.
    """
    mask, stripes = (1 << bits) - 1, (tokens + STRIPE_TOKENS - 1) // STRIPE_TOKENS
    stream_bytes = 4 << bits
    for byte in range(0, stripes * _STREAMS * stream_bytes, 4):
        store_int32(places + byte, 0)
    for stripe in range(stripes):
        first = places + stripe * _STREAMS * stream_bytes
        second, third, fourth = first + stream_bytes, first + 2 * stream_bytes, first + 3 * stream_bytes
        begin = entries + 2 * stripe * STRIPE_TOKENS
        end = min(entries + 2 * tokens, begin + 2 * STRIPE_TOKENS)
        whole = begin + (end - begin) // 8 * 8
        for code in range(begin, whole, 8):
            _count(first, code, mask)
            _count(second, code + 2, mask)
            _count(third, code + 4, mask)
            _count(fourth, code + 6, mask)
        for code in range(whole, end, 2):
            _count(first, code, mask)
    total = 0
    for bucket in range(1 << bits):
        for stripe in range(stripes):
            place = places + stripe * _STREAMS * stream_bytes + 4 * bucket
            count = 0
            for stream in range(_STREAMS):
                count += load_int32(place + stream * stream_bytes)
            store_int32(offsets + 4 * (bucket * stripes + stripe), total)
            store_int32(place, total)
            total += count
    store_int32(offsets + 4 * (stripes << bits), total)
    for stripe in range(stripes):
        first, begin = places + stripe * _STREAMS * stream_bytes, stripe * STRIPE_TOKENS
        for token in range(begin, min(tokens, begin + STRIPE_TOKENS)):
            at = first + 4 * (load_uint16(entries + 2 * token) & mask)
            place = load_int32(at)
            store_int16(tile + 2 * place, token - begin)
            store_int32(at, place + 1)
    copy_bytes(entries, tile, 2 * tokens)


@inner
def _count(histogram, code, mask):
    at = histogram + 4 * (load_uint16(code) & mask)
    store_int32(at, load_int32(at) + 1)


@numba.njit(nogil=True, cache=True)
def _build(entries, offsets, bits, begin, end):
    tokens = entries.shape[1]
    places, tile = np.empty(_STREAMS * offsets.shape[1], np.int32), np.empty(tokens, np.uint16)
    for table in range(begin, end):
        _sort_table(
            address_of(entries[table]), tokens, address_of(offsets[table]), bits, address_of(places), address_of(tile)
        )


@numba.njit(nogil=True, cache=True, parallel=True)
def _build_together(entries, offsets, bits, begin, end, threads, counters):
    for me in numba.prange(threads):
        team = Team(counters, np.int64(me), threads)
        tokens = entries.shape[1]
        places, tile = np.empty(_STREAMS * offsets.shape[1], np.int32), np.empty(tokens, np.uint16)
        table = claim(team, 0, end - begin)
        while table >= 0:
            at = begin + table
            _sort_table(
                address_of(entries[at]), tokens, address_of(offsets[at]), bits, address_of(places), address_of(tile)
            )
            table = claim(team, 0, end - begin)


@numba.njit(nogil=True, cache=True)
def _undo(entries, offsets, bits, begin, end, codes):
    tokens = entries.shape[1]
    stripes = (tokens + STRIPE_TOKENS - 1) // STRIPE_TOKENS
    for table in range(begin, end):
        for bucket in range(1 << bits):
            for stripe in range(stripes):
                at = bucket * stripes + stripe
                for place in range(offsets[table, at], offsets[table, at + 1]):
                    codes[table, stripe * STRIPE_TOKENS + entries[table, place]] = bucket

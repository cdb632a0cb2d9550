"""Look up the tokens that share the query's bucket in two hash tables or more.

Functions for numba code, for one head of a query and one piece. paper (2410.16179) section 4.3. Found ids are in rising
order and distinct, and none is outside of the piece's range or in an excluded block. Excluded ids are dropped after
collisions are counted, so that u is still the probability of the others. Counters are zero between calls. Bytes moved:
the query's bucket of every table, and an offset line of each; those of the next lookup are prefetched meanwhile.
"""

import numpy as np

from cpu.exclusions import clear_excluded, next_covered
from cpu.pieces import (
    BEGIN,
    END,
    ENTRIES,
    ENTRY_HEAD,
    ENTRY_TABLE,
    OFFSET_HEAD,
    OFFSET_TABLE,
    OFFSETS,
    RUN_BEGIN,
    TOKENS,
)
from transfer.host_memory import STRIPE_TOKENS
from transfer.simd.inner import inner
from transfer.simd.memory import (
    COUNTERS,
    cap_pairs,
    count_bits,
    count_up,
    load_int32,
    load_uint16,
    lowest_bit,
    prefetch_middle,
    store_int16,
    take_pairs,
)

COUNTER_MARGIN = 64  # uint8 on both sides of a stripe's counters, for blocks that overlap its borders
_CAPPED = 253  # tables counted between two caps, so that a uint8 counter stays below 256
_LINE_BYTES = 64
_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
SPANS = 3  # borders of a bucket's lists: a segment has at most two stripes


@inner
def room_for(begin, end):
    """Return how many uint16 a lookup in a range may write: an id for each token, and a vector more."""
    return (end - begin + 2 * COUNTERS - 1) // COUNTERS * COUNTERS


@inner
def stripes_of(piece):
    """Return how many stripes the segment has, and the range `[first, last)` of those that the piece overlaps."""
    stripes = (piece[TOKENS] + STRIPE_TOKENS - 1) // STRIPE_TOKENS
    return stripes, piece[BEGIN] // STRIPE_TOKENS, (piece[END] + STRIPE_TOKENS - 1) // STRIPE_TOKENS


@inner
def _offset(piece, kv_head, table, codes, mask, stripes):
    """Return the address of a table's offset of the query's bucket. A code beyond the last bucket is masked to one."""
    bucket = load_uint16(codes + 2 * table) & mask
    return piece[OFFSETS] + kv_head * piece[OFFSET_HEAD] + table * piece[OFFSET_TABLE] + 4 * stripes * bucket


@inner
def fetch_offsets(piece, kv_head, codes, tables, mask):
    """Prefetch the offsets that `fetch_bucket` reads. codes: address of the query's codes, uint16 `[tables]`."""
    stripes, _, _ = stripes_of(piece)
    for table in range(tables):
        offset = _offset(piece, kv_head, table, codes, mask, stripes)
        prefetch_middle(offset)
        prefetch_middle(offset + 4 * stripes)  # the bucket's end may lie on the next line


@inner
def fetch_bucket(piece, kv_head, codes, table, mask):
    """Prefetch the query's bucket of one table."""
    stripes, first, last = stripes_of(piece)
    offset = _offset(piece, kv_head, table, codes, mask, stripes)
    entries = piece[ENTRIES] + kv_head * piece[ENTRY_HEAD] + table * piece[ENTRY_TABLE]
    begin, end = entries + 2 * load_int32(offset + 4 * first), entries + 2 * load_int32(offset + 4 * last)
    for line in range(begin, end + _LINE_BYTES - 1, _LINE_BYTES):
        prefetch_middle(line)


@inner
def find_samples(
    piece, kv_head, codes, excluded, words, next_piece, next_head, next_codes, tables, mask, counters, spans, ids
):
    """Write the sampled ids to address `ids`, uint16 `[room_for(begin, end)]`, and return how many there are.

    excluded, words: see `cpu.exclusions`. next_*: the following lookup, whose lines are prefetched; next_codes 0: there
    is none. counters: address of uint8 `[STRIPE_TOKENS]`, zero, with COUNTER_MARGIN on both sides. spans: int64
    `[tables * SPANS]`, scratch.
    """
    stripes, first, last = stripes_of(piece)
    for table in range(tables):
        offset = _offset(piece, kv_head, table, codes, mask, stripes)
        entries = piece[ENTRIES] + kv_head * piece[ENTRY_HEAD] + table * piece[ENTRY_TABLE]
        for stripe in range(first, last + 1):
            spans[table * SPANS + stripe - first] = entries + 2 * load_int32(offset + 4 * stripe)
    if next_codes != 0:
        fetch_offsets(next_piece, next_head, next_codes, tables, mask)
    found = 0
    for stripe in range(first, last):
        fetches = next_codes != 0 and stripe == last - 1
        for table in range(tables):
            if fetches:
                fetch_bucket(next_piece, next_head, next_codes, table, mask)
            span = table * SPANS + stripe - first
            for entry in range(spans[span], spans[span + 1], 2):
                count_up(counters + load_uint16(entry))
            if table % _CAPPED == _CAPPED - 1:
                for counter in range(0, STRIPE_TOKENS, COUNTERS):
                    cap_pairs(counters + counter)
        base = stripe * STRIPE_TOKENS
        if excluded != 0:
            begin, end = max(base, piece[BEGIN]), min(base + STRIPE_TOKENS, piece[END])
            to_run = piece[RUN_BEGIN] - piece[BEGIN]
            clear_excluded(excluded, words, begin + to_run, end + to_run, counters + begin - base)
        counted = min(STRIPE_TOKENS, piece[TOKENS] - base)
        found = _take(counters, base, counted, piece[BEGIN], piece[END], ids, found)
    return found


@inner
def list_covered(piece, excluded, words, ids):
    """Write all ids of the piece's range that are not excluded, in the form of `find_samples`."""
    found, to_run, end = 0, piece[RUN_BEGIN] - piece[BEGIN], piece[END]
    begin = piece[BEGIN]
    while begin < end:
        begin, until = next_covered(excluded, words, begin + to_run, end + to_run)
        for at in range(begin - to_run, until - to_run):
            store_int16(ids + 2 * found, at)
            found += 1
        begin = until - to_run
    return found


@inner
def count_bytes(piece, tables, spans):
    """Return the bytes of the index that a lookup read: entries of buckets, and borders of their lists. spans: as the
    lookup left them.
    """
    _, first, last = stripes_of(piece)
    read = 4 * tables * (last - first + 1)
    for table in range(tables):
        read += spans[table * SPANS + last - first] - spans[table * SPANS]
    return read


@inner
def _take(counters, base, tokens, begin, end, ids, found):
    """Append the ids of a stripe whose counters are 2 or more, and set the counters to zero. Most words of COUNTERS
    have at most two such ids, so two are written without a test, and overwritten if there were fewer.
    """
    for word in range(0, tokens, COUNTERS):
        mask, at = take_pairs(counters + word), base + word
        if at < begin or at + COUNTERS > end:
            mask &= _between(at, begin, end)
        count = count_bits(mask)
        to = ids + 2 * found
        store_int16(to, at + lowest_bit(mask))
        mask &= mask - _ONE
        store_int16(to + 2, at + lowest_bit(mask))
        if count > 2:
            mask &= mask - _ONE
            for place in range(2, count):
                store_int16(to + 2 * place, at + lowest_bit(mask))
                mask &= mask - _ONE
        found += count
    return found


@inner
def _between(at, begin, end):
    """Return a mask of the ids `[at, at + COUNTERS)` that lie in `[begin, end)`."""
    mask = _ALL
    if at < begin:
        mask = _ALL << np.uint64(begin - at) if begin - at < COUNTERS else np.uint64(0)
    if at + COUNTERS > end:
        mask &= _ALL >> np.uint64(at + COUNTERS - end) if at < end else np.uint64(0)
    return mask

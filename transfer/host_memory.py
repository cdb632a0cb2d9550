"""Count the bytes of offloaded tokens in host memory: rows, hash tables and their offsets, to the byte. No torch.

The memory plan, admission and the store all count with these functions. A layer of a segment is one slab; slabs come in
size classes.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from transfer.reading import Reading
from transfer.tier_shape import TierShape

SEGMENT_TOKENS = 65_536  # most tokens of a segment: entries of tables are uint16
STRIPE_TOKENS = 32_768  # a bucket is listed by stripes of so many tokens, whose counters stay in the first cache
TAIL_TOKENS = 2_048  # capacity of an open segment; a larger reservation, or an equal one, gets segments of its own
SPLIT_TOKENS = 32  # granule of evenly split segments, so that tables are whole cache lines
ALIGN_BYTES = 64
HUGE_PAGE_BYTES = 2**21
SMALL_PAGE_BYTES = 2**16  # granule of slabs below a huge page
_CLASS_BITS = 5  # 16 size classes an octave: freed slabs are found again, and 3 % is lost on average
CODE_BYTES, _OFFSET_BYTES, _FLOAT_BYTES = 2, 4, 4


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Where the arrays of one layer of a segment begin in its slab, in bytes; keys begin at 0."""

    values: int
    codes: int
    offsets: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CentreLayout:
    """Where one layer's scales begin behind its centre, in bytes, and the stride from layer to layer."""

    key_scale: int
    value_scale: int
    layer_bytes: int


def without_tables(shape: TierShape) -> TierShape:
    """Return the shape of the same rows without tables, for contexts that are never sampled."""
    return replace(shape, num_tables=0)


def shape_for(shape: TierShape, reading: Reading) -> TierShape:
    """Return the shape in which a context of that reading is kept."""
    return shape if reading.has_tables else without_tables(shape)


def num_offsets(bits_per_table: int, tokens: int) -> int:
    """Return the number of int32 offsets of one table: one for each bucket and stripe, and the end."""
    return (-(-tokens // STRIPE_TOKENS) << bits_per_table) + 1


def is_bulk(num_tokens: int) -> bool:
    """Return whether a reservation of so many tokens gets segments of its own, instead of the open tail."""
    return num_tokens >= TAIL_TOKENS


def split_tokens(num_tokens: int) -> list[int]:
    """Return the capacities of an empty context's segments for `num_tokens`: even, in multiples of SPLIT_TOKENS."""
    if num_tokens <= 0:
        return []
    if not is_bulk(num_tokens):
        return [TAIL_TOKENS]
    count = -(-num_tokens // SEGMENT_TOKENS)
    blocks = -(-num_tokens // SPLIT_TOKENS)
    borders = [min(-(-blocks * index // count) * SPLIT_TOKENS, num_tokens) for index in range(count + 1)]
    return [end - begin for begin, end in pairwise(borders)]


def lay_out_layer(shape: TierShape, capacity_tokens: int) -> LayerLayout:
    """Lay out keys and values `[kv_heads, capacity, dim]`, codes `[kv_heads, tables, capacity]`, and offsets of their
    tables.
    """
    rows = _aligned(shape.num_kv_heads * capacity_tokens * shape.row_bytes)
    tables = shape.num_kv_heads * shape.num_tables
    codes = _aligned(tables * capacity_tokens * CODE_BYTES)
    offsets = _aligned(tables * num_offsets(shape.bits_per_table, capacity_tokens) * _OFFSET_BYTES)
    return LayerLayout(rows, 2 * rows, 2 * rows + codes, 2 * rows + codes + offsets)


def lay_out_centre(shape: TierShape) -> CentreLayout:
    """Lay out one layer's centre `[kv_heads, dim]` and, behind it, the scales of int8 rows, all float32."""
    centre = _aligned(shape.num_kv_heads * shape.dim * _FLOAT_BYTES)
    if shape.rows != "int8":
        return CentreLayout(centre, centre, centre)
    key_scale = _aligned(shape.num_kv_heads * _FLOAT_BYTES)
    return CentreLayout(centre, centre + key_scale, 2 * centre + key_scale)


def slab_bytes(num_bytes: int) -> int:
    """Return the size of the smallest class that holds `num_bytes` (above 0)."""
    granule = HUGE_PAGE_BYTES if num_bytes > HUGE_PAGE_BYTES else SMALL_PAGE_BYTES
    granules = -(-num_bytes // granule)
    step = 1 << max(0, granules.bit_length() - _CLASS_BITS)
    return -(-granules // step) * step * granule


def bytes_of_segment(shape: TierShape, capacity_tokens: int) -> int:
    """Return the bytes of all layers of one segment, without its centre."""
    return len(shape.layers) * slab_bytes(lay_out_layer(shape, capacity_tokens).num_bytes)


def bytes_of_centre(shape: TierShape) -> int:
    """Return the bytes of a centre, with scales, which a segment or a run of small ones is stored relative to."""
    return slab_bytes(len(shape.layers) * lay_out_centre(shape).layer_bytes)


def bytes_of_context(shape: TierShape, num_tokens: int) -> int:
    """Return the bytes of an empty context that reserves `num_tokens` at once."""
    return sum(bytes_of_segment(shape, capacity) + bytes_of_centre(shape) for capacity in split_tokens(num_tokens))


def bytes_of_run(shape: TierShape, bulk_tokens: int, more_tokens: int, reading: Reading, is_fork: bool) -> int:
    """Return the most bytes of its own that a context takes for `bulk_tokens` at once and `more_tokens` in blocks.

    Blocks fill one open tail after the other. Tails are merged only if there is room, so merges are not counted on. A
    fork may have to copy the open tail whose first tokens it shares.
    """
    rows = shape_for(shape, reading)
    num_bytes, in_tails = 0, bulk_tokens + more_tokens
    if is_bulk(bulk_tokens):
        num_bytes, in_tails = bytes_of_context(rows, bulk_tokens), more_tokens
    num_tails = -(-in_tails // TAIL_TOKENS) + (is_fork and bulk_tokens + more_tokens > 0)
    return num_bytes + num_tails * bytes_of_context(rows, 1)


def bytes_per_token(shape: TierShape) -> int:
    """Return the bytes of a token of a full segment, rounded up: the cost per token of a long context."""
    return -(-bytes_of_context(shape, SEGMENT_TOKENS) // SEGMENT_TOKENS)


def table_bytes_of_context(shape: TierShape, num_tokens: int) -> int:
    """Return the bytes of hash tables alone, entries and offsets, without the rounding of slabs, as the paper's Table 7
    counts them.
    """
    rows = without_tables(shape)
    return sum(
        len(shape.layers) * (lay_out_layer(shape, capacity).num_bytes - lay_out_layer(rows, capacity).num_bytes)
        for capacity in split_tokens(num_tokens)
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES

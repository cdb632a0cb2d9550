"""Allocate and plan the arrays between KV pages and host memory, of rows and of host requests. No torch."""

from collections.abc import Sequence
from itertools import pairwise

from gpu.model.architecture import Architecture
from gpu.operations.host_rows.chunk_columns import CHUNKS, COLUMNS
from transfer.arrays import FLOATS, ArraySpec
from transfer.slot_shape import SlotShape
from transfer.tier_shape import BLOCK_TOKENS, TierShape

OFFLOAD_BLOCK_TOKENS = 128  # tokens that a running sequence offloads at once: whole pages of every size
MOST_LINKED_ROWS = 16  # most rows of a step that reads a part of host memory over the link
LINKED_PARTS = 2  # most parts of such a step
PIECE_ROWS = 65_536  # tokens x KV heads of a piece: one head of the longest segment, or more heads of a shorter one


def num_gathered_heads(kv_heads: int, has_codes: bool) -> int:
    """Return the KV heads that a gathered layer has room for. An offload also needs room for half of them in
    float32.
    """
    return kv_heads + kv_heads % 2 * has_codes


def gathered_array(kv_heads: int, dim: int, num_tokens: int, dtype_bytes: int, has_codes: bool) -> ArraySpec:
    """Return the array of one layer's gathered keys, `[heads, tokens, dim]`; values have the same."""
    return ArraySpec((num_gathered_heads(kv_heads, has_codes), num_tokens, dim), FLOATS[dtype_bytes])


def num_staged_layers(layers: Sequence[int]) -> int:
    """Return how many layers of an offloaded prompt are staged at once. layers: the offloaded layers.

    Two: one is computed while the rows of the other are copied. One, if a layer without rows in host memory lies
    between any two offloaded layers, as in hybrids, and is computed meanwhile.
    """
    return 2 if any(after - before == 1 for before, after in pairwise(layers)) else 1


def staged_array(num_staged: int, kv_heads: int, dim: int, num_tokens: int, dtype_bytes: int) -> ArraySpec:
    """Return the array of an offloaded prompt's staged keys, `[num_staged, kv_heads, tokens, dim]`; values alike."""
    return ArraySpec((num_staged, kv_heads, num_tokens, dim), FLOATS[dtype_bytes])


def offload_block_array(num_layers: int, kv_heads: int, dim: int, dtype_bytes: int, has_codes: bool) -> ArraySpec:
    """Return the array of keys and values of one offload block, `[2, layers, kv_heads, tokens, dim]`, codes decoded."""
    dtype = "float32" if has_codes else FLOATS[dtype_bytes]
    return ArraySpec((2, num_layers, kv_heads, OFFLOAD_BLOCK_TOKENS, dim), dtype)


def piece_arrays(shape: TierShape, num_tables: int) -> dict[str, ArraySpec]:
    """Return the device arrays of one direction of copies on CUDA: stored keys and values of a piece, and codes of its
    keys. widened: int4 keys in float, from which codes are made.

    On the CPU none are needed: rows are written to their places.
    """
    is_widened = shape.rows == "int4" and num_tables > 0
    return {
        "rows": ArraySpec((2, PIECE_ROWS * shape.row_width), "uint8" if shape.rows == "int4" else shape.rows),
        "widened": ArraySpec((PIECE_ROWS * shape.dim if is_widened else 0,), "bfloat16"),
        "codes": ArraySpec((PIECE_ROWS * num_tables,), "uint16"),
    }


def link_arrays(shape: TierShape) -> dict[str, ArraySpec]:
    """Return the arrays that the device needs to read host memory in attention: for each of LINKED_PARTS the addresses
    of rows and which rows share them, and partial outputs.
    """
    rows = MOST_LINKED_ROWS
    return {
        "chunks": ArraySpec((len(shape.layers), rows, COLUMNS, CHUNKS), "int64"),
        "sharing": ArraySpec((3, rows), "int32"),
        "outs": ArraySpec((rows * shape.num_heads * CHUNKS * shape.dim,), "float32"),
        "lses": ArraySpec((rows * shape.num_heads * CHUNKS,), "float32"),
    }


def slot_shape(
    architecture: Architecture, num_tables: int, dtype: str, excludes: bool, is_counted: bool = False
) -> SlotShape:
    """Return the shape of a host request, for one row and one layer. excludes: whether a row may exclude blocks."""
    blocks = -(-architecture.max_context_tokens // BLOCK_TOKENS) if excludes else 0
    a = architecture
    return SlotShape(a.num_heads, a.dim, num_tables, dtype, a.num_kv_heads, blocks, is_counted)

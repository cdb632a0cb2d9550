"""Size the device memory of document chunks on their way to a prompt, or while they are computed. No torch."""

from transfer.arrays import FLOATS, ArraySpec
from transfer.chunks.chunk_format import ChunkShape

STAGED_LAYERS = 2  # layers of a prompt's chunks: one is read while the next is copied
CHUNK_TOKEN_IDS_BYTES = 32  # for each token whose rows are placed: cell, position of its rotation, slot, score


def staged_chunks(shape: ChunkShape, num_tokens: int) -> ArraySpec:
    """Return the array of staged layers of stored keys and values, `[layers, 2, tokens, bytes]`."""
    return ArraySpec((STAGED_LAYERS, 2, num_tokens, shape.num_kv_heads * shape.row_bytes), "uint8")


def computed_rows(kv_heads: int, dim: int, num_tokens: int, dtype_bytes: int) -> ArraySpec:
    """Return the array of one layer's keys of computed chunks, `[kv_heads, tokens, dim]`; values have the same."""
    return ArraySpec((kv_heads, num_tokens, dim), FLOATS[dtype_bytes])


def chunk_token_bytes(shape: ChunkShape, dtype_bytes: int) -> int:
    """Return the bytes of chunks for each token under prefill: copied in, or computed and then stored."""
    computed = 2 * computed_rows(shape.num_kv_heads, shape.dim, 1, dtype_bytes).num_bytes + shape.layer_bytes(1)
    return max(staged_chunks(shape, 1).num_bytes, computed) + CHUNK_TOKEN_IDS_BYTES

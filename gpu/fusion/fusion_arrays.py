"""What documents' chunks take on the device on their way to a prompt, or while they are computed. No torch."""

from transfer.arrays import FLOATS, ArraySpec
from transfer.chunks.chunk_format import ChunkShape

STAGED_LAYERS = 2  # of a prompt's chunks: one is read while the next comes
CHUNK_TOKEN_IDS_BYTES = 32  # of a token whose rows are placed: cell, position of its rotation, slot, score


def staged_chunks(shape: ChunkShape, num_tokens: int) -> ArraySpec:
    """Return the layers of stored keys and values on their way, `[layers, 2, tokens, bytes]`."""
    return ArraySpec((STAGED_LAYERS, 2, num_tokens, shape.num_kv_heads * shape.row_bytes), "uint8")


def computed_rows(kv_heads: int, dim: int, num_tokens: int, dtype_bytes: int) -> ArraySpec:
    """Return one layer's keys of chunks that are computed, `[kv_heads, tokens, dim]`; values are alike."""
    return ArraySpec((kv_heads, num_tokens, dim), FLOATS[dtype_bytes])


def chunk_token_bytes(shape: ChunkShape, dtype_bytes: int) -> int:
    """Return the bytes of a token under prefill that chunks hold: on its way in, or computed and then stored."""
    computed = 2 * computed_rows(shape.num_kv_heads, shape.dim, 1, dtype_bytes).num_bytes + shape.layer_bytes(1)
    return max(staged_chunks(shape, 1).num_bytes, computed) + CHUNK_TOKEN_IDS_BYTES

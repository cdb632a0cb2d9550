"""Sizes of what prefill holds: outputs of pieces of a past, rows of windows beside a unit, a job's tokens. No torch."""

from transfer.arrays import FLOATS, ArraySpec

PIECE_TOKENS = 2048
"""The shortest piece of a past; each is twice as long as the next."""

MERGED_PIECES = 7
"""Pieces whose outputs are kept until they are merged."""

EXPANDED_TOKENS = 8192
"""Rows of latents whose keys and values are made at once."""

LEAST_BUFFER_TOKENS = 256
HIDDEN_TOKEN_IDS_BYTES = 32
"""Of a job's token, beside its hidden state: id, position, slot."""


def most_piece_outputs(max_context_tokens: int, num_lanes: int) -> int:
    """Return how many outputs of a past's pieces, each as wide as a query, exist at once until they are merged. The
    merged one stands where attention's output does. With two lanes all pieces may be of the shortest kind.
    """
    most = max_context_tokens // PIECE_TOKENS
    return min(MERGED_PIECES, most if num_lanes > 1 else most.bit_length())


def window_buffer(kv_heads: int, dim: int, num_tokens: int, dtype_bytes: int) -> ArraySpec:
    """Return the keys of a unit of so many tokens or fewer beside a window, `[1, kv_heads, tokens, dim]`; values are
    alike.
    """
    size = 1 << (max(num_tokens, LEAST_BUFFER_TOKENS) - 1).bit_length()
    return ArraySpec((1, kv_heads, size, dim), FLOATS[dtype_bytes])


def seen_rows(kv_heads: int, dim: int, num_tokens: int, dtype_bytes: int) -> ArraySpec:
    """Return the keys that a unit's tokens see in front of them, `[kv_heads, tokens, dim]`; values are alike."""
    return ArraySpec((kv_heads, num_tokens, dim), FLOATS[dtype_bytes])


def expanded_array(num_tokens: int, num_heads: int, query_dim: int, value: int, dtype_bytes: int) -> ArraySpec:
    """Return what is made of so many rows of latents: keys and values, with the products that they are put together
    of.
    """
    width = max(query_dim, value)
    return ArraySpec((num_tokens, num_heads, 2 * width + query_dim + value), FLOATS[dtype_bytes])


def latent_arrays(num_rows: int, num_heads: int, rank: int, row: int, dtype_bytes: int) -> dict[str, ArraySpec]:
    """Return what a step of latent attention holds: queries that are asked of rows, with the latents that they are put
    together of, and attended latents, in float32 and as they are multiplied.
    """
    return {
        "queries": ArraySpec((num_rows, num_heads, row + 2 * rank), FLOATS[dtype_bytes]),
        "attended": ArraySpec((num_rows, num_heads, rank), "float32"),
    }

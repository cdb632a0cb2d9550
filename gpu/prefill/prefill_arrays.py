"""Compute the sizes of prefill's arrays: outputs of pieces, rows beside windows, a job's tokens. No torch."""

from transfer.arrays import FLOATS, ArraySpec

PIECE_TOKENS = 2048
"""Tokens of the shortest piece of a past. Longer pieces are this times a power of two."""

MERGED_PIECES = 7
"""Pieces whose outputs are kept until they are merged."""

EXPANDED_TOKENS = 8192
"""Latent rows that are expanded to keys and values at once."""

LEAST_BUFFER_TOKENS = 256
HIDDEN_TOKEN_IDS_BYTES = 32
"""Bytes of a job's token beside its hidden state: id, position, slot."""


def most_piece_outputs(max_context_tokens: int, num_lanes: int) -> int:
    """Return how many outputs of pieces, each as wide as a query, exist at once until they are merged.

    The merged output uses the memory of attention's output. With two lanes all pieces may have the shortest length.
    """
    most = max_context_tokens // PIECE_TOKENS
    return min(MERGED_PIECES, most if num_lanes > 1 else most.bit_length())


def window_buffer(kv_heads: int, dim: int, num_tokens: int, dtype_bytes: int) -> ArraySpec:
    """Return the array of a unit's keys beside a window, `[1, kv_heads, tokens, dim]`, for up to so many tokens.

    Values take another such array.
    """
    size = 1 << (max(num_tokens, LEAST_BUFFER_TOKENS) - 1).bit_length()
    return ArraySpec((1, kv_heads, size, dim), FLOATS[dtype_bytes])


def seen_rows(kv_heads: int, dim: int, num_tokens: int, dtype_bytes: int) -> ArraySpec:
    """Return the array of the keys in front of a unit that its tokens see, `[kv_heads, tokens, dim]`; values take
    another.
    """
    return ArraySpec((kv_heads, num_tokens, dim), FLOATS[dtype_bytes])


def window_unit_arrays(
    kv_heads: int, dim: int, window_tokens: int, unit_tokens: int, dtype_bytes: int
) -> dict[str, ArraySpec]:
    """Return the arrays of keys, and after them of values, that a unit takes beside a window of so many tokens.

    buffer: the unit's rows. before: the window's rows in front of it. joined: these with the unit's own.
    """
    seen = seen_rows(kv_heads, dim, window_tokens + unit_tokens, dtype_bytes)
    return {
        "buffer": window_buffer(kv_heads, dim, unit_tokens, dtype_bytes).times(2),
        "before": seen.times(2),
        "joined": seen.times(2),
    }


def expanded_array(num_tokens: int, num_heads: int, query_dim: int, value: int, dtype_bytes: int) -> ArraySpec:
    """Return the array for keys and values that are expanded from so many latent rows, and the products they consist
    of.
    """
    width = max(query_dim, value)
    return ArraySpec((num_tokens, num_heads, 2 * width + query_dim + value), FLOATS[dtype_bytes])


def latent_arrays(num_rows: int, num_heads: int, rank: int, row: int, dtype_bytes: int) -> dict[str, ArraySpec]:
    """Return the arrays of a step of latent attention.

    queries: absorbed queries, with the latents that they consist of. attended: attended latents, in float32 and in the
    dtype in which they are multiplied.
    """
    return {
        "queries": ArraySpec((num_rows, num_heads, row + 2 * rank), FLOATS[dtype_bytes]),
        "attended": ArraySpec((num_rows, num_heads, rank), "float32"),
    }

"""Sizes of what prefill holds: outputs of pieces of a past, rows of windows beside a unit, a job's tokens. No torch."""

from transfer.arrays import FLOATS, ArraySpec

PIECE_TOKENS = 2048
"""The shortest piece of a past; each is twice as long as the next."""

MERGED_PIECES = 7
"""Pieces whose outputs are kept until they are merged."""

LEAST_BUFFER_TOKENS = 256
HIDDEN_TOKEN_IDS_BYTES = 32
"""Of a job's token, beside its hidden state: id, position, slot."""


def most_piece_outputs(max_context_tokens: int, num_lanes: int) -> int:
    """Return the outputs of a past's pieces, as wide as a query, until they are merged; what they are merged to, and to
    what others were before, has the place of attention's output. Where there are two lanes all may be of the shortest
    kind.
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

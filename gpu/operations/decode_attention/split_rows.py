"""Compute into how many partials decode attention cuts contexts, and the scratch memory for them. No torch."""

from transfer.arrays import ArraySpec

MAX_SPLITS = 128
MAX_SPLIT_TOKENS = 8192
PROGRAMS_PER_SM = 4
PIECES_PER_SM = 4
LEAST_PIECES = 5  # used without a GPU, where the interpreter runs each
MOST_PROGRAMS = 4096  # enough to fill any device


def num_rows(requests: int, kv_heads: int, max_context_tokens: int, parts: int, num_sms: int) -> int:
    """Return the rows of a workspace for so many requests, enough for launches with and without bounds."""
    splits = num_splits(requests, kv_heads, max_context_tokens, num_sms)
    return max(requests * splits, -(-num_places(requests, kv_heads, parts, num_sms) // kv_heads))


def most_rows(max_requests: int, kv_heads: int, max_context_tokens: int) -> int:
    """Return the most rows that a workspace of one part needs for up to so many requests, on any device."""
    to_bound = max_requests * -(-max_context_tokens // MAX_SPLIT_TOKENS)
    return to_bound + max_requests + MOST_PROGRAMS // kv_heads


def scratch_arrays(num_rows: int, num_heads: int, dim: int) -> dict[str, ArraySpec]:
    """Return the arrays for partials of so many rows: out `[rows, heads, dim]`, lse `[rows, heads]`."""
    return {
        "out": ArraySpec((num_rows, num_heads, dim), "float32"),
        "lse": ArraySpec((num_rows, num_heads), "float32"),
    }


def num_splits(requests: int, kv_heads: int, max_context_tokens: int, num_sms: int) -> int:
    """Return the number of splits of one context: enough programs to fill the device, and none that is much
    too long.
    """
    to_fill = -(-PROGRAMS_PER_SM * num_sms // (requests * kv_heads))
    to_bound = -(-max_context_tokens // MAX_SPLIT_TOKENS)
    return max(1, min(MAX_SPLITS, max(to_fill, to_bound)))


def num_pieces(num_sms: int) -> int:
    """Return the number of programs of a launch with bounds."""
    return max(LEAST_PIECES, PIECES_PER_SM * num_sms)


def num_places(requests: int, kv_heads: int, parts: int, num_sms: int) -> int:
    """Return for how many partials of a query group a launch with bounds has room."""
    return num_pieces(num_sms) + requests * kv_heads * parts

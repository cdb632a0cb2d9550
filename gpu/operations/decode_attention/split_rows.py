"""Compute into how many partials decode attention cuts contexts, and the scratch memory for them. No torch."""

from functools import cache

from transfer.arrays import ArraySpec

MAX_SPLITS = 128
MAX_SPLIT_TOKENS = 8192
PROGRAMS_PER_SM = 4
INTEGER_PROGRAMS_PER_SM = 8  # of kernels that multiply integers, whose programs are single warps
LEAST_PIECES = 5  # used without a GPU, where the interpreter runs each
MOST_PROGRAMS = 4096  # twice what fills any device
LEAST_GAIN = 0.95  # more splits must reduce a launch's estimated time to this


def num_rows(requests: int, kv_heads: int, max_context_tokens: int, parts: int, num_sms: int) -> int:
    """Return the rows of a workspace for so many requests, enough for launches with and without bounds."""
    splits = max(
        num_splits(requests, kv_heads, max_context_tokens, num_sms, programs)
        for programs in (PROGRAMS_PER_SM, INTEGER_PROGRAMS_PER_SM)
    )
    places = num_places(requests, kv_heads, parts, num_sms, INTEGER_PROGRAMS_PER_SM)
    return max(requests * splits, -(-places // kv_heads))


def most_rows(max_requests: int, kv_heads: int, max_context_tokens: int) -> int:
    """Return the most rows that a workspace of one part needs for up to so many requests, on any device."""
    to_bound = max_requests * -(-max_context_tokens // MAX_SPLIT_TOKENS)
    return to_bound + 2 * max_requests + MOST_PROGRAMS // kv_heads


def scratch_arrays(num_rows: int, num_heads: int, dim: int) -> dict[str, ArraySpec]:
    """Return the arrays for partials of so many rows: out `[rows, heads, dim]`, lse `[rows, heads]`."""
    return {
        "out": ArraySpec((num_rows, num_heads, dim), "float32"),
        "lse": ArraySpec((num_rows, num_heads), "float32"),
    }


@cache
def num_splits(
    requests: int, kv_heads: int, max_context_tokens: int, num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM
) -> int:
    """Return the number of splits of one context, so that none is much too long and programs end together.

    Programs are taken to be equally long and to run in rounds of `programs_per_sm` a multiprocessor. The device idles
    in the last round unless it is full: 256 contexts in three splits take as long as in four.
    """
    least = min(MAX_SPLITS, max(1, -(-max_context_tokens // MAX_SPLIT_TOKENS)))
    pairs, at_once = requests * kv_heads, programs_per_sm * num_sms
    if at_once == 0:
        return least
    most = min(MAX_SPLITS, max(least, 2 * -(-at_once // pairs)))
    chosen, shortest = least, float("inf")
    for splits in range(least, most + 1):
        time = -(-pairs * splits // at_once) / splits
        if time <= LEAST_GAIN * shortest:
            chosen, shortest = splits, time
    return chosen


def num_pieces(num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM) -> int:
    """Return the number of programs of a launch with bounds."""
    return max(LEAST_PIECES, programs_per_sm * num_sms)


def num_places(requests: int, kv_heads: int, parts: int, num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM) -> int:
    """Return for how many partials of a query group a launch with bounds has room."""
    return num_pieces(num_sms, programs_per_sm) + requests * kv_heads * parts

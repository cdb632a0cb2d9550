"""Compute into how many partials decode attention cuts contexts, and the scratch memory for them. No torch."""

from functools import cache

from transfer.arrays import ArraySpec

MAX_SPLITS = 128
MAX_SPLIT_TOKENS = 8192
PROGRAMS_PER_SM = 4  # unless a kernel's configuration says otherwise
MOST_PROGRAMS_PER_SM = 8  # of all configurations
LEAST_PIECES = 5  # used without a GPU, where the interpreter runs each
MOST_PROGRAMS = 4096  # twice what fills any device
LEAST_GAIN = 0.95  # more splits must reduce a launch's estimated time to this


def num_rows(requests: int, kv_heads: int, max_context_tokens: int, parts: int, num_sms: int) -> int:
    """Return the rows of a workspace for so many requests, enough for launches of all kernels."""
    splits = num_splits(_most_filling(requests * kv_heads, MOST_PROGRAMS_PER_SM * num_sms), max_context_tokens)
    places = num_places(requests, kv_heads, parts, num_sms, MOST_PROGRAMS_PER_SM)
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


def _most_filling(pairs: int, at_once: int) -> int:
    """Return the most splits that `filling_splits` may choose: about two rounds of programs."""
    return min(MAX_SPLITS, max(1, 2 * -(-at_once // pairs)))


@cache
def filling_splits(pairs: int, num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM) -> int:
    """Return into how many splits to cut each context so that the device is full until all programs end.

    pairs: of a request and a KV head. Programs are taken to be equally long and to run in rounds of `programs_per_sm` a
    multiprocessor, and the device idles unless the last round is full: 256 pairs in three splits of 528 programs at
    once take longer than in two.
    """
    at_once = max(1, programs_per_sm * num_sms)
    chosen, shortest = 1, float("inf")
    for splits in range(1, _most_filling(pairs, at_once) + 1):
        time = -(-pairs * splits // at_once) / splits
        if time <= LEAST_GAIN * shortest:
            chosen, shortest = splits, time
    return chosen


def num_splits(filling: int, max_context_tokens: int) -> int:
    """Return the splits of the longest context: at least those that fill the device, and none is much too long."""
    return min(MAX_SPLITS, max(filling, -(-max_context_tokens // MAX_SPLIT_TOKENS)))


def num_pieces(num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM) -> int:
    """Return the number of programs of a launch with bounds."""
    return max(LEAST_PIECES, programs_per_sm * num_sms)


def num_places(requests: int, kv_heads: int, parts: int, num_sms: int, programs_per_sm: int = PROGRAMS_PER_SM) -> int:
    """Return for how many partials of a query group a launch with bounds has room."""
    return num_pieces(num_sms, programs_per_sm) + requests * kv_heads * parts

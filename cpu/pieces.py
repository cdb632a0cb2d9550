"""Define the table of pieces: which rows a step's attention reads, for which request, and where they lie.

A piece is a range `[begin, end)` of the tokens of one segment in one layer. Addresses must stay valid until the call
returns. A request's pieces are adjacent and disjoint, and requests are in rising order. Adjacent requests may share
exact pieces, which are read once for all of them. A request without a piece gets the empty partial. Rows may begin
anywhere, but rows of whole 64-byte lines in huge pages are read 1.5 times as fast.
"""

import numpy as np

EXACT, SAMPLED = 0, 1  # modes

# All int64. `*_bytes` are strides; an address of 0 means none.
PIECE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "request",  # row of queries
            "mode",  # SAMPLED needs entries and offsets; EXACT reads every row of the range
            "begin",  # tokens of the segment that are covered, begin <= end <= tokens
            "end",
            "run_begin",  # token `begin`'s place in the run of the request's context, whose blocks may be excluded
            "tokens",  # of the segment: all that its tables hold
            "keys",  # address of [kv_heads, tokens, dim], less `centre`: bf16 as uint16, float32, int8, or int4
            "key_head_bytes",
            "key_row_bytes",
            "values",  # address of [kv_heads, tokens, dim] of the same type
            "value_head_bytes",
            "value_row_bytes",
            "entries",  # address of uint16 [kv_heads, tables, tokens]: see `cpu.tables`
            "entry_head_bytes",
            "entry_table_bytes",
            "offsets",  # address of int32 [kv_heads, tables, num_offsets(bits, tokens)]
            "offset_head_bytes",
            "offset_table_bytes",
            "centre",  # address of float32 [kv_heads, dim], contiguous, or 0: keys are stored as they are
            "key_scale",  # int8: address of float32 [kv_heads]; else 0
            "value_scale",  # int8: address of float32 [kv_heads, dim], contiguous; else 0
            "followers",  # requests behind `request` that read all of its pieces, too; with any, all these are EXACT
        )
    ]
)
COLUMNS = len(PIECE.names or ())
(
    REQUEST, MODE, BEGIN, END, RUN_BEGIN, TOKENS, KEYS, KEY_HEAD, KEY_ROW, VALUES, VALUE_HEAD, VALUE_ROW, ENTRIES,
    ENTRY_HEAD, ENTRY_TABLE, OFFSETS, OFFSET_HEAD, OFFSET_TABLE, CENTRE, KEY_SCALE, VALUE_SCALE, FOLLOWERS,
) = range(COLUMNS)  # fmt: skip


def new_pieces(count: int) -> np.ndarray:
    """Return PIECE `[count]`, all zero."""
    return np.zeros(count, PIECE)


def as_columns(pieces: np.ndarray) -> np.ndarray:
    """Return the same memory as int64 `[pieces, COLUMNS]`."""
    assert pieces.dtype == PIECE, "pieces: a table of cpu.pieces.PIECE"
    assert pieces.flags.c_contiguous, "pieces: contiguous"
    return pieces.view(np.int64).reshape(len(pieces), COLUMNS)

"""Define the table of addresses at which a device reads a context's rows in host memory by itself. No torch.

The code that hands out a table keeps its rows alive. Pieces are in the context's order and disjoint. A piece's rows are
stored relative to one centre, with one scale for each KV head. Strides and addresses, except those of key scales, are
multiples of ALIGN_BYTES.
"""

import numpy as np

# Rows of a table, int64 `[layers, COLUMNS, pieces]`: a piece's tokens `[begin, end)` of the run; addresses of its first
# key and value, stored rows `[kv_heads, tokens]` with their strides in bytes; and of float32 centre `[kv_heads, dim]`,
# key scale `[kv_heads]` and value scale `[kv_heads, dim]`, 0: bf16 and int4 rows have no such scales.
(
    RUN_BEGIN, RUN_END, KEYS, KEY_HEAD_BYTES, KEY_ROW_BYTES, VALUES, VALUE_HEAD_BYTES, VALUE_ROW_BYTES, CENTRE,
    KEY_SCALE, VALUE_SCALE,
) = range(11)  # fmt: skip
COLUMNS = 11
ALIGN_BYTES = 16  # bytes of a load

PIECE_TOKENS = 2_048  # fewest tokens of most pieces: a tail has so many, and a bulk reservation more


def most_pieces(context_tokens: int) -> int:
    """Return the most pieces of a context, as a power of two. At worst, tails and prompts' segments alternate."""
    return 1 << (2 * -(-context_tokens // PIECE_TOKENS) + 2).bit_length()


def check_places(places: np.ndarray, most: int) -> None:
    """Check that a table has at most `most` pieces, and that addresses are aligned for loads."""
    assert places.shape[2] <= most, f"places: a run in {places.shape[2]} pieces, room for {most}"
    aligned = [*range(KEYS, CENTRE + 1), VALUE_SCALE]
    assert not (places[:, aligned] % ALIGN_BYTES).any(), f"places: addresses that {ALIGN_BYTES} does not divide"

"""Define the table of addresses at which a device reads a context's rows in host memory by itself. No torch.

Whoever hands out a table keeps its rows alive. Pieces stand in the context's order and are disjoint. A piece's rows are
stored relative to one centre, with one scale for each KV head. Addresses (except key scales') and strides are multiples
of ALIGN_BYTES.
"""

import numpy as np

# Rows of a table, int64 `[layers, COLUMNS, pieces]`: a piece's tokens `[begin, end)` of the run; addresses of its first
# key and value, bf16 or int8 `[kv_heads, tokens, dim]` with their strides in bytes; and of float32 centre `[kv_heads,
# dim]`, key scale `[kv_heads]` and value scale `[kv_heads, dim]`, 0: bf16 rows have no scales.
(
    RUN_BEGIN, RUN_END, KEYS, KEY_HEAD_BYTES, KEY_ROW_BYTES, VALUES, VALUE_HEAD_BYTES, VALUE_ROW_BYTES, CENTRE,
    KEY_SCALE, VALUE_SCALE,
) = range(11)  # fmt: skip
COLUMNS = 11
ALIGN_BYTES = 16  # of a load

PIECE_TOKENS = 2_048  # of a context: a tail of so many, or more at once


def most_pieces(context_tokens: int) -> int:
    """Return the pieces of the longest context, a power of two. A tail and a prompt's segment take turns at worst."""
    return 1 << (2 * -(-context_tokens // PIECE_TOKENS) + 2).bit_length()


def check_places(places: np.ndarray, most: int) -> None:
    """Check that a table fits into `most` pieces, and that addresses are as aligned as loads want them."""
    assert places.shape[2] <= most, f"places: a run in {places.shape[2]} pieces, room for {most}"
    aligned = [*range(KEYS, CENTRE + 1), VALUE_SCALE]
    assert not (places[:, aligned] % ALIGN_BYTES).any(), f"places: addresses that {ALIGN_BYTES} does not divide"

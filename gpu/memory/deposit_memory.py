"""Device memory that rows pass through on their way to the host and back. No torch.

Invariant: a piece is whole KV heads of one segment, so that each of its heads is one contiguous run on both sides.
"""

PIECE_ROWS = 65_536  # tokens x KV heads of a piece: one head of the longest segment, or more heads of a shorter one


def deposit_bytes(dim: int, row_element_bytes: int, num_tables: int) -> int:
    """Bytes on a CUDA device: keys, values and codes of a piece going down, keys and values of one coming up.

    row_element_bytes: 2 for bfloat16 rows, 1 for int8. On the CPU rows are written where they belong: 0 bytes.
    """
    return PIECE_ROWS * (4 * dim * row_element_bytes + 2 * num_tables)

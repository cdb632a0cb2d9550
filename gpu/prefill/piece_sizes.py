"""Sizes of the pieces in which prefill attends to a past. No torch."""

PIECE_TOKENS = 2048
"""The shortest piece; each is twice as long as the next."""

MERGED_PIECES = 7
"""Pieces whose outputs are kept until they are merged."""

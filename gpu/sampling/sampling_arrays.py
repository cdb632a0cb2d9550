"""Size the memory of drawing: the table of penalties, and the most that a step's draws hold at once. No torch."""

from transfer.arrays import ArraySpec

LOGPROB_LOGITS = 1 << 23  # logprobs take rows in groups of this many logits ...
LOGPROB_ENTRY_BYTES = 30  # ... each with float32 and int64 copies
DRAW_ENTRY_BYTES = 44  # a vocabulary entry of a drawn row with all filters: scores, distances, weights, digits


def penalty_arrays(num_rows: int, vocab_size: int) -> dict[str, ArraySpec]:
    """Return the arrays of the penalty table: counts of output tokens, and flags of prompt tokens, `[rows, vocab]`."""
    return {
        "counts": ArraySpec((num_rows, vocab_size), "int32"),
        "in_prompt": ArraySpec((num_rows, vocab_size), "bool"),
    }


def drawing_bytes(num_logits_rows: int, num_drawn: int, vocab_size: int) -> int:
    """Return the most bytes that logprobs of `num_logits_rows` rows, or draws of `num_drawn` sequences, take beside the
    logits.
    """
    logprobs = LOGPROB_ENTRY_BYTES * min(LOGPROB_LOGITS, num_logits_rows * vocab_size)
    return max(logprobs, DRAW_ENTRY_BYTES * num_drawn * vocab_size)

"""Cut rows of hidden states into several products for prompt logprobs: all logits at once would take gigabytes.

A row's logits must not depend on where units begin and end. So products are cut from blocks that begin at multiples of
`LOGITS_BLOCK_ROWS` of the prompt. A product of few rows may add its terms in another order than one of many, so a
unit's product has at least `LEAST_ROWS` rows if its block has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

LOGITS_BLOCK_ROWS = 256
LEAST_ROWS = 64


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The rows of one product.

    Rows `computed` are multiplied. Of the result, rows `wanted` are rows `reported` of the prompt.
    """

    computed: slice
    wanted: slice
    reported: slice


def cut_rows(begin: int, end: int, num_rows: int) -> Iterator[ScoredRows]:
    """Yield the products for rows `[begin, end)` of a prompt that has `num_rows` rows, in order."""
    for block in range(begin // LOGITS_BLOCK_ROWS * LOGITS_BLOCK_ROWS, end, LOGITS_BLOCK_ROWS):
        block_end = min(block + LOGITS_BLOCK_ROWS, num_rows)
        first, last = max(begin, block), min(end, block_end)
        low = max(block, min(first, last - LEAST_ROWS))
        high = min(block_end, max(last, low + LEAST_ROWS))
        yield ScoredRows(slice(low, high), slice(first - low, last - low), slice(first, last))

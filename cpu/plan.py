"""The plan of one layer's attention: which lookups and which exact parts there are, and where their results go.

Made on the calling thread before the region, in some microseconds, from the table of pieces. It refuses to know rows.
Invariant: its order is that of the table, so partials merge in one order whatever thread computes them.
"""

from typing import NamedTuple

import numba
import numpy as np

from cpu.lookup import room_for
from cpu.pieces import BEGIN, END, MODE, REQUEST, SAMPLED, TOKENS
from cpu.stages import PART_ROWS, PART_SAMPLES


class Needs(NamedTuple):
    """What a table of pieces takes: sampled pieces, ids, exact parts, slots of partials. -1s: the table is no table."""

    sampled: int
    ids: int
    parts: int
    slots: int


@numba.njit(nogil=True, cache=True)
def _count(pieces, requests, heads, kv_heads):
    sampled, ids, parts, slots, last = 0, 0, 0, 0, 0
    for index in range(len(pieces)):
        piece = pieces[index]
        begin, end = piece[BEGIN], piece[END]
        if not (last <= piece[REQUEST] < requests and 0 <= begin <= end <= piece[TOKENS]):
            return -1, -1, -1, -1
        last = piece[REQUEST]
        if piece[MODE] == SAMPLED:
            sampled += 1
            ids += room_for(begin, end) * heads
            slots += (end - begin + PART_SAMPLES - 1) // PART_SAMPLES * heads
        else:
            parts += (end - begin + PART_ROWS - 1) // PART_ROWS * kv_heads
    return sampled, ids, parts, slots + parts * (heads // kv_heads)


def count_needs(pieces: np.ndarray, requests: int, heads: int, kv_heads: int) -> Needs:
    """Of int64 `[pieces, COLUMNS]`. Raises ValueError if requests do not rise or a range is not in its segment."""
    needs = Needs(*_count(pieces, requests, heads, kv_heads))
    if needs.slots < 0:
        raise ValueError(
            f"pieces: got requests {pieces[:, REQUEST].tolist()}, ranges {pieces[:, [BEGIN, END, TOKENS]].tolist()}; "
            f"wanted requests in rising order below {requests}, and 0 <= begin <= end <= tokens"
        )
    return needs


@numba.njit(nogil=True, cache=True)
def fill_plan(pieces, requests, heads, kv_heads, first_piece, ordinals, sampled, ids_at, parts):
    """Write the plan's arrays (see `cpu.stages.Plan`), which are large enough."""
    order, ids, part, request = 0, 0, 0, 0
    first_piece[0] = 0
    for index in range(len(pieces)):
        piece = pieces[index]
        while request < piece[REQUEST]:
            request += 1
            first_piece[request] = index
        begin, end = piece[BEGIN], piece[END]
        if piece[MODE] == SAMPLED:
            ordinals[index], sampled[order] = order, index
            ids_at[order, 0], ids_at[order, 1] = ids, room_for(begin, end)
            ids += room_for(begin, end) * heads
            order += 1
            continue
        ordinals[index] = part
        for kv_head in range(kv_heads):
            for at in range(begin, end, PART_ROWS):
                parts[part, 0], parts[part, 1] = index, kv_head
                parts[part, 2], parts[part, 3] = at, min(at + PART_ROWS, end)
                part += 1
    while request < requests:
        request += 1
        first_piece[request] = len(pieces)

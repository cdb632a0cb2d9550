"""One layer's rings: the last queries of each request, and what their prefixes summed to.

Invariant: entry i of a request that writes cell m belongs to cell m - d, d in [1, capacity] and (m - d) % capacity ==
i; what is empty or may not be reused has the norm inf; a negative one says that the prefix held too much of the entry's
own attention to stand for another's.
"""

from dataclasses import dataclass

from torch import Tensor

LEAST_NORM = 1e-30  # of a refused entry: its sign is seen, whatever its query


@dataclass(frozen=True, slots=True)
class Ring:
    """The rings of one layer.

    queries: bfloat16 `[rings, heads, capacity, dim]`, pre-RoPE.
    norms: float32 `[rings, heads, capacity]`, squared, of the stored query, negative: refused for its share.
    outs: float32 or bfloat16 `[rings, heads, capacity, dim]`, lses: float32 `[rings, heads, capacity]`, natural log: of
        cells `[sink, p + 1 - band)` of the entry's cell p.
    origins: int32 `[rings, heads, capacity]`, the cell at which the oldest part was computed.
    is_estimate: uint8, likewise shaped: whether it holds sampled mass.
    """

    queries: Tensor
    norms: Tensor
    outs: Tensor
    lses: Tensor
    origins: Tensor
    is_estimate: Tensor


@dataclass(frozen=True, slots=True)
class RowRings:
    """The rows of a step beside one layer's rings. rings: int32 `[rows]`, the ring of each row, -1: none; cells: int64
    `[rows]`, the last of each row's context. Rows that have one ring write cells that follow one another, fewer than
    any match is positions back, and fewer than it is short of the whole ring (`gpu.methods.mac.Mac.why_no_draft`).
    """

    ring: Ring
    rings: Tensor
    cells: Tensor

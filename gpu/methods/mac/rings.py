"""Hold one layer's rings: the last queries of each request, and the summaries of their prefixes.

Invariant: while a request writes cell m, entry i belongs to cell m - d with d in [1, capacity] and (m - d) % capacity
== i. An entry that is empty or not reusable has the norm inf. A negative norm says that the prefix held too much of the
entry's own attention to replace another's.
"""

from dataclasses import dataclass

from torch import Tensor

LEAST_NORM = 1e-30  # of a refused entry, so that its norm has a sign even for a query of zeros


@dataclass(frozen=True, slots=True)
class Ring:
    """The rings of one layer.

    queries: bfloat16 `[rings, heads, capacity, dim]`, before RoPE.
    norms: float32 `[rings, heads, capacity]`, squared, of the stored query; negative: refused for its share.
    outs, lses: float32 or bfloat16 `[rings, heads, capacity, dim]`, and float32 `[rings, heads, capacity]`, natural
        log: the partial over cells `[sink, p + 1 - band)` of the entry's cell p.
    origins: int32 `[rings, heads, capacity]`, the cell at which the oldest part was computed.
    is_estimate: uint8 `[rings, heads, capacity]`, whether the summary holds sampled mass.
    """

    queries: Tensor
    norms: Tensor
    outs: Tensor
    lses: Tensor
    origins: Tensor
    is_estimate: Tensor


@dataclass(frozen=True, slots=True)
class RowRings:
    """The rows of a step beside one layer's rings.

    rings: int32 `[rows]`, the ring of each row, -1: none. cells: int64 `[rows]`, the last cell of each row's context.
    Rows with the same ring write consecutive cells. They are so few that no row can match an entry of another one
    (`gpu.methods.mac.Mac.why_no_draft`).
    """

    ring: Ring
    rings: Tensor
    cells: Tensor

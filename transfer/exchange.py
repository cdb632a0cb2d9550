"""Where a decode step's queries wait for the CPU and its answers for the device: one slot a half batch.

It refuses to know layers and requests. Invariant: a row's flag holds the stamp of the ask that its query and codes
belong to, and is written after them, so a reader that sees the stamp sees the row.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class ExchangeSlot:
    """Host memory that the device reads and writes (pinned where it is CUDA).

    queries: `[max_rows, heads, dim]`, the device's dtype, rotated; codes: uint16 `[max_rows, heads, tables]` or None;
    flags: int32 `[max_rows]`; out: float32 `[max_rows, heads, dim]`; lse: float32 `[max_rows, heads]`; rows: in use by
    the step under way; stamp: of the ask under way.
    """

    queries: Tensor
    codes: Tensor | None
    flags: Tensor
    out: Tensor
    lse: Tensor
    rows: int
    stamp: int

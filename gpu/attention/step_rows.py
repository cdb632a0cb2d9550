"""The rows of one decode step in one device buffer, so that one copy fills it.

A row is a token of a slot, and the rows of a slot follow one another. A row writes its token's key and value to the
last cell of its context. Rows that pad a batch to a captured size have slot -1 and context 0: they write and read
nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu.step import HostRead

_WIDE, _NARROW = 2, 6  # int64 and int32 columns


class StepRows:
    """The rows of a decode step, as views of one buffer.

    positions (of the rotation, and of the cell), token_slots (where the input token stands in `last_tokens`): int64
    `[rows]`. slots, context_lens (this token's cell with them): int32 `[rows]`. skips: int32 `[3, rows]`, begin and end
    of the row's host read, which attention on the device skips, and the end again: the three bounds that
    `paged_decode_attention` takes. 0, 0, 0: the row has no host read. drafted: int32 `[rows]`, 1 for a draft's token.
    turns: at most so many rows are of one slot that holds a ring in which they take turns.

    A buffer is uint8 `[num_bytes(rows)]`.
    """

    def __init__(self, buffer: Tensor, rows: int, turns: int = 1) -> None:
        self.buffer = buffer
        self.num_rows = rows
        self.turns = turns
        wide = buffer[: 8 * _WIDE * rows].view(torch.int64).view(_WIDE, rows)
        narrow = buffer[8 * _WIDE * rows :].view(torch.int32).view(_NARROW, rows)
        self.positions, self.token_slots = wide
        self.slots, self.context_lens = narrow[:2]
        self.skips = narrow[2:5]
        self.drafted = narrow[5]

    def bounds(self, num_heads: int) -> Tensor:
        """Return bounds of attention beside a host read, int32 `[3, rows, heads]`, the last axis expanded: the row's
        host read is skipped, and nothing is far.
        """
        return self.skips.unsqueeze(-1).expand(3, self.num_rows, num_heads)

    def window_bounds(self, num_heads: int, window_tokens: int) -> Tensor:
        """Return bounds of attention to each row's last `window_tokens` cells: all before them is skipped."""
        cut = (self.context_lens - window_tokens).clamp_min_(0)
        return torch.stack([torch.zeros_like(cut), cut, cut]).unsqueeze(-1).expand(3, self.num_rows, num_heads)

    def of_slots(self, table: Tensor) -> Tensor:
        """Return for each row the entry of its slot in `[max_running + 1, ..]`; padding rows get the last."""
        return table[self.slots.long()]

    def list_turns(self, entries: Tensor) -> list[Tensor]:
        """Return entries, int32 `[rows]`, as they are in each turn: those of each slot's first rows, second rows, and
        so on, and -1 for all others.
        """
        if self.turns == 1:
            return [entries]
        before = (self.slots[:, None] == self.slots[None, :]).tril_(-1).sum(1)
        return [torch.where(before == turn, entries, -1) for turn in range(self.turns)]

    @staticmethod
    def num_bytes(rows: int) -> int:
        return (8 * _WIDE + 4 * _NARROW) * rows

    @staticmethod
    def pack(slots: Sequence[int], token_slots: Sequence[int], positions: Sequence[int],
             host_reads: Sequence[HostRead | None], rows: int, padding_token_slot: int,
             drafted: Sequence[bool] = ()) -> np.ndarray:  # fmt: skip
        """Return the buffer's bytes, padded to `rows`. drafted: by row; none: no row is of a draft."""
        packed = np.zeros(StepRows.num_bytes(rows), dtype=np.uint8)
        wide = packed[: 8 * _WIDE * rows].view(np.int64).reshape(_WIDE, rows)
        narrow = packed[8 * _WIDE * rows :].view(np.int32).reshape(_NARROW, rows)
        used = len(slots)
        wide[1], narrow[0] = padding_token_slot, -1
        wide[:, :used] = positions, token_slots
        narrow[0, :used], narrow[1, :used] = slots, wide[0, :used] + 1
        narrow[5, : len(drafted)] = drafted
        for row, host_read in enumerate(host_reads):
            if host_read is not None:
                narrow[2:5, row] = host_read.begin, host_read.end, host_read.end
        return packed

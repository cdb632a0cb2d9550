"""Pack the rows of one decode step into one device buffer, so that a single copy fills it.

A row is one token of a slot, and the rows of a slot follow one another. A row writes its token's key and value to the
last cell of its context. Rows that pad a batch to a captured size have slot -1 and context length 0: they write and
read nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu.step import HostRead

_WIDE, _NARROW = 2, 6  # int64 and int32 columns


class StepRows:
    """The rows of a decode step, as views of one buffer, which is uint8 `[num_bytes(rows)]`.

    positions: int64 `[rows]`, of RoPE and of the cell. token_slots: int64 `[rows]`, index of the input token in
        `last_tokens`.
    slots, context_lens: int32 `[rows]`; a context's length includes this token's cell.
    skips: int32 `[3, rows]`: begin and end of the row's host read, which attention on the device skips, and the end
        again. These are the three bounds that `paged_decode_attention` takes. 0, 0, 0: the row has no host read.
    drafted: int32 `[rows]`, 1 for a row whose token is a draft.
    turns: the most rows of one slot that take turns in the slot's ring.
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
        """Return attention bounds that skip each row's host read, int32 `[3, rows, heads]`; nothing is far.

        The last axis is expanded, not copied.
        """
        return self.skips.unsqueeze(-1).expand(3, self.num_rows, num_heads)

    def window_bounds(self, num_heads: int, window_tokens: int) -> Tensor:
        """Return bounds of attention to each row's last `window_tokens` cells; all cells before them are skipped."""
        cut = (self.context_lens - window_tokens).clamp_min_(0)
        return torch.stack([torch.zeros_like(cut), cut, cut]).unsqueeze(-1).expand(3, self.num_rows, num_heads)

    def of_slots(self, table: Tensor) -> Tensor:
        """Return the entry of each row's slot in a table `[max_running + 1, ..]`; padding rows get the last entry."""
        return table[self.slots.long()]

    def list_turns(self, entries: Tensor) -> list[Tensor]:
        """Return the entries, int32 `[rows]`, for each turn: those of every slot's first row, then of its second row,
        and so on.

        In each turn the entries of all other rows are -1.
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
        """Return the buffer's bytes, padded to `rows`.

        drafted: for each row, whether its token is a draft; empty: none is.
        """
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

"""Decide for each layer whether matching saves reads: compare the reads of its searches with those that hits avoided.

MAC-Attention, eq. (9), with the measured lengths of contexts. A layer that reads more than it saves over a window of
steps stops matching, and tries again some windows later. Invariant: which layers match follows from the counts at the
ends of windows, never from time; nothing waits for the device.
"""

import torch
from torch import Tensor

from gpu.methods.mac.match import NUM_COUNTS, Count

WINDOW_STEPS = 256
TABLE_COLUMNS = -(-(NUM_COUNTS + 2) // 2) * 2  # even, so that rows of all layers have the same alignment
PAUSE_WINDOWS = 8  # windows without matching after a layer has stopped


class BreakEven:
    """Decides per layer whether matching saves reads, and counts for it.

    table: int64 `[layers, TABLE_COLUMNS]`, in one piece, so that one copy brings all of it to the host. Its columns
    are: counts `[layers, NUM_COUNTS]`, which steps add to; num_stops `[layers]`; and last is_matching, int32 `[layers,
    1]`, which steps read.

    is_asked: bool `[layers]`, layers whose far cells are in host memory. There each head that hits saves its own reads;
    on the device a KV head is read once for all heads of a group that miss. row_bytes: of a key and a value of one KV
    head. try_bytes: see `gpu.methods.mac.try_bytes`. group: query heads per KV head.
    """

    def __init__(self, is_asked: Tensor, row_bytes: int, try_bytes: int, group: int, stops: bool) -> None:
        layers, device = len(is_asked), is_asked.device
        self.table = torch.zeros(layers, TABLE_COLUMNS, dtype=torch.int64, device=device)
        self.counts, self.num_stops = self.table[:, :NUM_COUNTS], self.table[:, NUM_COUNTS]
        self.is_matching = self.table.view(torch.int32)[:, -2:-1].fill_(1)
        self._is_asked, self._row_bytes, self._group, self._stops = is_asked, row_bytes, group, stops
        self._try_bytes = try_bytes
        self._before = self.counts.clone()
        self._pauses = torch.zeros_like(self.num_stops)  # windows left without matching
        self._num_steps = 0

    def end_step(self) -> None:
        """Count a launched step. The last step of a window compares the window's reads."""
        self._num_steps += 1
        if self._stops and self._num_steps % WINDOW_STEPS == 0:
            self._compare_window()

    def _compare_window(self) -> None:
        """Stop the layers that read more than they saved over the last window, and resume those whose pause is over."""
        seen = self.counts - self._before
        self._before.copy_(self.counts)
        by_head = seen[:, Count.SKIPPED] // self._group
        by_group = seen[:, Count.CELLS] // self._group - seen[:, Count.READ]
        saved = torch.where(self._is_asked, by_head, by_group) * self._row_bytes
        stops = (seen[:, Count.TRIES] > 0) & (saved < seen[:, Count.TRIES] * self._try_bytes)
        self._pauses.sub_(1).clamp_min_(0)
        self._pauses.masked_fill_(stops, PAUSE_WINDOWS)
        self.num_stops.add_(stops)
        self.is_matching.copy_((self._pauses == 0)[:, None])

"""Hold windows of keys and values: for layers with sliding attention, each sequence has a ring of pages in place of
pages for its whole context.

A window is a ring of `num_pages` pages in each of these layers: cell c of a context is in page `c // page_tokens %
num_pages`. Readers and writers use an ordinary page table, and a copy of a window has the same cells. The scheduler
numbers windows and decides which slot holds which. Cells are read no further back than a layer's window, and a ring is
at least as long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.kv.commitment import Commitment, allocate_arena
from gpu.step import WindowWrite
from gpu.upload import upload
from transfer.allocation import dtype_of
from transfer.arrays import ArraySpec


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The sizes of windows: `count` windows of `num_pages` pages in each of `layers`. Without layers, all layers have
    pages.
    """

    layers: tuple[int, ...]
    count: int
    num_pages: int


NO_WINDOWS = WindowShape((), 0, 1)


class Windows:
    """The windows of all slots.

    page: keys of a page in one layer, with rows of `dim` numbers (`gpu.page_layout.page_array`).
    arenas: of keys and of values, `[layers, windows, pages, kv_heads, page_tokens, dim]`.
    page_table: int32 `[max_slots, max_pages]`, by cell: pages of the slot's window, counted across all windows.
    """

    def __init__(
        self, shape: WindowShape, page: ArraySpec, dim: int, max_slots: int, max_pages: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_kv_heads, self.dim = page.shape[0], dim
        self.device = device
        keys = page.times(len(shape.layers), shape.count, shape.num_pages)
        self.arenas = [allocate_arena(keys.shape, dtype_of(keys), device) for _ in range(2)]
        self.commitment = Commitment(self.arenas)
        self._ring = torch.arange(max_pages if shape.layers else 0, device=device) % shape.num_pages
        self.page_table = self._ring.int().repeat(max_slots, 1)

    @property
    def num_cells(self) -> int:
        """Return the cells of a window."""
        return self.shape.num_pages * self.arenas[0].shape[-2]

    def views(self) -> list[dict[int, Tensor]]:
        """Return keys and values of each layer, by layer: `[windows * pages, kv_heads, page_tokens, dim]`."""
        return [dict(zip(self.shape.layers, arena.flatten(1, 2).unbind(0), strict=True)) for arena in self.arenas]

    def page_ids(self, window: int, cells: Tensor) -> Tensor:
        """Return the page ids (int64, in `views`) in which a window has these cells."""
        page_tokens = self.num_cells // self.shape.num_pages
        return window * self.shape.num_pages + cells // page_tokens % self.shape.num_pages

    def write(self, writes: Sequence[WindowWrite]) -> None:
        """Copy windows and give them to slots, in order; asynchronous. Raises ValueError for one out of range."""
        for write in writes:
            named = [write.window] + ([] if write.source is None else [write.source])
            if not all(0 <= window < self.shape.count for window in named):
                raise ValueError(f"windows: asked {named}, have {self.shape.count}")
            if write.source is not None and write.source != write.window:
                for arena in self.arenas:
                    arena[:, write.window].copy_(arena[:, write.source])
        given = [(write.slot, write.window) for write in writes if write.slot is not None]
        if given:
            slots, windows = upload(np.array(given, np.int64).T.copy(), self.device).unbind(0)
            self.page_table[slots] = (windows[:, None] * self.shape.num_pages + self._ring).int()

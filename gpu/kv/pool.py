"""Hold pages of keys and values on the device, and each slot's page table.

The scheduler decides which pages are free or shared. `gpu.page_layout` defines where resident pages, of all layers, and
dense pages, of the dense layers alone, are in the arena. The tokens of a dense page are in host memory for the other
layers, whose readers skip that range. Layers with windows of their own (`gpu.kv.windows`) have no pages. A row of the
table is read only up to its slot's context, so rows of released slots need no clearing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.kv.commitment import Commitment, allocate_arena
from gpu.kv.states import States
from gpu.kv.windows import NO_WINDOWS, Windows, WindowShape
from gpu.model.architecture import Architecture
from gpu.operations.kv.gather_pages import gather_pages
from gpu.operations.kv.kv_rows import write_rows
from gpu.page_layout import CODE_FORMATS, KvFormat, PageLayout, page_array, page_table, row_array
from gpu.step import FinishedReload, PageEviction, PageWrite, StateMove, TablePlace, WindowWrite
from gpu.upload import upload
from transfer.allocation import allocate, dtype_name, dtype_of


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Sizes of a pool.

    dtype: dtype that computes.
    kv: format of rows in pages; None: dtype.
    windows: windows of layers that have no pages.
    num_states: states of recurrent layers, in state_dtype; 0: one for each slot.
    num_host_states: copies of states in host memory.
    """

    num_pages: int
    dense_layers: Sequence[int]
    page_tokens: int
    max_slots: int
    max_context_tokens: int
    dtype: torch.dtype
    windows: WindowShape = NO_WINDOWS
    kv: KvFormat | None = None
    num_states: int = 0
    state_dtype: torch.dtype = torch.float32
    num_host_states: int = 0


class KvPool:
    """The KV pages of one model and the page tables of its slots.

    arenas: of keys and of values.
    key_pages, value_pages: for each layer `[pages, kv_heads, page_tokens, dim]`, in a dtype or in codes (`kv_rows`) as
        `kv` says. They are views of the arena by page id: `num_pages` resident pages and, in a dense layer, all ids
        behind them. A layer with windows has its rows in `windows` instead; a recurrent layer has none, but `states`.
    latent_rank: of latent attention, whose rows are keys and values at once: there is one arena, and both lists are
        views of it. None: there are two arenas.
    page_table: int32 `[max_slots, max_pages]`, by cell, for all layers with pages.
    dense_layers: may also name layers without pages.
    """

    def __init__(self, architecture: Architecture, shape: PoolShape, device: torch.device) -> None:
        dtype, num_pages, page_tokens = shape.dtype, shape.num_pages, shape.page_tokens
        windows, max_slots = shape.windows, shape.max_slots
        kv = shape.kv or dtype_name(dtype)
        row = row_array(kv, architecture.dim, architecture.latent is not None)
        page = page_array(architecture.num_kv_heads, page_tokens, row)
        own = architecture.window_heads
        if architecture.has_own_window_heads and set(architecture.window_layers) - set(windows.layers):
            raise ValueError(
                f"pages hold {architecture.num_kv_heads} KV heads of {architecture.dim}; layers with a window have "
                f"{own.count} of {own.dim}, and wanted are windows that are kept by themselves"
            )
        self.dtype = dtype
        self.has_codes = kv in CODE_FORMATS
        self.latent_rank = None if architecture.latent is None else architecture.latent.rank
        self.num_kv_heads, self.dim = architecture.num_kv_heads, architecture.dim
        recurrent, self._without_kv = architecture.recurrent_layers, architecture.layers_without_kv
        apart = {*windows.layers, *architecture.layers_without_kv}
        layers = [layer for layer in range(architecture.num_layers) if layer not in apart]
        self.num_pages = num_pages
        self.dense_layers = tuple(layer for layer in shape.dense_layers if layer in layers)
        self.offloaded_layers = tuple(layer for layer in layers if layer not in self.dense_layers)
        self.layout = PageLayout(len(layers), len(self.dense_layers), num_pages)
        self.page_tokens = page_tokens
        self.max_slots = max_slots
        self.max_pages = -(-shape.max_context_tokens // page_tokens)
        self.device = device
        pages = page.times(len(layers) * num_pages)
        self.arenas = [allocate_arena(pages.shape, dtype_of(pages), device) for _ in range(architecture.rows_of_head)]
        self.commitment = Commitment([arena.view(len(layers), num_pages, *page.shape) for arena in self.arenas])
        window_page = page_array(own.count, page_tokens, row_array(kv, own.dim))
        self.windows = Windows(windows, window_page, own.dim, max_slots, self.max_pages, device)
        own_states = architecture.recurrent
        self.states = None if own_states is None else States(
            own_states, recurrent, shape.num_states, max_slots, dtype, shape.state_dtype, device, shape.num_host_states
        )  # fmt: skip
        views = [self._views(arena, own) for arena, own in zip(self.arenas, self.windows.views(), strict=False)]
        self.key_pages, self.value_pages = views[0], views[-1]
        self.page_table = allocate(page_table(max_slots, self.max_pages), device)

    def table_of(self, layer: int) -> Tensor:
        """Return the page table of a layer: int32 `[max_slots, max_pages]`, by cell."""
        return self.windows.page_table if layer in self.windows.shape.layers else self.page_table

    def write_windows(self, writes: Sequence[WindowWrite | StateMove]) -> None:
        """Copy windows, or states, and give them to slots."""
        if self.states is not None:
            self.states.write(writes)
        else:
            self.windows.write([write for write in writes if isinstance(write, WindowWrite)])

    def write_pages(self, writes: Sequence[PageWrite]) -> None:
        """Append pages to page tables; asynchronous. Raises ValueError for a slot or page that does not exist."""
        if not writes:
            return
        cells, pages = [], []
        for write in writes:
            end = write.first_page + len(write.page_ids)
            if not 0 <= write.slot < self.max_slots or not 0 <= write.first_page <= end <= self.max_pages:
                raise ValueError(
                    f"page table: slot {write.slot}, pages {write.first_page} to {end}; "
                    f"have {self.max_slots} slots of {self.max_pages} pages"
                )
            self._check_ids(write.page_ids, self.layout.num_ids)
            row = write.slot * self.max_pages
            cells.extend(range(row + write.first_page, row + end))
            pages.extend(write.page_ids)
        packed = upload(np.array([cells, pages], dtype=np.int64), self.device)
        self.page_table.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))

    def evict(self, eviction: PageEviction) -> None:
        """Replace resident pages by dense pages; asynchronous. The caller has offloaded the other layers' rows before.

        Dense pages may lie in the evicted pages. Raises ValueError for a slot or page that does not exist.
        """
        self._check(eviction)
        self._move(eviction.page_ids, eviction.dense_page_ids, eviction.places)

    def reload(self, reload: FinishedReload) -> None:
        """Replace dense pages by resident pages that have the other layers' rows already; asynchronous. Raises
        ValueError for a slot or page that does not exist.
        """
        self._check(reload)
        self._move(reload.dense_page_ids, reload.page_ids, reload.places)

    def write(self, layer: int, page_ids: Tensor, keys: Tensor, values: Tensor, offsets: Tensor | None = None) -> None:
        """Write keys and values `[kv_heads, tokens, dim]`, tokens of whole pages, to a layer's `page_ids`, int64; with
        offsets, int64 `[tokens]` as `page_ids` then are, each token to its own cell.
        """
        write_rows(keys, page_ids, offsets, self.key_pages[layer])
        write_rows(values, page_ids, offsets, self.value_pages[layer])

    def read(self, layer: int, page_ids: Tensor, keys: Tensor, values: Tensor) -> None:
        """Copy whole pages of a layer to keys and values `[kv_heads, tokens, dim]`, heads strided. page_ids: int64."""
        by_page = [rows.unflatten(1, (-1, self.page_tokens)) for rows in (keys, values)]
        gather_pages(self.key_pages[layer], self.value_pages[layer], page_ids, *by_page)

    def _move(self, source_ids: Sequence[int], target_ids: Sequence[int], places: Sequence[TablePlace]) -> None:
        """Copy rows of dense layers, and replace pages in page tables."""
        count = len(source_ids)
        source, target = upload(np.array([source_ids, target_ids], dtype=np.int64), self.device).unbind(0)
        rows = [pages[layer] for layer in self.dense_layers for pages in (self.key_pages, self.value_pages)]
        read = [pages.index_select(0, source) for pages in rows]  # all are read before any is written
        for pages, own in zip(rows, read, strict=True):
            pages.index_copy_(0, target, own)
        for place in places:
            self.page_table[place.slot, place.first_page : place.first_page + count] = target.to(torch.int32)

    def gather_rows(self, page_ids: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Copy resident pages of the offloaded layers to keys and values `[layers, kv_heads, tokens, dim]`, whose
        layers and heads may be strided. Codes are decoded to any dtype.
        """
        self._check_ids(page_ids, self.num_pages)
        ids = upload(np.array(page_ids, dtype=np.int64), self.device)
        for place, layer in enumerate(self.offloaded_layers):
            self.read(layer, ids, keys[place], values[place])

    def _views(self, arena: Tensor, of_windows: dict[int, Tensor]) -> list[Tensor]:
        """Return each layer's view of an arena, dense layers first. of_windows: the views of layers with windows."""
        views = dict(of_windows)
        views |= dict.fromkeys(self._without_kv, arena[:0])
        for place, layer in enumerate((*self.dense_layers, *self.offloaded_layers)):
            count = self.layout.num_ids if layer in self.dense_layers else self.num_pages
            views[layer] = arena[place * self.num_pages :][:count]
        return [views[layer] for layer in range(len(views))]

    def _check(self, change: PageEviction | FinishedReload) -> None:
        count = len(change.page_ids)
        if count != len(change.dense_page_ids):
            raise ValueError(
                f"page table: {count} pages and {len(change.dense_page_ids)} dense ones; wanted as many of both"
            )
        self._check_ids(change.page_ids, self.num_pages)
        self._check_ids(change.dense_page_ids, self.layout.num_ids)
        for place in change.places:
            last = place.first_page + count
            if not 0 <= place.slot < self.max_slots or not 0 <= place.first_page <= last <= self.max_pages:
                raise ValueError(
                    f"page table: slot {place.slot}, pages {place.first_page} to {last}; have {self.max_slots} slots "
                    f"of {self.max_pages} pages"
                )

    def _check_ids(self, page_ids: Sequence[int], end: int) -> None:
        if page_ids and not 0 <= min(page_ids) <= max(page_ids) < end:
            raise ValueError(f"page table: page ids {min(page_ids)} to {max(page_ids)}; have {end} pages")

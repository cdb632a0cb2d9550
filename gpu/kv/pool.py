"""Pages of keys and values on the device, and each slot's page tables.

It refuses to know which pages are free or shared: the scheduler decides, and says so in page writes and deposits. Page
ids below `num_pages` are resident, with storage in every layer; the ids after them are dense, with storage in the dense
layers alone: their tokens are in host memory, and what reads the other layers states a hole there. Invariant: a table
row is only ever read up to its slot's context, so rows of released slots need no clearing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu.model.architecture import Architecture
from gpu.step import PageWrite
from gpu.upload import upload


class KvPool:
    """key_pages, value_pages: a `[pages, kv_heads, page_tokens, dim]` for each layer, `num_pages` or, in a dense layer,
    `num_pages + num_dense_pages` of them.

    page_table: int32 `[max_slots, max_pages]`, by cell, of all layers.
    """

    def __init__(self, architecture: Architecture, num_pages: int, num_dense_pages: int, dense_layers: Sequence[int],
                 page_tokens: int, max_slots: int, max_context_tokens: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        row_shape = (architecture.num_kv_heads, page_tokens, architecture.dim)
        layers = range(architecture.num_layers)
        self.num_pages = num_pages
        self.num_dense_pages = num_dense_pages
        self.dense_layers = tuple(dense_layers)
        self.deposited_layers = tuple(layer for layer in layers if layer not in self.dense_layers)
        self.page_tokens = page_tokens
        self.max_slots = max_slots
        self.max_pages = -(-max_context_tokens // page_tokens)
        self.device = device
        counts = [num_pages + (num_dense_pages if layer in self.dense_layers else 0) for layer in layers]
        self.key_pages: list[Tensor] = [_allocate((count, *row_shape), dtype, device) for count in counts]
        self.value_pages: list[Tensor] = [_allocate((count, *row_shape), dtype, device) for count in counts]
        self.page_table = torch.zeros(max_slots, self.max_pages, dtype=torch.int32, device=device)

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
            self._check_ids(write.page_ids, 0, self.num_pages + self.num_dense_pages)
            row = write.slot * self.max_pages
            cells.extend(range(row + write.first_page, row + end))
            pages.extend(write.page_ids)
        packed = upload(np.array([cells, pages], dtype=np.int64), self.device)
        self.page_table.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))

    def deposit(self, slot: int, begin: int, end: int, page_ids: Sequence[int], dense_page_ids: Sequence[int]) -> None:
        """Tokens `[begin, end)` of a slot go down: `dense_page_ids` take their pages' places; asynchronous.

        The dense layers' rows are copied there; the rows of the other layers in `page_ids` are the caller's to send
        down first. Raises ValueError for a slot or page that does not exist, and for tokens that are not whole pages.
        """
        first, last = begin // self.page_tokens, end // self.page_tokens
        if not 0 <= slot < self.max_slots or not 0 <= first < last <= self.max_pages:
            raise ValueError(f"deposit: slot {slot}, tokens {begin} to {end}; have {self.max_slots} slots of "
                             f"{self.max_pages * self.page_tokens} tokens")  # fmt: skip
        whole = begin % self.page_tokens == end % self.page_tokens == 0
        if not whole or not len(page_ids) == len(dense_page_ids) == last - first:
            raise ValueError(f"deposit: slot {slot}, tokens {begin} to {end} in {len(page_ids)} pages, "
                             f"{len(dense_page_ids)} dense; wanted whole pages of {self.page_tokens}")  # fmt: skip
        self._check_ids(page_ids, 0, self.num_pages)
        self._check_ids(dense_page_ids, self.num_pages, self.num_pages + self.num_dense_pages)
        source, target = upload(np.array([page_ids, dense_page_ids], dtype=np.int64), self.device).unbind(0)
        for layer in self.dense_layers:
            for pages in (self.key_pages[layer], self.value_pages[layer]):
                pages.index_copy_(0, target, pages.index_select(0, source))
        self.page_table[slot, first:last] = target.to(torch.int32)

    def gather_rows(self, page_ids: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Copy resident pages of the layers that go down to keys and values `[layers, kv_heads, tokens, dim]`, of which
        layers and heads may lie apart.
        """
        self._check_ids(page_ids, 0, self.num_pages)
        ids = upload(np.array(page_ids, dtype=np.int64), self.device)
        for rows, pages in ((keys, self.key_pages), (values, self.value_pages)):
            by_page = rows.unflatten(2, (-1, self.page_tokens))
            for place, layer in enumerate(self.deposited_layers):
                by_page[place] = pages[layer].index_select(0, ids).transpose(0, 1)

    def poison(self) -> None:
        """Fill every page with NaN: a debug and test aid that shows any read of a token nobody wrote."""
        for pages in (*self.key_pages, *self.value_pages):
            pages.fill_(float("nan"))

    def _check_ids(self, page_ids: Sequence[int], begin: int, end: int) -> None:
        if page_ids and not begin <= min(page_ids) <= max(page_ids) < end:
            raise ValueError(
                f"page table: page ids {min(page_ids)} to {max(page_ids)}; have {end - begin} pages from {begin} on"
            )


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that is really there: a host hands out pages at their first write, and could refuse one in mid-service."""
    return torch.empty(shape, dtype=dtype, device=device).zero_()

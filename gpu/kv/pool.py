"""Pages of keys and values on the device, and each slot's page tables.

It refuses to know which pages are free or shared: the scheduler decides, and says so in page writes and deposits. Page
ids below `num_pages` are resident, with storage in every layer; the ids after them are dense, with storage in the dense
layers alone: their tokens are deposited, so the other layers' rows of them are in host memory. Invariants: a table row
is only ever read up to its slot's context, so rows of released slots need no clearing; a slot's deposited tokens are
one run of whole pages, and `resident_table` is `page_table` without them.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gpu.model.architecture import Architecture
from gpu.step import PageWrite
from gpu.upload import upload


class KvPool:
    """key_pages, value_pages: a `[pages, kv_heads, page_tokens, dim]` for each layer, `num_pages` or, in a dense layer,
    `num_pages + num_dense_pages` of them.

    page_table, by position: int32 `[max_slots, max_pages]`, for KV writes, prefill and dense layers. resident_table, of
    the same shape (and the same memory where there are no dense pages), for the other layers' decode: a slot's row
    lists the pages before its deposited run and then those after it. deposited_tokens: int32 `[max_slots]`, on the
    device.
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
        self.resident_table = torch.zeros_like(self.page_table) if num_dense_pages else self.page_table
        self.deposited_tokens = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self._deposited = [range(0)] * max_slots  # logical pages, by slot

    def num_deposited_tokens(self, slot: int) -> int:
        """The host's copy of `deposited_tokens[slot]`."""
        return len(self._deposited[slot]) * self.page_tokens

    def write_pages(self, writes: Sequence[PageWrite]) -> None:
        """Append pages to page tables; asynchronous. Dense pages of a slot follow one another: its deposited run.

        Raises ValueError for a slot or page that does not exist, and for a dense page apart from the run.
        """
        if not writes:
            return
        cells, pages, resident_cells, resident_pages = [], [], [], []
        changed = set()
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
            for begin, end in self._split(write):
                page_ids = write.page_ids[begin - write.first_page : end - write.first_page]
                if page_ids[0] >= self.num_pages:
                    self._extend_run(write.slot, begin, end)
                    changed.add(write.slot)
                else:
                    first = row + self._resident_place(write.slot, begin, end)
                    resident_cells.extend(range(first, first + len(page_ids)))
                    resident_pages.extend(page_ids)
        self._write(self.page_table, cells, pages)
        if self.resident_table is not self.page_table:
            self._write(self.resident_table, resident_cells, resident_pages)
        for slot in changed:
            self.deposited_tokens[slot] = self.num_deposited_tokens(slot)

    def deposit(self, slot: int, begin: int, end: int, page_ids: Sequence[int], dense_page_ids: Sequence[int]) -> None:
        """Tokens `[begin, end)` of a slot go down: `dense_page_ids` take their pages' places; asynchronous.

        The dense layers' rows are copied there; the rows of the other layers in `page_ids` are the caller's to send
        down first. Raises ValueError for a slot or page that does not exist, and for tokens that are not whole pages
        next to those that are down.
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
        self._extend_run(slot, first, last)
        source, target = upload(np.array([page_ids, dense_page_ids], dtype=np.int64), self.device).unbind(0)
        for layer in self.dense_layers:
            for pages in (self.key_pages[layer], self.value_pages[layer]):
                pages.index_copy_(0, target, pages.index_select(0, source))
        self.page_table[slot, first:last] = target.to(torch.int32)
        run_begin, count = self._deposited[slot].start, last - first
        row = self.resident_table[slot]
        row[run_begin : self.max_pages - count] = row[run_begin + count :].clone()  # the two overlap
        self.deposited_tokens[slot] = self.num_deposited_tokens(slot)

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

    def release(self, slot: int) -> None:
        """The slot is free: its next owner has nothing deposited yet."""
        if self._deposited[slot]:
            self._deposited[slot] = range(0)
            self.deposited_tokens[slot] = 0

    def poison(self) -> None:
        """Fill every page with NaN: a debug and test aid that shows any read of a token nobody wrote."""
        for pages in (*self.key_pages, *self.value_pages):
            pages.fill_(float("nan"))

    def _check_ids(self, page_ids: Sequence[int], begin: int, end: int) -> None:
        if page_ids and not begin <= min(page_ids) <= max(page_ids) < end:
            raise ValueError(
                f"page table: page ids {min(page_ids)} to {max(page_ids)}; have {end - begin} pages from {begin} on"
            )

    def _split(self, write: PageWrite) -> list[tuple[int, int]]:
        """A write's logical pages, `begin, end` of each stretch that is all resident or all dense."""
        is_dense = np.array(write.page_ids, dtype=np.int64) >= self.num_pages
        cuts = [0, *(np.flatnonzero(is_dense[1:] != is_dense[:-1]) + 1).tolist(), len(is_dense)]
        return [(write.first_page + a, write.first_page + b) for a, b in pairwise(cuts) if a < b]

    def _extend_run(self, slot: int, begin: int, end: int) -> None:
        """Logical pages `begin, end` of the slot are down."""
        run = self._deposited[slot]
        if run and begin != run.stop:
            raise ValueError(
                f"page table: slot {slot}: pages {begin} to {end} go down, {run.start} to {run.stop} are; "
                "wanted the pages next to them"
            )
        self._deposited[slot] = range(run.start if run else begin, end)

    def _resident_place(self, slot: int, begin: int, end: int) -> int:
        """Where the resident table has logical pages `begin, end`."""
        run = self._deposited[slot]
        if run and begin < run.stop and end > run.start:
            raise ValueError(
                f"page table: slot {slot}: resident ids for pages {begin} to {end}, but {run.start} to {run.stop} are "
                "down; wanted dense ids"
            )
        return begin - (len(run) if begin >= run.stop else 0)

    def _write(self, table: Tensor, cells: Sequence[int], pages: Sequence[int]) -> None:
        packed = upload(np.array([cells, pages], dtype=np.int64), self.device)
        table.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that is really there: a host hands out pages at their first write, and could refuse one in mid-service."""
    return torch.empty(shape, dtype=dtype, device=device).zero_()

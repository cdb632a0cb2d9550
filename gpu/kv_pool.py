"""Pages of keys and values on the device, and each slot's page table.

It refuses to know which pages are free or shared: the scheduler decides, and says so in page writes. Invariant: a page
table row is only ever read up to its slot's context, so rows of released slots need no clearing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpu.architecture import Architecture
from gpu.step import PageWrite
from gpu.upload import upload


class KvPool:
    """key_pages, value_pages: a `[num_pages, kv_heads, page_tokens, dim]` for each layer.

    page_table: int32 `[max_slots, max_pages]`.
    """

    def __init__(self, architecture: Architecture, num_pages: int, page_tokens: int, max_slots: int,
                 max_context_tokens: int, dtype: torch.dtype, device: torch.device) -> None:  # fmt: skip
        shape = (num_pages, architecture.num_kv_heads, page_tokens, architecture.dim)
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.max_slots = max_slots
        self.max_pages = -(-max_context_tokens // page_tokens)
        self.device = device
        layers = range(architecture.num_layers)
        self.key_pages: list[Tensor] = [_allocate(shape, dtype, device) for _ in layers]
        self.value_pages: list[Tensor] = [_allocate(shape, dtype, device) for _ in layers]
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
            row = write.slot * self.max_pages
            cells.extend(range(row + write.first_page, row + end))
            pages.extend(write.page_ids)
        if pages and not 0 <= min(pages) <= max(pages) < self.num_pages:
            raise ValueError(f"page table: page ids {min(pages)} to {max(pages)}; have {self.num_pages} pages")
        packed = upload(np.array([cells, pages], dtype=np.int64), self.device)
        self.page_table.view(-1).index_copy_(0, packed[0], packed[1].to(torch.int32))

    def poison(self) -> None:
        """Fill every page with NaN: a debug and test aid that shows any read of a token nobody wrote."""
        for pages in (*self.key_pages, *self.value_pages):
            pages.fill_(float("nan"))


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that is really there: a host hands out pages at their first write, and could refuse one in mid-service."""
    return torch.empty(shape, dtype=dtype, device=device).zero_()

"""Copy one layer's keys and values of a context out of its pages, for prefill's kernels.

Rows that were gathered before are used again, so code that computes tokens out of order, and thus changes their pages,
must call `forget`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpu.host.footprint import gathered_array
from gpu.kv.pool import KvPool
from gpu.operations.kv.gather_pages import gather_pages
from gpu.operations.kv.kv_rows import read_rows
from gpu.operations.kv.latent_rows import gather_latents
from transfer.allocation import allocate_empty


class GatheredKv:
    """One layer's keys and values of one context, contiguous in tokens: copied out of pages as its chunks come."""

    def __init__(self, pool: KvPool, kv_heads: int, dim: int) -> None:
        self.pool = pool
        num_tokens = pool.max_pages * pool.page_tokens
        spec = gathered_array(kv_heads, dim, num_tokens, pool.dtype.itemsize, pool.has_codes)
        self._kv_heads = kv_heads
        keys = allocate_empty(spec, pool.device)
        self.keys = keys.unflatten(1, (pool.max_pages, pool.page_tokens))
        self.values = self.keys if pool.latent_rank is not None else torch.empty_like(self.keys)
        self._holds: tuple[int, int, int] | None = None  # (job, slot, layer)
        self._tokens = 0

    def gather(self, job_id: int, slot: int, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[kv_heads, end, dim]` of tokens `[0, end)`, valid until the next gather.

        Rows that the last call gathered for the same job, slot and layer are not gathered again.
        """
        page_tokens = self.pool.page_tokens
        if self._holds != (job_id, slot, layer) or self._tokens > end:
            self._holds, self._tokens = (job_id, slot, layer), 0
        begin_page, end_page = self._tokens // page_tokens, -(-end // page_tokens)
        page_ids = self.pool.page_table[slot, begin_page:end_page]
        new = slice(begin_page, end_page)
        keys, values = self.keys[: self._kv_heads], self.values[: self._kv_heads]
        pages = self.pool.key_pages[layer]
        if self.pool.latent_rank is not None and self.pool.has_codes:
            gather_latents(pages, page_ids, keys[0, new], self.pool.latent_rank)
        else:
            gather_pages(pages, self.pool.value_pages[layer], page_ids, keys[:, new], values[:, new])
        self._tokens = end
        return keys.flatten(1, 2)[:, :end], values.flatten(1, 2)[:, :end]

    def gather_exact(self, slot: int, layer: int, end: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield a few KV heads at a time: their range, and their keys and values `[heads in range, end, dim]` of tokens
        `[0, end)` as they are stored, codes in float32. Valid until the next ones are yielded.
        """
        self.forget()
        dtype = torch.float32 if self.pool.has_codes else self.pool.dtype
        page_ids = self.pool.page_table[slot, : -(-end // self.pool.page_tokens)]
        buffers = [rows.view(-1).view(dtype).view(-1, *rows.shape[1:]) for rows in (self.keys, self.values)]
        for first in range(0, self._kv_heads, len(buffers[0])):
            heads = slice(first, min(first + len(buffers[0]), self._kv_heads))
            keys, values = (rows[: heads.stop - first, : len(page_ids)] for rows in buffers)
            pages = (of[layer][:, heads] for of in (self.pool.key_pages, self.pool.value_pages))
            gather_pages(*pages, page_ids, keys, values)
            yield heads, keys.flatten(1, 2)[:, :end], values.flatten(1, 2)[:, :end]
        self.forget()

    def pack(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[tokens, kv_heads, dim]` of `rows` of `rows_of`, valid until the next gather."""
        self.forget()
        kv_heads, dim = self._kv_heads, self.keys.shape[-1]
        packed = []
        for pages, gathered in (
            (self.pool.key_pages[layer], self.keys),
            (self.pool.value_pages[layer], self.values),
        ):
            flat = gathered.view(-1, dim)[: len(rows)]
            read_rows(pages, rows, flat)
            packed.append(flat.view(-1, kv_heads, dim))
        return packed[0], packed[1]

    def rows_of(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the row numbers of tokens' KV heads in a layer's pages, int64 `[tokens * kv_heads]`. slots, positions:
        `[tokens]`.
        """
        kv_heads, page_tokens = self._kv_heads, self.pool.page_tokens
        pages = self.pool.page_table[slots, positions // page_tokens].long()
        first = pages * (kv_heads * page_tokens) + positions % page_tokens
        heads = torch.arange(kv_heads, device=first.device) * page_tokens
        return (first[:, None] + heads).flatten()

    def forget(self) -> None:
        """Forget the rows that were gathered before."""
        self._holds = None

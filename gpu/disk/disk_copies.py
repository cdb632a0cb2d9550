"""Copies between the device's pages and records: whole pages as they are, without a look at what they hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.kv.pool import KvPool
from gpu.upload import upload
from transfer.copies import Streams
from transfer.disk.context_store import ContextStore


def pinned_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Return uint8 `[num_bytes]` of host memory that the device copies from and to by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


@dataclass(frozen=True, slots=True)
class DiskCopies:
    """The pages of a pool as records have them. layers: those with pages, in the order of a record's parts."""

    pool: KvPool
    store: ContextStore
    streams: Streams

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted((*self.pool.dense_layers, *self.pool.offloaded_layers)))

    @property
    def num_sides(self) -> int:
        """Return 2, keys and values; 1 where a row is both."""
        return len(self.pool.arenas)

    @property
    def block_pages(self) -> int:
        return self.store.block_tokens // self.pool.page_tokens

    @property
    def part_bytes(self) -> int:
        return self.store.kv.part_bytes[0]

    @property
    def apart(self) -> tuple[int, ...]:
        """Return the layers without pages, in the order of an end's parts behind those of pages."""
        pool = self.pool
        return tuple(pool.windows.shape.layers if pool.states is None else pool.states.layers)

    def window_arrays(self, layer: int, window: int) -> list[Tensor]:
        """Return what a window or state is made of in a layer."""
        held = self.pool.windows if self.pool.states is None else self.pool.states
        return [arena[self.apart.index(layer), window] for arena in held.arenas]

    def gather_end(self, pages: Tensor, window: int) -> Tensor:
        """Return an end, uint8 `[bytes]`: pages of `gather`, fewer than a block's, and what a window or state has."""
        layers, sides, num_pages, page_bytes = pages.shape
        whole = pages.new_zeros((layers, sides, self.block_pages, page_bytes))
        whole[:, :, :num_pages] = pages
        own = [array for layer in self.apart for array in self.window_arrays(layer, window)]
        return torch.cat([whole.flatten(), *(array.reshape(-1).view(torch.uint8) for array in own)])

    def sides(self, layer: int) -> list[Tensor]:
        """Return a layer's pages: keys, then values, `[pages, kv_heads, page_tokens, row]`."""
        return [self.pool.key_pages[layer], self.pool.value_pages[layer]][: self.num_sides]

    def gather(self, page_ids: Sequence[int]) -> Tensor:
        """Return resident pages of all layers, uint8 `[layers, sides, pages, page_bytes]` on the device."""
        pool = self.pool
        ids = upload(np.array(page_ids, np.int64), pool.device)
        in_arena = [*pool.dense_layers, *pool.offloaded_layers]
        order = upload(np.array([in_arena.index(layer) for layer in self.layers], np.int64), pool.device)
        sides = []
        for arena in pool.arenas:
            layers = arena.view(len(in_arena), pool.num_pages, -1)
            sides.append(layers[order[:, None], ids[None, :]].view(torch.uint8))
        return torch.stack(sides, 1)

    def gather_mixed(self, page_ids: Sequence[int], first: int, last: int) -> Tensor:
        """Return pages as `gather` does, of which `[first, last)` are dense ones: of other layers they are zeros."""
        pool, num_pages = self.pool, len(page_ids)
        ids = upload(np.array(page_ids, np.int64), pool.device)
        page_bytes = self.part_bytes // self.num_sides // self.block_pages
        rows = torch.zeros(
            (len(self.layers), self.num_sides, num_pages, page_bytes), dtype=torch.uint8, device=pool.device
        )
        parts = [slice(0, first), slice(last, num_pages)]
        for place, layer in enumerate(self.layers):
            for part in parts if layer in pool.offloaded_layers else [slice(0, num_pages)]:
                for side, pages in enumerate(self.sides(layer)):
                    own = pages.index_select(0, ids[part])
                    rows[place, side, part] = own.flatten(1).view(torch.uint8)
        return rows

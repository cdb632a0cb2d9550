"""Copy between the device's pages and records: whole pages byte by byte, or rows encoded to 8-bit codes with a scale
for each row (`kv_rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.kv.pool import KvPool
from gpu.operations.kv.kv_rows import codes_of, make_codes, read_rows, scales_of
from gpu.page_layout import SCALE_BYTES
from gpu.upload import upload
from transfer.copies import Streams
from transfer.disk.context_store import ContextStore
from transfer.disk.record_format import RecordShape


def pinned_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 `[num_bytes]` of host memory, pinned if the device is CUDA."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


@dataclass(frozen=True, slots=True)
class DiskCopies:
    """Copies pages of a pool to and from records. layers: the layers with pages, in the order of a record's parts."""

    pool: KvPool
    store: ContextStore
    streams: Streams

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted((*self.pool.dense_layers, *self.pool.offloaded_layers)))

    @property
    def num_sides(self) -> int:
        """Return 2, for keys and values, or 1 for latent rows, which are both."""
        return len(self.pool.arenas)

    @property
    def block_pages(self) -> int:
        return self.store.block_tokens // self.pool.page_tokens

    @property
    def part_bytes(self) -> int:
        """Return the bytes of a layer in a record."""
        return self.store.kv.part_bytes[0]

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page of one side on the device."""
        return self.pool.key_pages[self.layers[0]][0].nbytes

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of a layer of a block in the format of pages."""
        return self.num_sides * self.block_pages * self.page_bytes

    @property
    def has_codes(self) -> bool:
        """Return whether records have codes although pages do not."""
        return self.part_bytes != self.layer_bytes

    def encode(self, shape: RecordShape, raw: Tensor) -> Tensor:
        """Return a record, uint8 `[bytes]`, made of raw pages and the bytes behind them; plain torch, on the host."""
        if not self.has_codes:
            return raw[: sum(shape.part_bytes)]
        record, pages = raw.new_empty(sum(shape.part_bytes)), self.pool.key_pages[self.layers[0]]
        for place in range(len(self.layers)):
            own = raw[place * self.layer_bytes : (place + 1) * self.layer_bytes]
            rows = own.view(pages.dtype).view(-1, *pages.shape[1:])
            to = record[place * self.part_bytes : (place + 1) * self.part_bytes].view(torch.int8)
            to = to.view(*rows.shape[:-1], rows.shape[-1] + SCALE_BYTES)
            codes, scales = make_codes(rows, torch.int8)
            codes_of(to).copy_(codes)
            scales_of(to).copy_(scales)
        behind = len(self.layers) * self.part_bytes
        record[behind:] = raw[len(self.layers) * self.layer_bytes :][: len(record) - behind]
        return record

    def decode(self, pages: Tensor) -> Tensor:
        """Return pages in the pool's shape and dtype. pages: of one side in a record, uint8 `[pages, bytes]`."""
        like = self.pool.key_pages[self.layers[0]]
        if not self.has_codes:
            return pages.view(like.dtype).view(-1, *like.shape[1:])
        coded = pages.contiguous().view(torch.int8).view(-1, *like.shape[1:-1], like.shape[-1] + SCALE_BYTES)
        rows = like.new_empty((coded[..., 0].numel(), like.shape[-1]))
        read_rows(coded, torch.arange(len(rows), device=coded.device), rows)
        return rows.view(-1, *like.shape[1:])

    @property
    def apart(self) -> tuple[int, ...]:
        """Return the layers without pages, in the order of their parts in an end, behind the parts of pages."""
        pool = self.pool
        return tuple(pool.windows.shape.layers if pool.states is None else pool.states.layers)

    def window_arrays(self, layer: int, window: int) -> list[Tensor]:
        """Return the tensors of a window or state in a layer."""
        held = self.pool.windows if self.pool.states is None else self.pool.states
        return [arena[self.apart.index(layer), window] for arena in held.arenas]

    def gather_end(self, pages: Tensor, window: int) -> Tensor:
        """Return an end, uint8 `[bytes]`: pages from `gather`, fewer than a block's, and a window's or state's
        content.
        """
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
        """Return pages as `gather` does. Pages `[first, last)` are dense: they are zeros in the other layers."""
        pool, num_pages = self.pool, len(page_ids)
        ids = upload(np.array(page_ids, np.int64), pool.device)
        shape = (len(self.layers), self.num_sides, num_pages, self.page_bytes)
        rows = torch.zeros(shape, dtype=torch.uint8, device=pool.device)
        parts = [slice(0, first), slice(last, num_pages)]
        for place, layer in enumerate(self.layers):
            for part in parts if layer in pool.offloaded_layers else [slice(0, num_pages)]:
                for side, pages in enumerate(self.sides(layer)):
                    own = pages.index_select(0, ids[part])
                    rows[place, side, part] = own.flatten(1).view(torch.uint8)
        return rows

"""Save blocks to disk: copy them out of their pages in stream order, and write them in a background thread.

Rows of evicted pages are in host memory. The writing thread reads them there, while they are lent, and converts them to
the format of pages.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue

import torch
from torch import Tensor

from gpu.disk.disk_copies import DiskCopies, pinned_bytes
from gpu.disk.record_shapes import STAGED_BLOCKS, block_array, num_buffers, saving_arrays
from gpu.host.row_transfer import cut_rows
from gpu.operations.host_rows.restore_rows import restore_rows
from gpu.operations.kv.kv_rows import write_rows
from gpu.step import EvictedPart, SavedBlock
from transfer.allocation import allocate_empty
from transfer.copies import PASSED, Event
from transfer.host_tier import HostTier, LentRows


class BlockWriter:
    """Writes blocks through buffers of pinned memory, one block each. On the device, blocks pass through two more
    buffers, so that their memory there does not grow when the link is behind.
    """

    def __init__(self, copies: DiskCopies, tier: HostTier | None) -> None:
        self._copies = copies
        self._tier = tier
        more = len(copies.layers) * (copies.layer_bytes - copies.part_bytes)  # of rows that are not in codes yet
        block = block_array(copies.store.shapes, more)
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(num_buffers(copies.store.config.memory_mib, block.num_bytes)):
            self._free.put(pinned_bytes(block.num_bytes, copies.pool.device))
        self._staged = allocate_empty(saving_arrays(block)["staged"], copies.pool.device)
        self._read: list[Event] = [PASSED] * STAGED_BLOCKS  # what was in each is in host memory
        self._num_saved = 0

    @property
    def num_free(self) -> int:
        """Return how many blocks a plan may save to disk now."""
        return min(STAGED_BLOCKS, self._free.qsize())

    def save(self, blocks: Sequence[SavedBlock]) -> None:
        """Copy blocks, at most `num_free`, out of their pages, and write them in the background."""
        for block in blocks:
            lent, evicted = None, block.evicted
            if evicted is not None:
                assert self._tier is not None, "disk: a block in host memory, but there is no tier"
                lent = self._tier.lend_rows(evicted.context_id, evicted.end)
                if lent is None:
                    continue  # its rows have not landed yet: the context's next turn writes it
            buffer = self._free.get_nowait()
            try:
                done = self._copy_down(self._gather(block), buffer)
                self._copies.store.run_write(partial(self._write, block, buffer, lent, done))
            except BaseException:
                self._give_back(buffer, lent)
                raise

    def shutdown(self) -> None:
        """Finish all writes, and unlock the folder."""
        self._copies.store.shutdown()

    def _copy_down(self, rows: Tensor, buffer: Tensor) -> Event:
        """Copy to pinned memory, beside what is computed next."""
        streams, place = self._copies.streams, self._num_saved % STAGED_BLOCKS
        self._num_saved += 1
        streams.wait_for(self._read[place])
        staged = self._staged[place, : rows.numel()]
        staged.view_as(rows).copy_(rows)
        with streams.aside(streams.down):
            buffer[: rows.numel()].copy_(staged, non_blocking=True)
            self._read[place] = streams.record()
        return self._read[place]

    def _gather(self, block: SavedBlock) -> Tensor:
        evicted = block.evicted
        if evicted is None:
            pages = self._copies.gather(block.page_ids)
        else:
            num_pages = (evicted.end - evicted.begin) // self._copies.pool.page_tokens
            pages = self._copies.gather_mixed(block.page_ids, evicted.first_page, evicted.first_page + num_pages)
        return pages if block.window is None else self._copies.gather_end(pages, block.window)

    def _write(self, block: SavedBlock, buffer: Tensor, lent: LentRows | None, done: Event) -> None:
        store = self._copies.store
        shape = store.kv if block.window is None or store.end is None else store.end
        try:
            done.synchronize()
            if lent is not None and block.evicted is not None:
                num_layers = len(self._copies.layers)
                layers = buffer[: num_layers * self._copies.layer_bytes].view(num_layers, -1)
                with torch.inference_mode():
                    self._restore(block.evicted, layers, lent)
            ends = list(accumulate(shape.part_bytes, initial=0))
            with torch.inference_mode():
                raw = self._copies.encode(shape, buffer).numpy().data
            store.folder.put(shape.kind, block.name, [raw[begin:end] for begin, end in pairwise(ends)])
        finally:
            self._give_back(buffer, lent)

    def _give_back(self, buffer: Tensor, lent: LentRows | None) -> None:
        if lent is not None:
            lent.end()
        self._free.put(buffer)

    def _restore(self, evicted: EvictedPart, layers: Tensor, lent: LentRows) -> None:
        """Copy the evicted rows from host memory to their places in a block, uint8 `[layers, layer_bytes]`."""
        assert self._tier is not None
        pool, num_tokens = self._copies.pool, evicted.end - evicted.begin
        num_pages = num_tokens // pool.page_tokens
        pages_of = layers.view(len(layers), self._copies.num_sides, self._copies.block_pages, -1)
        own, numbers = slice(evicted.first_page, evicted.first_page + num_pages), torch.arange(num_pages)
        for rows, layer in zip(lent.rows, self._tier.shape.layers, strict=True):
            sides = torch.empty((2, pool.num_kv_heads, num_tokens, pool.dim), dtype=pool.dtype)
            begin = 0
            for one in cut_rows(rows, evicted.begin):
                end = begin + one.keys.shape[1]
                scales = one.centre, one.key_scale, one.value_scale
                restore_rows(one.keys, one.values, *scales, sides[0, :, begin:end], sides[1, :, begin:end])
                begin = end
            like = pool.key_pages[layer]
            for side, to in zip(sides, pages_of[self._copies.layers.index(layer)], strict=True):
                write_rows(side, numbers, None, to[own].view(like.dtype).view(-1, *like.shape[1:]))

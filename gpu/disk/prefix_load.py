"""Load the prefix of a prompt from disk, layer by layer, while earlier layers compute.

Threads read the parts of blocks in the order of layers, check them, and copy each to the place of its layer's rows: the
prompt's pages, or the staging buffer of an offloaded layer. Invariants: the unit that begins a layer runs after all
rows of the layer have come; no page or buffer is written before the device has done its earlier work on it, or after
the prompt has ended; a damaged part is never copied, and the prompt's prefix then counts as lost.
"""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock, local
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu.disk.disk_copies import DiskCopies, pinned_bytes
from gpu.disk.record_shapes import piece_array, piece_blocks
from gpu.host.staging import StagedPrompt
from gpu.operations.kv.gather_pages import gather_pages
from gpu.step import DiskPrefix
from gpu.upload import upload
from transfer.copies import Event
from transfer.disk.context_store import END, KV
from transfer.disk.record_format import RecordError
from transfer.host_tier import HostMemoryError

log = logging.getLogger(__name__)
_buffers = local()


class PrefixLoad:
    """The load of one prompt's prefix. staged: takes rows of offloaded layers, if the prompt is offloaded; else
    None.
    """

    def __init__(self, copies: DiskCopies, prefix: DiskPrefix, staged: StagedPrompt | None) -> None:
        self._copies, self._prefix, self._staged = copies, prefix, staged
        self.is_lost = self._is_closed = False
        pool, self._lock = copies.pool, Lock()
        self._first_page = prefix.begin // pool.page_tokens
        self._end_page = prefix.end // pool.page_tokens
        self._page_ids = upload(np.array(prefix.page_ids, np.int64), pool.device)
        self._reads: dict[int, list[Future[None]]] = {}
        self._copied: dict[int, list[Event]] = {}
        self._num_missing: Counter[int] = Counter()  # pieces that have not come, by layer
        self._ends = [prefix.end_name] if prefix.end_name else []
        self._has_lease = copies.store.folder.lease(KV, prefix.names)
        if self._has_lease and not copies.store.folder.lease(END, self._ends):
            copies.store.folder.release(KV, prefix.names)
            self._has_lease = False
        if not self._has_lease:
            self.is_lost = True
            return
        begin = copies.streams.record()
        for layer in sorted((*copies.layers, *copies.apart)):
            if layer in copies.apart:
                self._read_apart(layer, begin)
            elif self._place(layer) is None:
                self._read(layer, [begin])
        self._stage(0)

    def is_loaded(self, layer: int) -> bool:
        """Return whether the layer's rows have been read, and are on the device or being copied there."""
        has_rows = layer in self._copies.layers or layer in self._copies.apart
        is_over = not has_rows or (layer in self._reads and all(read.done() for read in self._reads[layer]))
        return is_over and not self.is_lost  # in this order: a read that finds damage sets `is_lost` before it ends

    def begin_layer(self, layer: int) -> None:
        """Let the layer's first unit wait for its rows. Raises HostMemoryError if they are lost, which the scheduler
        prevents by asking `is_loaded` before.
        """
        for read in self._reads.get(layer, []):
            read.result()
        if self._num_missing[layer] or not self._has_lease:
            raise HostMemoryError("contexts on disk: a block is lost, and its prompt was not computed anew")
        for event in self._copied.pop(layer, []):
            self._copies.streams.wait_for(event)
        place = self._place(layer)
        if place is not None and self._staged is not None and self._staged.staging.num_buffers > 1:
            self._stage(place + 1)

    def end_layer(self, layer: int) -> None:
        """Begin to read the next offloaded layer that uses this layer's buffer. The layer's last unit and the copies to
        host memory have been launched.
        """
        place = self._place(layer)
        if place is not None and self._staged is not None and self._staged.staging.num_buffers == 1:
            self._stage(place + 1)

    def close(self) -> None:
        """End the load: no further layers are read, and pieces that were read are not copied. Later work on the device
        runs after running copies. Does not wait for the disk.
        """
        with self._lock:  # waits for a copy that is being launched
            self._is_closed = True
        for reads in self._reads.values():
            for read in reads:
                read.cancel()
        for events in self._copied.values():
            for event in events:
                self._copies.streams.wait_for(event)
        if self._has_lease:
            for kind, names in ((KV, self._prefix.names), (END, self._ends)):
                self._copies.store.folder.release(kind, names)
                self._copies.store.run_touch(kind, names)

    def _place(self, layer: int) -> int | None:
        return None if self._staged is None else self._staged.place(layer)

    def _stage(self, place: int) -> None:
        """Begin to read an offloaded layer into its buffer, once the device no longer uses the buffer's content."""
        if self._staged is None or place >= len(self._staged.staging.tier.shape.layers):
            return
        staging = self._staged.staging
        layer = staging.tier.shape.layers[place]
        before = [self._copies.streams.record(), staging.read[place % len(staging.read)]]
        self._read(layer, before)

    def _read(self, layer: int, before: list[Event]) -> None:
        """Begin to read a layer's pages: those of blocks, and those of the prefix's end."""
        names, most = self._prefix.names, piece_blocks(self._copies.part_bytes)
        pieces = [(KV, first, names[first : first + most]) for first in range(0, len(names), most)]
        if self._end_page % self._copies.block_pages and self._ends:
            pieces.append((END, len(names), tuple(self._ends)))
        part, size = self._copies.layers.index(layer), self._copies.part_bytes
        self._submit(
            layer,
            [
                partial(self._read_piece, layer, kind, part, own, size, before, partial(self._place_rows, layer, first))
                for kind, first, own in pieces
            ],
        )

    def _read_apart(self, layer: int, before: Event) -> None:
        """Begin to read a layer without pages: its window or state."""
        end, place = self._copies.store.end, len(self._copies.layers) + self._copies.apart.index(layer)
        assert end is not None, "disk: ends of a model with layers without pages"
        assert self._ends, "disk: a prefix of a model with layers without pages has an end"
        size, put = end.part_bytes[place], partial(self._place_window, layer)
        self._submit(layer, [partial(self._read_piece, layer, END, place, tuple(self._ends), size, [before], put)])

    def _submit(self, layer: int, pieces: list[Callable[[], None]]) -> None:
        self._copied[layer], self._num_missing[layer] = [], len(pieces)
        self._reads[layer] = [self._copies.store.run_read(piece) for piece in pieces]

    def _read_piece(
        self, layer: int, kind: str, part: int, names: tuple[str, ...], size: int, before: list[Event],
        put: Callable[[Tensor], None],
    ) -> None:  # fmt: skip
        """Read a part of some records, of `size` bytes each, and call `put` to copy it to its place. Runs in a
        thread.
        """
        buffer = _buffer_of(self._copies)[: len(names) * size].view(len(names), size)
        for name, row in zip(names, buffer.numpy(), strict=True):
            if self._is_closed or self.is_lost:
                return
            try:
                self._copies.store.read(kind, name, part, row.data)
            except RecordError as error:
                log.warning("disk_block_lost layer=%d reason=%s", layer, error)
                self.is_lost = True
                return
        with self._lock, torch.inference_mode(), _on_stream(self._copies):
            if self._is_closed:
                return
            for event in before:
                self._copies.streams.wait_for(event)
            put(buffer)
            done = self._copies.streams.record()
            self._copied[layer].append(done)
            self._num_missing[layer] -= 1
        done.synchronize()  # the thread's next piece uses the same buffer

    def _place_window(self, layer: int, buffer: Tensor) -> None:
        """Copy a layer's window or state to the one that the prompt holds."""
        raw, begin = buffer.view(-1).to(self._copies.pool.device, non_blocking=True), 0
        for array in self._copies.window_arrays(layer, self._prefix.window):
            array.copy_(raw[begin : begin + array.nbytes].clone().view(array.dtype).view(array.shape))
            begin += array.nbytes

    def _place_rows(self, layer: int, first: int, buffer: Tensor) -> None:
        """Copy a layer's rows of blocks, from number `first` of the prefix on, to their places."""
        copies, pool = self._copies, self._copies.pool
        rows = buffer.to(pool.device, non_blocking=True).view(len(buffer), copies.num_sides, copies.block_pages, -1)
        first_page = (self._prefix.first_block + first) * copies.block_pages
        begin, end = (
            max(self._first_page, first_page),
            min(self._end_page, first_page + len(buffer) * copies.block_pages),
        )
        if begin >= end:
            return
        own = slice(begin - first_page, end - first_page)
        sides = [copies.decode(rows[:, side].flatten(0, 1)[own]) for side in range(copies.num_sides)]
        place = self._place(layer)
        if place is None or self._staged is None:
            ids = self._page_ids[begin - self._first_page : end - self._first_page]
            for pages, side in zip(copies.sides(layer), sides, strict=True):
                pages.index_copy_(0, ids, side)
            return
        tokens = slice(begin * pool.page_tokens, end * pool.page_tokens)
        into = [one[:, tokens].unflatten(1, (-1, pool.page_tokens)) for one in self._staged.staging.buffer(place)]
        numbers = torch.arange(end - begin, device=pool.device)
        gather_pages(sides[0].contiguous(), sides[1].contiguous(), numbers, *into)


def _buffer_of(copies: DiskCopies) -> Tensor:
    """Return this thread's pinned memory for a piece, uint8 `[bytes]`."""
    size = piece_array(copies.store.kv, copies.store.end).num_bytes
    buffer: Tensor | None = getattr(_buffers, "own", None)
    if buffer is None or len(buffer) != size:
        buffer = _buffers.own = pinned_bytes(size, copies.pool.device)
    return buffer


def _on_stream(copies: DiskCopies) -> AbstractContextManager[Any]:
    up = copies.streams.up
    return nullcontext() if up is None else torch.cuda.stream(up)

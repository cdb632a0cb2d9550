"""Stage the KV of a prompt that is offloaded: while one layer is copied to host memory, the next layers are computed.

A buffer is not overwritten before its rows have been read, in stream order and without the host waiting. Before a
layer's first unit, its buffer has tokens `[0, begin)`. After its last unit, every token is in host memory or in the
slot's resident pages.
"""

import torch
from torch import Tensor

from gpu.host.footprint import num_staged_layers, staged_array
from gpu.host.row_transfer import RowTransfer
from gpu.kv.pool import KvPool
from gpu.layers.decoder import Pages
from gpu.step import PrefillPrompt
from transfer.allocation import allocate
from transfer.copies import PASSED, Event
from transfer.host_tier import HostTier


class Staging:
    """Two buffers that layers of offloaded prompts pass through, or one if other layers lie between offloaded layers.
    keys, values: `[num_buffers, kv_heads, tokens, dim]` in the pool's dtype, for the longest context; allocated once.
    The layer at `place` among offloaded layers uses buffer `place % num_buffers`.
    """

    def __init__(self, pool: KvPool, tier: HostTier, row_transfer: RowTransfer) -> None:
        self.pool = pool
        self.tier = tier
        self.row_transfer = row_transfer
        self.num_buffers = num_staged_layers(tier.shape.layers)
        num_tokens = pool.max_pages * pool.page_tokens
        spec = staged_array(self.num_buffers, pool.num_kv_heads, pool.dim, num_tokens, pool.dtype.itemsize)
        self.keys = allocate(spec, pool.device)
        self.values = torch.empty_like(self.keys).zero_()
        self.read: list[Event] = [PASSED] * self.num_buffers  # by buffer: its rows have been read
        self.loaded: list[Event] = [PASSED] * self.num_buffers  # by buffer: rows from host memory are in it
        self._one_page = torch.zeros(pool.max_slots, 1, dtype=torch.int32, device=pool.device)

    def buffer(self, place: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[kv_heads, tokens, dim]`."""
        index = self.index(place)
        return self.keys[index], self.values[index]

    def index(self, place: int) -> int:
        """Return which buffer the layer at this place uses."""
        return place % self.num_buffers

    def pages(self, place: int) -> Pages:
        """Return the buffer as one long page, which is the first page of every slot."""
        keys, values = self.buffer(place)
        return keys[None], values[None], self._one_page


class StagedPrompt:
    """A prompt that is offloaded. The constructor opens or forks its context and reserves room for its rows.

    Raises HostMemoryError, in the constructor and when layers begin and end.
    """

    def __init__(self, staging: Staging, prompt: PrefillPrompt) -> None:
        host, tier = prompt.host, staging.tier
        assert host is not None, "staging: a prompt that stays on the device"
        self.staging = staging
        self.slot = prompt.slot
        self.host = host
        self.begin = 0 if prompt.disk is not None else prompt.begin  # tokens from the disk are offloaded, too
        self.end = len(prompt.token_ids)
        if host.source_id is not None:
            tier.fork(host.source_id, host.context_id, self._num_offloaded, host.reading)
        elif self.begin == 0:
            tier.open(host.context_id, host.reading)
        num_tokens = host.end - max(self.begin, host.sink)
        self._reservations = tier.reserve(host.context_id, num_tokens) if num_tokens > 0 else []
        self._load_prefix(0)

    def place(self, layer: int) -> int | None:
        """Return the layer's place among offloaded layers; None: it is dense."""
        layers = self.staging.tier.shape.layers
        return layers.index(layer) if layer in layers else None

    def begin_layer(self, place: int) -> None:
        """Prepare the layer's buffer for its first unit: wait until it is free, and load the tokens that the prompt
        does not compute.
        """
        staging = self.staging
        index = staging.index(place)
        staging.row_transfer.streams.wait_for(staging.read[index])
        staging.row_transfer.streams.wait_for(staging.loaded[index])
        if self.begin:
            staging.pool.read(*self._pages(place, 0, self.host.sink))
        if staging.num_buffers > 1:
            self._load_prefix(place + 1)

    def end_layer(self, place: int) -> None:
        """Offload the layer's run after its last unit. Write sink, window and the resident end of the run to pages, but
        not the prefix, which is in pages already. Asynchronous.
        """
        staging, sink = self.staging, self.host.sink
        if self.begin == 0:
            staging.pool.write(*self._pages(place, 0, sink))
        staging.pool.write(*self._pages(place, max(self.host.evicted, self.begin), self.end))
        index = staging.index(place)
        staging.read[index] = staging.row_transfer.streams.record()
        keys, values = staging.buffer(place)
        for reservation in self._reservations:
            own = slice(sink + reservation.begin, sink + reservation.end)
            rows = [reservation.layer(place)]
            sent = staging.row_transfer.send(keys[None, :, own], values[None, :, own], rows, reservation.has_centre)
            staging.tier.fill(reservation, [place], sent.done)
            staging.read[index] = sent.read  # the last one's: they are read in turn
        if staging.num_buffers == 1:
            self._load_prefix(place + 1)

    @property
    def _num_offloaded(self) -> int:
        """Return how many tokens of the prefix are offloaded already."""
        return max(0, self.begin - self.host.sink)

    def _load_prefix(self, place: int) -> None:
        """Start to copy a layer's prefix from host memory; the device continues meanwhile."""
        staging = self.staging
        if self._num_offloaded == 0 or place >= len(staging.tier.shape.layers):
            return
        streams, index = staging.row_transfer.streams, staging.index(place)
        with streams.aside(streams.up):
            streams.wait_for(staging.read[index])
        keys, values = staging.buffer(place)
        own = slice(self.host.sink, self.begin)
        rows = staging.tier.rows(self.host.context_id, place, self._num_offloaded)
        staging.loaded[index] = staging.row_transfer.load(rows, keys[:, own], values[:, own])

    def _pages(self, place: int, begin: int, end: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """Return the layer, ids of these tokens' pages, and their staged keys and values, `[kv_heads, tokens, dim]`.
        They begin at a page border; the last page is whole.
        """
        pool, layer = self.staging.pool, self.staging.tier.shape.layers[place]
        first, last = begin // pool.page_tokens, -(-end // pool.page_tokens)
        page_ids = pool.page_table[self.slot, first:last].long()
        own = slice(first * pool.page_tokens, last * pool.page_tokens)
        keys, values = self.staging.buffer(place)
        return layer, page_ids, keys[:, own], values[:, own]

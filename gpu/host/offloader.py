"""Move running sequences' rows on the device's side of the host tier: offloads, reloads, and the end of contexts.

Invariants, all in stream order: an offload's rows are copied from their pages before the pages are evicted; reloaded
rows are in their pages before a page table has these pages; a context is closed only when none of its rows are being
reloaded. Offload blocks pass through one buffer, however many are due in a step. Larger offloads pass through another
buffer, a layer at a time, so that a context that grows past the resident limit needs no extra memory; the device then
waits for the link. Reloads use the staging buffers of prompts, while no offloaded prompt is being prefilled.
"""

from collections.abc import Sequence

import numpy as np

from gpu.host.footprint import OFFLOAD_BLOCK_TOKENS, offload_block_array
from gpu.host.gathered import GatheredKv
from gpu.host.row_transfer import RowTransfer, cut_rows, of_heads
from gpu.host.staging import Staging
from gpu.kv.pool import KvPool
from gpu.step import FinishedReload, Offload, Reload
from gpu.upload import upload
from transfer.allocation import allocate_empty
from transfer.copies import PASSED, Event
from transfer.host_tier import HostMemoryError, HostTier, LayerRows, Reservation

Room = tuple[Reservation, list[LayerRows]]  # a reservation and its rows, by layer


class Offloader:
    """The device side of offloading for running sequences. At least one layer is offloaded."""

    def __init__(
        self, tier: HostTier, row_transfer: RowTransfer, pool: KvPool, gathered: GatheredKv, staging: Staging
    ) -> None:
        self.tier = tier
        self._row_transfer = row_transfer
        self._pool = pool
        self._gathered = gathered
        self._staging = staging
        self._fetched: Event = PASSED
        self._lost: HostMemoryError | None = None  # why the last fetch failed
        layers, itemsize = len(tier.shape.layers), pool.dtype.itemsize
        block = offload_block_array(layers, pool.num_kv_heads, pool.dim, itemsize, pool.has_codes)
        self._block_buffer = allocate_empty(block, pool.device)
        self._block_buffer_read: Event = PASSED

    def close(self, context_ids: Sequence[int]) -> None:
        """Close contexts. Waits for prefixes that dropped prompts still reload, because memory may be freed at once."""
        if context_ids:
            self._row_transfer.wait_for_loads()
            self._fetched.synchronize()
        for context_id in context_ids:
            self.tier.close(context_id)

    def offload(self, offload: Offload) -> None:
        """Send an offload's rows down; asynchronous. Raises HostMemoryError."""
        num_tokens = offload.end - offload.begin
        if offload.is_new_context:
            self.tier.open(offload.context_id, offload.reading)
        reservations = self.tier.reserve(offload.context_id, num_tokens)
        layers = range(len(self.tier.shape.layers))
        rooms = [(one, [one.layer(layer) for layer in layers]) for one in reservations]  # all of them, or it raises
        if num_tokens <= OFFLOAD_BLOCK_TOKENS:
            self._send_offload_block(offload, rooms)
        else:
            self._send_layers(offload, rooms)

    def fetch(self, fetch: Reload) -> None:
        """Start to copy rows from host memory to their pages, layer by layer, on a stream of their own."""
        self._lost = None
        layers = self.tier.shape.layers
        try:
            loaded = [self.tier.rows(fetch.context_id, place, fetch.end) for place in range(len(layers))]
        except HostMemoryError as error:
            self._lost = error
            return
        streams, staging, own = self._row_transfer.streams, self._staging, slice(0, fetch.end - fetch.begin)
        page_ids = upload(np.array(fetch.page_ids, dtype=np.int64), self._pool.device)
        streams.keep((page_ids,), streams.up)
        for place, (layer, rows) in enumerate(zip(layers, loaded, strict=True)):
            keys, values = staging.buffer(place)
            with streams.aside(streams.up):
                streams.wait_for(staging.read[place % len(staging.read)])
            self._row_transfer.load(cut_rows(rows, fetch.begin), keys[:, own], values[:, own])
            with streams.aside(streams.up):
                self._pool.write(layer, page_ids, keys[:, own], values[:, own])
                self._fetched = staging.loaded[place % len(staging.loaded)] = streams.record()

    def finish_reload(self, reload: FinishedReload) -> None:
        """Put the pages of reloaded rows into page tables once the rows have come; asynchronous. Raises HostMemoryError
        if they could not come; then the pages at `reload.places` are void.
        """
        self._row_transfer.streams.wait_for(self._fetched)
        self._pool.reload(reload)
        if self._lost is not None:
            raise self._lost

    def _send_offload_block(self, offload: Offload, rooms: Sequence[Room]) -> None:
        self._row_transfer.streams.wait_for(self._block_buffer_read)
        keys, values = self._block_buffer[:, :, :, : offload.end - offload.begin]  # [layers, kv_heads, tokens, dim]
        self._pool.gather_rows(offload.page_ids, keys, values)
        first = rooms[0][0].begin
        for reservation, rows in rooms:
            own = slice(reservation.begin - first, reservation.end - first)
            sent = self._row_transfer.send(keys[:, :, own], values[:, :, own], rows, reservation.has_centre)
            self.tier.fill(reservation, range(len(rows)), sent.done)
            self._block_buffer_read = sent.read  # the last one's: they are read in turn

    def _send_layers(self, offload: Offload, rooms: Sequence[Room]) -> None:
        first = rooms[0][0].begin - offload.begin
        for place, layer in enumerate(self.tier.shape.layers):
            done = {}
            for heads, keys, values in self._gathered.gather_exact(offload.slot, layer, offload.end):
                for number, (reservation, rows) in enumerate(rooms):
                    own = slice(reservation.begin - first, reservation.end - first)
                    to, part = [of_heads(rows[place], heads)], (keys[None, :, own], values[None, :, own])
                    sent = self._row_transfer.send(*part, to, reservation.has_centre)
                    done[number] = sent.done
                    self._row_transfer.streams.wait_for(sent.read)
            for number, (reservation, _) in enumerate(rooms):
                self.tier.fill(reservation, [place], done[number])

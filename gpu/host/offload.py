"""The device's dealings with the host tier for running sequences: their deposits, and their decode steps.

It refuses to know which contexts go down and when: plans say. Invariants: a deposit's rows are copied from their pages
before the pages are given up, in stream order; a deposit that the host refuses leaves pages and page tables as they
were; a context is closed when nothing is on its way up. Lumps pass through one buffer, however many are due in a step,
and rows of more than a lump a layer at a time through another, so that a context that grows past the resident limit
takes no memory beside it; then the device waits for the link.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu.decode.attention import exact_decode_attention
from gpu.decode.hop_segments import HopSegments
from gpu.decode.hop_steps import HalfBatch, HopSteps, HopTimes, most_half_rows
from gpu.host.deposit import Depositor
from gpu.host.slot_exchange import SlotExchange
from gpu.kernels.paged_decode_attention import Workspace
from gpu.kernels.simhash_encode import Hyperplanes
from gpu.memory.host_demand import LUMP_TOKENS
from gpu.model.decoder import Decoder
from gpu.prefill.jobs import GatheredKv
from gpu.step import Deposit
from transfer.copies import PASSED, Event
from transfer.tier import HostTier, LayerRows, Reservation

NO_JOB = -1  # gathers rows for no prefill

Room = tuple[Reservation, list[LayerRows]]  # and its rows, a layer each


class Offload:
    """One tier's device side. At least one layer goes down.

    depositor.hyperplanes: of queries as of keys, or None where nothing is sampled. `times`: of all hop steps so far.
    """

    def __init__(self, tier: HostTier, depositor: Depositor, decoder: Decoder, gathered: GatheredKv,
                 last_tokens: Tensor, workspace: Workspace) -> None:  # fmt: skip
        self.tier = tier
        self.times = HopTimes()
        self._depositor = depositor
        self._pool = decoder.pool
        self._gathered = gathered
        kv_heads, _, dim = decoder.pool.key_pages[0].shape[1:]
        lump = (2, len(tier.shape.layers), kv_heads, LUMP_TOKENS, dim)  # keys and values
        self._lump = torch.empty(lump, dtype=decoder.pool.key_pages[0].dtype, device=decoder.pool.device)
        self._lump_read: Event = PASSED
        segments = HopSegments(decoder, exact_decode_attention, tier.shape.layers, last_tokens, workspace)
        self._exact = self._steps(segments, None)
        self._sampled = self._steps(segments, depositor.hyperplanes) if depositor.hyperplanes else None

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Of contexts that the tier takes, by `is_sampled`."""
        return (False,) if self._sampled is None else (False, True)

    def decode_steps(self, is_sampled: bool) -> HopSteps:
        """Steps whose queries have codes, or none."""
        if not is_sampled:
            return self._exact
        assert self._sampled is not None, "offload: a sampled context over a tier without tables"
        return self._sampled

    def close(self, context_ids: Sequence[int]) -> None:
        """Their memory may go at once, so a prefix that a dropped prompt still brings up is waited for."""
        if context_ids:
            self._depositor.wait_for_brought()
        for context_id in context_ids:
            self.tier.close(context_id)

    def deposit(self, deposit: Deposit) -> None:
        """Send a deposit's rows down and give up their pages; asynchronous. Raises HostMemoryError."""
        num_tokens = deposit.end - deposit.begin
        if deposit.opens:
            self.tier.open(deposit.context_id, deposit.is_sampled)
        reservations = self.tier.reserve(deposit.context_id, num_tokens)
        layers = range(len(self.tier.shape.layers))
        rooms = [(one, [one.layer(layer) for layer in layers]) for one in reservations]  # all of them, or it raises
        if num_tokens <= LUMP_TOKENS:
            self._send_lump(deposit, rooms)
        else:
            self._send_layers(deposit, rooms)
        self._pool.deposit(deposit.slot, deposit.begin, deposit.end, deposit.page_ids, deposit.dense_page_ids)

    def _send_lump(self, deposit: Deposit, rooms: Sequence[Room]) -> None:
        self._depositor.streams.wait_for(self._lump_read)
        keys, values = self._lump[:, :, :, : deposit.end - deposit.begin]  # [layers, kv_heads, tokens, dim]
        self._pool.gather_rows(deposit.page_ids, keys, values)
        first = rooms[0][0].begin
        for reservation, rows in rooms:
            own = slice(reservation.begin - first, reservation.end - first)
            sent = self._depositor.send_lump(keys[:, :, own], values[:, :, own], rows, reservation.has_centre)
            self.tier.fill(reservation, range(len(rows)), sent.done)
            self._lump_read = sent.read  # the last one's: they are read in turn

    def _send_layers(self, deposit: Deposit, rooms: Sequence[Room]) -> None:
        first = rooms[0][0].begin - deposit.begin
        self._gathered.forget()
        for place, layer in enumerate(self.tier.shape.layers):
            keys, values = self._gathered.gather(NO_JOB, deposit.slot, layer, deposit.end)  # [kv_heads, end, dim]
            for reservation, rows in rooms:
                own = slice(reservation.begin - first, reservation.end - first)
                sent = self._depositor.send(keys[:, own], values[:, own], rows[place], reservation.has_centre)
                self.tier.fill(reservation, [place], sent.done)
                self._depositor.streams.wait_for(sent.read)
        self._gathered.forget()

    def capture(self, batch_sizes: Sequence[int], on_progress: Callable[[float], None]) -> None:
        """CUDA graphs of both kinds of steps, for batches of these sizes."""
        kinds = [steps for steps in (self._exact, self._sampled) if steps is not None]
        pool = torch.cuda.graph_pool_handle()
        for done, steps in enumerate(kinds):
            begin = done / len(kinds)
            steps.capture(batch_sizes, pool, lambda part, begin=begin: on_progress(begin + part / len(kinds)))

    def _steps(self, segments: HopSegments, hyperplanes: Hyperplanes | None) -> HopSteps:
        shape, last_tokens = self.tier.shape, segments.last_tokens
        dtype, most_rows = self._pool.key_pages[0].dtype, len(last_tokens) - 1
        exchanges = [
            SlotExchange(rows, shape.num_heads, shape.dim, hyperplanes, dtype, last_tokens.device)
            for rows in most_half_rows(most_rows)
        ]
        return HopSteps([HalfBatch(segments, exchange) for exchange in exchanges], self.tier, self.times)

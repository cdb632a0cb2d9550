"""Decode steps over contexts that are partly in host memory: device and CPU take turns, a layer at a time.

It refuses to know requests, deposits, and how the CPU attends. A batch is cut into two half batches, each with its own
exchange slot: the device computes one's next segment while the CPU attends for the other. On CUDA a segment is a graph
for the next larger captured size, launched ahead of the answer that it begins with. Sizes beyond the ladder, and the
CPU device, run the same segments eagerly and behind the answer: a launch that allocates or loads may wait for a device
that would wait for this host.
Invariants: a slot has one ask open at a time, and its stamps are counted by the host as by the device; rows of padding
have slot -1 and no context, and the CPU is told of real rows alone; no device is left waiting for an answer. Whenever
a segment is launched, those launched before it have their answers: so a launch may wait for the device, but its own
segment must not have to end (CUDA_LAUNCH_BLOCKING): then nothing is launched ahead.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.decode_graphs import WARMUP_STEPS
from gpu.hop_segments import Carry, HopInputs, HopSegments
from gpu.slot_exchange import SlotExchange
from gpu.upload import upload
from transfer.tier import Attention, HostTier

LAUNCHES_BLOCK = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
MIN_ROWS_TO_HALVE = 2  # a single row leaves nothing to compute while the CPU attends


@dataclass(slots=True)
class HopTimes:
    """Totals over all hop steps so far, by the host's clock; a benchmark takes differences.

    rows: of all steps; launch_s: handing segments to the device (on the CPU: computing them); ready_s: waiting for
    deposits to land and tables to stand; attention_s: in `Attention.run`, waiting for queries and attending.
    """

    steps: int = 0
    rows: int = 0
    asks: int = 0
    launch_s: float = 0.0
    ready_s: float = 0.0
    attention_s: float = 0.0


@dataclass(slots=True)
class _Captured:
    """One size's graphs: `segments[i]` up to ask i, the last one to the logits, float32 `[rows, vocab]`."""

    inputs: HopInputs
    segments: list[torch.cuda.CUDAGraph]
    logits: Tensor


class HalfBatch:
    """One of two half batches: its exchange slot and graphs, and how far its step under way has come."""

    def __init__(self, segments: HopSegments, exchange: SlotExchange) -> None:
        self.segments = segments
        self.exchange = exchange
        self.max_rows = len(exchange.slot.flags)
        self._captured: dict[int, _Captured] = {}
        self._rows = 0
        self._graphs: _Captured | None = None
        self._inputs: HopInputs | None = None
        self._carry: Carry | None = None

    @property
    def goes_ahead(self) -> bool:
        """Whether segments of the step under way are launched ahead of answers: the device waits by itself."""
        return self._graphs is not None and not LAUNCHES_BLOCK

    def begin(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Launch the first segment."""
        pool, last_tokens = self.segments.decoder.pool, self.segments.last_tokens
        if self.exchange.slot.is_released:  # a step before this one failed
            self.exchange.forget_asks()
        self._rows = len(slots)
        size = min((size for size in self._captured if size >= self._rows), default=self._rows)
        deposited = [pool.num_deposited_tokens(slot) for slot in slots]
        packed = HopInputs.pack(slots, positions, deposited, size, len(last_tokens) - 1)
        self.exchange.slot.advance(self._rows)
        self._graphs = self._captured.get(size)
        if self._graphs is None:
            self._inputs = HopInputs(upload(packed, last_tokens.device), size)
            self._carry = self.segments.begin(self._inputs, self.exchange)
        else:
            self._graphs.inputs.buffer.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
            self._graphs.segments[0].replay()

    def go_on(self, ask: int) -> Tensor | None:
        """Launch the segment that begins with the answer to `ask`; the last one's logits `[rows, vocab]` come back."""
        is_last = ask + 1 == self.segments.num_asks
        if self._graphs is not None:
            self._graphs.segments[ask + 1].replay()
            return self._graphs.logits[: self._rows] if is_last else None
        assert self._inputs is not None
        assert self._carry is not None, "half batch: go_on before begin"
        if not is_last:
            self._carry = self.segments.go_on(ask, self._carry, self._inputs, self.exchange)
            return None
        logits = self.segments.end(self._carry, self._inputs, self.exchange)
        self._inputs = self._carry = None
        return logits

    def expect_next(self) -> None:
        """The ask under way has its answer, and the next one is on its way."""
        self.exchange.slot.advance(self._rows)

    def capture(self, size: int, pool: tuple[int, int]) -> None:
        """Graphs for up to `size` rows. Nobody answers while warming up, so the slot is released."""
        last_tokens = self.segments.last_tokens
        packed = HopInputs.pack([], [], [], size, len(last_tokens) - 1)
        inputs = HopInputs(upload(packed, last_tokens.device), size)
        self.exchange.slot.release()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._warm_up(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graphs: list[torch.cuda.CUDAGraph] = []

        def recorded() -> torch.cuda.graph:
            graphs.append(torch.cuda.CUDAGraph())
            return torch.cuda.graph(graphs[-1], pool=pool)

        with recorded():
            carry = self.segments.begin(inputs, self.exchange)
        for ask in range(self.segments.num_asks - 1):
            with recorded():
                carry = self.segments.go_on(ask, carry, inputs, self.exchange)
        with recorded():
            logits = self.segments.end(carry, inputs, self.exchange)
        self._captured[size] = _Captured(inputs, graphs, logits)
        self.exchange.forget_asks()

    def _warm_up(self, inputs: HopInputs) -> None:
        carry = self.segments.begin(inputs, self.exchange)
        for ask in range(self.segments.num_asks - 1):
            carry = self.segments.go_on(ask, carry, inputs, self.exchange)
        self.segments.end(carry, inputs, self.exchange)


class HopSteps:
    """Hop steps of one kind, with codes of the query or without. At least one layer goes down.

    halves: one or two, asked in turns; a single row goes to the first.
    """

    def __init__(self, halves: Sequence[HalfBatch], tier: HostTier, times: HopTimes) -> None:
        self.halves = halves
        self.num_asks = halves[0].segments.num_asks
        assert self.num_asks > 0, "hop steps: no layer goes down; step as the exact profile does"
        self.tier = tier
        self.times = times

    def run(self, slots: Sequence[int], positions: Sequence[int], context_ids: Sequence[int]) -> Tensor:
        """Logits, float32 `[rows, vocab]`, after one token a slot; the next step overwrites them.

        context_ids: the rows' contexts in the tier. Asynchronous up to the first question to the CPU; returns when the
        last one is answered and the segment behind it launched. Raises ContextLostError before the first answer: the
        step may be run again with other rows, since its first segment writes the same keys and values anew.
        """
        times, clock = self.times, time.perf_counter
        began = clock()
        parts = list(zip(self.halves, halve(len(slots)), strict=False))
        for half, rows in parts:
            half.begin(slots[rows], positions[rows])
        launched = clock()
        attentions = [self.tier.attention(context_ids[rows]) for _, rows in parts]
        times.launch_s += launched - began
        times.ready_s += clock() - launched
        try:
            logits = [
                answer
                for ask in range(self.num_asks)
                for (half, _), attention in zip(parts, attentions, strict=True)
                if (answer := self._hop(ask, half, attention)) is not None
            ]
        except BaseException:
            for half in self.halves:
                half.exchange.slot.release()
            for attention in attentions:
                attention.give_up()
            raise
        times.steps += 1
        times.rows += len(slots)
        times.asks += self.num_asks * len(parts)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _hop(self, ask: int, half: HalfBatch, attention: Attention) -> Tensor | None:
        """Answer an ask and launch the segment behind it, whichever may come first; logits of the last one."""
        times, clock = self.times, time.perf_counter
        began = clock()
        logits = half.go_on(ask) if half.goes_ahead else None
        launched = clock()
        attention.run(ask, half.exchange.slot)
        answered = clock()
        if not half.goes_ahead:
            logits = half.go_on(ask)
        if logits is None:
            half.expect_next()
        times.attention_s += answered - launched
        times.launch_s += launched - began + clock() - answered
        return logits

    def capture(self, batch_sizes: Sequence[int], pools: Sequence[tuple[int, int]],
                on_progress: Callable[[float], None]) -> None:  # fmt: skip
        """Capture half batches of batches of these sizes, largest first.

        `pools[i]` is the memory of half batch i alone: the two take turns, so one's carry must outlive the other's
        segments.
        """
        wanted = [
            (half, pool, size)
            for place, (half, pool) in enumerate(zip(self.halves, pools, strict=True))
            for size in half_sizes(batch_sizes, place)
        ]
        for done, (half, pool, size) in enumerate(wanted):
            half.capture(size, pool)
            on_progress((done + 1) / len(wanted))


def halve(rows: int) -> list[slice]:
    """A batch's rows, cut into one or two half batches; the first has the odd one."""
    if rows < MIN_ROWS_TO_HALVE:
        return [slice(0, rows)]
    middle = -(-rows // 2)
    return [slice(0, middle), slice(middle, rows)]


def half_sizes(batch_sizes: Sequence[int], place: int) -> list[int]:
    """Sizes of half batch 0 or 1 in batches of these sizes, largest first."""
    parts = [halve(size) for size in batch_sizes]
    return sorted({part[place].stop - part[place].start for part in parts if place < len(part)}, reverse=True)


def most_half_rows(max_rows: int) -> list[int]:
    """Most rows of each half batch in batches of up to `max_rows`."""
    sizes = [half_sizes(range(1, max_rows + 1), place) for place in (0, 1)]
    return [largest[0] for largest in sizes if largest]

"""Decode steps over contexts that are partly in host memory: device and CPU take turns, a layer at a time.

It refuses to know requests, deposits, and how the CPU attends. A batch is cut into two half batches, each with its own
exchange slot: the device computes one's next segment while the CPU attends for the other. On CUDA a whole step, both
half batches in turns, is one graph for the next larger captured size: it waits for each answer by itself, so the host
launches once and then only answers. Sizes beyond the ladder, and the CPU device, run the same segments eagerly, each
behind its answer: a launch that allocates or loads may wait for a device that would wait for this host.
Invariants: a slot has one ask open at a time, and its stamps are counted by the host as by the device; segments are
computed in the order in which the host answers, on one stream; rows of padding have slot -1 and no context, and the CPU
is told of real rows alone; no device is left waiting for an answer. A launch that must end before it returns
(CUDA_LAUNCH_BLOCKING) cannot wait for answers: then no step is captured.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.decode.hop_segments import Carry, HopInputs, HopSegments
from gpu.decode.steps import WARMUP_STEPS
from gpu.host.slot_exchange import SlotExchange
from gpu.upload import upload
from transfer.tier import Ask, Attention, HostTier

LAUNCHES_BLOCK = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
MIN_ROWS_TO_HALVE = 2  # a single row leaves nothing to compute while the CPU attends


@dataclass(slots=True)
class HopTimes:
    """Totals over all hop steps so far, by the host's clock; a benchmark takes differences.

    rows: of all steps; launch_s: handing steps to the device (on the CPU: computing them); ready_s: waiting for
    deposits to land and tables to stand; attention_s: of the tier, waiting for queries and attending.
    """

    steps: int = 0
    rows: int = 0
    asks: int = 0
    launch_s: float = 0.0
    ready_s: float = 0.0
    attention_s: float = 0.0


class HalfBatch:
    """One of two half batches: its exchange slot, and how far its eager step under way has come."""

    def __init__(self, segments: HopSegments, exchange: SlotExchange) -> None:
        self.segments = segments
        self.exchange = exchange
        self._inputs: HopInputs | None = None
        self._carry: Carry | None = None

    def pack(self, slots: Sequence[int], positions: Sequence[int], size: int) -> np.ndarray:
        """The bytes of `HopInputs` of these rows, padded to `size`."""
        deposited = [self.segments.decoder.pool.num_deposited_tokens(slot) for slot in slots]
        return HopInputs.pack(slots, positions, deposited, size, len(self.segments.last_tokens) - 1)

    def asks(self, slots: Sequence[int], context_ids: Sequence[int]) -> list[Ask]:
        """All that is down of each slot's context."""
        pool = self.segments.decoder.pool
        return [
            Ask(context_id, pool.num_deposited_tokens(slot))
            for slot, context_id in zip(slots, context_ids, strict=True)
        ]

    def to_device(self, packed: np.ndarray, size: int) -> HopInputs:
        return HopInputs(upload(packed, self.segments.last_tokens.device), size)

    def expect(self, rows: int) -> None:
        """The first ask of a step is on its way."""
        if self.exchange.slot.is_released:  # a step before this one failed
            self.exchange.forget_asks()
        self.exchange.slot.advance(rows)

    def begin(self, inputs: HopInputs) -> None:
        """The first segment."""
        self._inputs, self._carry = inputs, self.segments.begin(inputs, self.exchange)

    def go_on(self, ask: int) -> Tensor | None:
        """The segment that begins with the answer to `ask`; the last one's logits `[rows, vocab]` come back."""
        assert self._inputs is not None
        assert self._carry is not None, "half batch: go_on before begin"
        if ask + 1 < self.segments.num_asks:
            self._carry = self.segments.go_on(ask, self._carry, self._inputs, self.exchange)
            return None
        logits = self.segments.end(self._carry, self._inputs, self.exchange)
        self._inputs = self._carry = None
        return logits


@dataclass(slots=True)
class _CapturedStep:
    """A step of one size: `inputs` and `logits`, float32 `[rows, vocab]`, of each half batch."""

    inputs: list[HopInputs]
    graph: torch.cuda.CUDAGraph
    logits: list[Tensor]


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
        self._captured: dict[int, _CapturedStep] = {}

    def run(self, slots: Sequence[int], positions: Sequence[int], context_ids: Sequence[int]) -> Tensor:
        """Logits, float32 `[rows, vocab]`, after one token a slot; the next step overwrites them.

        context_ids: the rows' contexts in the tier. Returns when the last question to the CPU is answered and what is
        behind it launched. Raises ContextLostError before anything is launched: a device that waits for this host while
        this host waits for copies or tables might wait for ever, since either may need memory to be pinned.
        """
        times, clock = self.times, time.perf_counter
        parts = list(zip(self.halves, halve(len(slots)), strict=False))
        captured = self._captured.get(min((size for size in self._captured if size >= len(slots)), default=0))
        began = clock()
        attentions = [self.tier.attention(half.asks(slots[rows], context_ids[rows])) for half, rows in parts]
        ready = clock()
        try:
            for place, (half, rows) in enumerate(parts):
                half.expect(rows.stop - rows.start)
                size = captured.inputs[place].rows.rows if captured else rows.stop - rows.start
                packed = half.pack(slots[rows], positions[rows], size)
                if captured:
                    staged = torch.from_numpy(packed).pin_memory()
                    captured.inputs[place].buffer.copy_(staged, non_blocking=True)
                else:
                    half.begin(half.to_device(packed, size))
            if captured:
                captured.graph.replay()
            times.ready_s += ready - began
            times.launch_s += clock() - ready
            logits = self._answer_all(parts, attentions, captured) if captured else self._take_turns(parts, attentions)
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

    def _answer_all(
        self, parts: Sequence[tuple[HalfBatch, slice]], attentions: Sequence[Attention], captured: _CapturedStep
    ) -> list[Tensor]:
        """Answer a step that goes on by itself; the half batches' logits."""
        began = time.perf_counter()
        slots = [half.exchange.slot for half, _ in parts]
        self.tier.answer(list(zip(attentions, slots, strict=True)))
        self.times.attention_s += time.perf_counter() - began
        return [own[: rows.stop - rows.start] for own, (_, rows) in zip(captured.logits, parts, strict=True)]

    def _take_turns(self, parts: Sequence[tuple[HalfBatch, slice]], attentions: Sequence[Attention]) -> list[Tensor]:
        """Answer each ask and compute the segment behind it; the half batches' logits."""
        times, clock, logits = self.times, time.perf_counter, []
        for ask in range(self.num_asks):
            for (half, rows), attention in zip(parts, attentions, strict=True):
                began = clock()
                attention.run(ask, half.exchange.slot)
                answered = clock()
                last = half.go_on(ask)
                if last is None:
                    half.exchange.slot.advance(rows.stop - rows.start)
                else:
                    logits.append(last)
                times.attention_s += answered - began
                times.launch_s += clock() - answered
        return logits

    def capture(self, batch_sizes: Sequence[int], pool: tuple[int, int], on_progress: Callable[[float], None]) -> None:
        """Capture steps of these batch sizes and of a single row, largest first; `pool` is the graphs' memory, which
        other steps may share: one runs at a time.
        """
        sizes = sorted({1, *batch_sizes}, reverse=True)
        for done, size in enumerate(sizes):
            if not LAUNCHES_BLOCK:
                self._capture(size, pool)
            on_progress((done + 1) / len(sizes))

    def _capture(self, size: int, pool: tuple[int, int]) -> None:
        """Nobody answers while it warms up, so slots are released."""
        parts = list(zip(self.halves, (rows.stop - rows.start for rows in halve(size)), strict=False))
        inputs = [half.to_device(half.pack([], [], rows), rows) for half, rows in parts]
        for half, _ in parts:
            half.exchange.slot.release()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._compute(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._compute(inputs)
        self._captured[size] = _CapturedStep(inputs, graph, logits)
        for half, _ in parts:
            half.exchange.forget_asks()

    def _compute(self, inputs: Sequence[HopInputs]) -> list[Tensor]:
        """A step whose answers come by themselves, in the order of `_take_turns`; the half batches' logits."""
        parts = list(zip(self.halves, inputs, strict=False))
        for half, own in parts:
            half.begin(own)
        segments = [half.go_on(ask) for ask in range(self.num_asks) for half, _ in parts]
        return [logits for logits in segments if logits is not None]


def halve(rows: int) -> list[slice]:
    """A batch's rows, cut into one or two half batches; the first has the odd one."""
    if rows < MIN_ROWS_TO_HALVE:
        return [slice(0, rows)]
    middle = -(-rows // 2)
    return [slice(0, middle), slice(middle, rows)]


def most_half_rows(max_rows: int) -> list[int]:
    """Most rows of each half batch in batches of up to `max_rows`."""
    return [rows.stop - rows.start for rows in halve(max_rows)]

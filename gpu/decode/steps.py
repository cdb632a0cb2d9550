"""Decode steps on static buffers: CUDA graphs for a ladder of batch sizes, and the same loop eagerly elsewhere.

It refuses to know requests, deposits, and how the host attends. There are two kinds: steps in which some row asks the
host, and steps in which none does. On CUDA a whole step, both half batches in turns if there are two, is one graph for
the next larger captured size: it awaits each answer by itself, so the host launches once and then only answers. Sizes
beyond the ladder, and the CPU device, run the loop eagerly, each layer behind its answer: a launch that allocates or
loads may wait for a device that would wait for this host. On the CPU a small batch that asks nothing goes through the
compiled step instead.
Invariants: a step reads its tokens from `last_tokens` on the device, so the host never waits for one; a slot of the
exchange has one ask open at a time, and its stamps are counted by the host as by the device; layers are computed in the
order in which the host answers, on one stream; the host is told of real rows alone; no device is left waiting for an
answer. A launch that must end before it returns (CUDA_LAUNCH_BLOCKING) cannot wait for answers: then no step that asks
is captured.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.cpu_device.step import MAX_ROWS, CpuStep, serves
from gpu.decode.capture import capture
from gpu.decode.halving import Halving, cut
from gpu.decode.ladder import steps_to_capture
from gpu.decode.loop import LayerLoop, Step
from gpu.decode.rows import StepRows
from gpu.host.slot_exchange import SlotExchange
from gpu.step import HostAsk
from gpu.upload import upload
from transfer.tier import Ask, Attention, HostTier

NOTHING = Ask(None, 0)
LAUNCHES_BLOCK = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"


@dataclass(slots=True)
class AskTimes:
    """Totals over all steps that asked, by the host's clock; a benchmark takes differences.

    rows: of all steps; launch_s: handing steps to the device (on the CPU: computing them); ready_s: waiting for
    deposits to land and tables to stand; attention_s: of the tier, waiting for queries and attending.
    """

    steps: int = 0
    rows: int = 0
    asks: int = 0
    launch_s: float = 0.0
    ready_s: float = 0.0
    attention_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Asking:
    """What steps need that ask: the tier, an exchange slot for each part of a batch, and how batches are cut."""

    tier: HostTier
    exchanges: Sequence[SlotExchange]
    halving: Halving
    times: AskTimes


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step, one token each. asks: what a row asks the host for, or None."""

    slots: Sequence[int]
    positions: Sequence[int]
    cells: Sequence[int]
    asks: Sequence[HostAsk | None]

    def __getitem__(self, rows: slice) -> "Batch":
        return Batch(self.slots[rows], self.positions[rows], self.cells[rows], self.asks[rows])

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(slots=True)
class _Captured:
    """A step of one size: `rows` and `logits`, float32 `[rows, vocab]`, of each part."""

    rows: list[StepRows]
    graph: torch.cuda.CUDAGraph
    logits: list[Tensor]


class DecodeSteps:
    """asking: None where nothing goes down to the host."""

    def __init__(self, loop: LayerLoop, asking: Asking | None) -> None:
        self.loop = loop
        self.asking = asking
        self._captured: dict[tuple[int, int], _Captured] = {}  # by parts that ask, 0 to 2, and size
        self._compiled = _compiled_step(loop)

    def run(self, batch: Batch) -> Tensor:
        """Logits, float32 `[rows, vocab]`, after one token a row; the next step overwrites them.

        Asynchronous where no row asks; else it returns when the last ask is answered and what is behind it launched.
        Raises ContextLostError before anything is launched: a device that waits for this host while this host waits
        for copies or tables might wait for ever, since either may need memory to be pinned. Raises ExchangeError where
        the device asks nothing.
        """
        if any(ask is not None for ask in batch.asks):
            return self._run_asking(batch)
        if self._compiled is not None and len(batch) <= MAX_ROWS:
            slots = np.array(batch.slots, np.int32)
            positions, cells = np.array(batch.positions, np.int64), np.array(batch.cells, np.int64)
            return self._compiled.run(slots, positions, self.loop.last_tokens.numpy()[slots], cells)
        captured = self._find(0, len(batch))
        if captured is None:
            return _logits_of(self.loop.step(self._upload(batch, len(batch)), None))
        self._fill(captured.rows[0], batch)
        captured.graph.replay()
        return captured.logits[0][: len(batch)]

    def capture(self, batch_sizes: Sequence[int], on_progress: Callable[[float], None]) -> None:
        """Capture steps for these batch sizes: all share one memory pool, since one runs at a time."""
        if self.loop.checks_coverage:
            return  # it waits for the device in every layer
        max_running = len(self.loop.last_tokens) - 1
        steps = steps_to_capture(batch_sizes, max_running, self.asking is not None and not LAUNCHES_BLOCK)
        pool = torch.cuda.graph_pool_handle()
        for done, (parts, size) in enumerate(steps):
            self._captured[parts, size] = self._capture(parts, size, pool)
            on_progress((done + 1) / len(steps))

    def _run_asking(self, batch: Batch) -> Tensor:
        assert self.asking is not None, "decode: rows ask, but there is no tier"
        tier, times, clock = self.asking.tier, self.asking.times, time.perf_counter
        num_parts = self.asking.halving.choose(len(batch))
        parts = [batch[rows] for rows in cut(len(batch), num_parts)]
        exchanges = self.asking.exchanges[: len(parts)]
        captured = self._find(num_parts, len(batch))
        began = clock()
        attentions = [tier.attention([_ask_of(ask) for ask in part.asks]) for part in parts]
        ready = clock()
        try:
            for exchange, part in zip(exchanges, parts, strict=True):
                exchange.expect(len(part))
            if captured:
                for rows, part in zip(captured.rows, parts, strict=True):
                    self._fill(rows, part)
                captured.graph.replay()
                steps = []
            else:
                rows_of = [self._upload(part, len(part)) for part in parts]
                steps = [self.loop.step(rows, one) for rows, one in zip(rows_of, exchanges, strict=True)]
                for step in steps:
                    next(step)
            times.ready_s += ready - began
            times.launch_s += clock() - ready
            if captured:
                answering = clock()
                answered = tier.answer(
                    [(one, exchange.slot) for one, exchange in zip(attentions, exchanges, strict=True)]
                )
                self.asking.halving.observe(len(batch), num_parts, answered)
                times.attention_s += clock() - answering
                logits = [own[: len(part)] for own, part in zip(captured.logits, parts, strict=True)]
            else:
                logits = self._take_turns(steps, attentions, exchanges)
        except BaseException:
            for exchange in exchanges:
                exchange.slot.release()
            for attention in attentions:
                attention.give_up()
            raise
        times.steps += 1
        times.rows += len(batch)
        times.asks += len(self.loop.asked_layers) * len(parts)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _take_turns(
        self, steps: Sequence[Step], attentions: Sequence[Attention], exchanges: Sequence[SlotExchange]
    ) -> list[Tensor]:
        """Answer each ask of eager steps, and compute what is behind it; the parts' logits."""
        assert self.asking is not None
        times, clock, num_asks = self.asking.times, time.perf_counter, len(self.loop.asked_layers)
        logits = []
        for ask in range(num_asks):
            for step, attention, exchange in zip(steps, attentions, exchanges, strict=True):
                began = clock()
                attention.run(ask, exchange.slot)
                answered = clock()
                if ask + 1 < num_asks:
                    next(step)
                    exchange.slot.advance(exchange.slot.rows)
                else:
                    logits.append(_logits_of(step))
                times.attention_s += answered - began
                times.launch_s += clock() - answered
        return logits

    def _capture(self, num_parts: int, size: int, pool: tuple[int, int]) -> _Captured:
        """Nobody answers while a step that asks warms up, so its slots of the exchange are released."""
        asking = self.asking.exchanges[:num_parts] if self.asking is not None and num_parts else []
        exchanges: list[SlotExchange | None] = [*asking] or [None]
        empty = Batch([], [], [], [])
        rows_of = [self._upload(empty, part.stop - part.start) for part in cut(size, max(num_parts, 1))]
        for exchange in asking:
            exchange.slot.release()
        graph, logits = capture(lambda: self.compute(rows_of, exchanges), pool)
        for exchange in asking:
            exchange.forget_asks()
        return _Captured(rows_of, graph, logits)

    def compute(self, rows_of: Sequence[StepRows], exchanges: Sequence[SlotExchange | None]) -> list[Tensor]:
        """A step whose answers come by themselves, in the order of `_take_turns`; the parts' logits."""
        steps = [self.loop.step(rows, exchange) for rows, exchange in zip(rows_of, exchanges, strict=True)]
        for _ in self.loop.asked_layers if exchanges[0] is not None else ():
            for step in steps:
                next(step)
        return [_logits_of(step) for step in steps]

    def _find(self, num_parts: int, num_rows: int) -> _Captured | None:
        """The smallest captured step that so many rows fit."""
        fitting = [size for parts, size in self._captured if parts == num_parts and size >= num_rows]
        return self._captured[num_parts, min(fitting)] if fitting else None

    def _upload(self, batch: Batch, num_rows: int) -> StepRows:
        return StepRows(upload(self._pack(batch, num_rows), self.loop.last_tokens.device), num_rows)

    def _fill(self, rows: StepRows, batch: Batch) -> None:
        staged = torch.from_numpy(self._pack(batch, rows.num_rows)).pin_memory()
        rows.buffer.copy_(staged, non_blocking=True)

    def _pack(self, batch: Batch, num_rows: int) -> np.ndarray:
        padding_token_slot = len(self.loop.last_tokens) - 1
        return StepRows.pack(batch.slots, batch.positions, batch.cells, batch.asks, num_rows, padding_token_slot)


def _logits_of(step: Step) -> Tensor:
    """What a step computes behind its last answer."""
    try:
        next(step)
    except StopIteration as end:
        return end.value
    raise AssertionError("decode: a step asks more often than layers go down")


def _ask_of(ask: HostAsk | None) -> Ask:
    return NOTHING if ask is None else Ask(ask.context_id, ask.end - ask.begin)


def _compiled_step(loop: LayerLoop) -> CpuStep | None:
    """The compiled step where it can take the place of the loop: for rows that ask nothing, uncounted."""
    if loop.checks_coverage:
        return None
    architecture, weights = loop.decoder.architecture, loop.decoder.weights.logits
    return CpuStep(loop.decoder) if serves(architecture, weights.dtype, weights.device) else None

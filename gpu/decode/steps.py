"""Run decode steps on static buffers: as CUDA graphs for a ladder of batch sizes, else eagerly by the same loop.

A captured step is chosen by its batch size and by four questions. Does some row read host memory? Does the CPU do that,
or do methods alone? Does some row hold a ring of a method that reuses? And, in steps without host reads, has some row
an adapter?

On CUDA a whole step is one graph of the next larger captured size. If there are two half batches, the graph computes
them in turns. The graph awaits each answer of the CPU on the device. So the step is launched once and handed to the
thread that answers (`answering`), and the next step may be launched behind it. Larger batches, and the CPU device, run
the loop eagerly in the launching thread: each layer waits for its answer, and the whole step for those in flight. On
the CPU a small batch without host reads runs as the compiled step.

A step reads its tokens from `last_tokens` on the device, so the host never waits for one. A slot of the exchange has
one open request at a time, and host and device count its stamps alike. Layers are computed on one stream, in the order
in which the host answers. No device is left waiting for an answer. With CUDA_LAUNCH_BLOCKING a launch returns when it
has ended, so it cannot wait for answers: then no step with host reads is captured.

The CPU computes experts in host memory for captured steps of few rows, and on the CPU device. The requests of a
captured step are listed as it is captured. Requests for experts have slots of their own, one per lane, and threads that
answer them. All other steps fetch experts.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu.attention.step_rows import StepRows
from gpu.batching.capture import capture
from gpu.batching.captured_steps import StepKind, steps_to_capture
from gpu.batching.halving import Halving, cut
from gpu.cpu_step.cpu_step import CpuStep, reads_rows, serves
from gpu.cpu_step.step_arrays import MAX_ROWS, num_step_rows
from gpu.decode.answering import Answering, Answers, SlotRequests
from gpu.decode.link_reads import LinkReads
from gpu.decode.loop import LayerLoop, Step
from gpu.decode.step_code import StepCode
from gpu.exchange.device_experts import ExpertExchange
from gpu.exchange.device_slots import SlotExchange
from gpu.host.footprint import MOST_LINKED_ROWS
from gpu.operations.linear.numba_packed_linear import multiplies, widened_kinds
from gpu.operations.linear.packed_matrix import Packed
from gpu.step import HostRead
from gpu.upload import upload
from gpu.weights.weights import Weights
from transfer.copies import PASSED, Event
from transfer.expert_exchange import ROWS, ExpertRequests
from transfer.host_tier import Answered, Attention, ContextRead, HostTier, Loan

log = logging.getLogger(__name__)

NOTHING = ContextRead(None, 0)
LAUNCHES_BLOCK = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"


@dataclass(slots=True)
class HostReadTimes:
    """Totals over all answered steps with host reads, in the host's time; a benchmark takes differences.

    rows: of all steps.
    launch_s: time to launch steps on the device (on the CPU: to compute them).
    ready_s: time to wait for offloads to land and for tables to be ready.
    attention_s: time in the host tier, to wait for queries and to attend; other steps may be launched meanwhile.
    """

    steps: int = 0
    rows: int = 0
    requests: int = 0
    launch_s: float = 0.0
    ready_s: float = 0.0
    attention_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostReader:
    """Holds what steps with host reads use.

    tier: the host tier. exchanges: an exchange slot for each part of a batch. halving: decides whether a batch is cut
    in two.
    """

    tier: HostTier
    exchanges: Sequence[SlotExchange]
    halving: Halving
    times: HostReadTimes


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step, one token each. Rows of one slot are in the order of their positions.

    host_reads: what each row reads in host memory, or None.
    reuses: whether some row holds a ring.
    token_slots: index in `last_tokens` of each row's input token; None: the row's slot.
    has_host_reads: whether the step runs in the buffers of rows with host reads, even if no such row is left.
    drafted: for each row, whether its token is a draft; empty: no row's is.
    """

    slots: Sequence[int]
    positions: Sequence[int]
    host_reads: Sequence[HostRead | None]
    reuses: bool = False
    token_slots: Sequence[int] | None = None
    has_host_reads: bool = False
    drafted: Sequence[bool] = ()

    def __getitem__(self, rows: slice) -> "Batch":
        places = None if self.token_slots is None else self.token_slots[rows]
        return Batch(
            self.slots[rows], self.positions[rows], self.host_reads[rows], self.reuses, places,
            self.has_host_reads, self.drafted[rows],
        )  # fmt: skip

    @property
    def places(self) -> Sequence[int]:
        """Return the index in `last_tokens` of each row's input token."""
        return self.slots if self.token_slots is None else self.token_slots

    def __len__(self) -> int:
        return len(self.slots)


class LaunchedStep(NamedTuple):
    """A launched step: its logits, and the answers that the device awaits for them.

    logits: float32 `[rows, vocab]`; the next step overwrites them. answers: to requests for attention, and for experts.
    """

    logits: Tensor
    answers: tuple[Answers, ...] = ()


@dataclass(slots=True)
class _Captured:
    """A captured step of one size: `rows` and `logits`, float32 `[rows, vocab]`, of each part; its expert requests, or
    None.
    """

    rows: list[StepRows]
    graph: torch.cuda.CUDAGraph
    logits: list[Tensor]
    expert_requests: ExpertRequests | None


class DecodeSteps:
    """Runs decode steps: captured, compiled or eager.

    host_reader: None where nothing is offloaded.
    host_read_stream: stream of steps with host reads, where they have their own.
    experts: exchanges for experts that the CPU computes: first that of steps without host reads, last that of steps
        with them.
    compile_settings: see `StepCode`.
    turns: the most rows of a step that take turns in one ring.
    """

    def __init__(self, loop: LayerLoop, host_reader: HostReader | None,
                 host_read_stream: torch.cuda.Stream | None = None,
                 experts: Sequence[ExpertExchange] = (), compile_settings: str | None = None,
                 turns: int = 1) -> None:  # fmt: skip
        self.loop = loop
        self.host_reader = host_reader
        self._host_read_stream = host_read_stream
        self._most_turns = turns
        self._captured: dict[tuple[StepKind, int], _Captured] = {}  # by kind and size
        self._drafts: dict[int, tuple[StepRows, torch.cuda.CUDAGraph, Tensor]] = {}  # by the checkpoint's head, by size
        self._code, self._compiled = None, None
        if _has_compiled_step(loop):
            dtypes = loop.decoder.weights.embedding.dtype, loop.decoder.pool.key_pages[0].dtype
            self._code = StepCode(dtypes, compile_settings, _widened_kinds(loop.decoder.weights))
            self._compiled = CpuStep(loop.decoder)  # compiles functions of matrices meanwhile
        self._answering = None if host_reader is None else Answering(host_reader.exchanges, self._observe)
        self._experts = experts
        self._expert_answering = [Answering([one], lambda *told: None) for one in experts]

    def run(self, batch: Batch) -> LaunchedStep:
        """Decode one token per row.

        Asynchronous, except for eager steps with host reads: these return when the last answer is there and the work
        behind it is launched. Raises ContextLostError before anything is launched, and ExchangeError if the device
        sends no request in an eager step.
        """
        methods = self.loop.reusing if batch.reuses else ()
        for method in methods:
            method.prepare(batch.slots, batch.positions, batch.host_reads)
        launched = self._launch(batch)
        for method in methods:
            method.end_step()
        return launched

    def _launch(self, batch: Batch) -> LaunchedStep:
        """Launch a step by the fastest way that takes it: as the compiled step, as a captured one, or eagerly."""
        if batch.has_host_reads or any(host_read is not None for host_read in batch.host_reads):
            return self._run_by_methods(batch) if self._only_methods_read(batch) else self._run_host_reads(batch)
        adapters = self.loop.decoder.adapters
        adapts = adapters is not None and adapters.has_any(batch.slots)
        is_plain = not batch.reuses and not adapts and len(batch) <= MAX_ROWS
        if self._compiled is not None and self._code is not None and self._code.is_ready() and is_plain:
            slots = np.array(batch.slots, np.int32)
            positions = np.array(batch.positions, np.int64)
            token_ids = self.loop.last_tokens.numpy()[np.array(batch.places)]
            return LaunchedStep(self._compiled.run(slots, positions, token_ids))
        takes_turns = self._count_turns(batch) > 1
        captured = self._find_captured(StepKind(0, batch.reuses, adapts=adapts, turns=takes_turns), len(batch))
        if captured is None:
            rows, experts = self._upload(batch, len(batch)), self._eager_experts(len(batch))
            return LaunchedStep(_logits_of(self.loop.step(rows, None, batch.reuses, experts, adapts=adapts)))
        self._recover_experts(captured, reads_host=False)
        self._fill(captured.rows[0], batch)
        captured.graph.replay()
        return LaunchedStep(captured.logits[0][: len(batch)], self._answer_experts(captured, reads_host=False))

    def draft(self, batch: Batch) -> Tensor:
        """Return the logits of the token that the checkpoint's draft head guesses after each row, float32 `[rows,
        vocab]`.

        Runs a graph beside steps without host reads, else eagerly. The next call overwrites the logits.
        """
        size = min((size for size in self._drafts if size >= len(batch)), default=None)
        if size is None or batch.has_host_reads:
            return self.loop.draft(self._upload(batch, len(batch)), batch.has_host_reads)
        rows, graph, logits = self._drafts[size]
        self._fill(rows, batch)
        graph.replay()
        return logits[: len(batch)]

    @property
    def _has_adapters(self) -> bool:
        return self.loop.decoder.adapters is not None

    @property
    def most_rows(self) -> int:
        """Return the most rows of any step that is compiled or captured; without such a step, the most rows of any
        step.
        """
        if self._compiled is not None:
            return num_step_rows(self.loop.max_rows)
        return max((size for _, size in self._captured), default=self.loop.max_rows)

    def drain(self) -> None:
        """Wait until every host read of the launched steps has been answered and counted, or has failed."""
        for answering in self._all_answering:
            answering.drain()

    def shutdown(self) -> None:
        """Stop the threads that answer requests, and the child process that compiles."""
        for answering in self._all_answering:
            answering.stop()
        if self._code is not None:
            self._code.close()

    def drop_graphs(self) -> None:
        """Free all captured graphs."""
        self._captured.clear()
        self._drafts.clear()

    @property
    def _all_answering(self) -> list[Answering]:
        return [*([] if self._answering is None else [self._answering]), *self._expert_answering]

    def capture(self, batch_sizes: Sequence[int], on_progress: Callable[[float], None]) -> None:
        """Capture steps for these batch sizes, and call `on_progress` with the share that is done.

        Steps with host reads share one memory pool, since one of them runs at a time, and so do steps without.
        """
        if self.loop.checks_coverage:
            return  # the check waits for the device in every layer
        max_running = self.loop.max_rows
        with_host_reads = self.host_reader is not None and not LAUNCHES_BLOCK
        lends = any(method.reads_alone for method in self.loop.reusing)
        halves = self.host_reader is None or self.host_reader.halving.always != 1
        steps = steps_to_capture(
            batch_sizes, max_running, with_host_reads, bool(self.loop.reusing), lends, halves, self._has_adapters,
            self._most_turns > 1,
        )  # fmt: skip
        pools = {reads_host: torch.cuda.graph_pool_handle() for reads_host in (False, True)}
        for done, (kind, size) in enumerate(steps):
            self._captured[kind, size] = self._capture(kind, size, pools[kind.num_parts > 0 or kind.lends])
            on_progress((done + 1) / len(steps))
        if self.loop.head is not None:
            for size in sorted({min(size, max_running) for size in batch_sizes}, reverse=True):
                rows = self._upload(Batch([], [], []), size)
                graph, logits = capture(lambda rows=rows: self.loop.draft(rows, reads_host=False), pools[False])
                self._drafts[size] = rows, graph, logits

    def _run_host_reads(self, batch: Batch) -> LaunchedStep:
        """Launch a step in which the CPU attends to host reads, in one part or two."""
        assert self.host_reader is not None, "decode: rows read host memory, but there is no host tier"
        assert self._answering is not None, "decode: host reads are answered by a thread"
        tier, times, clock = self.host_reader.tier, self.host_reader.times, time.perf_counter
        num_parts = self.host_reader.halving.choose(batch.positions, batch.host_reads)
        if self.loop.decoder.delta is not None and any(batch.drafted):
            num_parts = 1  # a draft's tokens must stay in one part: each continues the recurrent state of those before
        parts = [batch[rows] for rows in cut(len(batch), num_parts)]
        kind = StepKind(num_parts, batch.reuses, adapts=self._has_adapters, turns=self._count_turns(batch) > 1)
        captured = self._find_captured(kind, len(batch))
        self._answering.recover()
        if captured is not None:
            self._recover_experts(captured, reads_host=True)
        began = clock()
        sizes = [len(part) for part in parts] if captured is None else [rows.num_rows for rows in captured.rows]
        with self._attentions_of(parts, self.loop.link, max(sizes) <= MOST_LINKED_ROWS) as attentions:
            ready = clock()
            requests = [
                SlotRequests(*each)
                for each in zip(self.host_reader.exchanges, attentions, map(len, parts), strict=False)
            ]
            times.ready_s += ready - began
            if captured is None:
                return LaunchedStep(self._run_eagerly(parts, attentions, batch.reuses))
            for rows, part in zip(captured.rows, parts, strict=True):
                self._fill(rows, part)
            captured.graph.replay()
        answers = self._answering.hand_over(tier, requests), *self._answer_experts(captured, reads_host=True)
        times.launch_s += clock() - ready
        logits = [own[: len(part)] for own, part in zip(captured.logits, parts, strict=True)]
        return LaunchedStep(logits[0] if len(logits) == 1 else torch.cat(logits), answers)

    def _run_by_methods(self, batch: Batch) -> LaunchedStep:
        """Launch a step whose host reads are done by methods alone, so that no answer of the CPU is awaited."""
        assert self.host_reader is not None, "decode: rows read host memory, but there is no host tier"
        times, clock = self.host_reader.times, time.perf_counter
        takes_turns = self._count_turns(batch) > 1
        kind = StepKind(0, batch.reuses, lends=True, adapts=self._has_adapters, turns=takes_turns)
        captured = self._find_captured(kind, len(batch))
        if captured is not None:
            self._recover_experts(captured, reads_host=True)
        began = clock()
        with self._attentions_of([batch]) as (attention,):
            ready = clock()
            times.ready_s += ready - began
            if captured is None:
                rows, experts = self._upload(batch, len(batch)), self._eager_experts(len(batch))
                logits = _logits_of(self.loop.step(rows, None, batch.reuses, experts, lends=True))
            else:
                self._fill(captured.rows[0], batch)
                captured.graph.replay()
                logits = captured.logits[0][: len(batch)]
        attention.give_up()  # the loan holds what the device still reads
        answers = () if captured is None else self._answer_experts(captured, reads_host=True)
        times.launch_s += clock() - ready
        self._count_step(len(batch), 0, 0.0)
        return LaunchedStep(logits, answers)

    @contextmanager
    def _attentions_of(
        self, parts: Sequence[Batch], link: LinkReads | None = None, is_linked: bool = False
    ) -> Iterator[list[Attention]]:
        """Yield the host tier's attention for each part of a batch.

        The rows are lent to methods that read host memory themselves, and to `link`, until the device has passed what
        is launched in the `with` block. All attentions are given up if the block fails. is_linked: the device reads a
        share of the requested tokens over the link.
        """
        assert self.host_reader is not None, "decode: rows read host memory, but there is no host tier"
        attentions: list[Attention] = []
        loans: list[Loan] = []
        borrowing = [method for method in self.loop.reusing if parts[0].reuses and method.borrows]
        tier = self.host_reader.tier
        try:
            for index, part in enumerate(parts):
                reads = [_context_read(host_read) for host_read in part.host_reads]
                whole = tier.attention(reads)
                attentions.append(whole)
                asked = reads if link is None else link.fill(index, reads, part.host_reads, whole, is_linked)
                if borrowing or asked != reads:
                    loans.append(whole.lend())
                for method in borrowing:
                    method.borrow(part.slots, part.positions, part.host_reads, whole)
                if asked != reads:
                    attentions[-1] = tier.attention(asked)
                    whole.give_up()
            yield attentions
        except BaseException:
            for attention in attentions:
                attention.give_up()
            for method in borrowing:
                method.give_up()
            raise
        finally:
            for loan in loans:
                loan.end(self._point())

    def _only_methods_read(self, batch: Batch) -> bool:
        """Return whether methods alone do the host reads of all rows, so that nothing is requested of the CPU."""
        if not batch.reuses:
            return False
        alone = [method for method in self.loop.reusing if method.reads_alone]
        reading = [slot for slot, read in zip(batch.slots, batch.host_reads, strict=True) if read is not None]
        return bool(reading) and all(any(method.has_ring(slot) for method in alone) for slot in reading)

    def _run_eagerly(self, parts: Sequence[Batch], attentions: Sequence[Attention], reuses: bool) -> Tensor:
        """Return the logits of all rows. Steps in flight are answered first, since they use the same exchange slots."""
        assert self.host_reader is not None
        assert self._answering is not None
        self._answering.drain()
        times, clock, exchanges = self.host_reader.times, time.perf_counter, self.host_reader.exchanges[: len(parts)]
        began = clock()
        try:
            for exchange, part in zip(exchanges, parts, strict=True):
                exchange.slot.advance(len(part))
            rows_of = [self._upload(part, len(part), index) for index, part in enumerate(parts)]
            experts = self._eager_experts(max(map(len, parts)))
            steps = [self.loop.step(rows, one, reuses, experts) for rows, one in zip(rows_of, exchanges, strict=True)]
            for step in steps:
                next(step)
            times.launch_s += clock() - began
            logits, attention_s = self._take_turns(steps, attentions, exchanges)
        except BaseException:
            for exchange in exchanges:
                exchange.slot.release()
            raise
        self._count_step(sum(map(len, parts)), len(parts), attention_s)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _observe(self, rows: int, num_parts: int, answered: Answered, attention_s: float) -> None:
        """Record the times of an answered step; see `answering.OnAnswered`."""
        assert self.host_reader is not None
        self.host_reader.halving.observe(rows, num_parts, answered.waited_s, answered.attended_s)
        self._count_step(rows, num_parts, attention_s)

    def _point(self) -> Event:
        """Record and return an event on the current stream. Waiting for it blocks without using a CPU core."""
        device = self.loop.last_tokens.device
        if device.type == "cpu":
            return PASSED
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def _count_step(self, rows: int, num_parts: int, attention_s: float) -> None:
        """Add an answered step to the totals."""
        assert self.host_reader is not None
        times = self.host_reader.times
        times.steps += 1
        times.rows += rows
        times.requests += len(self.loop.offloaded_layers) * num_parts
        times.attention_s += attention_s

    def _take_turns(
        self, steps: Sequence[Step], attentions: Sequence[Attention], exchanges: Sequence[SlotExchange]
    ) -> tuple[list[Tensor], float]:
        """Answer each host request of eager steps and compute the layers behind it, part by part.

        Returns the logits of each part, and the seconds that answers took.
        """
        assert self.host_reader is not None
        times, clock, num_requests = self.host_reader.times, time.perf_counter, len(self.loop.offloaded_layers)
        logits, attention_s = [], 0.0
        for place in range(num_requests):
            for step, attention, exchange in zip(steps, attentions, exchanges, strict=True):
                began = clock()
                attention.run(place, exchange.slot)
                answered = clock()
                if place + 1 < num_requests:
                    next(step)
                    exchange.slot.advance(exchange.slot.rows)
                else:
                    logits.append(_logits_of(step))
                attention_s += answered - began
                times.launch_s += clock() - answered
        return logits, attention_s

    def _capture(self, kind: StepKind, size: int, pool: tuple[int, int]) -> _Captured:
        """Capture a step as a CUDA graph.

        Exchange slots are released meanwhile, since nobody answers the requests of a step that warms up.
        """
        num_parts = kind.num_parts
        exchanging = self.host_reader.exchanges[:num_parts] if self.host_reader is not None and num_parts else []
        exchanges: list[SlotExchange | None] = [*exchanging] or [None]
        empty = Batch([], [], [])
        sizes = [part.stop - part.start for part in cut(size, max(num_parts, 1))]
        rows_of = [self._upload(empty, num_rows, index) for index, num_rows in enumerate(sizes)]
        most_rows = max(rows.num_rows for rows in rows_of)
        for rows in rows_of if kind.turns else ():
            rows.turns = min(rows.num_rows, self._most_turns)
        reads_host = bool(exchanging) or kind.lends
        experts = self._experts_of(most_rows, reads_host) if not LAUNCHES_BLOCK else None
        released = [*exchanging, *([] if experts is None else [experts])]
        for one in released:
            one.slot.release()
        on = self._host_read_stream if exchanging or kind.lends else None
        graph, logits = capture(lambda: self.compute(rows_of, exchanges, kind, experts), pool, on)
        for one in released:
            one.forget_requests()
        return _Captured(rows_of, graph, logits, None if experts is None else experts.take_requests())

    def compute(
        self, rows_of: Sequence[StepRows], exchanges: Sequence[SlotExchange | None], kind: StepKind,
        experts: ExpertExchange | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Return the logits of a step's parts, which are computed in turns as in `_take_turns`.

        The step's expert requests are afterwards those that `experts` lists. Answers come from other threads.
        """
        if experts is not None:
            experts.take_requests()
        steps = [
            self.loop.step(rows, exchange, kind.reuses, experts, kind.lends, kind.adapts)
            for rows, exchange in zip(rows_of, exchanges, strict=True)
        ]  # fmt: skip
        for _ in self.loop.offloaded_layers if exchanges[0] is not None else ():
            for step in steps:
                next(step)
        return [_logits_of(step) for step in steps]

    def _experts_of(self, num_rows: int, reads_host: bool) -> ExpertExchange | None:
        """Return where a step of so many rows requests experts of the CPU; None: the step fetches experts."""
        if not self._experts:
            return None
        experts = self._experts[_exchange_index(reads_host)]
        return experts if num_rows <= experts.max_rows else None

    def _eager_experts(self, num_rows: int) -> ExpertExchange | None:
        """Return the exchange for experts of an eager step on the CPU. On a GPU the request would wait for the launch
        to end.
        """
        experts = self._experts_of(num_rows, reads_host=False)
        return experts if experts is not None and experts.is_at_once else None

    def _recover_experts(self, captured: _Captured, reads_host: bool) -> None:
        if captured.expert_requests is not None:
            self._expert_answering[_exchange_index(reads_host)].recover()

    def _answer_experts(self, captured: _Captured, reads_host: bool) -> tuple[Answers, ...]:
        """Hand the expert requests of a launched step to the threads that answer them."""
        if captured.expert_requests is None:
            return ()
        place = _exchange_index(reads_host)
        experts, num_rows = self._experts[place], int(captured.expert_requests.table[0, ROWS])
        return (
            self._expert_answering[place].hand_over(
                experts.worker, [SlotRequests(experts, captured.expert_requests, num_rows)]
            ),
        )

    def _find_captured(self, kind: StepKind, num_rows: int) -> _Captured | None:
        """Return the smallest captured step of this kind that has room for so many rows, or None."""
        fitting = [size for known, size in self._captured if known == kind and size >= num_rows]
        return self._captured[kind, min(fitting)] if fitting else None

    def _count_turns(self, batch: Batch) -> int:
        """Return the most rows of a batch that share a ring in which rows take turns; 1 if none do."""
        sides = [side for side in self.loop.reusing if side.takes_turns]
        if not (sides and batch.reuses and any(batch.drafted)):
            return 1
        counts = Counter(slot for slot in batch.slots if any(side.has_ring(slot) for side in sides))
        turns = max(counts.values(), default=1)
        assert turns <= self._most_turns, "decode: a draft is longer than any profile of its ring allows"
        return turns

    def _upload(self, batch: Batch, num_rows: int, part: int = 0) -> StepRows:
        buffer = upload(self._pack(batch, num_rows), self.loop.last_tokens.device)
        rows = StepRows(buffer, num_rows, self._count_turns(batch))
        if self.loop.link is not None:
            self.loop.link.assign(rows, part)
        return rows

    def _fill(self, rows: StepRows, batch: Batch) -> None:
        staged = torch.from_numpy(self._pack(batch, rows.num_rows)).pin_memory()
        rows.buffer.copy_(staged, non_blocking=True)

    def _pack(self, batch: Batch, num_rows: int) -> np.ndarray:
        padding_token_slot = len(self.loop.last_tokens) - 1
        return StepRows.pack(
            batch.slots,
            batch.places,
            batch.positions,
            batch.host_reads,
            num_rows,
            padding_token_slot,
            batch.drafted,
        )


def _exchange_index(reads_host: bool) -> int:
    """Return the index of a step's exchange for experts: the last one is for steps with host reads."""
    return -1 if reads_host else 0


def _logits_of(step: Step) -> Tensor:
    """Run a step on from its last answer to its end, and return its logits."""
    try:
        next(step)
    except StopIteration as end:
        return end.value
    raise AssertionError("decode: a step has more host reads than offloaded layers")


def _context_read(host_read: HostRead | None) -> ContextRead:
    return NOTHING if host_read is None else ContextRead(host_read.context_id, host_read.end - host_read.begin)


def _widened_kinds(weights: Weights) -> list[tuple[str, int]]:
    """Return the kinds of rows that are widened: those of the embedding, and of matrices that prefill widens."""
    plain = [one for one in weights.matrices if isinstance(one, Packed) and not one.in_tiles]
    return widened_kinds([weights.embedding, *plain])


def _has_compiled_step(loop: LayerLoop) -> bool:
    """Return whether a compiled step can replace the loop, for rows without host reads and without rings.

    It cannot if coverage is checked, or if a method takes part in every step.
    """
    if loop.checks_coverage or not all(method.needs_host_reads or method.reuses for method in loop.methods):
        return False
    architecture, weights = loop.decoder.architecture, loop.decoder.weights
    if architecture.recurrent is not None and weights.embedding.device.type == "cpu":
        log.info("decode event=not_compiled reason='recurrent layers are computed layer by layer on the CPU'")
    has_code = all(multiplies(matrix) for matrix in weights.matrices if isinstance(matrix, Packed))
    if not has_code or not serves(architecture, weights.embedding.dtype, weights.embedding.device):
        return False
    return reads_rows(loop.decoder.pool.key_pages[0].dtype, architecture.dim)

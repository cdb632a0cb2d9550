"""Run the engine's loop: plan a step, launch it, and report the results of the step before.

On CUDA, a lane's step is planned and launched while the one before still runs, so the device never waits for Python. On
the CPU, launching a step computes it. A step with masked draws is launched without the draws; they follow once the step
before has been drawn. Invariants: a lane has at most two steps in flight, and none after an undrawn one. A fenced step
is reported after all steps that were launched before it.
"""

import logging
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from gpu.in_flight import InFlight
from gpu.methods.counters import add_counts
from gpu.runner import Runner
from gpu.step import Lane, PartId, StepPlan
from scheduler.engine.decode_reads import DecodeReads
from scheduler.engine.last_writes import Report, report_nothing, write_contexts
from scheduler.engine.rank_processes import RankProcesses
from scheduler.messages import (
    ChunksStored,
    Delta,
    DropChunks,
    EngineRequest,
    ExpertStats,
    HostStats,
    Stats,
    StoreChunks,
)
from scheduler.steps.scheduler import Scheduler

if TYPE_CHECKING:  # see `load_device`
    from cpu.cpu_tier import CpuTier

log = logging.getLogger(__name__)

MOST_IN_FLIGHT = 2  # steps of a lane
# After so long a thread hands the interpreter to another one. The thread that answers decode steps needs it between two
# steps, and the device leaves it about a millisecond.
HANDOVER_SECONDS = 0.0005
_LOOK_SECONDS = 1e-4  # between two checks whether a step of either lane is over
_PATIENCE_SECONDS = 30.0  # longer than any wait for the host's answers
_NO_STORE = "this engine stores no keys and values of documents; it computes them with each prompt"
_LOOKING_SECONDS = 5e-3  # spent on such checks before new requests are handled


class Engine:
    """Drives one runner. Not thread-safe: one thread submits, cancels and steps. ranks: the processes of the other
    devices; None: there are none.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, tier: "CpuTier | None", is_pipelined: bool,
        ranks: RankProcesses | None = None,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self._runner = runner
        self._tier = tier
        self._ranks = ranks
        self._is_pipelined = is_pipelined
        self._in_flight: list[tuple[StepPlan, InFlight, float]] = []  # and when each was launched, in that order
        self._undrawn: dict[Lane, InFlight] = {}
        self._unreported: list[Delta] = []  # of steps collected early, so that others could be drawn
        self._num_steps = 0
        self._step_seconds = 0.0
        self._decode_context_tokens = 0
        self._refused: list[ChunksStored] = []

    @property
    def has_work(self) -> bool:
        """Return whether there is work; freeing the memory of the last request counts as well."""
        scheduler, documents = self.scheduler, self.scheduler.documents
        has_documents = documents is not None and documents.has_work
        has_more = has_documents or scheduler.residence.disk.has_work
        return scheduler.roster.num_unfinished > 0 or bool(self._in_flight) or scheduler.has_changes or has_more

    def submit(self, requests: list[EngineRequest]) -> None:
        """Prepare and queue all of these requests or none. Raises QueueFullError, TooLargeError or GrammarError."""
        self.scheduler.roster.queue(self.scheduler.intake.prepare(requests, lambda: None))

    def cancel(self, request_ids: list[str]) -> None:
        self.scheduler.roster.cancel(request_ids)

    def store_chunks(self, message: StoreChunks) -> None:
        """Queue document chunks to be stored; `take_stored` returns the answer."""
        if self.scheduler.documents is None:
            self._refused.append(ChunksStored(message.request_id, 0, 0, _NO_STORE))
        else:
            self.scheduler.documents.store(message)

    def drop_chunks(self, message: DropChunks) -> None:
        if self.scheduler.documents is not None:
            self.scheduler.documents.drop(message)

    def take_stored(self) -> list[ChunksStored]:
        """Return the answers to `store_chunks` since the last call."""
        documents = self.scheduler.documents
        refused, self._refused = self._refused, []
        return refused if documents is None else documents.take_stored()

    def first_own_token(self, prefill_method: PartId) -> int | None:
        """Return what `Runner.first_own_token` does."""
        return self._runner.first_own_token(prefill_method)

    def step(self) -> list[Delta]:
        """Launch each lane's next step if there is one, and report a finished one if there is one."""
        began = time.perf_counter()
        plans = [plan for lane in self.scheduler.lanes if (plan := self._launch(lane)) is not None]
        most = MOST_IN_FLIGHT - 1 if self._is_pipelined else 0
        if not plans or any(self._num_in_flight(plan.lane) > most for plan in plans):
            self._unreported += self._collect(self._next_finished())
            for lane in list(self._undrawn):
                self._draw(lane)
        deltas, self._unreported = self._unreported, []
        if not plans and not deltas and not self._in_flight:
            time.sleep(_LOOK_SECONDS)  # for copies of chunks to land, and the disk
        self._step_seconds += time.perf_counter() - began
        return deltas

    def stats(self) -> Stats:
        """Return the counters and gauges that the API process shows."""
        experts = self._runner.expert_counts()
        parts = self._host_stats(), self._method_counts(), None if experts is None else ExpertStats(**asdict(experts))
        stats = self.scheduler.stats(self._num_steps, self._step_seconds, *parts)
        documents = self.scheduler.documents
        if documents is not None:
            stats = structs.replace(stats, chunks=documents.stats())
        side = self.scheduler.residence.disk.side
        return stats if side is None else structs.replace(stats, disk=side.store.counts())

    def _method_counts(self) -> dict[str, list[int]]:
        """Return the sums over the parts of profiles."""
        return add_counts(list(self._runner.method_counts().values()))

    def decode_reads(self) -> DecodeReads:
        """Return what decode steps have read since the start. It is complete once there is no work."""
        host, rows = (0, 0, 0), 0
        if self._tier is not None:
            counts = self._tier.stats().attention
            host, rows = (counts.tokens_covered, counts.keys_scored, counts.bytes_read), counts.rows_read
        return DecodeReads(self._decode_context_tokens, *host, self._method_counts(), rows)

    @property
    def host_layers(self) -> tuple[int, ...]:
        """Return the layers whose KV is offloaded; none without a tier."""
        return () if self._tier is None else tuple(self._tier.shape.layers)

    def shutdown(self, report: Report = report_nothing) -> None:
        """Write contexts to disk, free the host tier's memory, and end its threads and the other ranks' processes.

        The threads end after all steps in flight have their answers. No step can be launched afterwards. report: called
        with the progress of the writes.
        """
        try:
            self._end_host(report)
        finally:
            if self._ranks is not None:
                self._ranks.close(self._runner.drop_graphs)

    def kill_ranks(self) -> None:
        """Kill the other ranks' processes, and wait until their memory is free."""
        if self._ranks is not None:
            self._ranks.kill()

    def _end_host(self, report: Report) -> None:
        self.scheduler.constraints.shutdown()
        disk = self.scheduler.residence.disk
        is_plain = self._tier is None and self.scheduler.documents is None and disk.side is None
        if is_plain and self._runner.expert_counts() is None:
            return
        if not self.scheduler.roster.num_unfinished:
            write_contexts(disk, self.step, report)
        self._draw_all()
        for _, step, _ in self._in_flight:
            step.collect()
        self._runner.shutdown()
        if self._tier is not None:
            self._tier.shutdown()

    def _host_stats(self) -> HostStats | None:
        residence = self.scheduler.residence
        contexts, evictor, page_tokens = residence.contexts, residence.evictor, residence.page_tokens
        if self._tier is None or contexts is None or evictor is None:
            return None
        tier, times = self._tier.stats(), self._runner.host_read_times
        return HostStats(
            bytes_used=tier.bytes_in_use,
            bytes_promised=contexts.used_bytes,
            bytes_limit=tier.limit_bytes,
            contexts=tier.contexts,
            tokens=contexts.num_blocks * page_tokens,
            tokens_evicted=contexts.num_evicted * page_tokens,
            tokens_resident=evictor.num_resident_tokens(),
            tokens_reloaded=evictor.num_reloaded * page_tokens,
            segments=tier.segments,
            leases=tier.leases,
            tokens_covered=tier.attention.tokens_covered,
            rows_read=tier.attention.rows_read,
            rows_left_out=self.scheduler.late.num_left_out,
            ready_seconds=times.ready_s,
            wait_seconds=tier.attention.wait_s,
            attend_seconds=tier.attention.attend_s,
            method_counts=tier.method_counts,
        )

    def _launch(self, lane: Lane) -> StepPlan | None:
        """Launch a lane's next step and return its plan; None: it may not have one yet, or there is nothing to do."""
        if self._num_in_flight(lane) >= MOST_IN_FLIGHT or lane in self._undrawn:
            return None
        plan = self.scheduler.schedule(self._runner.is_ready, lane)
        self._unreported += self.scheduler.take_refused()
        if plan.is_empty:
            return None
        if plan.is_fenced or plan.released_slots:
            self._draw_all()
        step = self._runner.launch(plan)
        self._in_flight.append((plan, step, time.perf_counter()))
        if plan.masked_slots:
            self._undrawn[lane] = step
            self._draw(lane)
        self._num_steps += 1
        self._count_contexts(plan)
        return plan

    def _count_contexts(self, plan: StepPlan) -> None:
        """Count the tokens that a step's rows read: n rows of a slot, after p tokens, read `n * p + n * (n + 1)
        / 2`.
        """
        for group in plan.decode:
            for num_rows, place in zip(group.lengths, group.positions, strict=True):
                self._decode_context_tokens += num_rows * place + num_rows * (num_rows + 1) // 2

    def _draw(self, lane: Lane) -> None:
        """Draw the tokens of a lane's newest step, if all of its masks are known."""
        masks = self.scheduler.masks(lane, partial(self._runner.drafted, self._undrawn[lane]))
        if masks is not None:
            self._runner.draw(self._undrawn.pop(lane), masks)

    def _draw_all(self) -> None:
        """Draw every launched step, collecting first the results that its masks depend on."""
        for lane in list(self._undrawn):
            self._draw(lane)
            while lane in self._undrawn:
                self._unreported += self._collect(next(i for i in range(len(self._in_flight)) if self._may_be_next(i)))
                self._draw(lane)

    def _num_in_flight(self, lane: Lane) -> int:
        return sum(plan.lane is lane for plan, _, _ in self._in_flight)

    def _next_finished(self) -> int | None:
        """Return the index of the step in flight to collect next; None: none ends soon.

        With one lane it is the first one; with two, the first that is over. A step that takes very long is returned
        too. Collecting it blocks, so the heartbeat shows that it hangs.
        """
        firsts = [index for index in range(len(self._in_flight)) if self._may_be_next(index)]
        if len(self.scheduler.lanes) == 1:
            return firsts[0] if firsts else None
        now = time.perf_counter()
        if firsts and now - self._in_flight[0][2] > _PATIENCE_SECONDS:
            return 0
        until = now + _LOOKING_SECONDS
        while firsts and time.perf_counter() < until:
            for index in firsts:
                if self._in_flight[index][1].is_over:
                    return index
            time.sleep(_LOOK_SECONDS)
        return None

    def _may_be_next(self, index: int) -> bool:
        """Return whether a step may be collected next: it is drawn, and the first of its lane or, if fenced, of all."""
        before, (plan, step, _) = self._in_flight[:index], self._in_flight[index]
        if any(step is undrawn for undrawn in self._undrawn.values()):
            return False
        return not before or not (plan.is_fenced or any(other.lane is plan.lane for other, _, _ in before))

    def _collect(self, index: int | None) -> list[Delta]:
        if index is None:
            return []
        plan, step, _ = self._in_flight.pop(index)
        result = step.collect()
        figures = self._runner.request_figures([token.slot for token in result.tokens])
        return self.scheduler.postprocess(replace(result, figures=figures), plan.lane)

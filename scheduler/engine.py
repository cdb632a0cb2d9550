"""The engine: one loop that plans a step, launches it, and tells requests what came of the one before.

Knows the scheduler and the devices, which `scheduler.load` makes and hands to it. On CUDA a step is planned and
launched while the one before still runs (the device works in launch order) and perhaps awaits the CPU's answers, so it
never waits for Python; on the CPU a launch computes.
"""

import logging
import time
from collections.abc import Callable

from cpu.tier import CpuTier
from gpu.in_flight import InFlight
from gpu.runner import Runner
from scheduler.decode_reads import DecodeReads
from scheduler.messages import Delta, EngineRequest, HostStats, Progress, Stats
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence

log = logging.getLogger(__name__)


class Engine:
    """Drives one runner. Not thread-safe: one thread submits, cancels and steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner, tier: CpuTier | None, is_pipelined: bool) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._tier = tier
        self._is_pipelined = is_pipelined
        self._in_flight: InFlight | None = None
        self._num_steps = 0
        self._step_seconds = 0.0
        self._decode_context_tokens = 0

    @property
    def has_work(self) -> bool:
        """Also once all requests are gone: what they held on the device and the host is given back now."""
        scheduler = self.scheduler
        return scheduler.num_unfinished > 0 or self._in_flight is not None or scheduler.has_changes

    def prepare(self, requests: list[EngineRequest], rest: Callable[[], None]) -> list[Sequence]:
        """What `queue` takes, its prompts hashed: the one thing that any thread may ask. `rest` is called every tenth
        of a millisecond or so. Raises TooLargeError."""
        return self.scheduler.prepare(requests, rest)

    def queue(self, sequences: list[Sequence]) -> None:
        """Queue all or none. Raises QueueFullError."""
        self.scheduler.queue(sequences)

    def submit(self, requests: list[EngineRequest]) -> None:
        """Prepare and queue all or none. Raises QueueFullError or TooLargeError."""
        self.queue(self.prepare(requests, lambda: None))

    def cancel(self, request_ids: list[str]) -> None:
        self.scheduler.cancel(request_ids)

    def step(self) -> list[Delta]:
        """Launch the next step if there is one, and report a finished one if there is one."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        launched = None if plan.is_empty else self._runner.launch(plan)
        waited, self._in_flight = self._in_flight, launched
        deltas = self._collect(waited)
        if not self._is_pipelined:
            waited, self._in_flight = self._in_flight, None
            deltas += self._collect(waited)
        self._num_steps += launched is not None
        self._decode_context_tokens += sum(place + 1 for group in plan.decode for place in group.positions)
        self._step_seconds += time.perf_counter() - began
        return deltas

    def progress(self) -> list[Progress]:
        return self.scheduler.progress()

    def stats(self) -> Stats:
        return self.scheduler.stats(self._num_steps, self._step_seconds, self._host_stats())

    def decode_reads(self) -> DecodeReads:
        """What decode steps read since the start; all of them are in once there is no work."""
        if self._tier is None:
            return DecodeReads(self._decode_context_tokens, 0, 0, 0)
        counts = self._tier.stats().attention
        covered, scored = counts.tokens_covered, counts.keys_scored
        return DecodeReads(self._decode_context_tokens, covered, scored, counts.bytes_read)

    @property
    def host_layers(self) -> tuple[int, ...]:
        """Layers whose KV goes down to host memory; none without a tier."""
        return () if self._tier is None else tuple(self._tier.shape.layers)

    def shutdown(self) -> None:
        """End the host's threads, once they have given what is in flight its answers, and give the tier's memory back.
        The engine steps no more.
        """
        if self._tier is not None:
            if self._in_flight is not None:
                self._in_flight.collect()
            self._runner.shutdown()
            self._tier.shutdown()

    def _host_stats(self) -> HostStats | None:
        if self._tier is None:
            return None
        tier, residence, times = self._tier.stats(), self.scheduler.residence, self._runner.ask_times
        return HostStats(
            bytes_used=tier.bytes_in_use,
            bytes_promised=residence.num_promised_bytes,
            bytes_limit=tier.limit_bytes,
            contexts=tier.contexts,
            tokens=residence.num_deposited_tokens,
            tokens_released=residence.num_released_tokens,
            segments=tier.segments,
            tables_built=tier.tables_built,
            tables_failed=tier.tables_failed,
            tokens_covered=tier.attention.tokens_covered,
            rows_read=tier.attention.rows_read,
            ready_seconds=times.ready_s,
            wait_seconds=tier.attention.wait_s,
            attend_seconds=tier.attention.attend_s,
        )

    def _collect(self, step: InFlight | None) -> list[Delta]:
        return [] if step is None else self.scheduler.postprocess(step.collect())

"""The engine: one loop that plans a step, launches it, and tells requests what came of the one before.

The only module that knows both the scheduler and the devices. On CUDA a step is planned and launched while the one
before still runs (the device works in launch order), so it never waits for Python; on the CPU a launch computes.
"""

import hashlib
import logging
import time
from collections.abc import Callable

from cpu.tier import CpuTier, open_tier
from gpu.config import GpuConfig, ModelConfig
from gpu.load import DTYPES, load_architecture, load_runner
from gpu.memory.host_shares import resolve_host
from gpu.memory.plan import MemoryPlan, plan_memory
from gpu.model.architecture import Architecture
from gpu.profiles import get_profile, resolve_profiles, slot_bytes
from gpu.runner import InFlight, Runner
from gpu.step import StepPlan
from scheduler.capacity import plan_capacity
from scheduler.config import EngineConfig
from scheduler.decode_reads import DecodeReads
from scheduler.messages import Delta, EngineRequest, HostStats, Progress, Ready, Stats
from scheduler.prefill_queue import LEAST_UNIT_TOKENS
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from transfer.config import HostConfig
from transfer.machine import probe_machine
from transfer.tier_shape import TierShape

log = logging.getLogger(__name__)

_REHEARSED_PROMPTS = 8


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
        if not self._is_pipelined or _blocks(plan):
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
        """End the host tier's threads, and give its memory back. The engine steps no more."""
        if self._tier is not None:
            if self._in_flight is not None:
                self._in_flight.collect()
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


def _blocks(plan: StepPlan) -> bool:
    """Whether launching it waited for all but its last layers, as the CPU's part does: its tokens are nearly there."""
    return any(group.asks is not None for group in plan.decode)


def plan_engine(config: EngineConfig, architecture: Architecture) -> MemoryPlan:
    """The memory of this machine, shared out. Raises PlanError when the deployment does not fit, and ProfileError."""
    return plan_memory(
        architecture,
        config.gpu,
        host=config.host,
        slot_bytes=slot_bytes(resolve_profiles(config.profiles, config.host).values(), architecture),
        max_running=config.scheduler.max_running,
        chunk_tokens=config.scheduler.prefill.chunk_tokens,
        max_context_tokens=config.scheduler.max_context_tokens,
        max_hidden_tokens=config.scheduler.prefill.max_hidden_tokens,
        machine=probe_machine(),
    )


def load_engine(config: EngineConfig, on_progress: Callable[[str, float], None]) -> tuple[Engine, Ready]:
    """Plan the memory, load the model, and build an engine that is ready to step.

    `on_progress(stage, fraction)` is called as it goes. Raises ModelError, PlanError, HostMemoryError, or ProfileError
    for a profile that there cannot be, and for a default one that does not exist.
    """
    began = time.monotonic()
    profiles = resolve_profiles(config.profiles, config.host)
    get_profile(config.scheduler.default_profile, profiles, "scheduler.default_profile")
    architecture = load_architecture(config.model)
    plan = plan_engine(config, architecture)
    gpu = config.gpu.model_copy(update={"device": plan.device, "dtype": plan.dtype, "threads": plan.threads})
    shape = None if config.host is None else find_tier_shape(config, architecture, plan)
    tier = None if config.host is None or shape is None else load_tier(config.host, shape, plan)
    runner = load_runner(
        config.model,
        gpu,
        max_running=config.scheduler.max_running,
        max_context_tokens=plan.max_context_tokens,
        chunk_tokens=config.scheduler.prefill.chunk_tokens,
        max_hidden_tokens=plan.max_hidden_tokens,
        num_pages=plan.num_pages,
        num_dense_pages=plan.num_dense_pages,
        tier=tier,
        on_progress=on_progress,
    )
    capacity = plan_capacity(plan, shape)
    scheduler = Scheduler(config.scheduler, architecture, capacity, model_key(config.model, gpu), profiles)
    if plan.device == "cuda":
        rehearse(runner, scheduler, config.scheduler.prefill.chunk_tokens)
    longest = {name: capacity.longest_tokens(profile) for name, profile in profiles.items()}
    ready = Ready(
        vocab_size=architecture.vocab_size,
        max_context_tokens=max(longest.values()),
        profiles=longest,
        default_profile=config.scheduler.default_profile,
        num_pages=plan.num_pages,
        page_tokens=plan.page_tokens,
        device=plan.device,
        load_seconds=time.monotonic() - began,
    )
    return Engine(scheduler, runner, tier, is_pipelined=plan.device == "cuda"), ready


def rehearse(runner: Runner, scheduler: Scheduler, chunk_tokens: int) -> None:
    """Prefill what is common, so that its kernels are ready and the scheduler knows what units take from the start."""
    limits = runner.limits
    most = min(chunk_tokens, limits.max_context_tokens, limits.num_pages * limits.page_tokens) - 1
    few = min(LEAST_UNIT_TOKENS, most)
    together = max(1, min(limits.max_running, _REHEARSED_PROMPTS, most // (few + limits.page_tokens)))
    for lengths in ([few], [few] * together, [most]):
        units, seconds = runner.time_prefill(lengths)
        scheduler.learn_units(units, [lengths[-1]] * len(units), seconds)


def find_tier_shape(config: EngineConfig, architecture: Architecture, plan: MemoryPlan) -> TierShape:
    """What of the model goes down. Raises PlanError."""
    assert config.host is not None
    max_running = config.scheduler.max_running
    return resolve_host(config.host, architecture, plan.page_tokens, plan.dtype_bytes, max_running).tier_shape


def load_tier(host: HostConfig, shape: TierShape, plan: MemoryPlan) -> CpuTier:
    """Memory and threads for deposited contexts; pinned where a GPU copies into it."""
    threads = host.threads or plan.threads
    return open_tier(shape, DTYPES[plan.dtype], plan.host_limit_bytes, threads, is_pinned=plan.device == "cuda")


def model_key(model: ModelConfig, gpu: GpuConfig) -> bytes:
    """Names the weights and their precision in prefix hashes."""
    source = f"{model.path or model.random_weights}:{gpu.dtype}"
    return hashlib.blake2b(source.encode(), digest_size=16).digest()

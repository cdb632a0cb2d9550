"""The engine: one loop that plans a step, launches it, and tells requests what came of the one before.

The only module that knows both the scheduler and the devices. On CUDA a step is planned and launched while the one
before still runs (the device works in launch order), so it never waits for Python; on the CPU a launch computes.
"""

import hashlib
import logging
import time
from collections.abc import Callable

from gpu.architecture import Architecture
from gpu.config import GpuConfig, ModelConfig
from gpu.load import load_architecture, load_runner
from gpu.memory_plan import MemoryPlan, plan_memory
from gpu.profiles import ProfileError, get_profile, profiles_for
from gpu.runner import InFlight, Runner
from scheduler.capacity import Capacity
from scheduler.config import EngineConfig
from scheduler.messages import Delta, EngineRequest, Progress, Ready, Stats
from scheduler.scheduler import Scheduler
from transfer.machine import probe_machine

log = logging.getLogger(__name__)


class Engine:
    """Drives one runner. Not thread-safe: one thread submits, cancels and steps."""

    def __init__(self, scheduler: Scheduler, runner: Runner, is_pipelined: bool) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._is_pipelined = is_pipelined
        self._in_flight: InFlight | None = None
        self._num_steps = 0
        self._step_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_unfinished > 0 or self._in_flight is not None

    def submit(self, requests: list[EngineRequest]) -> None:
        """Queue all or none. Raises QueueFullError or TooLargeError."""
        self.scheduler.submit(requests)

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
        self._step_seconds += time.perf_counter() - began
        return deltas

    def progress(self) -> list[Progress]:
        return self.scheduler.progress()

    def stats(self) -> Stats:
        return self.scheduler.stats(self._num_steps, self._step_seconds)

    def _collect(self, step: InFlight | None) -> list[Delta]:
        return [] if step is None else self.scheduler.postprocess(step.collect())


def plan_engine(config: EngineConfig, architecture: Architecture) -> MemoryPlan:
    """The memory of this machine, shared out. Raises PlanError when the deployment does not fit."""
    return plan_memory(
        architecture,
        config.gpu,
        max_running=config.scheduler.max_running,
        chunk_tokens=config.scheduler.prefill.chunk_tokens,
        max_context_tokens=config.scheduler.max_context_tokens,
        max_hidden_tokens=config.scheduler.prefill.max_hidden_tokens,
        machine=probe_machine(),
    )


def load_engine(config: EngineConfig, on_progress: Callable[[str, float], None]) -> tuple[Engine, Ready]:
    """Plan the memory, load the model, and build an engine that is ready to step.

    `on_progress(stage, fraction)` is called as it goes. Raises ModelError, PlanError, or ProfileError for
    a default profile that does not exist.
    """
    began = time.monotonic()
    try:
        get_profile(config.scheduler.default_profile, config.host)
    except ProfileError as error:
        raise ProfileError(f"scheduler.default_profile: {error}") from None
    architecture = load_architecture(config.model)
    plan = plan_engine(config, architecture)
    gpu = config.gpu.model_copy(update={"device": plan.device, "dtype": plan.dtype, "threads": plan.threads})
    runner = load_runner(
        config.model,
        gpu,
        max_running=config.scheduler.max_running,
        max_context_tokens=plan.max_context_tokens,
        chunk_tokens=config.scheduler.prefill.chunk_tokens,
        max_hidden_tokens=plan.max_hidden_tokens,
        num_pages=plan.num_pages,
        on_progress=on_progress,
    )
    capacity = Capacity(plan.num_pages, plan.page_tokens, plan.max_context_tokens, plan.max_hidden_tokens)
    profiles = profiles_for(config.host)
    kv_keys = {name: profile.kv_key for name, profile in profiles.items()}
    scheduler = Scheduler(config.scheduler, architecture, capacity, model_key(config.model, gpu), kv_keys)
    ready = Ready(
        vocab_size=architecture.vocab_size,
        max_context_tokens=capacity.longest_tokens,
        profiles=list(profiles),
        default_profile=config.scheduler.default_profile,
        num_pages=plan.num_pages,
        page_tokens=plan.page_tokens,
        device=plan.device,
        load_seconds=time.monotonic() - began,
    )
    return Engine(scheduler, runner, is_pipelined=plan.device == "cuda"), ready


def model_key(model: ModelConfig, gpu: GpuConfig) -> bytes:
    """Names the weights and their precision in prefix hashes."""
    source = f"{model.path or model.random_weights}:{gpu.dtype}"
    return hashlib.blake2b(source.encode(), digest_size=16).digest()

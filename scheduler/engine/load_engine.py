"""Build an engine from a configuration and its memory plan: load the model, then rehearse common prefills."""

import hashlib
import logging
import platform
import time
from collections.abc import Callable
from functools import partial

from gpu.config import GpuConfig, ModelConfig
from gpu.decode.steps import LAUNCHES_BLOCK
from gpu.late_compilations import report_late_compilations
from gpu.layers.rope import rope_key
from gpu.load import LoadedModel, load_runner
from gpu.memory.plan import MemoryPlan, require_device
from gpu.method_times import learn_times
from gpu.model.architecture import Architecture
from gpu.model.draft_head_shape import without_draft_head
from gpu.model.humming_formats import products_key
from gpu.profiles import get_profile, resolve_profiles, served_parts
from gpu.ranks import RankError
from gpu.rehearsal import Rehearsal
from gpu.runner import Runner
from gpu.runner_settings import LoadSettings
from gpu.step import DENSE, Lane
from scheduler.constraints.constraints import Constraints, read_tokens
from scheduler.drafts.draft_model import DraftModel, DraftModelSizes
from scheduler.drafts.ngrams import NGrams
from scheduler.engine.engine import Engine
from scheduler.engine.load_device import load_device, reporting_stage
from scheduler.engine.rank_processes import OnEnd, RankProcesses, await_cause, end_engine
from scheduler.engine_config import EngineConfig, EngineStart, SchedulerConfig
from scheduler.messages import Ready
from scheduler.prefill.document_chunks import Documents
from scheduler.prefill.prefill_queue import LEAST_UNIT_TOKENS, QUIET_STEP_SECONDS
from scheduler.residence.disk_contexts import DiskSide
from scheduler.sequences.capacity import plan_capacity
from scheduler.steps.scheduler import Device, Scheduler, Sources
from transfer.chunks.chunk_library import ChunkLibrary
from transfer.machine import probe_gpu

log = logging.getLogger(__name__)

_REHEARSED_PROMPTS = 8
_LAUNCHES_A_LAYER = 12  # of a decode step with a host read; each may come while prefill's blocks occupy every SM
_WAITING_SHARE = 0.5  # of the token gap target, for all launches together if each waits for a whole block


def load_engine(
    config: EngineConfig,
    plan: MemoryPlan,
    on_progress: Callable[[str, float], None],
    loaded: LoadedModel | None = None,
    compiles_ahead: bool = False,
    on_rank_end: OnEnd = end_engine,
) -> tuple[Engine, Ready]:
    """Load the model into the planned memory, and build an engine that is ready to step.

    loaded: the model, if the caller has loaded it (a benchmark whose peer needs the weights as well).
    compiles_ahead: at a machine's first start, a child process compiles the CPU's decode step; the engine does not wait
        for it.
    on_rank_end: called with the reason if another device's process ends.
    on_progress(stage, fraction): called with "host_attention" (memory for contexts, and kernels, compiled once a
        machine, function by function), "documents" (weights are read for their digest), the stages of `load_runner`,
        "draft_model" and "rehearsal".

    Raises ModelError, HostMemoryError, PlanError if the plan's device is missing, or ProfileError for an invalid
    profile or a default profile that does not exist.
    """
    get_profile(config.default_profile, resolve_profiles(config.all_profiles, config.host), "scheduler.default_profile")
    require_device(plan, probe_gpu() if plan.device == "cuda" else None, platform.node())
    if config.gpu.devices == 1:
        return _make_engine(config, plan, on_progress, loaded, compiles_ahead, None)
    level = logging.getLevelName(logging.getLogger("gpu").getEffectiveLevel()).lower()
    processes = RankProcesses(EngineStart(config=config, memory=plan, log_level=level), on_rank_end)
    try:
        return _make_engine(config, plan, on_progress, loaded, False, processes)
    except BaseException as error:
        if isinstance(error, RankError):
            await_cause(error)
        processes.close()
        raise


def _make_engine(
    config: EngineConfig,
    plan: MemoryPlan,
    on_progress: Callable[[str, float], None],
    loaded: LoadedModel | None,
    compiles_ahead: bool,
    processes: RankProcesses | None,
) -> tuple[Engine, Ready]:
    began = time.monotonic()
    ranks = None if processes is None else processes.join()
    device = load_device(config, plan, on_progress, ranks, loaded, compiles_ahead)
    runner, architecture, profiles, gpu = device.runner, device.architecture, device.profiles, device.gpu
    shape, tier, library, disk, digest = device.shape, device.tier, device.library, device.disk, device.digest
    if processes is not None:
        runner.lead(processes.tell)
    prefill = config.scheduler.prefill.model_copy(update={"chunk_tokens": plan.chunk_tokens})
    scheduler_config = config.scheduler.model_copy(update={"prefill": prefill})
    runner.dense.bound_blocks(block_seconds(config.scheduler, architecture.num_layers))
    capacity = plan_capacity(plan, shape)
    has_lanes = tier is not None and plan.device == "cuda" and not LAUNCHES_BLOCK and processes is None
    lanes = (Lane.HOST, Lane.DEVICE) if has_lanes else (Lane.DEVICE,)
    scheduler = Scheduler(
        scheduler_config,
        without_draft_head(architecture),
        capacity,
        model_key(
            digest,
            config.model,
            gpu,
            rope_key(architecture, plan.max_context_tokens),
            products_key(architecture, plan.device, plan.is_packed),
        ),
        profiles,
        Device(
            lanes,
            runner.most_rows,
            runner.reads,
            runner.page_memory,
            runner.window_memory,
            QUIET_STEP_SECONDS if plan.device == "cuda" else 0.0,
        ),
        Sources(
            None if library is None else make_documents(library, config, architecture, plan, runner),
            Constraints(architecture.vocab_size, partial(read_tokens, config.model, architecture.vocab_size)),
            None
            if disk is None
            else DiskSide(disk, runner.is_read, runner.lost_jobs, lambda: runner.num_savable, runner.is_ready),
        ),
    )
    if any(one.draft is not None and one.draft.uses_ngrams for one in profiles.values()):
        NGrams.compile_ahead()
    if plan.draft is not None:
        scheduler.drafts.model = load_draft_model(plan, gpu, config, architecture.vocab_size, on_progress)
    if plan.device == "cuda":
        with reporting_stage(on_progress, "rehearsal"):
            rehearse(runner.rehearsal, scheduler, plan.chunk_tokens)
            parts = {part.id: part for part in served_parts(profiles.values())}
            learn_times(runner, parts, gpu.graph_batch_sizes, plan.kv)
        report_late_compilations()
    log.info("steps %s", describe_steps(scheduler_config, gpu, plan))
    longest = {name: capacity.longest_tokens(profile) for name, profile in profiles.items()}
    ready = Ready(
        vocab_size=architecture.vocab_size,
        num_layers=architecture.main_layers,
        max_context_tokens=max(longest.values()),
        profiles=longest,
        default_profile=config.default_profile,
        num_pages=plan.num_pages,
        page_tokens=plan.page_tokens,
        device=plan.device,
        load_seconds=time.monotonic() - began,
        contexts_folder="" if disk is None else str(disk.folder.path),
        without_epsilon={name: why for name, profile in profiles.items() if (why := profile.why_no_epsilon)},
    )
    return Engine(scheduler, runner, tier, plan.device == "cuda", processes), ready


def load_draft_model(
    plan: MemoryPlan, gpu: GpuConfig, config: EngineConfig, vocab_size: int, on_progress: Callable[[str, float], None]
) -> DraftModel:
    """Load the draft model into the memory that is planned for it. vocab_size: of the model that verifies."""
    draft = plan.draft
    assert draft is not None, "drafts: a model is planned"
    settings = LoadSettings(
        max_running=config.scheduler.max_running,
        max_context_tokens=draft.context_tokens,
        chunk_tokens=draft.chunk_tokens,
        max_hidden_tokens=draft.chunk_tokens,
        num_pages=draft.num_pages,
    )
    gpu = gpu.model_copy(update={"kv": draft.kv})
    with reporting_stage(on_progress, "draft_model"):
        runner = load_runner(ModelConfig(path=draft.path), gpu, settings, lambda stage, fraction: None)
    num_layers = runner.architecture.num_layers
    sizes = DraftModelSizes(
        num_layers, config.scheduler.max_running, draft.num_pages, plan.page_tokens, draft.context_tokens,
        draft.chunk_tokens, vocab_size,
    )  # fmt: skip
    return DraftModel(runner, sizes)


def describe_steps(scheduler: SchedulerConfig, gpu: GpuConfig, plan: MemoryPlan) -> str:
    """Describe for the log what decides the steps of a load: prefill units, and captured decode steps."""
    sizes = sorted({min(size, scheduler.max_running) for size in gpu.graph_batch_sizes})
    graphs = ",".join(map(str, sizes)) if plan.device == "cuda" and sizes else "none"
    return (
        f"favour={scheduler.favour} chunk_tokens={scheduler.prefill.chunk_tokens} "
        f"token_gap_target_ms={scheduler.token_gap_target_ms:g} max_running={scheduler.max_running} graphs={graphs}"
    )


def rehearse(rehearsal: Rehearsal, scheduler: Scheduler, chunk_tokens: int) -> None:
    """Prefill typical prompts by each method, so that kernels are ready and the scheduler knows the times of units."""
    limits = rehearsal.limits
    most = min(chunk_tokens, limits.max_context_tokens, limits.num_pages * limits.page_tokens) - 1
    few = min(LEAST_UNIT_TOKENS, most)
    together = max(1, min(limits.max_running, _REHEARSED_PROMPTS, most // (few + limits.page_tokens)))
    for method in scheduler.prefill_methods:
        for lengths in ([few], [few] * together, [most]):
            units, seconds = rehearsal.time_prefill(lengths, method)
            scheduler.learn_units(units, [lengths[-1]] * len(units), seconds)


def block_seconds(scheduler: SchedulerConfig, num_layers: int) -> float:
    """Return the most seconds of a thread block of prefill attention while rows wait for the host; 0: no limit."""
    if scheduler.prefill.block_us is not None:
        return 1e-6 * scheduler.prefill.block_us
    return 1e-3 * _WAITING_SHARE * scheduler.token_gap_target_ms / (_LAUNCHES_A_LAYER * num_layers)


def make_documents(
    library: ChunkLibrary, config: EngineConfig, architecture: Architecture, plan: MemoryPlan, runner: Runner
) -> Documents:
    """Make the document chunks of an engine. A chunk is no longer than a prefill unit."""
    windows = tuple(spec.window_tokens for spec in architecture.layers)
    products = products_key(architecture, plan.device, plan.is_packed)
    key = chunk_kv_key(architecture, plan.dtype, plan.max_context_tokens, products)
    most_tokens = min(plan.chunk_tokens, plan.max_hidden_tokens)
    return Documents(library, key, windows, most_tokens, runner.is_loaded)


def chunk_kv_key(architecture: Architecture, dtype: str, max_context_tokens: int, products: str) -> str:
    """Return a key for what a chunk's keys and values depend on besides weights and tokens: the dtype, the method, the
    rotation inside the chunk, and `products_key`.
    """
    return ":".join(filter(None, (dtype, DENSE.method, rope_key(architecture, max_context_tokens), products)))


def model_key(digest: str | None, model: ModelConfig, gpu: GpuConfig, rope: str, products: str) -> bytes:
    """Return the seed of prefix hashes: a digest of the weights' name, precisions, rotation and products.

    digest: of the weights themselves, if hashes outlive the process. rope, products: `rope_key`, `products_key`.
    """
    source = f"{digest or model.path or model.random_weights}:{model.weights}:{gpu.dtype}:{gpu.kv}:{rope}"
    source += f":{products}" if products else ""
    return hashlib.blake2b(source.encode(), digest_size=16).digest()

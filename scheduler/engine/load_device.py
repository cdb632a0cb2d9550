"""Load one device's part of an engine: the host tier, the stores of documents and contexts, and the runner."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING

from gpu.config import GpuConfig, ModelConfig
from gpu.decode.steps import LAUNCHES_BLOCK
from gpu.disk.record_shapes import disk_format, end_record, kv_record
from gpu.layers.rope import rope_key
from gpu.load import DTYPES, RANDOM_SEED, LoadedModel, load_runner
from gpu.memory.plan import MemoryPlan
from gpu.model.architecture import Architecture, ModelError, load_architecture
from gpu.model.humming_formats import products_key
from gpu.profiles import Profile, count_turns, resolve_profiles, served_parts
from gpu.ranks import ProcessRanks
from gpu.runner import Runner
from gpu.runner_settings import LoadSettings
from gpu.weights.weights_digest import digest_random, digest_rounded, digest_weights, kept_path
from scheduler.engine_config import EngineConfig, read_adapters
from scheduler.planning.engine_memory import find_tier_shape, served_shape
from transfer.chunks.chunk_format import ChunkShape
from transfer.chunks.chunk_library import ChunkLibrary
from transfer.chunks.chunk_store import open_chunks
from transfer.disk.context_store import ContextStore
from transfer.disk.disk_config import DiskConfig
from transfer.disk.record_folder import FolderError
from transfer.disk.record_format import name_model
from transfer.expert_exchange import OpenExperts
from transfer.host_config import DocumentsConfig, HostConfig
from transfer.reading import Reading
from transfer.simd.compilation import reporting_compilation
from transfer.tier_shape import TierShape

if TYPE_CHECKING:  # the kernels of host memory take 0.2 s and some 40 MB, which few hosts without a card want
    from cpu.cpu_tier import CpuTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDevice:
    """One device's runner, and what it was made of. digest: of the weights, if contexts are kept on disk."""

    runner: Runner
    architecture: Architecture
    profiles: Mapping[str, Profile]
    gpu: GpuConfig
    shape: TierShape | None
    tier: "CpuTier | None"
    library: ChunkLibrary | None
    disk: ContextStore | None
    digest: str | None


def load_device(
    config: EngineConfig,
    plan: MemoryPlan,
    on_progress: Callable[[str, float], None],
    ranks: ProcessRanks | None = None,
    loaded: LoadedModel | None = None,
    compiles_ahead: bool = False,
) -> LoadedDevice:
    """Load the model, or a rank's part of it, into the planned memory. See `load_engine`."""
    if ranks is not None and plan.device == "cuda":
        from gpu.peer_sums import use_peer_sums  # with much of torch.distributed

        use_peer_sums(ranks)
    profiles = resolve_profiles(config.all_profiles, config.host)
    plain = load_architecture(config.model) if loaded is None else loaded.architecture
    architecture = served_shape(config, plain)
    if loaded is not None and architecture is not plain:
        raise ModelError(f"draft: mtp: {plain.name} was loaded without its head; leave out profiles that draft by it")
    resolved = {"device": plan.device, "dtype": plan.dtype, "kv": plan.kv, "threads": plan.threads}
    gpu = config.gpu.model_copy(update=resolved)
    shape = None if config.host is None else find_tier_shape(config, architecture, plan)
    tier = library = disk = None
    digest: str | None = None
    if config.host is not None and shape is not None:
        from cpu.host_attention import COMPILED

        with (
            reporting_stage(on_progress, "host_attention"),
            reporting_compilation(COMPILED, partial(on_progress, "host_attention")),
        ):
            tier = load_tier(config.host, shape, plan)
    if config.documents is not None:
        with reporting_stage(on_progress, "documents"):
            library = open_library(config.documents, config.model, architecture, plan)
    if config.disk is not None:
        with reporting_stage(on_progress, "disk"):
            digest = digest_model(config.model, plan)
            disk = open_contexts(config.disk, digest, architecture, plan)
    runner = load_runner(
        config.model,
        gpu,
        LoadSettings(
            max_running=config.scheduler.max_running,
            max_context_tokens=plan.max_context_tokens,
            chunk_tokens=plan.chunk_tokens,
            prefill_graph_sizes=plan.prefill_graph_sizes,
            max_hidden_tokens=plan.max_hidden_tokens,
            num_pages=plan.num_pages,
            num_windows=plan.num_windows,
            window_pages=plan.window_pages,
            num_host_states=plan.num_host_states,
            drafts=architecture.draft_layers > 0,
            link_share=0.0 if config.host is None else _link_share(config.host, profiles.values()),
            experts_on_card=plan.experts_on_card,
            open_experts=find_expert_worker(config.host, plan),
            computed_rows=plan.computed_rows,
            tier=tier,
            parts=served_parts(profiles.values()),
            num_rings=plan.num_rings,
            ring_pages=plan.num_ring_pages,
            sink_tokens=plan.sink_tokens,
            window_tokens=plan.window_tokens,
            library=library,
            disk=disk,
            compiles_ahead=compiles_ahead,
            adapters=read_adapters(config, architecture),
            ranks=ranks,
            turns=max((count_turns(profiles.values(), part) for part in served_parts(profiles.values())), default=1),
        ),
        on_progress=on_progress,
        loaded=loaded,
    )
    return LoadedDevice(runner, architecture, MappingProxyType(profiles), gpu, shape, tier, library, disk, digest)


@contextmanager
def reporting_stage(on_progress: Callable[[str, float], None], stage: str) -> Iterator[None]:
    """Report the begin and the end of a stage."""
    on_progress(stage, 0.0)
    yield
    on_progress(stage, 1.0)


def _link_share(host: HostConfig, profiles: Iterable[Profile]) -> float | None:
    """Return the share of fully read host contexts that the device fetches; None: measured while it runs."""
    return host.link_share if any(profile.reading is Reading.WHOLE for profile in profiles) else 0.0


def load_tier(host: HostConfig, shape: TierShape, plan: MemoryPlan) -> "CpuTier":
    """Open memory and threads for contexts in host memory; the memory is pinned if a GPU copies into it."""
    from cpu.cpu_tier import open_tier

    threads = host.threads or plan.threads
    is_pinned = plan.device == "cuda"
    errors, is_adaptive = host.sampled.errors, host.residency == "adaptive"
    return open_tier(shape, DTYPES[plan.dtype], plan.host_limit_bytes, threads, is_pinned, errors, is_adaptive)


def find_expert_worker(host: HostConfig | None, plan: MemoryPlan) -> OpenExperts | None:
    """Return what opens the threads that compute experts in host memory; None: experts are fetched."""
    if not plan.computed_rows:
        return None
    if LAUNCHES_BLOCK:
        log.warning("experts in host memory are fetched: CUDA_LAUNCH_BLOCKING is set, and no step can wait for the CPU")
        return None
    from cpu.experts import HostExperts  # compiles as it is imported

    threads = (host.threads if host is not None else None) or plan.threads
    return partial(HostExperts, threads=threads)


def open_library(
    documents: DocumentsConfig, model: ModelConfig, architecture: Architecture, plan: MemoryPlan
) -> ChunkLibrary:
    """Open the document chunks of this model, whatever its folder is called. Raises ModelError."""
    if documents.rows == "int8" and plan.device == "cpu" and find_spec("fbgemm_gpu") is None:
        raise ModelError("documents.rows: int8 on the CPU wants fbgemm; pip install '.[cpu]', or choose bfloat16")
    digest = digest_model(model, plan)
    shape = ChunkShape(architecture.num_layers, architecture.num_kv_heads, architecture.dim, documents.rows)
    return ChunkLibrary(open_chunks(documents, plan.documents_bytes, digest, shape, is_pinned=plan.device == "cuda"))


def digest_model(model: ModelConfig, plan: MemoryPlan) -> str:
    """Return 32 hexadecimal digits of the model's weights, whatever its folder is called. Raises ModelError."""
    if model.path is not None:
        return digest_rounded(digest_weights(model.path, kept_path()), model.weights)
    split = "" if plan.experts_on_card is None else f" with {plan.experts_on_card} experts drawn first"
    drawn = digest_random(f"{model.random_weights}{split}", RANDOM_SEED, plan.dtype, plan.device)
    return digest_rounded(drawn, model.weights)


def open_contexts(config: DiskConfig, digest: str, architecture: Architecture, plan: MemoryPlan) -> ContextStore:
    """Open the contexts of this model on disk. digest: of its weights. Raises ModelError if the folder cannot
    be used.
    """
    stored = disk_format(config.rows, plan.kv)
    kv = kv_record(architecture, plan.window_layers, stored, config.block_tokens)
    end = end_record(architecture, plan.window_bytes, kv)
    rope = rope_key(architecture, plan.max_context_tokens)
    products = products_key(architecture, plan.device, plan.is_packed)
    made = plan.device, plan.dtype, plan.kv, rope, *(() if stored == plan.kv else (stored,)), *filter(None, (products,))
    model = name_model(digest, *made, plan.page_tokens, config.block_tokens, plan.window_pages, plan.window_bytes)
    try:
        store = ContextStore(config, model, kv, end)
    except FolderError as error:
        raise ModelError(str(error)) from None
    log.info(
        "disk folder=%s records=%d held_bytes=%d read_bytes_per_s=%d",
        store.folder.root, len(store.folder), store.folder.bytes_held, int(store.rate.bytes_a_second),
    )  # fmt: skip
    return store

"""Make a runner from a configuration: load weights, allocate pages, capture graphs.

The memory plan decides all sizes. A configuration that cannot be served is refused here with one line.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpu.config import GpuConfig, ModelConfig
from gpu.cpu_step.step_kernel import COMPILED
from gpu.kv.states import STATE_DTYPES
from gpu.kv.windows import NO_WINDOWS, WindowShape
from gpu.model.architecture import Architecture, ModelError, load_architecture
from gpu.model.split import split_over
from gpu.operations.decode_attention.paged_decode_attention import DECODED_DIMS
from gpu.runner import Runner
from gpu.runner_settings import LoadSettings, RunnerSettings
from gpu.weights.checkpoint import load_weights
from gpu.weights.drawing import random_weights
from gpu.weights.humming_matrix import prepare, require_products
from gpu.weights.weights import Weights
from transfer.simd.compilation import reporting_compilation

RANDOM_SEED = 20_240_901
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

LoadProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are already on the device, in the dtype of the plan."""

    architecture: Architecture
    weights: Weights


def load_runner(
    model: ModelConfig,
    gpu: GpuConfig,
    asked: LoadSettings,
    on_progress: LoadProgress,
    loaded: LoadedModel | None = None,
) -> Runner:
    """Load a model and make its runner.

    `on_progress(stage, fraction)` is called for the stages "weights", "products" (kernels of a library), "kernels"
    (compiled at a machine's first start) and "graphs". loaded: the model, if the caller has loaded it. Sets torch's
    threads for the whole process. Raises ModelError for a folder or shape that cannot be served.
    """
    if gpu.threads is not None:
        torch.set_num_threads(gpu.threads)
    device = torch.device(_resolve_device(gpu))
    dtype = DTYPES[_resolve_dtype(gpu, device)]
    architecture = load_architecture(model, asked.drafts) if loaded is None else loaded.architecture
    if asked.ranks is not None:
        architecture = split_over(architecture, asked.ranks.count, asked.ranks.rank)
    odd = {architecture.heads_of(spec).dim for spec in architecture.layer_pattern} - {*DECODED_DIMS}
    latent = architecture.latent
    if latent is not None:
        odd = {size for size in (latent.rank, latent.rotated) if size & (size - 1) or size < 16}
        if device.type == "cuda" and odd:
            raise ModelError(
                f"model: {architecture.name} has latents of {latent.rank} + {latent.rotated} numbers; on a GPU served: "
                "powers of two, 16 or more, of each"
            )
    if device.type == "cuda" and odd:
        served = ", ".join(map(str, DECODED_DIMS))
        raise ModelError(f"model: {architecture.name} has heads of {min(odd)}; on a GPU served: {served}")
    require_products(model.products, device, _resolve_dtype(gpu, device))
    context = asked.max_context_tokens or architecture.max_context_tokens
    if context > architecture.max_context_tokens:
        raise ModelError(
            f"scheduler.max_context_tokens: asked {context}, {architecture.name} has "
            f"{architecture.max_context_tokens} positions; lower it"
        )

    def weights_progress(fraction: float) -> None:
        on_progress("weights", fraction)

    compiling = reporting_compilation(COMPILED, lambda fraction: on_progress("kernels", fraction))
    with shortage_in_one_line(), compiling:
        if loaded is not None:
            weights = loaded.weights
        elif model.path is not None:
            weights = load_weights(model.path, architecture, dtype, device, weights_progress, asked.experts_on_card)
        else:
            weights = random_weights(architecture, RANDOM_SEED, dtype, device, weights_progress, asked.experts_on_card)
        most_tokens = max(asked.chunk_tokens, asked.max_running)
        prepare(weights.matrices, range(1, most_tokens + 1), lambda fraction: on_progress("products", fraction))
        on_progress("kernels", 0.0)
        settings = RunnerSettings(
            num_pages=asked.num_pages, page_tokens=gpu.page_tokens, max_running=asked.max_running,
            max_context_tokens=context, max_hidden_tokens=asked.max_hidden_tokens, dtype=dtype, device=device,
            tier=asked.tier, parts=asked.parts, num_rings=asked.num_rings, ring_pages=asked.ring_pages,
            sink_tokens=asked.sink_tokens, window_tokens=asked.window_tokens,
            checks_coverage=gpu.check_coverage, library=asked.library, disk=asked.disk,
            kv=None if gpu.kv == "auto" else gpu.kv,
            windows=WindowShape(architecture.window_layers, asked.num_windows, asked.window_pages)
            if asked.num_windows and architecture.window_layers else NO_WINDOWS,
            open_experts=asked.open_experts, computed_rows=asked.computed_rows,
            num_states=asked.num_windows if architecture.recurrent is not None else 0,
            state_dtype=STATE_DTYPES[gpu.state_dtype], num_host_states=asked.num_host_states,
            compile_settings=gpu.model_dump_json() if asked.compiles_ahead else None,
            link_share=asked.link_share,
            adapters=asked.adapters,
            ranks=asked.ranks,
            turns=asked.turns,
        )  # fmt: skip
        runner = Runner(architecture, weights, settings)
        runner.rehearsal.warm_up(asked.chunk_tokens, lambda fraction: on_progress("kernels", fraction))
        on_progress("kernels", 1.0)
        runner.capture(gpu.graph_batch_sizes, lambda fraction: on_progress("graphs", fraction))
        runner.rehearsal.capture_prefill(asked.prefill_graph_sizes)
    return runner


@contextmanager
def shortage_in_one_line() -> Iterator[None]:
    """Raise ModelError if memory runs out, which happens if other programs hold what was planned."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        is_short = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
        if not is_short and not (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            raise
        raise ModelError(
            "gpu.memory_limit_gib: memory ran out while loading, though the plan keeps to the limit; end what else "
            f"holds memory, or lower the limit ({str(error).splitlines()[0]})"
        ) from None


def _resolve_device(gpu: GpuConfig) -> str:
    if gpu.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if gpu.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("gpu.device: asked cuda, torch finds no CUDA device; use cpu, or repair the driver")
    return gpu.device


def _resolve_dtype(gpu: GpuConfig, device: torch.device) -> str:
    if gpu.dtype == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return gpu.dtype

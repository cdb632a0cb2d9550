"""Check memory plans. An error names what was asked for, what there is, and the setting to change. No torch."""

from collections.abc import Sequence

from gpu.config import GpuConfig
from gpu.memory.demand import SNAPSHOTS, Demand, MemoryItem, Place, PlanError
from gpu.memory.machine_limits import SMALLEST_CONTEXT_TOKENS, in_gib, least_gib
from gpu.methods.method import MethodState
from gpu.model.architecture import Architecture
from gpu.page_layout import CODE_FORMATS
from gpu.profiles import FULL_ATTENTION
from gpu.weights.expert_shares import PINNED_SHARE, most_experts
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import HostConfig
from transfer.machine import GIB, MachineProfile


def check_fixed(
    fixed: tuple[MemoryItem, ...], place: Place, limits: dict[Place, int], left: int, demand: Demand
) -> None:
    key = "gpu.memory_limit_gib" if place == "gpu" else "gpu.memory_limit_gib (host memory: the CPU is the device)"
    weights, limit = fixed[0].bytes, limits[place]
    if weights > limit:
        can_split = place == "gpu" and demand.experts_on_card is None and most_experts(demand.shape)
        raise PlanError(
            f"{key}: the weights take {in_gib(weights)}, the limit is {in_gib(limit)}; raise the limit, or use a "
            "smaller model or, if it is float32, dtype bfloat16"
            + (", or set gpu.experts_gib: auto, which leaves experts in host memory" if can_split else "")
            + (", or lower gpu.experts_gib" if demand.experts_on_card else "")
        )
    if left <= 0:
        raise PlanError(
            f"{key}: weights and workspaces take {in_gib(limit - left)}, the limit is {in_gib(limit)}; raise it, or "
            "lower scheduler.prefill.chunk_tokens or scheduler.max_running"
            + (", or gpu.kv_windows" if any(item.name == "KV windows" for item in fixed) else "")
            + (", or gpu.host_states_gib" if place == "host" and demand.num_host_states else "")
            + (", or a profile's `capacity` or `rings`" if demand.reuses else "")
            + (", or gpu.experts_gib" if demand.experts_on_card is not None else "")
            + (", or documents.memory_limit_gib" if any(item.name == "documents" for item in fixed) else "")
        )


def check_documents(shape: Architecture) -> None:
    """Raise PlanError if document chunks of this model cannot be stored. Its layers must be alike, and their keys and
    values must be made of hidden states alone.
    """
    why = None
    if shape.recurrent is not None:
        why = "layers are recurrent, and the state behind a chunk depends on all tokens in front of it"
    elif shape.has_own_window_heads:
        why = "layers with a window have KV heads of their own"
    elif shape.kept_layers:
        why = "layers use the keys and values of earlier layers"
    elif shape.latent is not None:
        why = "a token leaves a latent row, not keys and values"
    elif shape.layer_inputs is not None:
        why = "each layer has an embedding of its own"
    elif any(spec.output_gate for spec in shape.layer_pattern):
        why = "outputs of attention are gated, and gates are not stored with a chunk"
    if why is not None:
        raise PlanError(f"documents: {why} in {shape.name}, so its chunks cannot be stored; leave out `documents`")


def check_disk(shape: Architecture, window_layers: Sequence[int]) -> None:
    """Raise PlanError unless some layer has all of a context in pages: blocks on disk are made of pages."""
    if len(window_layers) == shape.num_layers:
        raise PlanError(
            f"disk: no layer of {shape.name} has all of a context in pages, and blocks on disk are of pages; leave out "
            "`disk`"
        )


def check_disk_rows(shape: Architecture, disk: DiskConfig, kv: str) -> None:
    """Raise PlanError if `disk.rows` asks for codes and rows in pages are codes already, or latent rows."""
    if disk.rows == "same":
        return
    why = None
    if kv in CODE_FORMATS:
        why = f"rows in pages are codes of 8 bits already (gpu.kv: {kv})"
    elif shape.latent is not None:
        why = f"a row of {shape.name} joins a latent and rotated numbers, which one scale does not suit"
    if why is not None:
        raise PlanError(f"disk.rows: asked {disk.rows}, but {why}; use same")


def check_disk_limit(disk: DiskConfig, block_bytes: int) -> None:
    """Raise PlanError if the limit does not hold one block."""
    if block_bytes > disk.limit_gib * GIB:
        raise PlanError(
            f"disk.limit_gib: asked {disk.limit_gib:g} GiB, a block of {disk.block_tokens} tokens takes "
            f"{block_bytes:,} bytes; raise it to {least_gib(block_bytes)}, or lower disk.block_tokens"
        )


def check_latents(shape: Architecture, host: HostConfig | None, states: Sequence[MethodState]) -> None:
    """Raise PlanError if latent rows would be read by a host tier, or by a method that needs keys and values."""
    if shape.latent is None:
        return
    row = f"{shape.name} keeps one row of {shape.latent.rank} + {shape.latent.rotated} numbers a token"
    if host is not None:
        raise PlanError(f"host: {row}, and the host tier reads keys and values of heads; leave out `host`")
    others = [state.part.method.name for state in states if state.part.method.name != FULL_ATTENTION]
    if others:
        name = others[0]
        raise PlanError(f"profiles: {name!r} reads keys and values of heads, and {row}; take it out of the profiles")


def check_states(shape: Architecture, gpu: GpuConfig) -> None:
    """Raise PlanError if memory is asked for states of a model without recurrent layers."""
    for key in ("states_gib", "host_states_gib"):
        asked = getattr(gpu, key)
        if asked is not None and shape.recurrent is None:
            raise PlanError(f"gpu.{key}: asked {asked:g} GiB, {shape.name} has no recurrent layers; leave it out")


def check_snapshots(fixed: Sequence[MemoryItem], demand: Demand, machine: MachineProfile) -> None:
    """Raise PlanError if host memory has no room for the pinned snapshots."""
    asked = sum(item.bytes for item in fixed if item.name == SNAPSHOTS)
    beside = sum(item.bytes for item in fixed if item.place == "host") - asked
    most = int(machine.memory_bytes * PINNED_SHARE) - beside
    if demand.place == "gpu" and asked > most:
        raise PlanError(
            f"gpu.host_states_gib: asked {in_gib(asked)} of pinned host memory, where there is room for "
            f"{in_gib(max(most, 0))} of {in_gib(machine.memory_bytes)}; lower it"
        )


def check_pinned(fixed: Sequence[MemoryItem], demand: Demand, machine: MachineProfile) -> None:
    """Raise PlanError if host memory has no room for the pinned experts."""
    shares = demand.expert_shares
    if not shares.host_bytes:
        return
    beside = sum(item.bytes for item in fixed if item.place == "host") - shares.host_bytes
    most = int(machine.memory_bytes * PINNED_SHARE) - beside
    if shares.host_bytes > most:
        raise PlanError(
            f"gpu.experts_gib: {in_gib(shares.card_bytes)} of experts would lie on the card, the other "
            f"{in_gib(shares.host_bytes)} in pinned host memory, where there is room for {in_gib(max(most, 0))} of "
            f"{in_gib(machine.memory_bytes)}; raise it, or use fewer bits (model.weights)"
        )


def check_configured(
    demand: Demand, gpu: GpuConfig, left: int, limit: int, context: int | None, hidden_tokens: int | None
) -> None:
    if gpu.kv_cache_gib is not None and int(gpu.kv_cache_gib * GIB) - demand.num_windows * demand.window_bytes > left:
        raise PlanError(
            f"gpu.kv_cache_gib: asked {gpu.kv_cache_gib:g} GiB, {in_gib(left)} left of {in_gib(limit)} after "
            "weights and workspaces; lower it, or leave it out to take what is left"
        )
    longest = demand.shape.max_context_tokens
    if context is not None and context > longest:
        raise PlanError(
            f"scheduler.max_context_tokens: asked {context:,}, the model has {longest:,} positions; lower it"
        )
    if context is not None and hidden_tokens is not None and hidden_tokens < context:
        raise PlanError(
            f"scheduler.prefill.max_hidden_tokens: asked {hidden_tokens:,}, a prompt may have {context:,} tokens; "
            "raise it or lower scheduler.max_context_tokens"
        )


def check_pages(
    demand: Demand, num_pages: int, context: int, asked: int | None, hidden_tokens: int, spare: int, gpu: GpuConfig
) -> None:
    wanted = asked if asked is not None else min(SMALLEST_CONTEXT_TOKENS, demand.shape.max_context_tokens)
    tokens = max(num_pages, 0) * demand.page_tokens
    if context >= wanted and tokens >= wanted:
        return
    needed = least_gib(wanted * demand.kv_token_bytes)
    have = f"{tokens:,} tokens fit" if tokens else "not one page fits"
    lower = "scheduler.max_context_tokens" if asked is not None else "scheduler.prefill.chunk_tokens"
    if gpu.kv_cache_gib is not None and gpu.kv_cache_gib * GIB <= spare:
        raise PlanError(
            f"gpu.kv_cache_gib: asked {gpu.kv_cache_gib:g} GiB, one sequence of {wanted:,} tokens needs {needed}, "
            f"{have}; raise it, leave it out to take what is left, or lower scheduler.max_context_tokens"
        )
    raise PlanError(
        f"gpu.memory_limit_gib: one sequence of {wanted:,} tokens needs {needed} of KV pages, {in_gib(max(spare, 0))} "
        f"is left beside {hidden_tokens:,} tokens of hidden states, {have}; raise it or lower {lower}"
    )

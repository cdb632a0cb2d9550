"""Where each byte of device and host memory goes, decided before anything is allocated. No torch.

Knows the settings and a machine profile, so a plan can be made for a machine that is elsewhere; what the parts ask for
is `gpu.memory_demand`'s. The invariant: the items of a place add up to no more than its limit, KV pages are whole, and
they hold the longest context.
"""

from dataclasses import dataclass
from typing import Literal

from gpu.architecture import Architecture
from gpu.config import GpuConfig
from gpu.memory_demand import MAX_LOGITS_ROWS, Demand, MemoryItem, Place
from transfer.machine import GIB, MachineProfile

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
GPU_SHARE = 0.92  # of the card, where no limit is set: a desktop's other programs need the rest
HOST_SHARE = 0.5  # of the host, where the CPU is the device and no limit is set
SMALLEST_CONTEXT_TOKENS = 2048  # a machine that cannot hold one such sequence is refused


class PlanError(Exception):
    """A deployment that does not fit its machine: one line with the numbers and the key to change."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`limit_bytes[place]` bounds the sum of that place's items; without a GPU every item is in host memory."""

    device: Literal["cuda", "cpu"]
    dtype: Literal["bfloat16", "float32"]
    threads: int
    max_context_tokens: int
    max_hidden_tokens: int
    max_logits_rows: int
    page_tokens: int
    num_pages: int
    items: tuple[MemoryItem, ...]
    limit_bytes: dict[Place, int]
    notes: tuple[str, ...]

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def used_bytes(self, place: Place) -> int:
        return sum(item.bytes for item in self.items if item.place == place)


def plan_memory(
    architecture: Architecture,
    gpu: GpuConfig,
    *,
    max_running: int,
    chunk_tokens: int,
    max_context_tokens: int | None,
    max_hidden_tokens: int | None,
    machine: MachineProfile,
) -> MemoryPlan:
    """Resolve what is None or `auto` and share the memory out; KV pages get what is left, or `gpu.kv_cache_gib`.

    A context that nobody asked for shrinks to what fits; one that the configuration names must fit. Raises PlanError.
    """
    device = _resolve_device(gpu, machine)
    dtype = _resolve_dtype(gpu, device, machine)
    demand = Demand(
        architecture, device, DTYPE_BYTES[dtype], max_running, chunk_tokens, gpu.page_tokens, gpu.graph_batch_sizes
    )
    place = demand.place
    limits = _resolve_limits(gpu, device, machine)
    fixed = demand.fixed_items()
    left = limits[place] - sum(item.bytes for item in fixed if item.place == place)
    _check_fixed(fixed, place, limits, left)

    budget = left
    if gpu.kv_cache_gib is not None:
        budget = int(gpu.kv_cache_gib * GIB)
        if budget > left:
            raise PlanError(
                f"gpu.kv_cache_gib: asked {gpu.kv_cache_gib:g} GiB, {_gib(left)} left of {_gib(limits[place])} after "
                "weights and workspaces; lower it, or leave it out to take what is left"
            )
    context, notes = _resolve_context(demand, left, budget, max_context_tokens, max_hidden_tokens)
    hidden_tokens = max_hidden_tokens or demand.default_hidden_tokens(context, left)
    per_context = demand.context_items(context, hidden_tokens)
    spare = left - sum(item.bytes for item in per_context)
    num_pages = min(spare, budget) // demand.page_bytes
    _check_pages(demand, num_pages, context, max_context_tokens, hidden_tokens, spare, gpu)

    pages_note = f"{num_pages:,} pages of {gpu.page_tokens} tokens, {num_pages * gpu.page_tokens:,} tokens in all"
    pages = MemoryItem("KV pages", place, num_pages * demand.page_bytes, pages_note)
    if device == "cpu":
        notes = (*notes, "the CPU is the device: every item is in host memory")
    return MemoryPlan(
        device=device,
        dtype=dtype,
        threads=gpu.threads or machine.physical_cores,
        max_context_tokens=context,
        max_hidden_tokens=hidden_tokens,
        max_logits_rows=max(MAX_LOGITS_ROWS, max_running),
        page_tokens=gpu.page_tokens,
        num_pages=num_pages,
        items=(*fixed, *per_context, pages),
        limit_bytes=limits,
        notes=notes,
    )


def _resolve_device(gpu: GpuConfig, machine: MachineProfile) -> Literal["cuda", "cpu"]:
    if gpu.device == "auto":
        return "cpu" if machine.gpu is None else "cuda"
    if gpu.device == "cuda" and machine.gpu is None:
        raise PlanError(
            f"gpu.device: asked cuda, machine {machine.name!r} has no usable NVIDIA GPU; use auto or cpu, or "
            "plan for another machine with --machine"
        )
    return gpu.device


def _resolve_dtype(gpu: GpuConfig, device: str, machine: MachineProfile) -> Literal["bfloat16", "float32"]:
    if device == "cuda" and machine.gpu is not None and machine.gpu.compute_capability < (8, 0):
        major, minor = machine.gpu.compute_capability
        raise PlanError(
            f"gpu.device: {machine.gpu.name} has compute capability {major}.{minor}, wanted 8.0; use device: cpu"
        )
    if gpu.dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return gpu.dtype


def _resolve_limits(gpu: GpuConfig, device: str, machine: MachineProfile) -> dict[Place, int]:
    asked = None if gpu.memory_limit_gib is None else int(gpu.memory_limit_gib * GIB)
    if device == "cuda" and machine.gpu is not None:
        total, share, what = machine.gpu.memory_bytes, GPU_SHARE, machine.gpu.name
    else:
        total, share, what = machine.memory_bytes, HOST_SHARE, f"machine {machine.name!r}"
    if asked is not None and asked > total:
        raise PlanError(f"gpu.memory_limit_gib: asked {_gib(asked)}, {what} has {_gib(total)}; lower it")
    limit = int(total * share) if asked is None else asked
    return {"gpu": limit, "host": machine.memory_bytes} if device == "cuda" else {"host": limit}


def _check_fixed(fixed: tuple[MemoryItem, ...], place: Place, limits: dict[Place, int], left: int) -> None:
    key = "gpu.memory_limit_gib" if place == "gpu" else "gpu.memory_limit_gib (host memory: the CPU is the device)"
    weights, limit = fixed[0].bytes, limits[place]
    if weights > limit:
        raise PlanError(
            f"{key}: the weights take {_gib(weights)}, the limit is {_gib(limit)}; raise the limit, or use a smaller "
            "model or, if it is float32, dtype bfloat16"
        )
    if left <= 0:
        raise PlanError(
            f"{key}: weights and workspaces take {_gib(limit - left)}, the limit is {_gib(limit)}; raise it, or lower "
            "scheduler.prefill.chunk_tokens or scheduler.max_running"
        )


def _resolve_context(
    demand: Demand, left: int, budget: int, asked: int | None, hidden_tokens: int | None
) -> tuple[int, tuple[str, ...]]:
    """The longest context to serve, and what to say of it where it is not the model's."""
    longest = demand.shape.max_context_tokens
    if asked is not None:
        if asked > longest:
            raise PlanError(
                f"scheduler.max_context_tokens: asked {asked:,}, the model has {longest:,} positions; lower it"
            )
        if hidden_tokens is not None and hidden_tokens < asked:
            raise PlanError(
                f"scheduler.prefill.max_hidden_tokens: asked {hidden_tokens:,}, a prompt may have {asked:,} tokens; "
                "raise it or lower scheduler.max_context_tokens"
            )
        return asked, ()
    fixed_hidden = (hidden_tokens or 0) * demand.hidden_token_bytes
    per_token = demand.context_token_bytes(1 if hidden_tokens is None else 0)
    fits = int((left - fixed_hidden) / per_token)
    in_pages = min(fits, budget // demand.kv_token_bytes) // demand.page_tokens * demand.page_tokens
    context = min(longest, max(in_pages, 0), hidden_tokens or longest)
    if context == longest:
        return context, ()
    return context, (f"contexts are limited to {context:,} of the model's {longest:,} tokens by what memory is left",)


def _check_pages(
    demand: Demand, num_pages: int, context: int, asked: int | None, hidden_tokens: int, spare: int, gpu: GpuConfig
) -> None:
    wanted = asked if asked is not None else min(SMALLEST_CONTEXT_TOKENS, demand.shape.max_context_tokens)
    tokens = max(num_pages, 0) * demand.page_tokens
    if context >= wanted and tokens >= wanted:
        return
    needed = _gib(wanted * demand.kv_token_bytes)
    have = f"{tokens:,} tokens fit" if tokens else "not one page fits"
    lower = "scheduler.max_context_tokens" if asked is not None else "scheduler.prefill.chunk_tokens"
    if gpu.kv_cache_gib is not None and gpu.kv_cache_gib * GIB <= spare:
        raise PlanError(
            f"gpu.kv_cache_gib: asked {gpu.kv_cache_gib:g} GiB, one sequence of {wanted:,} tokens needs {needed}, "
            f"{have}; raise it, leave it out to take what is left, or lower scheduler.max_context_tokens"
        )
    raise PlanError(
        f"gpu.memory_limit_gib: one sequence of {wanted:,} tokens needs {needed} of KV pages, {_gib(max(spare, 0))} is "
        f"left beside {hidden_tokens:,} tokens of hidden states, {have}; raise it or lower {lower}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"

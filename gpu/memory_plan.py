"""Where each byte of device and host memory goes, decided before anything is allocated. No torch.

Knows a model's shape, the settings and a machine profile, so a plan can be made for a machine that is elsewhere. The
invariant: the items of a place add up to no more than its limit, and KV pages are whole. Reserves that the code cannot
derive (CUDA context, graphs, interpreter) are the named constants below; everything else is counted.
"""

from dataclasses import dataclass
from typing import Literal

from gpu.architecture import Architecture
from gpu.config import GpuConfig
from transfer.machine import GIB, MachineProfile

Place = Literal["gpu", "host"]
MIB = 2**20
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}

GPU_SHARE = 0.92  # of the card, where no limit is set: a desktop's other programs need the rest
HOST_SHARE = 0.5  # of the host, where the CPU is the device and no limit is set
CUDA_RUNTIME_BYTES = 768 * MIB  # context, library workspaces, loaded kernels, and what the allocator cannot reuse
CUDA_GRAPH_BYTES = 48 * MIB  # one batch size: the graphs of all layers with their private pools
HOST_RUNTIME_BYTES = 1536 * MIB  # two processes with their libraries; half of it is code shared with nobody
MAX_LOGITS_ROWS = 256  # rows of logits at once: decode, and blocks of prompt logprobs
KV_SPLITS = 32  # most parts of a context that decode attention works on at once
SMALLEST_CONTEXT_TOKENS = 2048  # a machine that cannot hold one such sequence is refused


class PlanError(Exception):
    """A deployment that does not fit its machine: one line with the numbers and the key to change."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    name: str
    place: Place
    bytes: int
    note: str


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
    demand = _Demand(architecture, DTYPE_BYTES[dtype], max_running, chunk_tokens, gpu.page_tokens)
    place: Place = "gpu" if device == "cuda" else "host"
    limits = _resolve_limits(gpu, device, machine)
    fixed = _fixed_items(demand, gpu, device)
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
    per_context = _context_items(demand, context, hidden_tokens, place)
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


@dataclass(frozen=True, slots=True)
class _Demand:
    """Bytes that the parts of a deployment ask for."""

    shape: Architecture
    dtype_bytes: int
    max_running: int
    chunk_tokens: int
    page_tokens: int

    @property
    def kv_token_bytes(self) -> int:
        return self.shape.kv_bytes_per_token(self.dtype_bytes)

    @property
    def page_bytes(self) -> int:
        return self.kv_token_bytes * self.page_tokens

    @property
    def layer_kv_token_bytes(self) -> int:
        return self.kv_token_bytes // self.shape.num_layers

    @property
    def hidden_token_bytes(self) -> int:
        return self.shape.hidden * self.dtype_bytes

    @property
    def rope_token_bytes(self) -> int:
        return self.shape.dim * 4  # cosine and sine of half the dimensions, float32

    @property
    def page_table_token_bytes(self) -> float:
        return 4 * self.max_running / self.page_tokens

    def activation_bytes(self, num_tokens: int) -> int:
        """One layer over `num_tokens`: norm, QKV, pre-RoPE query, attention output, gate and up, their product."""
        shape = self.shape
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim
        width = 2 * shape.hidden + qkv + 2 * shape.num_heads * shape.dim + 3 * shape.intermediate
        return num_tokens * width * self.dtype_bytes

    def default_hidden_tokens(self, context: int, left: int) -> int:
        """One prompt of the longest kind, and up to four chunks beside it for an eighth of what that one leaves."""
        rest = max(0, left - int(context * self.context_token_bytes(1)))
        return context + min(4 * self.chunk_tokens, rest // 8 // self.hidden_token_bytes)

    def context_token_bytes(self, hidden_tokens_per_token: int) -> float:
        """What one more token of `max_context_tokens` costs: its KV, its hidden state, its share of workspaces."""
        hidden = self.hidden_token_bytes * hidden_tokens_per_token
        work = self.layer_kv_token_bytes + self.rope_token_bytes + self.page_table_token_bytes
        return self.kv_token_bytes + hidden + work


def _resolve_device(gpu: GpuConfig, machine: MachineProfile) -> Literal["cuda", "cpu"]:
    if gpu.device == "auto":
        return "cpu" if machine.gpu is None else "cuda"
    if gpu.device == "cuda" and machine.gpu is None:
        raise PlanError(f"gpu.device: asked cuda, machine {machine.name!r} has no usable NVIDIA GPU; use auto or cpu")
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


def _fixed_items(demand: _Demand, gpu: GpuConfig, device: str) -> tuple[MemoryItem, ...]:
    """What does not depend on the context."""
    shape, running = demand.shape, demand.max_running
    place: Place = "gpu" if device == "cuda" else "host"
    rows = max(MAX_LOGITS_ROWS, running)
    logits = rows * shape.vocab_size * 4 * 2
    split_kv = running * shape.num_heads * KV_SPLITS * (shape.dim + 1) * 4
    items = [
        MemoryItem("weights", place, shape.num_weights * demand.dtype_bytes, f"{shape.num_weights / 1e9:.2f} billion"),
        MemoryItem(
            "prefill activations",
            place,
            demand.activation_bytes(demand.chunk_tokens),
            f"one layer over {demand.chunk_tokens:,} tokens",
        ),
        MemoryItem("logits", place, logits, f"{rows} rows of {shape.vocab_size:,}, float32, and their softmax"),
        MemoryItem(
            "decode workspace",
            place,
            demand.activation_bytes(running) + split_kv,
            f"activations of {running} sequences, and partials of {KV_SPLITS} parts of a context",
        ),
        MemoryItem(
            "sampler", place, running * shape.vocab_size * 9, f"{running} slots: counts, bias and prompt mask a token"
        ),
        MemoryItem("processes", "host", HOST_RUNTIME_BYTES, "interpreters and libraries (reserve)"),
    ]
    if device == "cuda":
        graphs = sum(1 for size in gpu.graph_batch_sizes if size <= running)
        items += [
            MemoryItem("CUDA runtime", "gpu", CUDA_RUNTIME_BYTES, "context, library workspaces, kernels (reserve)"),
            MemoryItem("CUDA graphs", "gpu", graphs * CUDA_GRAPH_BYTES, f"{graphs} batch sizes (reserve)"),
        ]
    return tuple(items)


def _context_items(demand: _Demand, context: int, hidden_tokens: int, place: Place) -> tuple[MemoryItem, ...]:
    tables = int(context * demand.page_table_token_bytes) + demand.max_running * 4
    return (
        MemoryItem(
            "gathered KV",
            place,
            context * demand.layer_kv_token_bytes,
            f"one layer's KV of {context:,} tokens",
        ),
        MemoryItem(
            "hidden states", place, hidden_tokens * demand.hidden_token_bytes, f"{hidden_tokens:,} tokens under prefill"
        ),
        MemoryItem("positions", place, context * demand.rope_token_bytes + tables, "RoPE table and page tables"),
    )


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
    demand: _Demand, left: int, budget: int, asked: int | None, hidden_tokens: int | None
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
    demand: _Demand, num_pages: int, context: int, asked: int | None, hidden_tokens: int, spare: int, gpu: GpuConfig
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

"""Where each byte of device and host memory goes, decided before anything is allocated. No torch.

Knows the settings and a machine profile, so a plan can be made for a machine that is elsewhere; what the parts ask for
is `gpu.memory.demand`'s. The invariant: the items of a place add up to no more than its limit, KV pages are whole, and
they hold the longest context; with a host tier, `gpu.memory.host_shares` says what that takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpu.config import GpuConfig
from gpu.kv.layout import CODE_FORMATS, KvFormat
from gpu.memory.demand import MAX_LOGITS_ROWS, Demand, MemoryItem, Place, PlanError
from gpu.memory.expert_shares import KV_SHARE, PINNED_SHARE, most_experts
from gpu.memory.host_demand import LUMP_TOKENS, HostDemand
from gpu.memory.host_shares import Budget, HostShares, resolve_host, share_memory
from gpu.methods.kept import Kept
from gpu.methods.method import MethodState
from gpu.model.architecture import Architecture
from transfer.config import DocumentsConfig, HostConfig
from transfer.machine import GIB, GpuProfile, MachineProfile

__all__ = ["MemoryPlan", "PlanError", "plan_memory", "require_device"]

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
GPU_SHARE = 0.92  # of the card, where no limit is set: a desktop's other programs need the rest
HOST_SHARE = 0.5  # of the host, where the CPU is the device and no limit is set
RING_SHARE = 1 / 8  # of what weights and workspaces leave, where nobody says how many rings there are
WINDOW_SHARE = 1 / 2  # likewise, at most, for windows of layers that keep no more, where other layers have pages
ONLY_WINDOWS_SHARE = 3 / 4  # and where none has: the rest is for prompts under way
WINDOWS_PER_SEQUENCE = 2  # at most: its own, and one that is kept for the next turn
CODES_DIM_STEP = 16  # of a row in codes: what a load takes at once
MOST_EMPTY_PAGES = 2**18  # where no layer has pages, there are numbers alone
SMALLEST_CONTEXT_TOKENS = 2048  # a machine that cannot hold one such sequence is refused


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`limit_bytes[place]` bounds the sum of that place's items; without a GPU every item is in host memory.

    `kv`: how pages hold rows. `kv_bytes` bound windows and the `num_pages` KV pages, resident and dense
    (`gpu.kv.layout`). With a host tier a context keeps `sink_tokens` and `window_tokens` on the device (whole pages),
    and all of it up to `resident_tokens`; `lump_tokens` go down at once. Without one these are 0. `num_rings`: of the
    methods that keep some, by what profiles name them (`gpu.profiles.Part`). `num_windows` of `window_pages` pages and
    `window_bytes`, in `window_layers`, which then have no others (`gpu.kv.windows`); `spare_window_tokens` of each are
    beyond what these see; 0: there are none. experts_on_card: of each layer's experts, the first so many, and the
    others lie in host memory; None: all, or the model has none. computes_experts: decode steps of few rows have the CPU
    compute those; else they fetch them.
    """

    device: Literal["cuda", "cpu"]
    dtype: Literal["bfloat16", "float32"]
    kv: KvFormat
    threads: int
    max_context_tokens: int
    max_hidden_tokens: int
    max_logits_rows: int
    page_tokens: int
    kv_bytes: int
    num_pages: int
    dense_layers: tuple[int, ...]
    sink_tokens: int
    window_tokens: int
    resident_tokens: int
    lump_tokens: int
    residency: Literal["adaptive", "fixed"]
    num_rings: dict[str, int]
    host_limit_bytes: int
    host_tokens: int
    items: tuple[MemoryItem, ...]
    limit_bytes: dict[Place, int]
    notes: tuple[str, ...]
    window_layers: tuple[int, ...] = ()
    num_windows: int = 0
    window_bytes: int = 0
    window_pages: int = 0
    spare_window_tokens: int = 0
    experts_on_card: int | None = None
    computes_experts: bool = False

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def used_bytes(self, place: Place) -> int:
        return sum(item.bytes for item in self.items if item.place == place)


def plan_memory(
    architecture: Architecture,
    gpu: GpuConfig,
    *,
    host: HostConfig | None,
    kept: Kept | None,
    states: Sequence[MethodState],
    max_running: int,
    chunk_tokens: int,
    max_context_tokens: int | None,
    max_hidden_tokens: int | None,
    machine: MachineProfile,
    documents: DocumentsConfig | None = None,
    computes_experts: bool = False,
) -> MemoryPlan:
    """Resolve what is None or `auto` and share the memory out; KV pages get what is left, or `gpu.kv_cache_gib`.

    kept: what of contexts that go down stays on the device (`gpu.profiles.find_kept`), None without `host`;
    states: what attention methods keep for sequences that run (`gpu.profiles.list_states`); rings that nobody counted
    take an eighth of what weights and workspaces leave, and there is one at least; documents: how their chunks are
    kept; computes_experts: of few rows, see `MemoryPlan`. A context that nobody asked for shrinks to what fits; one
    that the configuration names must fit. Raises PlanError.
    """
    device = _resolve_device(gpu, machine)
    dtype = _resolve_dtype(gpu, device)
    kv = _resolve_kv(gpu, dtype, architecture)
    tier = None
    if host is not None and kept is not None:
        tier = resolve_host(host, kept, architecture, gpu.page_tokens, DTYPE_BYTES[dtype], max_running, kv)
    spare_tokens = _spare_window_tokens(gpu.page_tokens, tier)
    window_pages = 0
    if documents is None:  # a prompt that takes chunks has queries anywhere in it, and what they see must be there
        window_pages = _count_window_pages(architecture, gpu, spare_tokens, max_context_tokens)
    if gpu.kv_windows is not None and not window_pages:
        why = "documents need all of a context" if architecture.window_layers else "no layer of the model has a window"
        raise PlanError(f"gpu.kv_windows: asked {gpu.kv_windows}, but {why}; leave it out")
    if tier is not None and window_pages:
        tier = replace(tier, window_layers=architecture.window_layers)
    demand = Demand(
        architecture,
        device,
        DTYPE_BYTES[dtype],
        max_running,
        chunk_tokens,
        gpu.page_tokens,
        gpu.graph_batch_sizes,
        tier,
        tuple(states),
        documents,
        window_pages,
        kv=kv,
        computes_experts=computes_experts,
    )
    place = demand.place
    limits = _resolve_limits(gpu, device, machine)
    demand = _count_experts(demand, limits[place], gpu, max_context_tokens, max_hidden_tokens)
    demand = _count_rings(demand, limits[place])
    demand = _count_windows(demand, limits[place], gpu)
    fixed = demand.fixed_items()
    left = limits[place] - sum(item.bytes for item in fixed if item.place == place)
    _check_fixed(fixed, place, limits, left, demand)
    _check_pinned(fixed, demand, machine)
    _check_asked(demand, gpu, left, limits[place], max_context_tokens, max_hidden_tokens)
    if host is None:
        shares, notes = _share_pages(demand, gpu, left, max_context_tokens, max_hidden_tokens)
    else:
        window_bytes = demand.num_windows * demand.window_bytes
        budget = _host_budget(gpu, host, fixed, demand, left, max_hidden_tokens, machine, window_bytes)
        shares, notes = _share_with_host(demand, budget, max_context_tokens)
    if demand.window_layers and demand.num_windows < max_running:
        notes = (
            *notes,
            f"there are windows for {demand.num_windows} sequences, scheduler.max_running is {max_running}: the others "
            "wait; gpu.kv_windows says how many",
        )
    if device == "cpu":
        notes = (*notes, "the CPU is the device: every item is in host memory")
    return MemoryPlan(
        device=device,
        dtype=dtype,
        kv=kv,
        threads=gpu.threads or machine.physical_cores,
        max_context_tokens=shares.context,
        max_hidden_tokens=shares.hidden_tokens,
        max_logits_rows=max(MAX_LOGITS_ROWS, max_running),
        page_tokens=gpu.page_tokens,
        kv_bytes=shares.kv_bytes + demand.num_windows * demand.window_bytes,
        num_pages=shares.num_pages,
        dense_layers=tier.dense_layers if tier else (),
        sink_tokens=tier.sink_tokens if tier else 0,
        window_tokens=tier.window_tokens if tier else 0,
        resident_tokens=tier.resident_tokens if tier else 0,
        lump_tokens=LUMP_TOKENS if tier else 0,
        residency=host.residency if host else "fixed",
        num_rings={state.part: state.count or 0 for state in demand.states if state.is_ring},
        host_limit_bytes=shares.host_limit_bytes,
        host_tokens=shares.host_tokens,
        items=(*fixed, *demand.context_items(shares.context, shares.hidden_tokens), *_kv_items(demand, shares)),
        limit_bytes=limits,
        notes=notes,
        window_layers=demand.window_layers,
        num_windows=demand.num_windows,
        window_bytes=demand.window_bytes,
        window_pages=window_pages,
        spare_window_tokens=spare_tokens if window_pages else 0,
        experts_on_card=demand.experts_on_card,
        computes_experts=demand.computes_experts,
    )


def require_device(plan: MemoryPlan, gpu: GpuProfile | None, machine_name: str) -> None:
    """Raises PlanError where the GPU that was planned for is gone, or is another one now, too old or too small."""
    if plan.device == "cuda":
        card = _require_gpu(gpu, machine_name)
        _require_memory(plan.limit_bytes["gpu"], card.memory_bytes, card.name)


def _share_pages(
    demand: Demand, gpu: GpuConfig, left: int, max_context_tokens: int | None, max_hidden_tokens: int | None
) -> tuple[HostShares, tuple[str, ...]]:
    """Without a host tier: pages hold all of every context."""
    budget = left
    if gpu.kv_cache_gib is not None:
        budget = int(gpu.kv_cache_gib * GIB) - demand.num_windows * demand.window_bytes
    context, notes = _resolve_context(demand, left, budget, max_context_tokens, max_hidden_tokens)
    hidden_tokens = max_hidden_tokens or demand.default_hidden_tokens(context, left)
    spare = left - sum(item.bytes for item in demand.context_items(context, hidden_tokens))
    if demand.page_bytes:
        num_pages = min(spare, budget) // demand.page_bytes
    else:
        most = -(-context // demand.page_tokens)
        num_pages = max(most, min(MOST_EMPTY_PAGES, demand.num_windows * most)) if spare >= 0 else 0
    _check_pages(demand, num_pages, context, max_context_tokens, hidden_tokens, spare, gpu)
    return HostShares(context, hidden_tokens, num_pages * demand.page_bytes, num_pages, 0, 0), notes


def _share_with_host(
    demand: Demand, budget: Budget, max_context_tokens: int | None
) -> tuple[HostShares, tuple[str, ...]]:
    model = demand.shape.max_context_tokens
    longest = min(model, budget.hidden_tokens or model)
    shares = share_memory(demand, budget, max_context_tokens, longest, min(SMALLEST_CONTEXT_TOKENS, longest))
    notes = []
    if max_context_tokens is None and shares.context < model:
        notes.append(
            f"contexts are limited to {shares.context:,} of the model's {model:,} tokens by what memory is left"
        )
    tier = _present(demand.host)
    spare = shares.num_pages - tier.running_tokens(shares.context) // demand.page_tokens
    in_pages = spare * tier.dense_per_block * demand.page_tokens
    if tier.dense_layers and in_pages < shares.host_tokens:
        notes.append(
            f"host memory has room for {shares.host_tokens:,} tokens, the dense layers' pages for {in_pages:,}: with "
            "fewer of host.dense_layers, more of it is used"
        )
    beside = shares.num_pages - tier.dense_blocks(tier.deposited_tokens(shares.context))
    fit = beside * demand.page_tokens // tier.running_tokens(shares.context)
    if fit < demand.max_running:
        notes.append(
            f"resident KV pages hold the windows of {fit} sequences, scheduler.max_running is {demand.max_running}: "
            "the others wait"
        )
    return shares, tuple(notes)


def _host_budget(
    gpu: GpuConfig, host: HostConfig, fixed: tuple[MemoryItem, ...], demand: Demand, left: int, hidden: int | None,
    machine: MachineProfile, window_bytes: int,
) -> Budget:  # fmt: skip
    """What host memory may be taken: of the machine's where a GPU is the device, else of what is left of its limit."""
    planned = sum(item.bytes for item in fixed if item.place == "host")
    have = left if demand.place == "host" else machine.memory_bytes - planned
    asked = None if host.memory_limit_gib is None else int(host.memory_limit_gib * GIB)
    if asked is not None and asked > have:
        raise PlanError(
            f"host.memory_limit_gib: asked {_gib(asked)}, {_gib(max(have, 0))} of host memory left; lower it"
        )
    default = min(max(have, 0), int(machine.memory_bytes * HOST_SHARE))
    if demand.expert_shares.host_bytes:  # which nobody can page out
        default = min(default, max(0, int(machine.memory_bytes * PINNED_SHARE) - planned))
    kv = None if gpu.kv_cache_gib is None else int(gpu.kv_cache_gib * GIB) - window_bytes
    return Budget(left, kv, asked, default, hidden)


def _present(host: HostDemand | None) -> HostDemand:
    assert host is not None, "memory plan: a plan with a host tier has its demand"
    return host


def _kv_items(demand: Demand, shares: HostShares) -> tuple[MemoryItem, ...]:
    page_tokens, host = demand.page_tokens, demand.host
    note = f"{shares.num_pages:,} pages of {page_tokens} tokens, {shares.num_pages * page_tokens:,} tokens in all"
    if host is not None and host.dense_layers:
        layers = ", ".join(map(str, host.dense_layers))
        note += f", or of released tokens' layers {layers} {host.dense_per_block} times as many"
    pages = MemoryItem("KV pages", demand.place, shares.num_pages * demand.page_bytes, note)
    if host is None:
        return (pages,)
    rows = shares.host_limit_bytes * host.host_row_bytes // host.host_token_bytes
    note_rows = f"{shares.host_tokens:,} tokens fit, in {host.config.rows}"
    note_tables = f"of these tokens, {host.config.sampled.num_tables} a KV head"
    return (
        pages,
        MemoryItem("deposited KV", "host", rows, note_rows),
        MemoryItem("hash tables", "host", shares.host_limit_bytes - rows, note_tables),
    )


def _resolve_device(gpu: GpuConfig, machine: MachineProfile) -> Literal["cuda", "cpu"]:
    if gpu.device == "cpu" or (gpu.device == "auto" and machine.gpu is None):
        return "cpu"
    _require_gpu(machine.gpu, machine.name)
    return "cuda"


def _require_gpu(gpu: GpuProfile | None, machine_name: str) -> GpuProfile:
    if gpu is None:
        raise PlanError(
            f"gpu.device: asked cuda, machine {machine_name!r} has no usable NVIDIA GPU; use auto or cpu, or "
            "plan for another machine with --machine"
        )
    if gpu.compute_capability < (8, 0):
        major, minor = gpu.compute_capability
        raise PlanError(f"gpu.device: {gpu.name} has compute capability {major}.{minor}, wanted 8.0; use device: cpu")
    return gpu


def _require_memory(asked: int, total: int, what: str) -> None:
    if asked > total:
        raise PlanError(f"gpu.memory_limit_gib: asked {_gib(asked)}, {what} has {_gib(total)}; lower it")


def _resolve_dtype(gpu: GpuConfig, device: str) -> Literal["bfloat16", "float32"]:
    if gpu.dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return gpu.dtype


def _resolve_kv(gpu: GpuConfig, dtype: Literal["bfloat16", "float32"], shape: Architecture) -> KvFormat:
    """How pages hold rows. Raises PlanError."""
    if gpu.kv == "auto":
        return dtype
    if gpu.kv == "bfloat16" and dtype != "bfloat16":
        raise PlanError(
            f"gpu.kv: asked bfloat16, gpu.dtype is {dtype} here; wanted auto, fp8 or int8, or dtype: bfloat16"
        )
    if gpu.kv in CODE_FORMATS and shape.dim % CODES_DIM_STEP:
        raise PlanError(
            f"gpu.kv: {gpu.kv} rows are of a multiple of {CODES_DIM_STEP} elements, heads of {shape.name} have "
            f"{shape.dim}; use auto"
        )
    return gpu.kv


def _resolve_limits(gpu: GpuConfig, device: str, machine: MachineProfile) -> dict[Place, int]:
    asked = None if gpu.memory_limit_gib is None else int(gpu.memory_limit_gib * GIB)
    if device == "cuda" and machine.gpu is not None:
        total, share, what = machine.gpu.memory_bytes, GPU_SHARE, machine.gpu.name
    else:
        total, share, what = machine.memory_bytes, HOST_SHARE, f"machine {machine.name!r}"
    if asked is not None:
        _require_memory(asked, total, what)
    limit = int(total * share) if asked is None else asked
    return {"gpu": limit, "host": machine.memory_bytes} if device == "cuda" else {"host": limit}


def _count_experts(
    demand: Demand, limit: int, gpu: GpuConfig, context: int | None, hidden_tokens: int | None
) -> Demand:
    """With the number of each layer's experts on the card: as many as were asked for fit, or as many as leave contexts
    what they want. Raises PlanError where there is nothing to ask for.
    """
    asked, shape, most = gpu.experts_gib, demand.shape, most_experts(demand.shape)
    if asked is None:
        return demand
    if not most:
        raise PlanError(f"gpu.experts_gib: asked {asked}, {shape.name} has no experts; leave it out")
    if demand.device == "cpu":
        raise PlanError(
            f"gpu.experts_gib: asked {asked}, the CPU is the device and has all experts in its memory; leave it out"
        )
    counts = [replace(demand, experts_on_card=count) for count in range(most, -1, -1)]
    if asked != "auto":
        return next(one for one in counts if one.expert_shares.card_bytes <= asked * GIB)
    left = {one.experts_on_card: limit - sum(item.bytes for item in one.fixed_items() if item.place == "gpu")
            for one in counts}  # fmt: skip
    least = counts[-1]
    bare = left[0] + sum(item.bytes for item in least.fetching_items() if item.place == "gpu")
    wanted = _bytes_of_contexts(demand, bare, gpu, context, hidden_tokens)
    return next((one for one in counts if left[one.experts_on_card or 0] >= wanted), least)


def _bytes_of_contexts(
    demand: Demand, bare: int, gpu: GpuConfig, context: int | None, hidden_tokens: int | None
) -> int:
    """What experts leave contexts of `bare` bytes: what was asked for, or a share of it; and in any case what one of
    the longest takes that was asked for. Of one that goes down that is what keeps it going.
    """
    longest, tier = context or min(SMALLEST_CONTEXT_TOKENS, demand.shape.max_context_tokens), demand.host
    if tier is None:
        pages = -(-longest // demand.page_tokens)
    else:
        down = tier.deposited_tokens(longest)
        pages = -(-tier.floor_tokens(longest, 1) // demand.page_tokens) + tier.dense_blocks(down)
    kv_bytes = pages * demand.page_bytes + demand.window_bytes * bool(demand.window_layers)
    if gpu.kv_cache_gib is not None:
        kv_bytes = max(kv_bytes, int(gpu.kv_cache_gib * GIB))
        if context is None and tier is None and demand.kv_token_bytes:
            longest = min(demand.shape.max_context_tokens, kv_bytes // demand.kv_token_bytes)
    hidden_tokens = hidden_tokens or longest + 4 * demand.chunk_tokens  # as `Demand.default_hidden_tokens` may have
    one = kv_bytes + sum(item.bytes for item in demand.context_items(longest, hidden_tokens))
    return one if gpu.kv_cache_gib is not None else max(one, int(bare * KV_SHARE))


def _check_pinned(fixed: Sequence[MemoryItem], demand: Demand, machine: MachineProfile) -> None:
    """Raises PlanError where the host has no room for the experts that lie there."""
    shares = demand.expert_shares
    if not shares.host_bytes:
        return
    beside = sum(item.bytes for item in fixed if item.place == "host") - shares.host_bytes
    most = int(machine.memory_bytes * PINNED_SHARE) - beside
    if shares.host_bytes > most:
        raise PlanError(
            f"gpu.experts_gib: {_gib(shares.card_bytes)} of experts would lie on the card, the other "
            f"{_gib(shares.host_bytes)} in pinned host memory, where there is room for {_gib(max(most, 0))} of "
            f"{_gib(machine.memory_bytes)}; raise it, or use fewer bits (model.weights)"
        )


def _count_rings(demand: Demand, limit: int) -> Demand:
    """With the number of each method's rings: as it is asked for, or an equal part of RING_SHARE; never more than there
    may be sequences.
    """
    uncounted = [state for state in demand.states if state.is_ring and state.count is None]
    left = limit - sum(item.bytes for item in demand.fixed_items() if item.place == demand.place)
    share = max(0, left) * RING_SHARE / max(1, len(uncounted))
    counted = []
    for state in demand.states:
        count = max(1, int(share / state.size(demand.row_bytes))) if state in uncounted else state.count
        counted.append(replace(state, count=min(count, demand.max_running)) if state.is_ring and count else state)
    return replace(demand, states=tuple(counted))


def _spare_window_tokens(page_tokens: int, host: HostDemand | None) -> int:
    """Of a window, beyond what layers see: where a prefix may end behind which a prompt begins. The tokens of a turn's
    last pages, and, of a context that goes down, all that is not down.
    """
    return 2 * page_tokens + (host.window_tokens + 2 * LUMP_TOKENS if host is not None else 0)


def _count_window_pages(shape: Architecture, gpu: GpuConfig, spare_tokens: int, context: int | None) -> int:
    """Of one window; 0: pages hold all, since there are none, or nobody asked for them and they save less than half."""
    longest = max((spec.window_tokens for spec in shape.layer_pattern if spec.window_tokens is not None), default=0)
    num_pages = -(-(longest + spare_tokens) // gpu.page_tokens)
    saves = 2 * num_pages * gpu.page_tokens <= (context or shape.max_context_tokens)
    return num_pages if longest and (saves or gpu.kv_windows is not None) else 0


def _count_windows(demand: Demand, limit: int, gpu: GpuConfig) -> Demand:
    """With the number of windows: as it is asked for, or for each sequence and as many prefixes, if they take no more
    than their share.
    """
    if not demand.window_layers:
        return demand
    if gpu.kv_windows is not None:
        return replace(demand, num_windows=gpu.kv_windows)
    left = limit - sum(item.bytes for item in demand.fixed_items() if item.place == demand.place)
    if gpu.kv_cache_gib is not None:
        left = min(left, int(gpu.kv_cache_gib * GIB))
    share = WINDOW_SHARE if demand.kv_token_bytes else ONLY_WINDOWS_SHARE
    count = max(1, int(max(0, left) * share) // demand.window_bytes)
    return replace(demand, num_windows=min(count, WINDOWS_PER_SEQUENCE * demand.max_running))


def _check_fixed(
    fixed: tuple[MemoryItem, ...], place: Place, limits: dict[Place, int], left: int, demand: Demand
) -> None:
    key = "gpu.memory_limit_gib" if place == "gpu" else "gpu.memory_limit_gib (host memory: the CPU is the device)"
    weights, limit = fixed[0].bytes, limits[place]
    if weights > limit:
        can_split = place == "gpu" and demand.experts_on_card is None and most_experts(demand.shape)
        raise PlanError(
            f"{key}: the weights take {_gib(weights)}, the limit is {_gib(limit)}; raise the limit, or use a smaller "
            "model or, if it is float32, dtype bfloat16"
            + (", or set gpu.experts_gib: auto, which leaves experts in host memory" if can_split else "")
            + (", or lower gpu.experts_gib" if demand.experts_on_card else "")
        )
    if left <= 0:
        raise PlanError(
            f"{key}: weights and workspaces take {_gib(limit - left)}, the limit is {_gib(limit)}; raise it, or lower "
            "scheduler.prefill.chunk_tokens or scheduler.max_running"
            + (", or gpu.kv_windows" if any(item.name == "KV windows" for item in fixed) else "")
            + (", or a profile's `capacity` or `rings`" if demand.reuses else "")
            + (", or gpu.experts_gib" if demand.experts_on_card is not None else "")
            + (", or documents.memory_limit_gib" if any(item.name == "documents" for item in fixed) else "")
        )


def _check_asked(
    demand: Demand, gpu: GpuConfig, left: int, limit: int, context: int | None, hidden_tokens: int | None
) -> None:
    if gpu.kv_cache_gib is not None and int(gpu.kv_cache_gib * GIB) - demand.num_windows * demand.window_bytes > left:
        raise PlanError(
            f"gpu.kv_cache_gib: asked {gpu.kv_cache_gib:g} GiB, {_gib(left)} left of {_gib(limit)} after "
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


def _resolve_context(
    demand: Demand, left: int, budget: int, asked: int | None, hidden_tokens: int | None
) -> tuple[int, tuple[str, ...]]:
    """The longest context to serve, and what to say of it where it is not the model's."""
    if asked is not None:
        return asked, ()
    longest = demand.shape.max_context_tokens
    fixed_hidden = (hidden_tokens or 0) * demand.hidden_token_bytes
    per_token = demand.context_token_bytes(1 if hidden_tokens is None else 0)
    fits = int((left - fixed_hidden) / per_token)
    in_budget = budget // demand.kv_token_bytes if demand.kv_token_bytes else fits
    in_pages = min(fits, in_budget) // demand.page_tokens * demand.page_tokens
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

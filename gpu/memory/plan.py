"""Plan each byte of device and host memory before anything is allocated. No torch.

A plan is made from the settings and a machine profile, so the machine can be elsewhere; `gpu.memory.demand` states what
each part needs. Invariant: the items of a place add up to no more than its limit, KV pages are whole, and they hold the
longest context. With a host tier, `gpu.memory.host_shares` says what that takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gpu.config import GpuConfig
from gpu.disk.record_shapes import disk_format, kv_record
from gpu.host.footprint import OFFLOAD_BLOCK_TOKENS
from gpu.memory.counting import (
    count_experts,
    count_host_states,
    count_rings,
    count_window_pages,
    count_windows,
    spare_window_tokens,
)
from gpu.memory.demand import Demand, MemoryItem, Place, PlanError
from gpu.memory.draft_model import DraftModelPlan
from gpu.memory.host_demand import HostDemand
from gpu.memory.host_shares import Budget, HostShares, resolve_host, share_memory
from gpu.memory.machine_limits import (
    HOST_SHARE,
    SMALLEST_CONTEXT_TOKENS,
    in_gib,
    require_gpu,
    require_memory,
    resolve_device,
    resolve_dtype,
    resolve_kv,
    resolve_limits,
)
from gpu.memory.refusals import (
    check_configured,
    check_disk,
    check_disk_limit,
    check_disk_rows,
    check_documents,
    check_fixed,
    check_latents,
    check_pages,
    check_pinned,
    check_snapshots,
    check_states,
)
from gpu.methods.kept import Kept
from gpu.methods.method import MethodState
from gpu.model.adapter_file import AdapterFile, adapter_bytes
from gpu.model.architecture import Architecture
from gpu.model.humming_formats import why_not_here
from gpu.model.matrix_formats import why_unpacked
from gpu.page_layout import KvFormat, page_table
from gpu.step import PartId
from gpu.weights.expert_shares import PINNED_SHARE
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import DocumentsConfig, HostConfig
from transfer.machine import GIB, GpuProfile, MachineProfile

__all__ = ["MemoryPlan", "PlanError", "PlannedSizes", "plan_memory", "require_device"]

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
WHOLE_CONTEXTS = 4  # of those that run, that have room for the longest context where the CPU is the device
MOST_EMPTY_PAGES = 2**18  # where no layer has pages, there are numbers alone


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a deployment, planned item by item. `limit_bytes[place]` bounds the sum of that place's items;
    without a GPU every item is in host memory.

    `kv`: how pages hold rows. `kv_bytes` bound windows and the `num_pages` KV pages, resident and dense
    (`gpu.page_layout`). With a host tier a context keeps `sink_tokens` and `window_tokens` on the device (whole pages),
    and all of it up to `resident_tokens`; `offload_block_tokens` are offloaded at once. Without one these are 0.
    `own_windows`: by name, of profiles whose methods need longer windows (`scheduler.planning.engine_memory`). `rings`:
    how many, of the methods that keep some, by what profiles name them (`ProfilePart`); `ring_pages`: that these share,
    of the methods whose rings share some. `num_windows` of `window_pages`
    pages and `window_bytes`, in `window_layers`, which then have no others (`gpu.kv.windows`); `spare_window_tokens` of
    each are beyond what these see; 0: there are none. num_host_states: of recurrent layers, in host memory.
    experts_on_card: of each layer's experts, the first so many, and the others lie in host memory; None: all, or the
    model has none. computed_rows: those are computed by the CPU in decode steps of up to so many, and fetched in
    others. documents_bytes: of host memory, for their chunks used last. is_packed: whether matrices of few bits, if
    there are any, stay as they are stored. chunk_tokens: most tokens of a unit of prefill. prefill_graph_sizes: of
    units whose layers are captured. draft: a model that drafts, or None.
    """

    device: Literal["cuda", "cpu"]
    dtype: Literal["bfloat16", "float32"]
    kv: KvFormat
    threads: int
    max_context_tokens: int
    max_hidden_tokens: int
    chunk_tokens: int
    page_tokens: int
    kv_bytes: int
    num_pages: int
    dense_layers: tuple[int, ...]
    sink_tokens: int
    window_tokens: int
    resident_tokens: int
    offload_block_tokens: int
    residency: Literal["adaptive", "fixed"]
    rings: tuple[tuple[PartId, int], ...]
    ring_pages: tuple[tuple[PartId, int], ...]
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
    snapshot_tokens: int | None = None
    num_host_states: int = 0
    experts_on_card: int | None = None
    computed_rows: int = 0
    documents_bytes: int = 0
    is_packed: bool = True
    own_windows: dict[str, int] = field(default_factory=dict)
    prefill_graph_sizes: tuple[int, ...] = ()
    draft: DraftModelPlan | None = None

    @property
    def num_rings(self) -> dict[PartId, int]:
        return dict(self.rings)

    @property
    def num_ring_pages(self) -> dict[PartId, int]:
        return dict(self.ring_pages)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def resident_tokens_of(self, profile: str) -> int:
        """Return the tokens up to which a context of that profile stays on the device, whole."""
        window = self.own_windows.get(profile, self.window_tokens)
        return max(self.resident_tokens, self.sink_tokens + window + self.offload_block_tokens)

    def used_bytes(self, place: Place) -> int:
        return sum(item.bytes for item in self.items if item.place == place)

    def start_bytes(self, place: Place) -> int:
        """Return how much of that is held before any request comes, at most: on the CPU device pages and windows come
        with requests, and so does host memory for what is offloaded.
        """
        later = self.host_limit_bytes if place == "host" else 0
        if place == "host" and self.device == "cpu":
            later += self.kv_bytes
        return self.used_bytes(place) - later


@dataclass(frozen=True, slots=True)
class PlannedSizes:
    """What steps and contexts are asked for: sequences that run, tokens of a prefill chunk, of the longest context, and
    of all prompts under way together; None: as many as fit. prefill_graph_sizes: of units whose layers are captured.
    """

    max_running: int
    chunk_tokens: int
    max_context_tokens: int | None
    max_hidden_tokens: int | None
    prefill_graph_sizes: tuple[int, ...] = ()


def plan_memory(
    architecture: Architecture,
    gpu: GpuConfig,
    *,
    host: HostConfig | None,
    kept: Kept | None,
    states: Sequence[MethodState],
    sizes: PlannedSizes,
    machine: MachineProfile,
    documents: DocumentsConfig | None = None,
    disk: DiskConfig | None = None,
    computed_rows: int = 0,
    draft: DraftModelPlan | None = None,
    adapters: Sequence[AdapterFile] = (),
) -> MemoryPlan:
    """Resolve what is None or `auto` and share the memory out; KV pages get what is left, or `gpu.kv_cache_gib`.

    kept: what of contexts that are offloaded stays on the device (`gpu.profiles.find_kept`), None without `host`;
    states: what attention methods keep for sequences that run (`gpu.profiles.list_states`); rings that nobody counted
    take an eighth of what weights and workspaces leave, and there is one at least; documents: how their chunks are
    kept; disk: how contexts are kept there; computed_rows, draft: see `MemoryPlan`; adapters: beside the weights. A
    context that nobody asked for shrinks to what fits; one that the configuration names must fit. Raises PlanError.
    """
    max_running, max_context_tokens, max_hidden_tokens = (
        sizes.max_running, sizes.max_context_tokens, sizes.max_hidden_tokens,
    )  # fmt: skip
    device = resolve_device(gpu, machine)
    dtype = resolve_dtype(gpu, device)
    if architecture.quantisation is not None and architecture.quantisation.humming:
        reason = why_not_here(device, dtype)
        if reason is not None:
            raise PlanError(reason)
    kv = resolve_kv(gpu, dtype, architecture)
    check_latents(architecture, host, states)
    check_states(architecture, gpu)
    tier = None
    if host is not None and kept is not None:
        excludes = any(state.part.method.excludes_blocks for state in states)
        tier = resolve_host(host, kept, architecture, gpu.page_tokens, DTYPE_BYTES[dtype], max_running, kv, excludes)
    spare_tokens = spare_window_tokens(gpu.page_tokens, tier)
    window_pages = 0
    if documents is not None:
        check_documents(architecture)
    else:  # a prompt that takes chunks has queries anywhere in it, and what they see must be there
        window_pages = count_window_pages(architecture, gpu, spare_tokens, max_context_tokens)
    if gpu.kv_windows is not None and not window_pages:
        why = "documents need all of a context" if architecture.window_layers else "no layer of the model has a window"
        raise PlanError(f"gpu.kv_windows: asked {gpu.kv_windows}, but {why}; leave it out")
    if tier is not None and window_pages:
        tier = replace(tier, window_layers=architecture.window_layers)
    if tier is not None and architecture.recurrent is not None:
        tier = replace(tier, window_layers=architecture.recurrent_layers)
    added = adapter_bytes(adapters, architecture, DTYPE_BYTES[dtype], sizes.chunk_tokens)
    place: Place = "gpu" if device == "cuda" else "host"
    beside = (MemoryItem("adapters", place, added, "of rank by rank, beside the weights"),) if added else ()
    demand = Demand(
        architecture,
        device,
        DTYPE_BYTES[dtype],
        max_running,
        sizes.chunk_tokens,
        gpu.page_tokens,
        gpu.graph_batch_sizes,
        tier,
        tuple(states),
        documents,
        0 if documents is None else documents.memory_bytes(machine.memory_bytes),
        disk,
        window_pages,
        kv=kv,
        computed_rows=computed_rows,
        asked_context=max_context_tokens,
        state_bytes=4 if gpu.state_dtype == "float32" else 2,
        unpacked=why_unpacked(architecture, machine.has_vectors) if device == "cpu" else None,
        prefill_graph_sizes=sizes.prefill_graph_sizes,
        beside=(*(() if draft is None else draft.items), *beside),
    )
    if disk is not None:
        check_disk(architecture, demand.window_layers)
        check_disk_rows(architecture, disk, kv)
        stored = disk_format(disk.rows, kv)
        check_disk_limit(disk, kv_record(architecture, demand.window_layers, stored, disk.block_tokens).file_bytes)
    place = demand.place
    limits = resolve_limits(gpu, device, machine)
    demand = count_experts(demand, limits[place], gpu, max_context_tokens, max_hidden_tokens)
    demand = count_rings(demand, limits[place])
    demand = count_windows(count_host_states(demand, gpu), limits[place], gpu)
    fixed = demand.fixed_items()
    left = limits[place] - sum(item.bytes for item in fixed if item.place == place)
    check_fixed(fixed, place, limits, left, demand)
    check_pinned(fixed, demand, machine)
    check_snapshots(fixed, demand, machine)
    check_configured(demand, gpu, left, limits[place], max_context_tokens, max_hidden_tokens)
    if host is None:
        shares, notes = _share_pages(demand, gpu, left, max_context_tokens, max_hidden_tokens)
        if device == "cpu" and gpu.kv_cache_gib is None and gpu.memory_limit_gib is None:
            wanted = _count_wanted(demand, shares)
            if wanted < shares.num_pages:
                shares = replace(shares, num_pages=wanted, kv_bytes=wanted * demand.page_bytes)
                held = *fixed, *demand.context_items(shares.context, shares.hidden_tokens), *_kv_items(demand, shares)
                limits = {place: sum(item.bytes for item in held)}
                notes = (*notes, _say_wanted(demand, shares))
    else:
        window_bytes = demand.num_windows * demand.window_bytes
        budget = _host_budget(gpu, host, fixed, demand, left, max_hidden_tokens, machine, window_bytes)
        shares, notes = _share_with_host(demand, budget, max_context_tokens)
    if demand.window_layers and demand.num_windows < max_running:
        what, key = ("windows", "gpu.kv_windows says") if window_pages else ("states", "gpu.states_gib says")
        notes = (
            *notes,
            f"there are {what} for {demand.num_windows} sequences, scheduler.max_running is {max_running}: the others "
            f"wait; {key} how many",
        )
    if device == "cpu":
        notes = (*notes, "the CPU is the device: every item is in host memory")
    elif max(gpu.graph_batch_sizes, default=0) < max_running:
        notes = (
            *notes,
            f"gpu.graph_batch_sizes: {list(gpu.graph_batch_sizes)}, scheduler.max_running: {max_running}: steps of "
            "more sequences than the largest graph has are launched kernel by kernel, several times as slowly",
        )
    return MemoryPlan(
        device=device,
        dtype=dtype,
        kv=kv,
        threads=gpu.threads or machine.physical_cores,
        max_context_tokens=shares.context,
        max_hidden_tokens=shares.hidden_tokens,
        chunk_tokens=sizes.chunk_tokens,
        prefill_graph_sizes=sizes.prefill_graph_sizes,
        page_tokens=gpu.page_tokens,
        kv_bytes=shares.kv_bytes + demand.num_windows * demand.window_bytes,
        num_pages=shares.num_pages,
        dense_layers=tier.dense_layers if tier else (),
        sink_tokens=tier.sink_tokens if tier else 0,
        window_tokens=tier.least_window_tokens if tier else 0,
        resident_tokens=tier.least_resident_tokens if tier else 0,
        offload_block_tokens=OFFLOAD_BLOCK_TOKENS if tier else 0,
        residency=host.residency if host else "fixed",
        rings=tuple((state.part.id, state.count or 0) for state in demand.states if state.has_rings),
        ring_pages=tuple((state.part.id, state.pages) for state in demand.states if state.pages),
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
        snapshot_tokens=None if architecture.recurrent is None else gpu.snapshot_tokens,
        num_host_states=demand.num_host_states,
        experts_on_card=demand.experts_on_card,
        computed_rows=demand.computed_rows,
        documents_bytes=demand.documents_bytes,
        is_packed=demand.unpacked is None,
        draft=draft,
    )


def require_device(plan: MemoryPlan, gpu: GpuProfile | None, machine_name: str) -> None:
    """Check that the GPU that was planned for is still there, new enough and large enough. Raises PlanError."""
    if plan.device == "cuda":
        card = require_gpu(gpu, machine_name)
        require_memory(plan.limit_bytes["gpu"], card.memory_bytes, card.name)


def _share_pages(
    demand: Demand, gpu: GpuConfig, left: int, max_context_tokens: int | None, max_hidden_tokens: int | None
) -> tuple[HostShares, tuple[str, ...]]:
    """Share memory out without a host tier: pages hold all of every context."""
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
    check_pages(demand, num_pages, context, max_context_tokens, hidden_tokens, spare, gpu)
    return HostShares(context, hidden_tokens, num_pages * demand.page_bytes, num_pages, 0, 0), notes


def _count_wanted(demand: Demand, shares: HostShares) -> int:
    """Return the pages that running sequences may want where the CPU is the device: there they are taken as they are
    used, and prefixes that nobody asks for again would take all that memory gives. A share for rings has no such end.
    """
    if not demand.page_bytes or demand.reuses:
        return shares.num_pages
    return min(demand.max_running, WHOLE_CONTEXTS) * -(-shares.context // demand.page_tokens)


def _say_wanted(demand: Demand, shares: HostShares) -> str:
    count = min(demand.max_running, WHOLE_CONTEXTS)
    which = "one context" if count == 1 else f"{count} contexts"
    return (
        f"memory is limited to what {which} of {shares.context:,} tokens want; gpu.kv_cache_gib or "
        "gpu.memory_limit_gib give more room, for sequences that run and for prefixes"
    )


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
    if tier.dense_per_block and in_pages < shares.host_tokens:
        notes.append(
            f"host memory has room for {shares.host_tokens:,} tokens, the dense layers' pages for {in_pages:,}: with "
            "fewer of host.dense_layers, more of it is used"
        )
    beside = shares.num_pages - tier.dense_blocks(tier.offloaded_tokens(shares.context))
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
    """Return what host memory may be taken: of the machine's where a GPU is the device, else of what is left of its
    limit.
    """
    planned = sum(item.bytes for item in fixed if item.place == "host")
    have = left if demand.place == "host" else machine.memory_bytes - planned
    asked = None if host.memory_limit_gib is None else int(host.memory_limit_gib * GIB)
    others = [item for item in fixed if item.name == "documents"]
    also = f", or documents.memory_limit_gib, which is {in_gib(others[0].bytes)}" if others else ""
    if asked is not None and asked > have:
        raise PlanError(
            f"host.memory_limit_gib: asked {in_gib(asked)}, {in_gib(max(have, 0))} of host memory left; lower it{also}"
        )
    default = min(max(have, 0), int(machine.memory_bytes * HOST_SHARE))
    if demand.expert_shares.host_bytes or demand.num_host_states:  # which nobody can page out
        default = min(default, max(0, int(machine.memory_bytes * PINNED_SHARE) - planned))
    kv = None if gpu.kv_cache_gib is None else int(gpu.kv_cache_gib * GIB) - window_bytes
    if demand.place == "host" and asked is not None and kv is not None and kv + asked > left:
        raise PlanError(
            f"gpu.kv_cache_gib: asked {gpu.kv_cache_gib:g} GiB, {in_gib(left - asked)} left beside "
            f"host.memory_limit_gib, which is {in_gib(asked)}; lower one of them{also}"
        )
    return Budget(left, kv, asked, default, hidden)


def _present(host: HostDemand | None) -> HostDemand:
    assert host is not None, "memory plan: a plan with a host tier has its demand"
    return host


def _kv_items(demand: Demand, shares: HostShares) -> tuple[MemoryItem, ...]:
    page_tokens, host = demand.page_tokens, demand.host
    note = f"{shares.num_pages:,} pages of {page_tokens} tokens, {shares.num_pages * page_tokens:,} tokens in all"
    if host is not None and host.dense_per_block:
        layers = ", ".join(str(layer) for layer in host.dense_layers if layer not in host.window_layers)
        note += f", or {host.dense_per_block} times as many of evicted tokens' dense layers {layers}"
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


def _resolve_context(
    demand: Demand, left: int, budget: int, asked: int | None, hidden_tokens: int | None
) -> tuple[int, tuple[str, ...]]:
    """Return the longest context to serve, and what to say of it where it is not the model's."""
    if asked is not None:
        return asked, ()
    longest = demand.shape.max_context_tokens
    fixed_hidden = (hidden_tokens or 0) * demand.hidden_token_bytes + page_table(demand.max_running, 1).num_bytes
    per_token = demand.context_token_bytes(1 if hidden_tokens is None else 0)
    fits = int((left - fixed_hidden) / per_token)
    in_budget = budget // demand.kv_token_bytes if demand.kv_token_bytes else fits
    in_pages = min(fits, in_budget) // demand.page_tokens * demand.page_tokens
    context = min(longest, max(in_pages, 0), hidden_tokens or longest)
    if context == longest:
        return context, ()
    return context, (f"contexts are limited to {context:,} of the model's {longest:,} tokens by what memory is left",)

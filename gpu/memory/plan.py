"""Plan each byte of device and host memory before anything is allocated. No torch.

A plan is made from the settings and a machine profile, so it can be made on another machine. `gpu.memory.demand` states
what each part needs. Invariant: the items of a place add up to no more than its limit, and whole KV pages hold the
longest context, for which `gpu.memory.host_shares` has the rules with a host tier.
"""

from collections.abc import Mapping
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
from gpu.memory.draft_model_plan import DraftModelPlan
from gpu.memory.host_demand import HostDemand
from gpu.memory.host_shares import HostShares, resolve_host
from gpu.memory.machine_limits import (
    require_gpu,
    require_memory,
    resolve_device,
    resolve_dtype,
    resolve_kv,
    resolve_limits,
)
from gpu.memory.memory_request import MemoryRequest, PlannedSizes
from gpu.memory.page_shares import count_wanted, kv_items, say_wanted, share_out, takes_as_used
from gpu.memory.refusals import (
    check_configured,
    check_disk,
    check_disk_limit,
    check_disk_rows,
    check_documents,
    check_fixed,
    check_latents,
    check_pinned,
    check_snapshots,
    check_states,
)
from gpu.model.adapter_file import adapter_bytes
from gpu.model.humming_formats import why_not_here
from gpu.model.matrix_formats import why_unpacked
from gpu.page_layout import KvFormat
from gpu.step import PartId
from transfer.disk.disk_config import DiskConfig
from transfer.machine import GpuProfile

__all__ = ["MemoryPlan", "MemoryRequest", "PlanError", "PlannedSizes", "plan_memory", "require_device"]

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a deployment, planned item by item. `limit_bytes[place]` bounds the sum of that place's items;
    without a GPU every item is in host memory. With a host tier a context keeps `sink_tokens` and `window_tokens` on
    the device (whole pages), and all of it up to `resident_tokens`; `offload_block_tokens` are offloaded at once.
    Without one these are 0.

    kv: format of rows in pages.
    kv_bytes: bytes of windows and the `num_pages` KV pages, resident and dense (`gpu.page_layout`).
    own_windows: by profile, the windows that are longer than window_tokens (`scheduler.planning.engine_memory`).
    rings: by part (`ProfilePart`), the number of rings.
    ring_pages: by part, the pages that its rings share.
    num_windows: windows of `window_pages` pages and `window_bytes`, for layers that then have no other pages
        (`gpu.kv.windows`), or states of recurrent layers; 0: there are none.
    window_layers: all layers without other pages.
    spare_window_tokens: tokens of each window beyond those that its layer attends to.
    num_host_states: states of recurrent layers in host memory.
    experts_on_card: how many of each layer's experts, the first ones, are on the card; the others are in host memory.
        None: all, or the model has none.
    computed_rows: in decode steps of up to so many rows the CPU computes those experts; larger steps fetch them.
    documents_bytes: host memory for the document chunks used last.
    is_packed: whether matrices of few bits stay as they are stored.
    chunk_tokens: the most tokens of a prefill unit.
    prefill_graph_sizes: sizes of units whose layers are captured.
    draft: the plan of the draft model, or None.
    devices: how many devices the model is split over; the plan is for each of them.
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
    limit_bytes: Mapping[Place, int]
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
    own_windows: Mapping[str, int] = field(default_factory=dict)
    prefill_graph_sizes: tuple[int, ...] = ()
    draft: DraftModelPlan | None = None
    devices: int = 1

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
        """Return the length up to which a context of that profile stays on the device as a whole."""
        window = self.own_windows.get(profile, self.window_tokens)
        return max(self.resident_tokens, self.sink_tokens + window + self.offload_block_tokens)

    def used_bytes(self, place: Place) -> int:
        return sum(item.bytes for item in self.items if item.place == place)

    def start_bytes(self, place: Place) -> int:
        """Return the most bytes of a place that are allocated before the first request. Host memory for offloaded KV
        is allocated with requests, and on a machine without a GPU so are pages and windows.
        """
        later = self.host_limit_bytes if place == "host" else 0
        if place == "host" and self.device == "cpu":
            later += self.kv_bytes
        return self.used_bytes(place) - later


def plan_memory(asked: MemoryRequest) -> MemoryPlan:
    """Resolve settings that are None or `auto`, and plan the memory. KV pages get what is left, or `gpu.kv_cache_gib`.

    Rings without a configured number take an eighth of what weights and workspaces leave; there is at least one. A
    configured longest context must fit; without one it shrinks to what fits. Raises PlanError.
    """
    demand, dtype = _find_demand(asked)
    gpu, sizes, place = asked.gpu, asked.sizes, demand.place
    limits = resolve_limits(gpu, demand.device, asked.machine)
    demand = count_experts(demand, limits[place], gpu, sizes.max_context_tokens, sizes.max_hidden_tokens)
    demand = count_rings(demand, limits[place])
    demand = count_windows(count_host_states(demand, gpu), limits[place], gpu)
    fixed = demand.fixed_items()
    left = limits[place] - sum(item.bytes for item in fixed if item.place == place)
    check_fixed(fixed, place, limits, left, demand)
    check_pinned(fixed, demand, asked.machine)
    check_snapshots(fixed, demand, asked.machine)
    check_configured(demand, gpu, left, limits[place], sizes.max_context_tokens, sizes.max_hidden_tokens)
    shares, notes = share_out(asked, demand, fixed, left)
    items = (*fixed, *demand.context_items(shares.context, shares.hidden_tokens), *kv_items(demand, shares))
    if takes_as_used(asked, demand) and (wanted := count_wanted(demand, shares)) < shares.num_pages:
        shares = replace(shares, num_pages=wanted, kv_bytes=wanted * demand.page_bytes)
        items = (*fixed, *demand.context_items(shares.context, shares.hidden_tokens), *kv_items(demand, shares))
        limits = {place: sum(item.bytes for item in items)}
        notes = (*notes, say_wanted(demand, shares))
    notes = (*notes, *_say_slow(demand, gpu))
    return _make_plan(asked, demand, dtype, shares, items, limits, notes)


def _find_demand(asked: MemoryRequest) -> tuple[Demand, Literal["bfloat16", "float32"]]:
    """Return what the parts of a deployment need, without counts that are still to be chosen, and the dtype that
    computes. Raises PlanError for settings that exclude each other.
    """
    architecture, gpu, sizes, machine = asked.architecture, asked.gpu, asked.sizes, asked.machine
    device = resolve_device(gpu, machine)
    dtype = resolve_dtype(gpu, device)
    if architecture.quantisation is not None:
        reason = why_not_here(architecture.quantisation.products, device, dtype)
        if reason is not None:
            raise PlanError(reason)
    kv = resolve_kv(gpu, machine, dtype, architecture, asked.host is not None or asked.documents is not None)
    check_latents(architecture, asked.host, asked.states)
    check_states(architecture, gpu)
    tier = _find_tier(asked, kv, dtype)
    window_pages = _find_window_pages(asked, spare_window_tokens(gpu.page_tokens, tier))
    if tier is not None and window_pages:
        tier = replace(tier, window_layers=architecture.window_layers)
    if tier is not None and architecture.recurrent is not None:
        tier = replace(tier, window_layers=architecture.layers_without_kv)
    documents = asked.documents
    demand = Demand(
        architecture,
        device,
        DTYPE_BYTES[dtype],
        sizes.max_running,
        sizes.chunk_tokens,
        gpu.page_tokens,
        gpu.graph_batch_sizes,
        tier,
        tuple(asked.states),
        documents,
        0 if documents is None else documents.memory_bytes(machine.memory_bytes),
        asked.disk,
        window_pages,
        kv=kv,
        computed_rows=asked.computed_rows,
        asked_context=sizes.max_context_tokens,
        state_bytes=4 if gpu.state_dtype == "float32" else 2,
        unpacked=why_unpacked(architecture, machine.has_vectors) if device == "cpu" else None,
        prefill_graph_sizes=sizes.prefill_graph_sizes,
        beside=_find_beside(asked, device, dtype),
        adapts=bool(asked.adapters),
    )
    if asked.disk is not None:
        _check_disk(asked.disk, demand, kv)
    return demand, dtype


def _find_tier(asked: MemoryRequest, kv: KvFormat, dtype: Literal["bfloat16", "float32"]) -> HostDemand | None:
    if asked.host is None or asked.kept is None:
        return None
    excludes = any(state.part.method.excludes_blocks for state in asked.states)
    return resolve_host(
        asked.host, asked.kept, asked.architecture, asked.gpu.page_tokens, DTYPE_BYTES[dtype], asked.sizes.max_running,
        kv, excludes,
    )  # fmt: skip


def _find_window_pages(asked: MemoryRequest, spare_tokens: int) -> int:
    """Return the pages of a window; 0: layers have no windows of their own. Raises PlanError if gpu.kv_windows is set
    nevertheless.
    """
    architecture, gpu, window_pages = asked.architecture, asked.gpu, 0
    if asked.documents is not None:
        check_documents(architecture)
    else:  # with document chunks a prompt has queries at any position, whose windows must all be there
        window_pages = count_window_pages(architecture, gpu, spare_tokens, asked.sizes.max_context_tokens)
    if gpu.kv_windows is not None and not window_pages:
        why = "documents need all of a context" if architecture.window_layers else "no layer of the model has a window"
        raise PlanError(f"gpu.kv_windows: asked {gpu.kv_windows}, but {why}; leave it out")
    return window_pages


def _find_beside(
    asked: MemoryRequest, device: Literal["cuda", "cpu"], dtype: Literal["bfloat16", "float32"]
) -> tuple[MemoryItem, ...]:
    """Return the items beside the model's own: those of a draft model, and adapters."""
    added = adapter_bytes(asked.adapters, asked.architecture, DTYPE_BYTES[dtype], asked.sizes.chunk_tokens)
    place: Place = "gpu" if device == "cuda" else "host"
    adapters = (MemoryItem("adapters", place, added, "of rank by rank, beside the weights"),) if added else ()
    return (*(() if asked.draft is None else asked.draft.items), *adapters)


def _check_disk(disk: DiskConfig, demand: Demand, kv: KvFormat) -> None:
    """Raise PlanError if contexts of this model cannot be kept on disk, or not within its limit."""
    check_disk(demand.shape, demand.window_layers)
    check_disk_rows(demand.shape, disk, kv)
    stored = disk_format(disk.rows, kv)
    check_disk_limit(disk, kv_record(demand.shape, demand.window_layers, stored, disk.block_tokens).file_bytes)


def _say_slow(demand: Demand, gpu: GpuConfig) -> tuple[str, ...]:
    """Return notes on what makes sequences wait, or steps slow, although the plan fits."""
    notes, max_running = [], demand.max_running
    if demand.window_layers and demand.num_windows < max_running:
        what, key = ("windows", "gpu.kv_windows says") if demand.window_pages else ("states", "gpu.states_gib says")
        notes.append(
            f"there are {what} for {demand.num_windows} sequences, scheduler.max_running is {max_running}: the others "
            f"wait; {key} how many"
        )
    if demand.device == "cpu":
        notes.append("the CPU is the device: every item is in host memory")
    elif max(gpu.graph_batch_sizes, default=0) < max_running:
        notes.append(
            f"gpu.graph_batch_sizes: {list(gpu.graph_batch_sizes)}, scheduler.max_running: {max_running}: steps of "
            "more sequences than the largest graph has are launched kernel by kernel, several times as slowly"
        )
    return tuple(notes)


def _make_plan(
    asked: MemoryRequest,
    demand: Demand,
    dtype: Literal["bfloat16", "float32"],
    shares: HostShares,
    items: tuple[MemoryItem, ...],
    limits: dict[Place, int],
    notes: tuple[str, ...],
) -> MemoryPlan:
    gpu, tier, recurrent = asked.gpu, demand.host, asked.architecture.recurrent
    assert demand.kv is not None, "memory plan: how pages hold rows is resolved"
    return MemoryPlan(
        device=demand.device,
        dtype=dtype,
        kv=demand.kv,
        threads=gpu.threads or asked.machine.physical_cores,
        max_context_tokens=shares.context,
        max_hidden_tokens=shares.hidden_tokens,
        chunk_tokens=demand.chunk_tokens,
        prefill_graph_sizes=demand.prefill_graph_sizes,
        page_tokens=demand.page_tokens,
        kv_bytes=shares.kv_bytes + demand.num_windows * demand.window_bytes,
        num_pages=shares.num_pages,
        dense_layers=tier.dense_layers if tier else (),
        sink_tokens=tier.sink_tokens if tier else 0,
        window_tokens=tier.least_window_tokens if tier else 0,
        resident_tokens=tier.least_resident_tokens if tier else 0,
        offload_block_tokens=OFFLOAD_BLOCK_TOKENS if tier else 0,
        residency=asked.host.residency if asked.host else "fixed",
        rings=tuple((state.part.id, state.count or 0) for state in demand.states if state.has_rings),
        ring_pages=tuple((state.part.id, state.pages) for state in demand.states if state.pages),
        host_limit_bytes=shares.host_limit_bytes,
        host_tokens=shares.host_tokens,
        items=items,
        limit_bytes=limits,
        notes=notes,
        window_layers=demand.window_layers,
        num_windows=demand.num_windows,
        window_bytes=demand.window_bytes,
        window_pages=demand.window_pages,
        spare_window_tokens=spare_window_tokens(demand.page_tokens, tier) if demand.window_pages else 0,
        snapshot_tokens=None if recurrent is None else gpu.snapshot_tokens,
        num_host_states=demand.num_host_states,
        experts_on_card=demand.experts_on_card,
        computed_rows=demand.computed_rows,
        documents_bytes=demand.documents_bytes,
        is_packed=demand.unpacked is None,
        draft=asked.draft,
        devices=demand.shape.devices,
    )


def require_device(plan: MemoryPlan, gpu: GpuProfile | None, machine_name: str) -> None:
    """Raise PlanError unless this machine's GPU is there, new enough and large enough for the plan."""
    if plan.device == "cuda":
        card = require_gpu(gpu, machine_name)
        require_memory(plan.limit_bytes["gpu"], card.memory_bytes, card.name)

"""Plan the memory of a draft model on the same device as the model that it drafts for. No torch.

It has weights, workspaces and pages of its own, and shares the reserves of the process.
"""

from dataclasses import dataclass
from pathlib import Path

from gpu.config import GpuConfig
from gpu.memory.demand import Demand, MemoryItem, PlanError
from gpu.memory.machine_limits import resolve_device, resolve_draft_kv, resolve_dtype
from gpu.memory.refusals import check_latents
from gpu.model.architecture import Architecture
from gpu.model.matrix_formats import why_unpacked
from gpu.page_layout import KvFormat
from transfer.machine import MachineProfile

_SHARED_RESERVES = ("processes", "CUDA runtime")


@dataclass(frozen=True, slots=True)
class DraftModelPlan:
    """The planned memory of a draft model. context_tokens: the longest context that it drafts for. num_pages: pages of
    all its contexts. chunk_tokens: the most tokens of its prefill units. kv: format of rows in its pages.
    """

    path: Path
    context_tokens: int
    num_pages: int
    chunk_tokens: int
    kv: KvFormat
    items: tuple[MemoryItem, ...]


def plan_draft_model(
    path: Path, draft: Architecture, gpu: GpuConfig, machine: MachineProfile, *, max_running: int,
    chunk_tokens: int, context_tokens: int, cache_tokens: int,
) -> DraftModelPlan:  # fmt: skip
    """Plan a draft model at `path` for contexts of up to `context_tokens`. Its pages hold `cache_tokens` of all
    contexts together. gpu: settings with `kv` resolved for the main model. Raises PlanError for a model with states or
    windows, because rejected drafts would have changed them.
    """
    if draft.recurrent is not None:
        raise PlanError(
            f"draft.model: {draft.name} has recurrent layers, whose states drafted tokens would change; choose a model "
            "of attention alone"
        )
    if draft.has_own_window_heads:
        raise PlanError(
            f"draft.model: {draft.name} has sliding windows whose cells drafted tokens would overwrite; choose another "
            "model"
        )
    device = resolve_device(gpu, machine)
    dtype = resolve_dtype(gpu, device)
    kv = resolve_draft_kv(gpu, machine, dtype, draft)
    check_latents(draft, None, ())
    context = min(context_tokens, draft.max_context_tokens, cache_tokens)
    page = gpu.page_tokens
    num_pages = min(-(-cache_tokens // page), max_running * -(-context // page))
    chunk = min(chunk_tokens, context)
    demand = Demand(
        draft, device, 4 if dtype == "float32" else 2, max_running, chunk, page, gpu.graph_batch_sizes, None, (),
        kv=kv, asked_context=context, unpacked=why_unpacked(draft, machine.has_vectors) if device == "cpu" else None,
    )  # fmt: skip
    weights, *others = demand.fixed_items()
    steps = [*(item for item in others if item.name not in _SHARED_RESERVES), *demand.context_items(context, chunk)]
    items = (
        demand.item("draft model", weights.bytes, f"{draft.name}, {weights.note}"),
        demand.item(
            "draft model's steps", sum(item.bytes for item in steps), f"workspaces, prefill of {chunk:,} tokens"
        ),
        demand.item("draft model's KV", num_pages * demand.page_bytes, f"{num_pages * page:,} tokens"),
    )
    return DraftModelPlan(path, context, num_pages, chunk, kv, items)

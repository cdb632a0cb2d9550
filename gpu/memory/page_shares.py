"""Share what weights and workspaces leave between KV pages, contexts and the host tier."""

from gpu.config import GpuConfig
from gpu.memory.demand import Demand, MemoryItem, PlanError
from gpu.memory.host_demand import HostDemand
from gpu.memory.host_shares import Budget, HostShares, share_memory
from gpu.memory.machine_limits import HOST_SHARE, SMALLEST_CONTEXT_TOKENS, in_gib
from gpu.memory.memory_request import MemoryRequest, PlannedSizes
from gpu.memory.refusals import check_pages
from gpu.page_layout import page_table
from gpu.weights.expert_shares import PINNED_SHARE
from transfer.host_config import HostConfig
from transfer.machine import GIB

WHOLE_CONTEXTS = 4  # longest contexts that have room where the CPU is the device
MOST_EMPTY_PAGES = 2**18  # where no layer has pages: they are numbers without memory


def share_out(
    request: MemoryRequest, demand: Demand, fixed: tuple[MemoryItem, ...], left: int
) -> tuple[HostShares, tuple[str, ...]]:
    """Share out the `left` bytes beside the `fixed` items. Return the shares and notes on them. Raises PlanError."""
    if request.host is None:
        return _share_pages(demand, request.gpu, left, request.sizes)
    budget = _host_budget(request, request.host, demand, fixed, left)
    return _share_with_host(demand, budget, request.sizes.max_context_tokens)


def takes_as_used(request: MemoryRequest, demand: Demand) -> bool:
    """Return whether pages are allocated as they are used, and their number is not configured."""
    gpu = request.gpu
    has_limit = gpu.kv_cache_gib is not None or gpu.memory_limit_gib is not None
    return request.host is None and demand.device == "cpu" and not has_limit


def _share_pages(demand: Demand, gpu: GpuConfig, left: int, sizes: PlannedSizes) -> tuple[HostShares, tuple[str, ...]]:
    """Share memory out without a host tier: pages hold whole contexts."""
    budget, max_context_tokens, max_hidden_tokens = left, sizes.max_context_tokens, sizes.max_hidden_tokens
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


def count_wanted(demand: Demand, shares: HostShares) -> int:
    """Return how many pages running sequences may need where the CPU is the device.

    Pages are allocated there as they are used, and without this bound prefixes that are never requested again would
    fill all memory. With rings, whose pages are not bounded, all pages are planned.
    """
    if not demand.page_bytes or demand.reuses:
        return shares.num_pages
    return min(demand.max_running, WHOLE_CONTEXTS) * -(-shares.context // demand.page_tokens)


def say_wanted(demand: Demand, shares: HostShares) -> str:
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
    request: MemoryRequest, host: HostConfig, demand: Demand, fixed: tuple[MemoryItem, ...], left: int
) -> Budget:
    """Return the budget of a plan with a host tier. Offloaded KV takes the machine's memory, or, without a GPU, a part
    of `left`. Raises PlanError for limits that do not fit.
    """
    gpu, machine = request.gpu, request.machine
    window_bytes = demand.num_windows * demand.window_bytes
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
    if demand.expert_shares.host_bytes or demand.num_host_states:  # pinned memory cannot be paged out
        default = min(default, max(0, int(machine.memory_bytes * PINNED_SHARE) - planned))
    kv = None if gpu.kv_cache_gib is None else int(gpu.kv_cache_gib * GIB) - window_bytes
    if demand.place == "host" and asked is not None and kv is not None and kv + asked > left:
        raise PlanError(
            f"gpu.kv_cache_gib: asked {gpu.kv_cache_gib:g} GiB, {in_gib(left - asked)} left beside "
            f"host.memory_limit_gib, which is {in_gib(asked)}; lower one of them{also}"
        )
    return Budget(left, kv, asked, default, request.sizes.max_hidden_tokens)


def _present(host: HostDemand | None) -> HostDemand:
    assert host is not None, "memory plan: a plan with a host tier has its demand"
    return host


def kv_items(demand: Demand, shares: HostShares) -> tuple[MemoryItem, ...]:
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
    """Return the longest context to serve, and a note if it is shorter than the model's."""
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

"""Choose counts that are not configured: experts on the card, rings of methods, windows, window pages. No torch.

Invariant: a count is the configured one, or small enough to leave the other items their share.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from gpu.config import GpuConfig
from gpu.host.footprint import OFFLOAD_BLOCK_TOKENS
from gpu.memory.demand import Demand, MemoryItem, PlanError
from gpu.memory.host_demand import HostDemand
from gpu.memory.machine_limits import SMALLEST_CONTEXT_TOKENS, in_gib, least_gib
from gpu.methods.method import MethodState
from gpu.model.architecture import Architecture
from gpu.weights.expert_shares import KV_SHARE, most_experts
from transfer.machine import GIB

RING_SHARE = 1 / 8  # for rings whose number is not configured, of what weights and workspaces leave
RINGS_PER_CONTEXT = 4  # rings that share the pages of one longest context, where their number is not configured
WINDOW_SHARE = 1 / 2  # for windows, at most, of the same memory, where other layers have pages
ONLY_WINDOWS_SHARE = 3 / 4  # for windows, where no layer has pages: the rest is for prompts under prefill
WINDOWS_PER_SEQUENCE = 2  # its own, and one that is kept for the next turn
SPARE_WINDOW_SHARE = 1 / 50  # of what one context of the configured length leaves: where windows are small enough to
MOST_SPARE_WINDOWS = 64  # fit this share, more ends of prefixes are kept, up to so many windows in all


def count_experts(demand: Demand, limit: int, gpu: GpuConfig, context: int | None, hidden_tokens: int | None) -> Demand:
    """Return the demand with the number of each layer's experts on the card.

    As many as fit into `gpu.experts_gib`, or, with "auto", as many as leave contexts the memory that they need. Raises
    PlanError if the setting is given for a model without experts, or without a GPU.
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
    least = counts[-1]
    bare = limit - _card_bytes(least.fixed_items()) + _card_bytes(least.fetching_items())

    def left_by(one: Demand) -> int:
        """Return the bytes that weights and workspaces leave. Items other than experts are the same for each count."""
        shares = one.expert_shares
        if not shares.host_bytes:  # graphs of prefill units, and no staging
            return limit - _card_bytes(one.fixed_items())
        return bare - shares.card_bytes - _card_bytes(one.fetching_items())

    @cache
    def wanted(num_windows: int) -> int:
        return _bytes_of_contexts(replace(demand, num_windows=num_windows), bare, gpu, context, hidden_tokens)

    lefts = ((one, left_by(one)) for one in counts)
    return next((one for one, left in lefts if left >= wanted(_num_windows(demand, left, gpu))), least)


def _card_bytes(items: Iterable[MemoryItem]) -> int:
    return sum(item.bytes for item in items if item.place == "gpu")


def _bytes_of_contexts(
    demand: Demand, bare: int, gpu: GpuConfig, context: int | None, hidden_tokens: int | None
) -> int:
    """Return the bytes that experts must leave for contexts: `gpu.kv_cache_gib`, or a share of `bare`, the bytes left
    without any expert on the card. It is at least what one longest context takes; of an offloaded context, what it
    needs on the device.
    """
    longest, tier = context or min(SMALLEST_CONTEXT_TOKENS, demand.shape.max_context_tokens), demand.host
    if tier is None:
        pages = -(-longest // demand.page_tokens)
    else:
        down = tier.offloaded_tokens(longest)
        pages = -(-tier.floor_tokens(longest, 1) // demand.page_tokens) + tier.dense_blocks(down)
    kv_bytes = pages * demand.page_bytes + demand.num_windows * demand.window_bytes
    if gpu.kv_cache_gib is not None:
        kv_bytes = max(kv_bytes, int(gpu.kv_cache_gib * GIB))
        if context is None and tier is None and demand.kv_token_bytes:
            longest = min(demand.shape.max_context_tokens, kv_bytes // demand.kv_token_bytes)
    hidden_tokens = hidden_tokens or longest + 4 * demand.chunk_tokens  # the most of `Demand.default_hidden_tokens`
    one = kv_bytes + sum(item.bytes for item in demand.context_items(longest, hidden_tokens))
    return one if gpu.kv_cache_gib is not None else max(one, int(bare * KV_SHARE))


def count_rings(demand: Demand, limit: int) -> Demand:
    """Return the demand with the number of each method's rings: the configured one, or as many as fit into an equal
    part of RING_SHARE; at most one for each running sequence.
    """
    uncounted = [state for state in demand.states if state.has_rings and state.count is None]
    left = limit - sum(item.bytes for item in demand.fixed_items() if item.place == demand.place)
    share = int(max(0, left) * RING_SHARE / max(1, len(uncounted)))
    counted = [_count_state(state, demand, share) if state.has_rings else state for state in demand.states]
    return replace(demand, states=tuple(counted))


def _count_state(state: MethodState, demand: Demand, share: int) -> MethodState:
    """Return a method's state with the number of its rings and of the pages that they share: as configured, or within
    `share` bytes. Raises PlanError if the configured pages do not hold one longest context.
    """
    size = state.sequence_bytes(demand.served, demand.max_running, demand.stored_row.num_bytes, demand.dtype_bytes)
    own = state.footprint(demand.served, demand.max_running)
    most = -(-demand.served.max_context_tokens // own.page_tokens) if own.page_tokens else 0
    asked = state.part.method.shared_tokens(state.part.settings)
    count = state.count
    if count is None:
        with_part = size + most * own.page_bytes // RINGS_PER_CONTEXT
        count = max(1, share // with_part) if with_part else demand.max_running
    count = min(count, demand.max_running)
    if not most:
        return replace(state, count=count)
    if asked is not None and asked < demand.served.max_context_tokens:
        raise PlanError(
            f"profiles: {state.part.method.name!r}: pages for {asked:,} tokens, and contexts of up to "
            f"{demand.served.max_context_tokens:,}; raise `index_tokens` or lower scheduler.max_context_tokens"
        )
    if asked is not None:
        pages = -(-asked // own.page_tokens)
    elif state.count is not None:
        pages = count * most
    else:
        pages = max(most, (share - count * size) // own.page_bytes)
    return replace(state, count=count, pages=min(pages, count * most))


def spare_window_tokens(page_tokens: int, host: HostDemand | None) -> int:
    """Return the tokens of a window beyond those that a layer attends to. A prompt may go on from a prefix that ends
    anywhere in them: the last pages of a turn, and of an offloaded context all tokens that are not offloaded yet.
    """
    return 2 * page_tokens + (host.window_tokens + 2 * OFFLOAD_BLOCK_TOKENS if host is not None else 0)


def count_window_pages(shape: Architecture, gpu: GpuConfig, spare_tokens: int, context: int | None) -> int:
    """Return the pages of one window. 0: layers with a window have pages as other layers have, or there are none.

    Windows are used if `gpu.kv_windows` is set, if they save at least half of the memory, or if these layers have other
    KV heads than the layers with pages.
    """
    longest = max((spec.window_tokens for spec in shape.layer_pattern if spec.window_tokens is not None), default=0)
    num_pages = -(-(longest + spare_tokens) // gpu.page_tokens)
    saves = 2 * num_pages * gpu.page_tokens <= (context or shape.max_context_tokens)
    return num_pages if longest and (saves or gpu.kv_windows is not None or shape.has_own_window_heads) else 0


def count_host_states(demand: Demand, gpu: GpuConfig) -> Demand:
    """Return the demand with the number of states in `gpu.host_states_gib`. Raises PlanError if not one fits."""
    if gpu.host_states_gib is None:
        return demand
    one, count = demand.window_bytes, int(gpu.host_states_gib * GIB) // demand.window_bytes
    if not count:
        raise PlanError(
            f"gpu.host_states_gib: asked {gpu.host_states_gib:g} GiB, a state of {demand.shape.name} takes {one:,} "
            f"bytes; raise it to {least_gib(one)}"
        )
    return replace(demand, num_host_states=count)


def count_windows(demand: Demand, limit: int, gpu: GpuConfig) -> Demand:
    """Return the demand with the number of windows, or states: the configured one, or two for each running sequence
    within their share of memory. Raises PlanError if `gpu.states_gib` does not hold one state, or does not fit.
    """
    if not demand.window_layers:
        return demand
    left = limit - sum(item.bytes for item in demand.fixed_items() if item.place == demand.place)
    if gpu.kv_cache_gib is not None:
        left = min(left, int(gpu.kv_cache_gib * GIB))
    if gpu.states_gib is not None and gpu.kv_windows is None:
        asked, one = f"gpu.states_gib: asked {gpu.states_gib:g} GiB", demand.window_bytes
        count = int(gpu.states_gib * GIB) // one
        if not count:
            raise PlanError(
                f"{asked}, a state of {demand.shape.name} takes {one:,} bytes; raise it to {least_gib(one)}"
            )
        if 0 < left < count * one:
            where = "of gpu.kv_cache_gib" if gpu.kv_cache_gib is not None else "beside weights and workspaces"
            raise PlanError(f"{asked}, there are {in_gib(left)} {where}; lower it, or leave it out to take a share")
    return replace(demand, num_windows=_num_windows(demand, left, gpu))


def _num_windows(demand: Demand, left: int, gpu: GpuConfig) -> int:
    """Return the number of windows, or states, if weights and workspaces leave `left` bytes."""
    if not demand.window_layers:
        return 0
    if gpu.kv_windows is not None:
        return gpu.kv_windows
    if gpu.states_gib is not None:
        return int(gpu.states_gib * GIB) // demand.window_bytes
    share = WINDOW_SHARE if demand.kv_token_bytes else ONLY_WINDOWS_SHARE
    count = max(1, int(max(0, left) * share) // demand.window_bytes)
    unasked = left - (demand.asked_context or 0) * demand.kv_token_bytes
    cheap = min(int(max(0, unasked) * SPARE_WINDOW_SHARE) // demand.window_bytes, MOST_SPARE_WINDOWS)
    return min(count, max(WINDOWS_PER_SEQUENCE * demand.max_running, cheap))

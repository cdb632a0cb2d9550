"""Share memory in a deployment with a host tier: KV pages, resident and dense, and offloaded KV. No torch.

Invariants: beside the dense layers of the longest context, pages hold the tokens that a sequence needs to run
(`HostDemand.floor_tokens`), and that context fits into host memory.
"""

from dataclasses import dataclass

from gpu.memory.demand import Demand, PlanError
from gpu.memory.host_demand import HostDemand
from gpu.methods.kept import Kept
from gpu.model.architecture import Architecture
from gpu.page_layout import KvFormat
from transfer.host_config import HostConfig
from transfer.machine import GIB
from transfer.tier_shape import HOST_DIMS, MAX_HOST_GROUP

DENSE_SHARE = 0.6  # of KV pages, at most, for the dense layers of the longest context where that is not configured


@dataclass(frozen=True, slots=True)
class HostShares:
    """The shares of memory in a plan. kv_bytes: for resident and dense pages. host_limit_bytes: for offloaded KV and
    tables of `host_tokens` tokens.
    """

    context: int
    hidden_tokens: int
    kv_bytes: int
    num_pages: int
    host_limit_bytes: int
    host_tokens: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that is left to plan.

    left_bytes: of the device, after the items that do not depend on the context. Without a GPU, offloaded KV is a part
        of it.
    kv_bytes, host_bytes, hidden_tokens: configured values, or None.
    host_default_bytes: limit of offloaded KV where host_bytes is None.
    """

    left_bytes: int
    kv_bytes: int | None
    host_bytes: int | None
    host_default_bytes: int
    hidden_tokens: int | None


def resolve_host(
    host: HostConfig, kept: Kept, shape: Architecture, page_tokens: int, dtype_bytes: int, max_running: int,
    kv: KvFormat | None = None, excludes: bool = False,
) -> HostDemand:  # fmt: skip
    """Return what a host tier needs. kept: what stays on the device of offloaded contexts (`gpu.profiles.find_kept`).

    Raises PlanError for heads that the host cannot read, and for dense layers that the model does not have or that
    leave no layer to offload.
    """
    if shape.dim not in HOST_DIMS or shape.group > MAX_HOST_GROUP:
        dims = ", ".join(map(str, HOST_DIMS))
        raise PlanError(
            f"host: {shape.name} has heads of {shape.dim}, {shape.group} to a KV head; the host reads heads of {dims}, "
            f"up to {MAX_HOST_GROUP} to a KV head; leave out `host`"
        )
    outside = [layer for layer in kept.dense_layers if not 0 <= layer < shape.num_layers]
    if outside:
        raise PlanError(
            f"host.dense_layers: asked {outside[0]}, the model has layers 0 to {shape.num_layers - 1}; correct it"
        )
    num_dense = len(kept.dense_layers)
    if num_dense == shape.num_layers:
        why = f"asked all {num_dense} layers"
        if shape.layers_apart:
            what = "have a window" if shape.recurrent is None else "have a state, or no mixer"
            why = f"all {num_dense} layers stay on the device, {len(shape.layers_apart)} since they {what}"
        raise PlanError(f"host.dense_layers: {why}, so nothing would be offloaded; name fewer, or leave out `host`")
    return HostDemand(shape, host, kept, page_tokens, dtype_bytes, max_running, kv=kv, excludes=excludes)


def share_memory(demand: Demand, budget: Budget, context: int | None, longest: int, smallest: int) -> HostShares:
    """Return the shares for the configured `context`, or for the longest that fits, from `smallest` to `longest`.

    Resident pages hold the windows of all sequences that may run. If memory is too short for that, they hold those of
    one sequence, and the others wait for pages. Raises PlanError if not even that fits.
    """
    everyone = _fit(demand, budget, context, longest, smallest, demand.max_running)
    if isinstance(everyone, HostShares):
        return everyone
    alone = _fit(demand, budget, context, longest, smallest, 1)
    if isinstance(alone, PlanError):
        raise alone
    return alone


def _fit(
    demand: Demand, budget: Budget, context: int | None, longest: int, smallest: int, num_sequences: int
) -> HostShares | PlanError:
    if context is not None:
        return _divide(demand, budget, context, num_sequences, 1.0)
    whole = _divide(demand, budget, longest, num_sequences, DENSE_SHARE)
    if isinstance(whole, HostShares):
        return whole
    page = demand.page_tokens
    first, last = -(-smallest // page), longest // page
    while first < last:
        middle = (first + last + 1) // 2
        fits = isinstance(_divide(demand, budget, middle * page, num_sequences, DENSE_SHARE), HostShares)
        first, last = (middle, last) if fits else (first, middle - 1)
    return _divide(demand, budget, min(first * page, longest), num_sequences, DENSE_SHARE)


def _divide(
    demand: Demand, budget: Budget, context: int, num_sequences: int, dense_share: float
) -> HostShares | PlanError:
    """Return the shares for a longest context, or the error that says what is short. dense_share: the largest share of
    KV pages that its dense layers may take.
    """
    host, page = demand.host, demand.page_tokens
    assert host is not None, "host plan: no host tier to plan for"
    offloaded_tokens = host.offloaded_tokens(context)
    floor_bytes = -(-host.floor_tokens(context, num_sequences) // page) * demand.page_bytes
    dense_bytes = host.dense_blocks(offloaded_tokens) * demand.page_bytes

    shared_host = budget.host_bytes or 0 if demand.device == "cpu" else 0
    left = budget.left_bytes - shared_host
    hidden_tokens = budget.hidden_tokens or context
    spare = left - _sum(demand, context, hidden_tokens)
    if budget.hidden_tokens is None:
        rest = max(0, spare - floor_bytes - dense_bytes)
        hidden_tokens += min(4 * demand.chunk_tokens, rest // 8 // demand.hidden_token_bytes)
        spare = left - _sum(demand, context, hidden_tokens)

    kv_bytes = spare if budget.kv_bytes is None else min(spare, budget.kv_bytes)
    if budget.host_bytes is not None:
        host_limit = budget.host_bytes
    elif demand.device == "cpu":
        kv_bytes = kv_bytes if budget.kv_bytes is not None else spare // 2
        host_limit = max(0, min(spare - kv_bytes, budget.host_default_bytes))
    else:
        host_limit = budget.host_default_bytes
    host_tokens = host_limit // host.host_token_bytes

    wanted_bytes = host.host_context_bytes(context)
    if wanted_bytes > host_limit:
        return PlanError(
            f"host.memory_limit_gib: a context of {context:,} tokens takes {_gib(wanted_bytes)} of host memory, there "
            f"are {_gib(host_limit)}; raise it or lower scheduler.max_context_tokens"
        )
    if kv_bytes - floor_bytes < dense_bytes or dense_bytes > dense_share * kv_bytes:
        is_asked = budget.kv_bytes is not None and budget.kv_bytes <= spare
        key = "gpu.kv_cache_gib" if is_asked else "gpu.memory_limit_gib"
        return PlanError(
            f"{key}: {_gib(max(kv_bytes, 0))} of KV pages, resident ones need {_gib(floor_bytes)} and the dense layers "
            f"of {context:,} tokens {_gib(dense_bytes)}; raise it, or lower "
            "host.resident_tokens or scheduler.max_context_tokens"
        )
    num_pages = kv_bytes // demand.page_bytes
    return HostShares(context, hidden_tokens, kv_bytes, num_pages, host_limit, host_tokens)


def _sum(demand: Demand, context: int, hidden_tokens: int) -> int:
    return sum(item.bytes for item in demand.context_items(context, hidden_tokens))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"

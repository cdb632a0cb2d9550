"""Attend with one query token per request to its paged context: partials (out, natural-log lse) of stated cells.

A (request, head) reads *near*, `[0, skip_begin)` and `[cut, context_len)`, and *far*, `[skip_end, cut)`, as two
partials; without bounds, near is the whole context. Cells beyond a context or in the skipped range, and pages that hold
nothing else, are never read. A partial of no cells is (0, -inf). Bytes moved: a key and a value (2 * itemsize * dim; of
codes 2 * (dim + 4)) for each cell that a head of a query group reads, once for the group, and for the rest of the
blocks at its bounds.

On a GPU a whole context is cut into splits (split-KV, as in FlashDecoding), with one program for each (request, KV
head, split); a second kernel merges a request's splits. The launch fixes the number of programs, so a CUDA graph serves
every context length; programs that a short context does not need end at once. With bounds, spans differ, and
`balanced_decode_attention` cuts them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import INTERPRETED, check, check_contiguous, check_dtype, runs_on_triton
from gpu.operations.decode_attention.attended_blocks import (
    MAXIMA_CELLS,
    attend_blocks,
    blocks_of_split,
    group_rows,
    store_partial,
)
from gpu.operations.decode_attention.attended_codes import INTEGER_CONFIGS, multiplies_integers
from gpu.operations.decode_attention.balanced_decode_attention import launch_balanced
from gpu.operations.decode_attention.decode_launch import Given, PagedReads, Workspace
from gpu.operations.decode_attention.paged_decode_reference import attend_cells, attend_whole
from gpu.operations.decode_attention.split_rows import (
    filling_splits,
    num_rows,
    num_splits,
    scratch_arrays,
)
from gpu.operations.kv.kv_rows import check_pages, kind_of
from transfer.allocation import allocate_empty
from transfer.partial import Partial

# (itemsize of a stored element, dim): block_tokens, num_warps, num_stages, programs per multiprocessor. Every row fits
# 99 KiB of shared memory.
CONFIGS = {
    (1, 64): (32, 1, 3, 8),
    (1, 96): (32, 1, 3, 8),
    (1, 128): (32, 1, 3, 8),
    (1, 256): (64, 4, 3, 4),
    (1, 512): (64, 4, 1, 4),
    (2, 64): (64, 2, 3, 8),
    (2, 96): (64, 4, 2, 4),
    (2, 128): (32, 2, 2, 8),
    (2, 256): (32, 4, 2, 4),
    (2, 512): (16, 4, 2, 4),
    (4, 64): (32, 4, 2, 4),
    (4, 96): (32, 4, 2, 4),
    (4, 128): (32, 4, 2, 4),
    (4, 256): (16, 4, 2, 4),
    (4, 512): (16, 4, 1, 4),
}

REDUCED_DIMS = 128  # of a program that merges splits: with all 512 of a head it would take as long as attention
NUMBERS_OF_A_WARP = 1024  # of merged splits: with fewer per warp, programs wait for their warps
DECODED_DIMS = tuple(sorted({dim for _, dim in CONFIGS}))


@dataclass(frozen=True, slots=True)
class DevicePartials:
    """The partials of a launch: near, and far if it was asked for and there are bounds."""

    near: Partial
    far: Partial | None


def workspace_for(
    max_requests: int, num_heads: int, num_kv_heads: int, dim: int, max_context_tokens: int,
    device: torch.device | str, has_far: bool = False,
) -> Workspace:  # fmt: skip
    """Allocate the scratch memory for all launches of up to `max_requests` requests of up to
    `max_context_tokens` each.
    """
    device = torch.device(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    parts = 1 + has_far
    rows = 0
    if num_sms or INTERPRETED:
        rows = max(
            num_rows(count, num_kv_heads, max_context_tokens, parts, num_sms) for count in range(1, max_requests + 1)
        )
    scratch = scratch_arrays(rows, num_heads, dim)
    return Workspace(
        allocate_empty(scratch["out"], device),
        allocate_empty(scratch["lse"], device),
        parts,
        max_requests,
        max_context_tokens,
        num_sms,
    )


def paged_decode_attention_reference(
    reads: PagedReads,
    bounds: Tensor | None = None,
    has_far: bool = False,
    maxima: Tensor | None = None,
) -> DevicePartials:
    """Compute `paged_decode_attention` in plain torch, on CPU only. In float64 the partials are float64 too."""
    query, *pages, context_lens, scale = reads
    slots = reads.slots
    context = torch.where(slots >= 0, context_lens, 0)[:, None]
    if bounds is None and maxima is None:
        whole = attend_whole(query, *pages, context_lens, scale)
        return DevicePartials(Partial(whole.out, whole.lse, context.expand(query.shape[:2]).to(torch.int32)), None)
    skip_begin, skip_end, cut = torch.zeros(3, *query.shape[:2]) if bounds is None else bounds.minimum(context)
    cells = torch.arange(max(int(context.max()), 1))
    is_near = (cells < skip_begin[..., None]) | ((cells >= cut[..., None]) & (cells < context[..., None]))
    is_far = (cells >= skip_end[..., None]) & (cells < cut[..., None]) & has_far
    near, logits = attend_cells(query, *pages, is_near, scale)
    far, more_logits = attend_cells(query, *pages, is_far, scale)
    if maxima is not None:
        largest = logits.maximum(more_logits).split(MAXIMA_CELLS, -1)
        maxima.fill_(float("-inf"))
        maxima[..., : len(largest)] = torch.stack([block.amax(-1) for block in largest], -1)
    return DevicePartials(near, far if has_far else None)


@triton.jit(do_not_specialize=["num_splits", "filling"])
def _split_kernel(
    query, key_pages, value_pages, page_table, slots, context_lens, maxima,
    split_out, split_lse, split_covered, scale_log2, query_stride, max_pages, num_splits, filling,
    maxima_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WARPS: tl.constexpr, MAXIMA: tl.constexpr,
    COUNTED: tl.constexpr, KIND: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    member = tl.arange(0, BLOCK_GROUP)
    head = kv_head * GROUP + member
    is_head = member < GROUP
    context = tl.where(tl.load(slots + request) >= 0, tl.load(context_lens + request), 0)
    num_blocks = tl.cdiv(context, BLOCK_TOKENS)
    split_blocks = blocks_of_split(context, filling, num_splits, BLOCK_TOKENS)
    first = split * split_blocks
    if first >= num_blocks:  # short contexts leave splits empty; the reduction skips these
        return

    column = tl.arange(0, BLOCK_DIM)[None, :]
    rows = tl.load(query + request * query_stride + head[:, None] * DIM + column,
                   mask=is_head[:, None] & (column < DIM), other=0.0)  # fmt: skip
    pages = page_table + tl.load(slots + request).to(tl.int64) * max_pages
    highest = maxima + (request * (KV_HEADS * GROUP) + head) * maxima_stride
    last = tl.minimum(first + split_blocks, num_blocks)
    top, mass, out, covered = attend_blocks(
        rows, key_pages, value_pages, pages, highest, kv_head, first, last, context, is_head, scale_log2,
        KV_HEADS, DIM, BLOCK_DIM, PAGE_TOKENS, BLOCK_GROUP, BLOCK_TOKENS, WARPS, MAXIMA, COUNTED, KIND,
        INTEGERS,
    )  # fmt: skip
    row = (request * num_splits + split) * (KV_HEADS * GROUP) + head
    store_partial(split_out, split_lse, split_covered, row, top, mass, out, covered, is_head, DIM, BLOCK_DIM, COUNTED)


@triton.jit(do_not_specialize=["num_splits", "filling"])
def _reduce_kernel(
    split_out, split_lse, split_covered, out, lse, covered, slots, context_lens, num_splits, filling,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)  # programs of further dims store the same lse
    context = tl.where(tl.load(slots + request) >= 0, tl.load(context_lens + request), 0)
    num_blocks = tl.cdiv(context, BLOCK_TOKENS)
    split_blocks = blocks_of_split(context, filling, num_splits, BLOCK_TOKENS)
    split = tl.arange(0, BLOCK_SPLITS)
    is_used = (split * split_blocks < num_blocks) & (split < num_splits)
    column = tl.program_id(2) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    row = (request * num_splits + split) * HEADS + head
    lse2 = tl.load(split_lse + row, mask=is_used, other=float("-inf"))
    top = tl.max(lse2, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse2 - top)
    mass = tl.sum(weights, 0)
    has_mass = mass != 0.0
    divisor = tl.where(has_mass, mass, 1.0)
    parts = tl.load(split_out + row[:, None] * DIM + column[None, :],
                    mask=(lse2 != float("-inf"))[:, None] & (column < DIM)[None, :], other=0.0)  # fmt: skip
    merged = tl.sum(parts * weights[:, None], 0) / divisor
    LN2: tl.constexpr = 0.6931471805599453
    to = request * HEADS + head
    tl.store(out + to * DIM + column, merged, mask=column < DIM)
    tl.store(lse + to, tl.where(has_mass, (top + tl.log2(divisor)) * LN2, float("-inf")))
    if COUNTED:
        tl.store(covered + to, tl.sum(tl.load(split_covered + row, mask=is_used, other=0), 0))


def paged_decode_attention(
    reads: PagedReads,
    workspace: Workspace,
    bounds: Tensor | None = None,
    has_far: bool = False,
    maxima: Tensor | None = None,
    is_counted: bool = False,
) -> DevicePartials:
    """Attend with each request's query to the cells of slot `slots[i]` that its heads read.

    bounds: int32 `[3, requests, heads]`, whose axes may be expanded: skip_begin <= skip_end <= cut; None: all is near.
    has_far: False if all cuts are at the skipped range's end. maxima: float32 `[requests, heads, blocks]`, filled with
    the largest natural logit of each 16 cells, -inf if a head reads none of them. Partials are out float32 `[requests,
    heads, dim]`, lse float32 `[requests, heads]`, natural log, and with `is_counted` int32 `covered`. Raises ValueError
    for another shape, dtype or device, or for more requests than the workspace holds; context lengths, bounds and page
    ids are trusted.
    """
    query, key_pages, value_pages, page_table, slots, context_lens, _ = reads
    op, (requests, heads, dim), device = "paged_decode_attention", query.shape, query.device
    num_pages, kv_heads, page_tokens = key_pages.shape[:3]
    if heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads over {kv_heads} KV heads; wanted a multiple")
    check_pages(op, "key_pages", key_pages, (num_pages, kv_heads, page_tokens, dim), query.dtype, device)
    check(op, "value_pages", value_pages, tuple(key_pages.shape), key_pages.dtype, device)
    check(op, "page_table", page_table, tuple(page_table.shape), torch.int32, device)
    check(op, "slots", slots, (requests,), torch.int32, device)
    check(op, "context_lens", context_lens, (requests,), torch.int32, device)
    if bounds is not None and (bounds.shape != (3, requests, heads) or bounds.dtype != torch.int32):
        got = f"{tuple(bounds.shape)} {bounds.dtype}"
        raise ValueError(f"{op}: bounds are {got}; wanted {(3, requests, heads)} torch.int32")
    if maxima is not None:
        check(op, "maxima", maxima, (requests, heads, maxima.shape[-1]), torch.float32, device)
    if not runs_on_triton(query) or requests == 0:
        return paged_decode_attention_reference(reads, bounds, has_far, maxima)
    check_dtype(op, query)
    for name, tensor in (("key_pages", key_pages), ("value_pages", value_pages), ("page_table", page_table)):
        check_contiguous(op, name, tensor)
    if query.stride()[1:] != (dim, 1):
        raise ValueError(f"{op}: query has strides {query.stride()}; wanted heads and dim contiguous")
    parts = 1 + (has_far and bounds is not None)
    if requests > workspace.max_requests or workspace.out.shape[1:] != (heads, dim) or workspace.parts < parts:
        held = f"{workspace.max_requests} requests of {tuple(workspace.out.shape[1:])}, {workspace.parts} parts"
        raise ValueError(
            f"{op}: {requests} requests of {(heads, dim)}, {parts} parts, the workspace holds {held}; allocate a larger"
        )
    if (key_pages.element_size(), dim) not in CONFIGS:
        raise ValueError(f"{op}: dim is {dim}; wanted one of {DECODED_DIMS}")
    out = torch.empty(parts, requests, heads, dim, dtype=torch.float32, device=device)
    lse = torch.empty(parts, requests, heads, dtype=torch.float32, device=device)
    covered = torch.empty(parts, requests, heads, dtype=torch.int32, device=device) if is_counted else None
    if maxima is not None:
        maxima.fill_(float("-inf"))
    if bounds is None:
        _launch_splits(reads, maxima, workspace, Given(out, lse, covered))
    else:
        launch_balanced(reads, bounds, maxima, workspace, Given(out, lse, covered))
    counts = [None] * parts if covered is None else covered.unbind()
    near, *far = map(Partial, out.unbind(), lse.unbind(), counts)
    return DevicePartials(near, *(far or [None]))


def _launch_splits(reads: PagedReads, maxima: Tensor | None, workspace: Workspace, given: Given) -> None:
    """Launch for the whole of each context, for checked arguments. given: buffers of one part."""
    query, key_pages, value_pages, page_table, slots, context_lens, scale = reads
    _, lse, covered = given
    (requests, heads, dim), (kv_heads, page_tokens) = query.shape, key_pages.shape[1:3]
    group, kind = heads // kv_heads, kind_of(key_pages)
    integers = multiplies_integers(query, group, kind)
    config = INTEGER_CONFIGS[dim] if integers else CONFIGS[key_pages.element_size(), dim]
    block_tokens, num_warps, num_stages, programs = config
    filling = filling_splits(requests * kv_heads, workspace.num_sms, programs)
    splits = num_splits(filling, workspace.max_context_tokens)
    is_counted = covered is not None
    split_covered = slots  # a placeholder that the kernel does not read
    if is_counted:
        split_covered = torch.empty(requests * splits, heads, dtype=torch.int32, device=query.device)
    _split_kernel[(requests, kv_heads, splits)](
        query, key_pages, value_pages, page_table, slots, context_lens, lse if maxima is None else maxima,
        workspace.out, workspace.lse, split_covered, scale * 1.4426950408889634, query.stride(0), page_table.stride(0),
        splits, filling, 0 if maxima is None else maxima.shape[-1],
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), PAGE_TOKENS=page_tokens,
        BLOCK_GROUP=group_rows(group, kind, integers), BLOCK_TOKENS=block_tokens, WARPS=num_warps,
        MAXIMA=maxima is not None, COUNTED=is_counted, KIND=kind, INTEGERS=integers,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    merge_splits(workspace, split_covered, slots, context_lens, splits, filling, block_tokens, given)


def merge_splits(
    workspace: Workspace, split_covered: Tensor, slots: Tensor, context_lens: Tensor, splits: int, filling: int,
    block_tokens: int, given: tuple[Tensor, Tensor, Tensor | None],
) -> None:  # fmt: skip
    """Merge each request's splits in the workspace; they are cut at whole blocks of `block_tokens`.

    splits: of the longest context. filling: of a short one. given: out, lse and covered of one part, which receive the
    partial.
    """
    out, lse, covered = given
    requests, heads, dim = out.shape[-3:]
    block_dim, block_splits = min(REDUCED_DIMS, triton.next_power_of_2(dim)), triton.next_power_of_2(splits)
    _reduce_kernel[(requests, heads, triton.cdiv(dim, block_dim))](
        workspace.out, workspace.lse, split_covered, out, lse, slots if covered is None else covered, slots,
        context_lens, splits, filling,
        HEADS=heads, DIM=dim, BLOCK_DIM=block_dim, BLOCK_SPLITS=block_splits,
        BLOCK_TOKENS=block_tokens, COUNTED=covered is not None,
        num_warps=min(4, max(1, block_splits * block_dim // NUMBERS_OF_A_WARP)),
    )  # fmt: skip

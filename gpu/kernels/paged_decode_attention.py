"""Attention of one query token per request over its paged context: a partial (out, natural-log lse).

It refuses to know which tokens are resident: it covers `[0, context_len)` of the slot's page table. Invariant: rows
beyond a context, and pages that it does not own, are never read into the result; an empty context gives (0, -inf).
Bytes moved: 2 * itemsize * kv_heads * dim * sum(context_lens), each key and value once for its whole query group.

On a GPU a context is cut into splits (split-KV, as in FlashDecoding), one program for each (request, KV head, split); a
second kernel merges a request's splits. The number of splits is fixed by the launch, so a CUDA graph holds for every
context length; the range of a split is worked out on the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import INTERPRETED, check, check_contiguous, check_dtype, runs_on_triton
from transfer.partial import Partial

MAX_SPLITS = 128
MAX_SPLIT_TOKENS = 8192
PROGRAMS_PER_SM = 4
MIN_GROUP_ROWS = 16  # the smallest tile that tensor cores take

# A context whose keys and values are no more goes through CPU attention in one batch with others like it. Measured in
# float32, 64 requests: of 100 tokens 1.1 ms in a batch, 3.8 ms one by one; of 300 the same; of 1024 3x slower.
BATCHED_BYTES = 256 * 1024

# (itemsize, dim): block_tokens, num_warps, num_stages. Every row fits 99 KiB of shared memory.
CONFIGS = {
    (2, 64): (64, 4, 3),
    (2, 128): (64, 4, 2),
    (4, 64): (32, 4, 2),
    (4, 128): (32, 4, 2),
}


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch of the split kernel: out float32 `[rows, heads, dim]`, lse float32 `[rows, heads]`, log base 2.

    A launch uses the first requests * splits rows. On CPU both are empty.
    """

    out: Tensor
    lse: Tensor
    max_requests: int
    max_context_tokens: int
    num_sms: int


def workspace_for(
    max_requests: int, num_heads: int, num_kv_heads: int, dim: int, max_context_tokens: int, device: torch.device | str
) -> Workspace:
    """Allocate once, for every launch of up to `max_requests` requests of up to `max_context_tokens` each."""
    device = torch.device(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    rows = 0
    if num_sms or INTERPRETED:
        counts = range(1, max_requests + 1)
        rows = max(count * num_splits(count, num_kv_heads, max_context_tokens, num_sms) for count in counts)
    return Workspace(
        torch.empty(rows, num_heads, dim, dtype=torch.float32, device=device),
        torch.empty(rows, num_heads, dtype=torch.float32, device=device),
        max_requests,
        max_context_tokens,
        num_sms,
    )


def num_splits(requests: int, kv_heads: int, max_context_tokens: int, num_sms: int) -> int:
    """Splits of one context: enough programs to fill the device, and no split so long that it ends last alone."""
    to_fill = -(-PROGRAMS_PER_SM * num_sms // (requests * kv_heads))
    to_bound = -(-max_context_tokens // MAX_SPLIT_TOKENS)
    return max(1, min(MAX_SPLITS, max(to_fill, to_bound)))


def paged_decode_attention_reference(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Partial:
    """Plain torch, on CPU only; see `paged_decode_attention`. In float64 the partial is float64 too.

    Short contexts go through torch's flash attention in one padded batch, long ones each by itself.
    """
    requests, heads, dim = query.shape
    lens = torch.where(slots >= 0, context_lens, 0).tolist()
    token_bytes = 2 * key_pages.shape[1] * dim * key_pages.element_size()
    short = [row for row, context in enumerate(lens) if 0 < context * token_bytes <= BATCHED_BYTES]
    pages = (key_pages, value_pages, page_table)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if len(short) == requests or (requests == 1 and lens[0] > 0):
        out, lse = _attend(query, *pages, slots, lens, scale)
        return Partial(out.to(wide), lse.to(wide))
    out = torch.zeros(requests, heads, dim, dtype=wide)
    lse = torch.full((requests, heads), float("-inf"), dtype=wide)
    if short:
        out_short, lse_short = _attend(query[short], *pages, slots[short], [lens[row] for row in short], scale)
        out[short], lse[short] = out_short.to(wide), lse_short.to(wide)
    for row, context in enumerate(lens):
        if context * token_bytes > BATCHED_BYTES:
            one = slice(row, row + 1)
            out[one], lse[one] = _attend(query[one], *pages, slots[one], [context], scale)
    return Partial(out, lse)


def _attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    contexts: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of requests with contexts of one token or more, padded to the longest with tokens of their own."""
    requests, heads, dim = query.shape
    kv_heads, page_tokens = key_pages.shape[1:3]
    longest = max(contexts)
    num_pages = -(-longest // page_tokens)
    owned = page_table[slots, :num_pages] if requests > 1 else page_table[slots[0], :num_pages].unsqueeze(0)
    mask = None
    if min(contexts) < longest:
        lens = torch.tensor(contexts).unsqueeze(1)
        owned = torch.where(torch.arange(num_pages) * page_tokens < lens, owned, owned[:, :1])
        mask = torch.zeros(requests, 1, 1, longest, dtype=query.dtype)
        mask.masked_fill_((torch.arange(longest) >= lens)[:, None, None], float("-inf"))
    rows = (owned.unsqueeze(1) * kv_heads + torch.arange(kv_heads).unsqueeze(1)).view(-1)
    shape = (requests, kv_heads, -1, dim)  # a page's tokens of one KV head are one row
    keys = key_pages.view(-1, page_tokens * dim).index_select(0, rows).view(shape)[:, :, :longest]
    values = value_pages.view(-1, page_tokens * dim).index_select(0, rows).view(shape)[:, :, :longest]
    if mask is not None:  # what a masked row holds must be finite: 0 * NaN is NaN
        for row, context in enumerate(contexts):
            keys[row, :, context:].zero_()
            values[row, :, context:].zero_()
    grouped = query.reshape(requests, kv_heads, heads // kv_heads, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return out.reshape(requests, heads, dim), lse.reshape(requests, heads)


@triton.jit
def _split_kernel(
    query, key_pages, value_pages, page_table, slots, context_lens, split_out, split_lse,
    scale_log2, query_stride, max_pages, num_splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + request).to(tl.int64)
    context = tl.load(context_lens + request)
    context = tl.where(slot >= 0, context, 0)
    split_tokens = tl.cdiv(tl.cdiv(context, num_splits), BLOCK_TOKENS) * BLOCK_TOKENS
    begin = split * split_tokens
    if begin >= context:  # short contexts leave splits empty; the reduction knows which
        return
    end = tl.minimum(begin + split_tokens, context)

    member = tl.arange(0, BLOCK_GROUP)
    column = tl.arange(0, DIM)
    head = kv_head * GROUP + member
    is_head = member < GROUP
    rows = tl.load(query + request * query_stride + head[:, None] * DIM + column[None, :], mask=is_head[:, None],
                   other=0.0)  # fmt: skip
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_GROUP], tl.float32)
    out = tl.zeros([BLOCK_GROUP, DIM], tl.float32)
    for first in range(begin, end, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        inside = token < end
        page = tl.load(page_table + slot * max_pages + token // PAGE_TOKENS, mask=inside, other=0).to(tl.int64)
        address = ((page * KV_HEADS + kv_head) * PAGE_TOKENS + token % PAGE_TOKENS)[:, None] * DIM + column[None, :]
        key = tl.load(key_pages + address, mask=inside[:, None], other=0.0)
        logits = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale_log2
        logits = tl.where(inside[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - higher[:, None])
        rescale = tl.exp2(top - higher)
        mass = mass * rescale + tl.sum(weights, 1)
        value = tl.load(value_pages + address, mask=inside[:, None], other=0.0)
        out = out * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = higher

    row = (request * num_splits + split) * (KV_HEADS * GROUP) + head
    has_mass = mass != 0.0
    divisor = tl.where(has_mass, mass, 1.0)
    tl.store(split_lse + row, tl.where(has_mass, top + tl.log2(divisor), float("-inf")), mask=is_head)
    tl.store(split_out + row[:, None] * DIM + column[None, :], out / divisor[:, None],
             mask=(is_head & has_mass)[:, None])  # fmt: skip


@triton.jit
def _reduce_kernel(
    split_out, split_lse, out, lse, slots, context_lens, num_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.where(tl.load(slots + request) >= 0, tl.load(context_lens + request), 0)
    split_tokens = tl.maximum(tl.cdiv(tl.cdiv(context, num_splits), BLOCK_TOKENS) * BLOCK_TOKENS, 1)
    used_splits = tl.cdiv(context, split_tokens)
    split = tl.arange(0, BLOCK_SPLITS)
    column = tl.arange(0, DIM)
    row = (request * num_splits + split) * HEADS + head
    lse2 = tl.load(split_lse + row, mask=split < used_splits, other=float("-inf"))
    top = tl.max(lse2, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse2 - top)
    mass = tl.sum(weights, 0)
    has_mass = mass != 0.0
    divisor = tl.where(has_mass, mass, 1.0)
    parts = tl.load(split_out + row[:, None] * DIM + column[None, :],
                    mask=(lse2 != float("-inf"))[:, None], other=0.0)  # fmt: skip
    merged = tl.sum(parts * weights[:, None], 0) / divisor
    LN2: tl.constexpr = 0.6931471805599453
    tl.store(out + (request * HEADS + head) * DIM + column, merged)
    tl.store(lse + request * HEADS + head, tl.where(has_mass, (top + tl.log2(divisor)) * LN2, float("-inf")))


def paged_decode_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
    workspace: Workspace,
) -> Partial:
    """Softmax attention of each request's query over tokens `[0, context_lens[i])` of slot `slots[i]`.

    query: `[requests, heads, dim]`, after RoPE; key_pages, value_pages: `[num_pages, kv_heads, page_tokens, dim]`, the
    query's dtype; page_table: int32 `[max_slots, max_pages]`; slots, context_lens: int32 `[requests]`; slot -1 or
    context 0 is padding and gives an empty partial. Returns out float32 `[requests, heads, dim]`, lse float32
    `[requests, heads]`, natural log. Raises ValueError for another shape, dtype or device, or more requests than the
    workspace holds; context lengths and page ids are trusted.
    """
    op, (requests, heads, dim), device = "paged_decode_attention", query.shape, query.device
    num_pages, kv_heads, page_tokens = key_pages.shape[:3]
    if heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads over {kv_heads} KV heads; wanted a multiple")
    check(op, "key_pages", key_pages, (num_pages, kv_heads, page_tokens, dim), query.dtype, device)
    check(op, "value_pages", value_pages, tuple(key_pages.shape), query.dtype, device)
    check(op, "page_table", page_table, tuple(page_table.shape), torch.int32, device)
    check(op, "slots", slots, (requests,), torch.int32, device)
    check(op, "context_lens", context_lens, (requests,), torch.int32, device)
    if not runs_on_triton(query) or requests == 0:
        return paged_decode_attention_reference(query, key_pages, value_pages, page_table, slots, context_lens, scale)
    check_dtype(op, query)
    for name, tensor in (("key_pages", key_pages), ("value_pages", value_pages), ("page_table", page_table)):
        check_contiguous(op, name, tensor)
    if query.stride()[1:] != (dim, 1):
        raise ValueError(f"{op}: query has strides {query.stride()}; wanted heads and dim contiguous")
    if requests > workspace.max_requests or workspace.out.shape[1:] != (heads, dim):
        held = f"{workspace.max_requests} requests of {tuple(workspace.out.shape[1:])}"
        raise ValueError(f"{op}: {requests} requests of {(heads, dim)}, the workspace holds {held}; allocate a larger")
    if (query.element_size(), dim) not in CONFIGS:
        raise ValueError(f"{op}: dim is {dim}; wanted one of {sorted({dim for _, dim in CONFIGS})}")
    block_tokens, num_warps, num_stages = CONFIGS[query.element_size(), dim]
    splits = num_splits(requests, kv_heads, workspace.max_context_tokens, workspace.num_sms)
    group = heads // kv_heads
    _split_kernel[(requests, kv_heads, splits)](
        query, key_pages, value_pages, page_table, slots, context_lens, workspace.out, workspace.lse,
        scale * 1.4426950408889634, query.stride(0), page_table.stride(0), splits,
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, PAGE_TOKENS=page_tokens,
        BLOCK_GROUP=max(MIN_GROUP_ROWS, triton.next_power_of_2(group)), BLOCK_TOKENS=block_tokens,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    out = torch.empty(requests, heads, dim, dtype=torch.float32, device=device)
    lse = torch.empty(requests, heads, dtype=torch.float32, device=device)
    _reduce_kernel[(requests, heads)](
        workspace.out, workspace.lse, out, lse, slots, context_lens, splits,
        HEADS=heads, DIM=dim, BLOCK_SPLITS=triton.next_power_of_2(splits), BLOCK_TOKENS=block_tokens, num_warps=4,
    )  # fmt: skip
    return Partial(out, lse)

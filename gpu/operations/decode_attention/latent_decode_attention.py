"""Attend with one query token per request to its paged latent rows. The partial's values are latents, too.

All heads share one row per token: a latent of `rank` numbers, and `rotated` numbers after RoPE. Scores use the whole
row, values only its latent. A tile of tokens is read once for up to MOST_HEADS heads. A context is cut into splits as
in `paged_decode_attention`, whose second kernel merges them. Bytes moved: each token's row, once per MOST_HEADS heads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, check_dtype, runs_on_triton
from gpu.operations.decode_attention.attended_blocks import blocks_of_split, store_partial
from gpu.operations.decode_attention.decode_launch import Workspace
from gpu.operations.decode_attention.paged_decode_attention import merge_splits
from gpu.operations.decode_attention.split_rows import filling_splits, num_splits
from gpu.operations.kv.kv_rows import PLAIN, floats_of, kind_of, widen
from gpu.operations.kv.latent_rows import check_latent_pages, read_latents
from transfer.partial import Partial

_PLAIN = tl.constexpr(PLAIN)
MOST_HEADS = {2: 32, 4: 16}  # of one program, by the itemsize of the query
TILES = {2: (32, 8, 2), 4: (16, 8, 1)}  # tokens, warps and stages; within 99 KiB of shared memory at a rank of 512
LEAST_HEADS = 16  # the fewest rows of a product of tiles


class LatentReads(NamedTuple):
    """What attention to latents reads.

    query: `[requests, heads, rank + rotated]`, absorbed: its latent part is multiplied by the matrix that makes keys.
    pages: `[num_pages, 1, page_tokens, rank + rotated]`, in the query's dtype, or in codes (`latent_rows`). page_table:
    int32 `[max_slots, max_pages]`, by cell. slots, context_lens (in cells): int32 `[requests]`; slot -1 or context
    length 0 is padding.
    """

    query: Tensor
    pages: Tensor
    page_table: Tensor
    slots: Tensor
    context_lens: Tensor
    scale: float
    rank: int


def latent_decode_attention_reference(reads: LatentReads) -> Partial:
    """Compute `latent_decode_attention` in plain torch, in the query's dtype, on the CPU."""
    query, pages, page_table, slots, context_lens, scale, rank = reads
    requests, heads, _ = query.shape
    out = torch.zeros(requests, heads, rank, dtype=query.dtype)
    lse = torch.full((requests, heads), float("-inf"), dtype=query.dtype)
    page_tokens = pages.shape[2]
    context = torch.where(slots >= 0, context_lens, 0)
    for request, length in enumerate(context.tolist()):
        if length == 0:
            continue
        page_ids = page_table[slots[request], : -(-length // page_tokens)].long()
        rows = read_latents(pages, page_ids, rank, query.dtype)[:length]
        logits = (query[request] @ rows.T) * scale
        lse[request] = torch.logsumexp(logits, 1)
        out[request] = (logits - lse[request, :, None]).exp() @ rows[:, :rank]
    return Partial(out, lse, context[:, None].expand(requests, heads).to(torch.int32))


@triton.jit(do_not_specialize=["num_splits", "filling"])
def _latent_split_kernel(
    query, pages, page_table, slots, context_lens, split_out, split_lse, split_covered, scale_log2, query_stride,
    max_pages, num_splits, filling,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, COUNTED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = head < HEADS
    slot = tl.load(slots + request)
    context = tl.where(slot >= 0, tl.load(context_lens + request), 0)
    num_blocks = tl.cdiv(context, BLOCK_TOKENS)
    split_blocks = blocks_of_split(context, filling, num_splits, BLOCK_TOKENS)
    first = split * split_blocks
    if first >= num_blocks:
        return
    last = tl.minimum(first + split_blocks, num_blocks)
    ROW: tl.constexpr = RANK + ROTATED
    column, turning = tl.arange(0, RANK), tl.arange(0, ROTATED)
    own = query + request * query_stride + head[:, None] * ROW
    rows = tl.load(own + column[None, :], mask=is_head[:, None], other=0.0)
    turned = tl.load(own + RANK + turning[None, :], mask=is_head[:, None], other=0.0)
    table = page_table + slot.to(tl.int64) * max_pages
    top = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_HEADS], tl.float32)
    out = tl.zeros([BLOCK_HEADS, RANK], tl.float32)
    covered = tl.zeros([BLOCK_HEADS], tl.int32)
    for block in tl.range(first, last):
        token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        is_token = token < context
        page = tl.load(table + token // PAGE_TOKENS, mask=is_token, other=0).to(tl.int64)
        if KIND == _PLAIN:
            source = pages + (page * PAGE_TOKENS + token % PAGE_TOKENS)[:, None] * ROW
            latents = tl.load(source + column[None, :], mask=is_token[:, None], other=0.0)
            keys = tl.load(source + RANK + turning[None, :], mask=is_token[:, None], other=0.0)
            logits = tl.dot(rows, tl.trans(latents), input_precision="ieee")
            logits += tl.dot(turned, tl.trans(keys), input_precision="ieee")
        else:
            source = pages + (page * (PAGE_TOKENS * (ROW + 8)) + token % PAGE_TOKENS * ROW)[:, None]
            word = page * (PAGE_TOKENS * (ROW + 8) // 4) + PAGE_TOKENS * ROW // 4 + token % PAGE_TOKENS * 2
            scale = tl.load(floats_of(pages) + word, mask=is_token, other=0.0)
            of_keys = tl.load(floats_of(pages) + word + 1, mask=is_token, other=0.0)
            codes = tl.load(source + column[None, :], mask=is_token[:, None], other=0)
            latents = widen(codes, query.dtype.element_ty, KIND)
            codes = tl.load(source + RANK + turning[None, :], mask=is_token[:, None], other=0)
            logits = tl.dot(rows, tl.trans(latents), input_precision="ieee") * scale[None, :]
            keys = widen(codes, query.dtype.element_ty, KIND)
            logits += tl.dot(turned, tl.trans(keys), input_precision="ieee") * of_keys[None, :]
        logits = tl.where(is_token[None, :], logits * scale_log2, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))  # finite: a block that is read has a token
        weights = tl.exp2(logits - highest[:, None])
        rescale = tl.exp2(top - highest)
        mass = mass * rescale + tl.sum(weights, 1)
        if KIND != _PLAIN:
            weights *= scale[None, :]
        out = out * rescale[:, None] + tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")
        top = highest
        if COUNTED:
            covered += tl.sum(is_token.to(tl.int32), 0)
    row = (request * num_splits + split) * HEADS + head
    store_partial(split_out, split_lse, split_covered, row, top, mass, out, covered, is_head, RANK, RANK, COUNTED)


def latent_decode_attention(reads: LatentReads, workspace: Workspace, is_counted: bool = False) -> Partial:
    """Attend with each request's query to the rows of slot `slots[i]`. Padding gives an empty partial.

    workspace: for `heads` heads of `rank`. Returns out float32 `[requests, heads, rank]`, lse float32 `[requests,
    heads]`, natural log, and with `is_counted` int32 `covered`. On a GPU rank and rotated are powers of two. Raises
    ValueError for another shape, dtype or device, or for more requests than the workspace holds; context lengths and
    page ids are trusted.
    """
    query, pages, page_table, slots, context_lens, scale, rank = reads
    op, (requests, heads, row), device = "latent_decode_attention", query.shape, query.device
    check_latent_pages(op, pages, row, query.dtype, device)
    check(op, "page_table", page_table, tuple(page_table.shape), torch.int32, device)
    check(op, "slots", slots, (requests,), torch.int32, device)
    check(op, "context_lens", context_lens, (requests,), torch.int32, device)
    if not runs_on_triton(query) or requests == 0:
        return latent_decode_attention_reference(reads._replace(query=query.float()))
    check_dtype(op, query)
    for name, tensor in (("pages", pages), ("page_table", page_table), ("query", query)):
        check_contiguous(op, name, tensor)
    rotated = row - rank
    if rank & (rank - 1) or rotated & (rotated - 1) or min(rank, rotated) < 16:
        raise ValueError(f"{op}: rows are {rank} + {rotated}; wanted powers of two, 16 or more")
    if requests > workspace.max_requests or workspace.out.shape[1:] != (heads, rank):
        held = f"{workspace.max_requests} requests of {tuple(workspace.out.shape[1:])}"
        raise ValueError(f"{op}: {requests} requests of {(heads, rank)}, the workspace holds {held}; allocate a larger")
    size = query.element_size()
    tile_tokens, num_warps, num_stages = TILES[size]
    block_heads = min(MOST_HEADS[size], max(LEAST_HEADS, triton.next_power_of_2(heads)))
    filling = filling_splits(requests, workspace.num_sms)
    splits = num_splits(filling, workspace.max_context_tokens)
    out = torch.empty(requests, heads, rank, dtype=torch.float32, device=device)
    lse = torch.empty(requests, heads, dtype=torch.float32, device=device)
    covered = torch.empty(requests, heads, dtype=torch.int32, device=device) if is_counted else None
    split_covered = slots  # a placeholder that the kernel does not read
    if is_counted:
        split_covered = torch.empty(requests * splits, heads, dtype=torch.int32, device=device)
    _latent_split_kernel[(requests, triton.cdiv(heads, block_heads), splits)](
        query, pages, page_table, slots, context_lens, workspace.out, workspace.lse, split_covered,
        scale * 1.4426950408889634, query.stride(0), page_table.stride(0), splits, filling,
        HEADS=heads, RANK=rank, ROTATED=rotated, PAGE_TOKENS=pages.shape[2], BLOCK_HEADS=block_heads,
        BLOCK_TOKENS=tile_tokens, COUNTED=is_counted, KIND=kind_of(pages), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    merge_splits(workspace, split_covered, slots, context_lens, splits, filling, tile_tokens, (out, lse, covered))
    return Partial(out, lse, covered)

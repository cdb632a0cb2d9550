"""What stands between a layer's projections, compiled for float32 on the CPU: RoPE with the KV write, decode attention.

Same contracts as `rope_kv_write` and `paged_decode_attention`, whose plain torch references take some sixty small
operations and a copy of every page; here a page is read where it lies. It refuses to know threads but its own pool,
which long contexts are spread over. Bytes moved: those of the two operations, keys and values once for a query group.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

import transfer.simd  # noqa: F401, what numba cannot cache it then keeps in memory
from gpu.kernels.head_norm import HeadNorms, head_norm
from gpu.kernels.paged_decode_attention import MAXIMA_CELLS, Reading
from transfer.partial import Partial

SPREAD_TOKENS = 8192  # context tokens of a batch from which more than one thread pays for its start
FINITE_OR_NOT = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; NaN and infinity stay what they are


def applies(tensor: Tensor) -> bool:
    """Whether these functions serve tensors of this device and type."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def rope_kv_write_cpu(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cells: Tensor,
    slots: Tensor,
    page_table: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See `gpu.kernels.rope_kv_write.rope_kv_write`; float32 throughout. A padding token's query is zero."""
    kv_heads, _, dim = key_pages.shape[1:]
    if norms is not None:
        head_norm(qkv, norms, num_heads, kv_heads)
    query = torch.zeros(len(qkv), num_heads, dim)
    tokens = qkv.view(-1, num_heads + 2 * kv_heads, dim)
    _rope_kv_write(
        tokens.numpy(), cos.numpy(), sin.numpy(), positions.numpy(), cells.numpy(), slots.numpy(),
        page_table.numpy(), key_pages.numpy(), value_pages.numpy(), query.numpy(),
    )  # fmt: skip
    return query


@numba.njit(nogil=True, cache=True, fastmath=FINITE_OR_NOT)
def _rope_kv_write(qkv, cos, sin, positions, cells, slots, page_table, key_pages, value_pages, query):
    heads, dim = query.shape[1:]
    kv_heads, page_tokens = key_pages.shape[1:3]
    half = dim // 2
    for token in range(qkv.shape[0]):
        slot, position, cell = slots[token], positions[token], cells[token]
        if slot < 0:
            continue
        page, offset = page_table[slot, cell // page_tokens], cell % page_tokens
        for head in range(heads + kv_heads):
            to = query[token, head] if head < heads else key_pages[page, head - heads, offset]
            for i in range(half):
                first, second = qkv[token, head, i], qkv[token, head, i + half]
                to[i] = first * cos[position, i] - second * sin[position, i]
                to[i + half] = second * cos[position, i] + first * sin[position, i]
        for head in range(kv_heads):
            for i in range(dim):
                value_pages[page, head, offset, i] = qkv[token, heads + kv_heads + head, i]


def paged_decode_attention_cpu(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
    bounds: Tensor | None = None,
    has_far: bool = False,
    maxima: Tensor | None = None,
) -> Reading:
    """See `gpu.kernels.paged_decode_attention.paged_decode_attention`; float32 throughout, always counted."""
    requests, heads, dim = query.shape
    kv_heads = key_pages.shape[1]
    parts = 1 + has_far
    out = torch.empty(parts, requests, heads, dim)
    lse = torch.empty(parts, requests, heads)
    covered = torch.empty(parts, requests, heads, dtype=torch.int32)
    lens = context_lens.numpy()
    limits = np.zeros((3, requests, heads), np.int32) if bounds is None else np.ascontiguousarray(bounds.numpy())
    highest = np.empty((requests, heads, 0), np.float32) if maxima is None else maxima.numpy()
    highest.fill(-np.inf)
    arrays = (
        query.numpy(), key_pages.numpy(), value_pages.numpy(), page_table.numpy(), slots.numpy(), lens, limits,
        np.float32(scale), out.numpy(), lse.numpy(), covered.numpy(), highest,
    )  # fmt: skip
    threads = torch.get_num_threads()
    items = requests * kv_heads
    if threads == 1 or int(lens.sum()) < SPREAD_TOKENS:
        _attend(*arrays, 0, items, 1)
    else:
        others = [_pool(threads - 1).submit(_attend, *arrays, first, items, threads) for first in range(1, threads)]
        _attend(*arrays, 0, items, threads)
        for other in others:
            other.result()
    partials = [Partial(out[part], lse[part], covered[part]) for part in range(parts)]
    return Reading(partials[0], partials[1] if has_far else None)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="decode-attention")


@numba.njit(nogil=True, cache=True, fastmath=FINITE_OR_NOT)
def _attend(query, key_pages, value_pages, page_table, slots, context_lens, bounds, scale, out, lse, covered, maxima,
            first, end, step):  # fmt: skip
    """(request, KV head) pairs `first, first + step ..`: near and then, where there is room for it, far."""
    kv_heads = key_pages.shape[1]
    group = query.shape[1] // kv_heads
    logits = np.empty((group, max(1, context_lens.max())), dtype=np.float32)
    below = np.zeros((2, group), np.int64)  # of near, and of far
    begins, ends = np.zeros((2, group), np.int64), np.zeros((2, group), np.int64)
    for item in range(first, end, step):
        request, kv_head = item // kv_heads, item % kv_heads
        heads = slice(kv_head * group, (kv_head + 1) * group)
        context = context_lens[request] if slots[request] >= 0 else 0
        for member in range(group):
            hole_begin, hole_end, cut = bounds[:, request, kv_head * group + member]
            below[0, member], begins[0, member], ends[0, member] = min(hole_begin, context), cut, context
            begins[1, member], ends[1, member] = hole_end, min(cut, context)
        for part in range(out.shape[0]):
            _attend_cells(
                query[request, heads], key_pages[:, kv_head], value_pages[:, kv_head],
                page_table[max(slots[request], 0)], below[part], begins[part], ends[part], scale, logits,
                out[part, request, heads], lse[part, request, heads], covered[part, request, heads],
                maxima[request, heads],
            )  # fmt: skip


@numba.njit(nogil=True, fastmath=FINITE_OR_NOT)
def _attend_cells(query, keys, values, pages, below, begins, ends, scale, logits, out, lse, covered, maxima):
    """One KV head's query group over the cells that some head reads, those below its `below` and in `[its begin, its
    end)`: logits, their softmax, then the weighted values."""
    group, dim = query.shape
    page_tokens = keys.shape[1]
    out[:] = np.float32(0.0)
    lse[:] = -np.inf
    covered[:] = 0
    front, back, last = below.max(), ends.max(), below.max()
    for member in range(group):
        if begins[member] < ends[member]:
            back, last = min(back, begins[member]), max(last, ends[member])
    back = max(front, back)
    num_cells = front + max(0, last - back)
    for place in range(num_cells):
        cell = place if place < front else back + place - front
        page, offset = _place(cell, pages, page_tokens, below, begins, ends)
        for member in range(group):
            if not (cell < below[member] or begins[member] <= cell < ends[member]):
                logits[member, place] = -np.inf
                continue
            product = np.float32(0.0)
            for i in range(dim):
                product += query[member, i] * keys[page, offset, i]
            logits[member, place] = product * scale
            covered[member] += 1
            if maxima.shape[1] > 0:
                block = cell // MAXIMA_CELLS
                maxima[member, block] = max(maxima[member, block], product * scale)
    for member in range(group):
        if covered[member] == 0:
            continue
        top = logits[member, :num_cells].max()
        mass = np.float32(0.0)
        for place in range(num_cells):
            weight = np.exp(logits[member, place] - top)
            logits[member, place] = weight
            mass += weight
        lse[member] = top + np.log(mass)
        for place in range(num_cells):
            logits[member, place] /= mass
    for place in range(num_cells):
        cell = place if place < front else back + place - front
        page, offset = _place(cell, pages, page_tokens, below, begins, ends)
        for member in range(group):
            if cell < below[member] or begins[member] <= cell < ends[member]:
                weight = logits[member, place]
                for i in range(dim):
                    out[member, i] += weight * values[page, offset, i]


@numba.njit(nogil=True)
def _place(cell, pages, page_tokens, below, begins, ends):
    """The page and offset of a cell that some head reads; of others anything, since there may be no page."""
    for member in range(len(below)):
        if cell < below[member] or begins[member] <= cell < ends[member]:
            return pages[cell // page_tokens], cell % page_tokens
    return pages[0], 0

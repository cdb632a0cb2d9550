"""Compute decode attention over paged rows on the CPU in float32, compiled by numba.

It reads each page in place, once per query group, and spreads long contexts over a pool of threads.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

import transfer.simd  # noqa: F401, what numba cannot cache it then keeps in memory
from gpu.operations.arguments import FINITE_OR_NOT
from gpu.operations.decode_attention.attended_blocks import MAXIMA_CELLS
from gpu.operations.decode_attention.decode_launch import PagedReads
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from transfer.partial import Partial
from transfer.simd.inner import inner

SPREAD_TOKENS = 8192  # from so many context tokens of a batch on, several threads are faster


def paged_decode_attention_cpu(
    reads: PagedReads,
    bounds: Tensor | None = None,
    has_far: bool = False,
    maxima: Tensor | None = None,
) -> DevicePartials:
    """Compute `paged_decode_attention` in float32 throughout; cells are always counted."""
    query, key_pages, value_pages, page_table, slots, context_lens, scale = reads
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
    return DevicePartials(partials[0], partials[1] if has_far else None)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="decode-attention")


@numba.njit(nogil=True, cache=True, fastmath=FINITE_OR_NOT)
def _attend(query, key_pages, value_pages, page_table, slots, context_lens, bounds, scale, out, lse, covered, maxima,
            first, end, step):  # fmt: skip
    """Attend for the pairs (request, KV head) `first, first + step ..`: near, and then far if there is room for it."""
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
            skip_begin, skip_end, cut = bounds[:, request, kv_head * group + member]
            below[0, member], begins[0, member], ends[0, member] = min(skip_begin, context), cut, context
            begins[1, member], ends[1, member] = skip_end, min(cut, context)
        for part in range(out.shape[0]):
            _attend_cells(
                query[request, heads], key_pages[:, kv_head], value_pages[:, kv_head],
                page_table[max(slots[request], 0)], below[part], begins[part], ends[part], scale, logits,
                out[part, request, heads], lse[part, request, heads], covered[part, request, heads],
                maxima[request, heads],
            )  # fmt: skip


@inner(fastmath=FINITE_OR_NOT)
def _attend_cells(query, keys, values, pages, below, begins, ends, scale, logits, out, lse, covered, maxima):
    """Attend with one KV head's query group to the cells that some head reads: logits, softmax, weighted values.

    A head reads the cells below its `below` and those in its `[begin, end)`.
    """
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


@inner
def _place(cell, pages, page_tokens, below, begins, ends):
    """Return the page and offset of a cell that some head reads.

    For other cells the result is arbitrary: they may have no page.
    """
    for member in range(len(below)):
        if cell < below[member] or begins[member] <= cell < ends[member]:
            return pages[cell // page_tokens], cell % page_tokens
    return pages[0], 0

"""Compute attention of the compiled decode step: RoPE, the write of KV, and each row's whole paged context.

A work item is one part of one (row, KV head). Contexts are cut every PART_TOKENS, so that threads share a long context,
and the thread that ends the last part merges all. Rows of one slot are adjacent, in the order of their positions. An
item also writes the rows before its own that it reads; their own items write the same numbers. Cuts follow from the
context alone and parts are merged in order, so a result depends neither on threads nor on the batch. Bytes moved: keys
and values of each context once for a group of query heads.

Pages hold rows in float32, in bf16, or as int8 codes with float32 scales behind a page's codes (as `kv_rows` makes
them). A key's scale multiplies the score of its codes, and a value's scale its weight, so no element is scaled alone.
"""

from typing import NamedTuple

import numpy as np

from gpu.cpu_step.step_arrays import PART_TOKENS
from gpu.operations.arguments import FINITE_OR_NOT
from gpu.operations.linear.numba_linear import ROWS, product
from gpu.page_layout import SCALE_BYTES
from transfer.simd.exp import exp
from transfer.simd.features import LANES
from transfer.simd.inner import inner
from transfer.simd.team import COUNTER_INT64, atomic_add, claim, end_stage
from transfer.simd.vectors import address_of, load, size_of, store, weighted_sum

_COLUMNS = 4 if LANES == 16 else 2  # vectors of a value row that a block sums for four query heads
COLUMN_BLOCK = _COLUMNS * LANES  # a head's dim is a multiple of this
_add_four = weighted_sum(4, _COLUMNS)
_add_one = weighted_sum(1, _COLUMNS)
_LARGEST_CODE = np.float32(127.0)
_SMALLEST_SCALE = np.float32(1e-30)  # the scale of rows that are all zero
_FLOAT = np.float32(0.0)  # the kind of scales, for `load` and `store`


class Parts(NamedTuple):
    """Partial results of the parts that contexts are cut into. out: float32 `[rows, heads, parts, dim]`, not yet
    divided by the mass. top, mass: `[rows, heads, parts]`. arrivals: int64 `[rows * kv_heads, COUNTER_INT64]`, zero
    between steps.
    """

    out: np.ndarray
    top: np.ndarray
    mass: np.ndarray
    arrivals: np.ndarray


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    page_tokens: int
    scale: np.float32


@inner
def num_parts(context):
    return -(-context // PART_TOKENS)


@inner
def attend(team, stage, kind, shape, key_pages, value_pages, qkv, cos, sin, rows, page_table, parts, query,
           scores, attended):  # fmt: skip
    """Attend for all rows: qkv float32 `[rows, (heads + 2 kv_heads) * dim ..]` -> attended `[rows, heads * dim ..]`.

    kind: of rows in pages, a float32, a uint16 for bf16 or an int8 for codes, as a type; key_pages, value_pages:
    addresses of `[pages, kv_heads, page_tokens, dim]`, of codes `dim + 4`; query `[group, dim]` and scores `[group,
    PART_TOKENS]`: float32 scratch of this thread. A row with slot -1 writes nothing and gives zeros.
    """
    tokens = len(rows.slots)
    most = max(1, num_parts(rows.context_lens.max()))
    items, done = tokens * shape.kv_heads * most, 0
    item = claim(team, stage, items)
    while item >= 0:
        row, kv_head, part = item // most // shape.kv_heads, item // most % shape.kv_heads, item % most
        slot, context = rows.slots[row], rows.context_lens[row]
        if slot < 0 or context == 0:
            first = kv_head * (shape.heads // shape.kv_heads) * shape.dim
            attended[row, first : first + shape.heads // shape.kv_heads * shape.dim] = np.float32(0.0)
        elif part < num_parts(context):
            begin, end = part * PART_TOKENS, min(context, (part + 1) * PART_TOKENS)
            own = row  # its own token, and the slot's tokens before it in this batch, which their items write too
            while own >= 0 and rows.slots[own] == slot:
                cell, position = rows.context_lens[own] - 1, rows.positions[own]
                if begin <= cell < end:
                    page = _page_at(0, kind, shape, page_table[slot], cell, kv_head)
                    _write(kind, shape, key_pages + page, value_pages + page, qkv[own], kv_head, cos[position],
                           sin[position], cell % shape.page_tokens, query[0])  # fmt: skip
                own -= 1
            position = rows.positions[row]
            _rotate_query(shape, qkv[row], kv_head, cos[position], sin[position], query)
            _attend_part(kind, shape, key_pages, value_pages, page_table[slot], row, kv_head, part, begin, end,
                         query, scores, parts)  # fmt: skip
            arrived = atomic_add(address_of(parts.arrivals) + 8 * COUNTER_INT64 * (row * shape.kv_heads + kv_head), 1)
            if arrived + 1 == num_parts(context):
                parts.arrivals[row * shape.kv_heads + kv_head, 0] = 0
                _merge(shape, parts, row, kv_head, num_parts(context), attended[row])
        done += 1
        item = claim(team, stage, items)
    end_stage(team, stage, items, done)


@inner
def _rotate_query(shape, qkv, kv_head, cos, sin, query):
    """Rotate and scale the group's queries."""
    half = shape.dim // 2
    for member in range(query.shape[0]):
        at = (kv_head * query.shape[0] + member) * shape.dim
        for i in range(half):
            first, second = qkv[at + i], qkv[at + i + half]
            query[member, i] = (first * cos[i] - second * sin[i]) * shape.scale
            query[member, i + half] = (second * cos[i] + first * sin[i]) * shape.scale


@inner
def _write(kind, shape, keys, values, qkv, kv_head, cos, sin, offset, rotated):
    """Write the key and the value of a token to a page of a KV head; rotated: float32 `[dim]`, scratch."""
    half = shape.dim // 2
    key, value = (shape.heads + kv_head) * shape.dim, (shape.heads + shape.kv_heads + kv_head) * shape.dim
    for i in range(half):
        first, second = qkv[key + i], qkv[key + i + half]
        rotated[i] = first * cos[i] - second * sin[i]
        rotated[i + half] = second * cos[i] + first * sin[i]
    _write_row(kind, shape, keys, offset, rotated)
    _write_row(kind, shape, values, offset, qkv[value : value + shape.dim])


@inner
def _write_row(kind, shape, page, offset, row):
    """Write a row to a page, as codes with the numbers of `kv_rows.make_codes`."""
    to = offset * shape.dim
    if not _has_scales(kind):
        for i in range(shape.dim):
            store(kind, page, to + i, row[i])
        return
    largest, broken = np.float32(0.0), np.float32(0.0)
    for i in range(shape.dim):
        largest = max(largest, abs(row[i]))
        broken += row[i] * np.float32(0.0)  # NaN where an element is not finite
    scale = max(largest / _LARGEST_CODE, _SMALLEST_SCALE) + broken
    for i in range(shape.dim):
        step = min(max(row[i] / scale, -_LARGEST_CODE), _LARGEST_CODE)
        store(kind, page, to + i, np.floor(step + np.float32(0.5)) if step == step else np.float32(0.0))
    store(_FLOAT, _scales_at(page, shape), offset, scale)


@inner
def _has_scales(kind):
    return size_of(kind) == 1


@inner
def _scales_at(page, shape):
    """Return the address of a page's scales, float32 `[page_tokens]`."""
    return page + shape.page_tokens * shape.dim


@inner
def _page_at(pages, kind, shape, table, token, kv_head):
    """Return the address of a KV head's rows in the page of `token`."""
    page = np.int64(table[token // shape.page_tokens])
    row_bytes = shape.dim * size_of(kind) + (SCALE_BYTES if _has_scales(kind) else 0)
    return pages + (page * shape.kv_heads + kv_head) * shape.page_tokens * row_bytes


@inner
def _scale_by_rows(kind, shape, page, factors, count):
    """Multiply factors `[group, count]` of the first rows of a page by the rows' scales, where they have any."""
    if _has_scales(kind):
        for member in range(factors.shape[0]):
            for token in range(count):
                factors[member, token] *= load(_FLOAT, _scales_at(page, shape), token)


@inner
def _attend_part(kind, shape, key_pages, value_pages, table, row, kv_head, part, begin, end, query, scores,
                 parts):  # fmt: skip
    """Attend to tokens `[begin, end)`, whole pages from `begin` on; scores of unwritten rows are unused."""
    group, dim = query.shape
    scores_at = address_of(scores)
    for token in range(begin, end, shape.page_tokens):
        keys = _page_at(key_pages, kind, shape, table, token, kv_head)
        next_token = min(token + shape.page_tokens, end - 1)
        ahead = _page_at(key_pages, kind, shape, table, next_token, kv_head) - keys
        for first in range(0, min(shape.page_tokens, end - token), ROWS):
            product(
                kind, keys + first * dim * size_of(kind), dim * size_of(kind), 0, 0, dim, address_of(query), dim, group,
                scores_at + 4 * (token - begin + first), scores.shape[1], ahead,
            )  # fmt: skip
        _scale_by_rows(kind, shape, keys, scores[:, token - begin :], min(shape.page_tokens, end - token))
    for member in range(group):
        head = kv_head * group + member
        parts.top[row, head, part], parts.mass[row, head, part] = _soften(scores[member, : end - begin])
        parts.out[row, head, part, :] = np.float32(0.0)
    out_at = address_of(parts.out) + 4 * dim * (part + parts.out.shape[2] * (kv_head * group + row * shape.heads))
    for token in range(begin, end, shape.page_tokens):
        values = _page_at(value_pages, kind, shape, table, token, kv_head)
        next_token = min(token + shape.page_tokens, end - 1)
        ahead = _page_at(value_pages, kind, shape, table, next_token, kv_head) - values
        _scale_by_rows(kind, shape, values, scores[:, token - begin :], min(shape.page_tokens, end - token))
        _add_values(kind, values, dim, scores_at + 4 * (token - begin), scores.shape[1],
                    min(shape.page_tokens, end - token), group, out_at, parts.out.shape[2] * dim, ahead)  # fmt: skip


@inner
def _add_values(kind, values, dim, weights, weight_stride, tokens, group, out, out_stride, ahead):
    for column in range(0, dim, COLUMN_BLOCK):
        at = values + column * size_of(kind)
        member = 0
        while group - member >= 4:
            _add_four(kind, at, dim, weights + 4 * member * weight_stride, weight_stride, tokens,
                      out + 4 * (column + member * out_stride), out_stride, ahead)  # fmt: skip
            member += 4
        while group - member >= 1:
            _add_one(kind, at, dim, weights + 4 * member * weight_stride, weight_stride, tokens,
                     out + 4 * (column + member * out_stride), out_stride, ahead)  # fmt: skip
            member += 1


@inner(fastmath=FINITE_OR_NOT)
def _soften(scores):
    """Replace scores by exp(score - top) in place; return top and the sum. NaN shows in the sum."""
    top = scores[0]
    for token in range(1, len(scores)):
        top = scores[token] if scores[token] > top else top
    mass = np.float32(0.0)
    for token in range(len(scores)):
        weight = exp(scores[token] - top)
        scores[token] = weight
        mass += weight
    return top, mass


@inner
def _merge(shape, parts, row, kv_head, count, attended):
    group = shape.heads // shape.kv_heads
    for head in range(kv_head * group, (kv_head + 1) * group):
        top = parts.top[row, head, :count].max()
        out = attended[head * shape.dim : (head + 1) * shape.dim]
        out[:] = np.float32(0.0)
        mass = np.float32(0.0)
        for part in range(count):
            share = exp(parts.top[row, head, part] - top)
            mass += share * parts.mass[row, head, part]
            for i in range(shape.dim):
                out[i] += share * parts.out[row, head, part, i]
        for i in range(shape.dim):
            out[i] /= mass

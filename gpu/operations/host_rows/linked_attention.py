"""Attend to chunks of rows in host memory, which the device reads over the link.

    logits = scale q (k_scale k + centre)      out = sum softmax(logits) v_scale v      lse = log sum exp(logits)

Rows of a step that read the same tokens are computed together, so each key and value crosses the link once for all of
them. A program takes one KV head and one chunk of its tokens, and a second kernel merges chunks. Sums are float32.
Products are in the query's dtype, which represents int8 rows exactly.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_dtype, runs_on_triton
from gpu.operations.host_rows.chunk_columns import (
    CENTRE,
    CHUNKS,
    COLUMNS,
    KEY_SCALE,
    KEYS,
    TOKENS,
    VALUE_SCALE,
    VALUES,
)
from gpu.operations.host_rows.host_bytes import bytes_at
from transfer.merge import NO_MASS

MOST_TOGETHER = 8  # most rows that read the same tokens together

_BLOCK_BYTES = 16_384  # of keys at once, in the query's dtype
_WARPS, _STAGES = 4, 2
_KEYS, _VALUES = tl.constexpr(KEYS), tl.constexpr(VALUES)
_CENTRE, _KEY_SCALE, _VALUE_SCALE = tl.constexpr(CENTRE), tl.constexpr(KEY_SCALE), tl.constexpr(VALUE_SCALE)
_TOKENS, _COLUMNS = tl.constexpr(TOKENS), tl.constexpr(COLUMNS)


@triton.jit
def _number(mine, CHUNKS: tl.constexpr, COLUMN: tl.constexpr):
    return tl.load(mine + COLUMN * CHUNKS)


@triton.jit
def _rows_at(mine, kv_head, token, inside, kind, CHUNKS: tl.constexpr, AT: tl.constexpr, DIM: tl.constexpr,
             WIDE: tl.constexpr):  # fmt: skip
    """Load the stored rows of tokens, `[tokens, WIDE]`, 0 behind DIM. kind: any pointer of the rows' type."""
    address = _number(mine, CHUNKS, AT) + kv_head * _number(mine, CHUNKS, AT + 1)
    address += token.to(tl.int64) * _number(mine, CHUNKS, AT + 2)
    column = tl.arange(0, WIDE)[None, :]
    at = tl.multiple_of(address.to(kind.dtype)[:, None], [1, 16]) + column
    return tl.load(at, mask=inside[:, None] & (column < DIM), other=0)


@triton.jit
def _floats_at(mine, first, CHUNKS: tl.constexpr, AT: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Load DIM float32 numbers from number `first` on, `[WIDE]`, 0 behind DIM."""
    column = tl.arange(0, WIDE)
    address = _number(mine, CHUNKS, AT).to(tl.pointer_type(tl.float32))
    return tl.load(address + first + column, mask=column < DIM, other=0.0)


@triton.jit
def _chunk_kernel(
    query, chunks, together, wanted, stored, outs, lses, query_stride, scale, num_rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT8: tl.constexpr, HAS_WANTED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to one chunk with one KV head's query heads of all rows that read it together.

    stored: a tensor of the rows' type. ROWS: the number of (row, head) pairs, a power of two.
    """
    row, kv_head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(together + row)
    if count == 0:
        return
    mine = chunks + row * (_COLUMNS * CHUNKS) + chunk
    tokens = _number(mine, CHUNKS, _TOKENS)
    if tokens == 0:
        return
    pair, column = tl.arange(0, ROWS), tl.arange(0, WIDE)
    own_row, head = row + pair // GROUP, kv_head * GROUP + pair % GROUP
    is_own = (pair // GROUP < count) & (own_row < num_rows)
    if HAS_WANTED:
        is_own = is_own & (tl.load(wanted + own_row * (KV_HEADS * GROUP) + head, mask=is_own, other=0) != 0)
        if tl.max(is_own.to(tl.int32), 0) == 0:
            return
    at = own_row.to(tl.int64)[:, None] * query_stride + (head * DIM)[:, None] + column[None, :]
    q = tl.load(query + at, mask=is_own[:, None] & (column < DIM)[None, :], other=0.0)
    centre = _floats_at(mine, kv_head * DIM, CHUNKS, _CENTRE, DIM, WIDE)
    shift = tl.sum(q.to(tl.float32) * centre[None, :], 1) * scale
    key_scale = scale
    if INT8:
        key_scale *= tl.load(_number(mine, CHUNKS, _KEY_SCALE).to(tl.pointer_type(tl.float32)) + kv_head)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDE], tl.float32)
    for begin in range(0, tokens, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        inside = token < tokens
        key = _rows_at(mine, kv_head, token, inside, stored, CHUNKS, _KEYS, DIM, WIDE).to(q.dtype)
        value = _rows_at(mine, kv_head, token, inside, stored, CHUNKS, _VALUES, DIM, WIDE).to(q.dtype)
        if EXACT:
            logits = tl.dot(q, tl.trans(key), input_precision="ieee") * key_scale + shift[:, None]
        else:
            logits = tl.dot(q, tl.trans(key)) * key_scale + shift[:, None]
        logits = tl.where(inside[None, :], logits, float("-inf"))
        higher = tl.maximum(most, tl.max(logits, 1))
        weight, kept = tl.exp(logits - higher[:, None]), tl.exp(most - higher)
        mass = mass * kept + tl.sum(weight, 1)
        out *= kept[:, None]
        if EXACT:
            out += tl.dot(weight.to(q.dtype), value, input_precision="ieee")
        else:
            out += tl.dot(weight.to(q.dtype), value)
        most = higher
    out /= mass[:, None]
    if INT8:
        out *= _floats_at(mine, kv_head * DIM, CHUNKS, _VALUE_SCALE, DIM, WIDE)[None, :]
    place = (own_row * (KV_HEADS * GROUP) + head).to(tl.int64) * CHUNKS + chunk
    tl.store(outs + place[:, None] * DIM + column[None, :], out, mask=is_own[:, None] & (column < DIM)[None, :])
    tl.store(lses + place, most + tl.log(mass), mask=is_own)


@triton.jit
def _merge_chunks_kernel(
    chunks, leaders, wanted, outs, lses, out, lse, NONE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, CHUNKS: tl.constexpr, HAS_WANTED: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of one row and head. NONE: the lse of a head that reads nothing."""
    row, head = tl.program_id(0), tl.program_id(1)
    chunk, column = tl.arange(0, CHUNKS), tl.arange(0, WIDE)
    leader, place, inside = tl.load(leaders + row), row * HEADS + head, column < DIM
    reads = leader >= 0
    if HAS_WANTED:
        reads = reads & (tl.load(wanted + place) != 0)
    if reads:
        is_read = tl.load(chunks + leader * (_COLUMNS * CHUNKS) + _TOKENS * CHUNKS + chunk) > 0
        own = tl.load(lses + place * CHUNKS + chunk, mask=is_read, other=float("-inf"))
        most = tl.max(own, 0)
        weight = tl.where(is_read, tl.exp(own - most), 0.0)
        mass = tl.sum(weight, 0)
        at = outs + (place.to(tl.int64) * CHUNKS + chunk)[:, None] * DIM + column[None, :]
        part = tl.load(at, mask=is_read[:, None] & inside[None, :], other=0.0)
        tl.store(out + place * DIM + column, tl.sum(part * weight[:, None], 0) / mass, mask=inside)
        tl.store(lse + place, most + tl.log(mass))
    else:
        tl.store(out + place * DIM + column, tl.zeros([WIDE], tl.float32), mask=inside)
        tl.store(lse + place, NONE)


class LinkedChunks(NamedTuple):
    """What rows read over the link.

    chunks: int64 `[rows, COLUMNS, CHUNKS]`, of which only those of leading rows are read. together: int32 `[rows]`, how
    many rows from this one on read its chunks; 0: it does not lead. leaders: int32 `[rows]`, the row whose chunks a row
    reads, -1: none.
    """

    chunks: Tensor
    together: Tensor
    leaders: Tensor


def linked_attention(
    query: Tensor, read: LinkedChunks, scale: float, kv_heads: int, is_int8: bool, wanted: Tensor | None,
    work: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out, float32 `[rows, heads, dim]`, and lse, float32 `[rows, heads]`, over each row's chunks.

    query: `[rows, heads, dim]`, after RoPE. A row without a leader gets (0, NO_MASS), and so does a head whose entry in
    `wanted`, uint8 `[rows, heads]`, is 0. work: float32, at least `[rows * heads * CHUNKS * dim]` and `[rows * heads *
    CHUNKS]`, overwritten. Raises ValueError for another shape, dtype or device; addresses are trusted.
    """
    chunks, together, leaders = read
    op, (rows, heads, dim), device = "linked_attention", query.shape, query.device
    check(op, "query", query, (rows, heads, dim), query.dtype, device)
    check_dtype(op, query)
    check(op, "chunks", chunks, (rows, COLUMNS, CHUNKS), torch.int64, device)
    check(op, "together", together, (rows,), torch.int32, device)
    check(op, "leaders", leaders, (rows,), torch.int32, device)
    if wanted is not None:
        check(op, "wanted", wanted, (rows, heads), torch.uint8, device)
    if not runs_on_triton(query):
        return linked_attention_reference(query, chunks, leaders, scale, kv_heads, is_int8, wanted)
    outs, lses = work
    for name, own, least in (("outs", outs, rows * heads * CHUNKS * dim), ("lses", lses, rows * heads * CHUNKS)):
        check(op, name, own, (max(own.numel(), least),), torch.float32, device)
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
    group = heads // kv_heads
    pairs = triton.next_power_of_2(max(16, min(rows, MOST_TOGETHER) * group))
    block = max(16, _BLOCK_BYTES // triton.next_power_of_2(dim) // query.element_size())
    stored = torch.empty(0, dtype=torch.int8 if is_int8 else torch.bfloat16, device=device)
    asked = query if wanted is None else wanted.contiguous()
    _chunk_kernel[(rows, kv_heads, CHUNKS)](
        query, chunks, together, asked, stored, outs, lses, query.stride(0), scale, rows, KV_HEADS=kv_heads,
        GROUP=group, DIM=dim, WIDE=triton.next_power_of_2(dim), CHUNKS=CHUNKS, ROWS=pairs, BLOCK=block, INT8=is_int8,
        HAS_WANTED=wanted is not None, EXACT=query.dtype == torch.float32, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    _merge_chunks_kernel[(rows, heads)](
        chunks, leaders, asked, outs, lses, out, lse, NONE=NO_MASS, HEADS=heads, DIM=dim,
        WIDE=triton.next_power_of_2(dim), CHUNKS=CHUNKS, HAS_WANTED=wanted is not None, num_warps=_WARPS,
    )  # fmt: skip
    return out, lse


def linked_attention_reference(
    query: Tensor, chunks: Tensor, leaders: Tensor, scale: float, kv_heads: int, is_int8: bool, wanted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `linked_attention` on the CPU, in float64 inside."""
    rows, heads, dim = query.shape
    group = heads // kv_heads
    out, lse = torch.zeros(rows, heads, dim), torch.full((rows, heads), NO_MASS)
    for row, leader in enumerate(leaders.tolist()):
        own = [chunk for chunk in chunks[leader].T.tolist() if chunk[TOKENS]] if leader >= 0 else []
        for kv_head in range(kv_heads) if own else ():
            keys, values = (torch.cat([_restored(chunk, kv_head, dim, is_int8, at) for chunk in own])
                            for at in (KEYS, VALUES))  # fmt: skip
            for head in range(kv_head * group, (kv_head + 1) * group):
                if wanted is not None and not wanted[row, head]:
                    continue
                logits = keys @ query[row, head].double() * scale
                lse[row, head] = torch.logsumexp(logits, 0)
                out[row, head] = torch.softmax(logits, 0) @ values
    return out, lse


def _restored(chunk: list[int], kv_head: int, dim: int, is_int8: bool, at: int) -> Tensor:
    """Return a chunk's keys or values of one KV head, float64 `[tokens, dim]`."""
    address, head_bytes, row_bytes = chunk[at : at + 3]
    stored = bytes_at(address + kv_head * head_bytes, (chunk[TOKENS] - 1) * row_bytes + dim * (1 if is_int8 else 2))
    typed = stored.view(torch.int8 if is_int8 else torch.bfloat16)
    rows = typed.as_strided((chunk[TOKENS], dim), (row_bytes // typed.element_size(), 1)).double()
    if is_int8 and at == KEYS:
        rows = rows * _floats(chunk[KEY_SCALE], kv_head, 1)
    if is_int8 and at == VALUES:
        rows = rows * _floats(chunk[VALUE_SCALE], kv_head * dim, dim)
    return rows + _floats(chunk[CENTRE], kv_head * dim, dim) if at == KEYS else rows


def _floats(address: int, first: int, count: int) -> Tensor:
    return bytes_at(address + 4 * first, 4 * count).view(torch.float32)

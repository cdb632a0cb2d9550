"""Rows in host memory, found by token in a table of pieces and read by the device where they lie."""

import ctypes

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.indexed.ring import Index
from transfer import places

_BEGIN = tl.constexpr(places.RUN_BEGIN)


def bytes_at(address: int, num_bytes: int) -> Tensor:
    """Return a copy of host memory, uint8."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.frombuffer(memory, np.uint8).copy())


def read_rows(index: Index, ring: int, kv_head: int, begin: int, end: int, is_int8: bool) -> tuple[Tensor, Tensor]:
    """Return keys and values of tokens `[begin, end)` of a run, float32 `[tokens, dim]`, restored. On the CPU.

    index: of one layer.
    """
    table, dim = index.lies[ring], index.piece_centres.shape[-1]
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for piece, own in enumerate(table.T.tolist()):
        first, last = max(begin, own[places.RUN_BEGIN]), min(end, own[places.RUN_END])
        if first >= last:
            continue
        for into, at in zip(rows, (places.KEYS, places.VALUES), strict=True):
            address, head_bytes, row_bytes = own[at : at + 3]
            address += kv_head * head_bytes + (first - own[places.RUN_BEGIN]) * row_bytes
            stored = bytes_at(address, (last - first) * row_bytes).view(torch.int8 if is_int8 else torch.bfloat16)
            into.append(stored.view(last - first, -1)[:, :dim].float())
        if is_int8:
            rows[0][-1] *= index.piece_key_scales[ring, piece, kv_head]
            rows[1][-1] *= index.piece_value_scales[ring, piece, kv_head]
        rows[0][-1] += index.piece_centres[ring, piece, kv_head]
    return torch.cat(rows[0]), torch.cat(rows[1])


@triton.jit
def find_piece(lies, token, PIECES: tl.constexpr):
    """Return where the pieces of tokens stand in the run's table, `[tokens]`, by halving: begins are in order."""
    piece = tl.zeros_like(token)
    for level in tl.static_range(1, 20):
        if (PIECES >> level) > 0:
            begin = tl.load(lies + _BEGIN * PIECES + piece + (PIECES >> level))
            piece = tl.where(begin <= token, piece + (PIECES >> level), piece)
    return piece


@triton.jit
def row_address(lies, piece, token, kv_head, is_there, AT: tl.constexpr, PIECES: tl.constexpr):
    """Return addresses of tokens' rows, int64 `[tokens]`. AT: the table's column of keys or of values."""
    address = tl.load(lies + AT * PIECES + piece, mask=is_there, other=0)
    address += kv_head * tl.load(lies + (AT + 1) * PIECES + piece, mask=is_there, other=0)
    first = tl.load(lies + _BEGIN * PIECES + piece, mask=is_there, other=0)
    return address + (token - first) * tl.load(lies + (AT + 2) * PIECES + piece, mask=is_there, other=0)


@triton.jit
def restored_rows(
    address, is_there, key_scale, value_scale, DIM: tl.constexpr, WIDE: tl.constexpr, INT8: tl.constexpr,
    IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Return rows, float32 `[tokens, WIDE]`, 0 behind DIM, without the centre.

    key_scale, value_scale: pointers for each token, of int8 rows.
    """
    column = tl.arange(0, WIDE)[None, :]
    inside = is_there[:, None] & (column < DIM)
    if INT8:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.int8))[:, None], [1, 16]) + column
        row = tl.load(at, mask=inside, other=0).to(tl.float32)
        if IS_VALUE:
            row *= tl.load(value_scale[:, None] + column, mask=inside, other=0.0)
        else:
            row *= tl.load(key_scale, mask=is_there, other=0.0)[:, None]
    else:
        at = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16))[:, None], [1, 16]) + column
        row = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return row

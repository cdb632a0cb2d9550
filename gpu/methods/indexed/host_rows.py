"""Find rows in host memory by token, in a table of pieces, and read them on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.indexed.ring import Index
from gpu.operations.host_rows.host_bytes import bytes_at
from gpu.operations.host_rows.int4_rows import int4_rows, restore_int4_reference
from transfer import places
from transfer.tier_shape import Rows

_BEGIN = tl.constexpr(places.RUN_BEGIN)


def widen_rows(stored: Tensor, dim: int, rows: Rows) -> Tensor:
    """Return stored rows, uint8 `[tokens, row_bytes]`, as float32 `[tokens, dim]`. Runs on the CPU.

    Scales of int8 and the centre are not applied.
    """
    if rows == "int4":
        return restore_int4_reference(stored, dim)
    return stored.view(torch.int8 if rows == "int8" else torch.bfloat16)[:, :dim].float()


def read_rows(index: Index, ring: int, kv_head: int, tokens: Tensor, stored: Rows) -> tuple[Tensor, Tensor]:
    """Return the restored keys and values of a run's tokens, float32 `[tokens, dim]`. Runs on the CPU.

    index: of one layer. tokens: int64.
    """
    dim = index.piece_centres.shape[-1]
    keys, values = (torch.empty(len(tokens), dim) for _ in range(2))
    for piece, own in enumerate(index.lies[ring].T.tolist()):
        begin, end = own[places.RUN_BEGIN], own[places.RUN_END]
        here = ((tokens >= begin) & (tokens < end)).nonzero().flatten()
        if not len(here):
            continue
        for into, at in ((keys, places.KEYS), (values, places.VALUES)):
            address, head_bytes, row_bytes = own[at : at + 3]
            rows = bytes_at(address + kv_head * head_bytes, (end - begin) * row_bytes).view(end - begin, -1)
            into[here] = widen_rows(rows[tokens[here] - begin], dim, stored)
        if stored == "int8":
            keys[here] *= index.piece_key_scales[ring, piece, kv_head]
            values[here] *= index.piece_value_scales[ring, piece, kv_head]
        keys[here] += index.piece_centres[ring, piece, kv_head]
    return keys, values


@triton.jit
def find_piece(lies, token, PIECES: tl.constexpr):
    """Return the index of each token's piece in the run's table, `[tokens]`, by binary search, since begins are in
    order.
    """
    piece = tl.zeros_like(token)
    for level in tl.static_range(1, 20):
        if (PIECES >> level) > 0:
            begin = tl.load(lies + _BEGIN * PIECES + piece + (PIECES >> level))
            piece = tl.where(begin <= token, piece + (PIECES >> level), piece)
    return piece


@triton.jit
def row_address(lies, piece, token, kv_head, is_there, AT: tl.constexpr, PIECES: tl.constexpr):
    """Return the addresses of tokens' rows, int64 `[tokens]`. AT: the table's column for keys or for values."""
    address = tl.load(lies + AT * PIECES + piece, mask=is_there, other=0)
    address += kv_head * tl.load(lies + (AT + 1) * PIECES + piece, mask=is_there, other=0)
    first = tl.load(lies + _BEGIN * PIECES + piece, mask=is_there, other=0)
    return address + (token - first) * tl.load(lies + (AT + 2) * PIECES + piece, mask=is_there, other=0)


@triton.jit
def restored_rows(
    address, is_there, key_scale, value_scale, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Load rows as float32 `[tokens, WIDE]`, 0 behind DIM, with scales but without the centre.

    key_scale, value_scale: pointers for each token, used for int8 rows.
    """
    column = tl.arange(0, WIDE)[None, :]
    inside = is_there[:, None] & (column < DIM)
    if ROWS == "int4":
        row = int4_rows(address.to(tl.pointer_type(tl.uint8)), is_there, DIM, WIDE)
    elif ROWS == "int8":
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

"""Convert rows to and from int4 in host memory: codes of groups of 32 dimensions, each with a scale and an offset.

A row is `dim / 2` bytes of codes and one word per group, padded to a multiple of 16 bytes (`int4_row_bytes`). Byte b of
a group has dimension b in its low half and dimension b + 16 in its high half. A word has the group's scale in its low
half and its offset in its high half, both bf16. Number = offset + scale * code, in float32. The offset is the least
number of the group, and 15 scales above it is the largest, both as bf16 rounds them. So a row needs nothing of its
segment but the centre. Its error is half a scale, or the error of bf16 if that is larger. Bytes moved: rows read once,
written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check_dtype, runs_on_triton
from transfer.tier_shape import INT4_GROUP, int4_row_bytes

BLOCK_TOKENS = 32
STEPS = 15  # from a group's least number to its largest
LEAST_STEP = 1e-30  # for groups whose numbers are all equal

_STEPS, _LEAST_STEP = tl.constexpr(STEPS), tl.constexpr(LEAST_STEP)
_GROUP = tl.constexpr(INT4_GROUP)


def store_int4_reference(rows: Tensor) -> Tensor:
    """Return rows `[..., dim]`, float32 or wider, in stored form: uint8 `[..., int4_row_bytes(dim)]`."""
    dim = rows.shape[-1]
    groups = rows.float().unflatten(-1, (dim // INT4_GROUP, INT4_GROUP))
    offset = groups.amin(-1).bfloat16()
    scale = ((groups.amax(-1) - offset.float()) / STEPS).bfloat16()
    steps = (groups - offset.float()[..., None]) / scale.float().clamp_min(LEAST_STEP)[..., None]
    codes = steps.add_(0.5).floor_().clamp_(0, STEPS).to(torch.uint8)
    stored = torch.zeros(*rows.shape[:-1], int4_row_bytes(dim), dtype=torch.uint8, device=rows.device)
    stored[..., : dim // 2] = (codes[..., : INT4_GROUP // 2] | codes[..., INT4_GROUP // 2 :] << 4).flatten(-2)
    words = torch.stack([scale, offset], -1).view(torch.uint8).flatten(-2)
    stored[..., dim // 2 : dim // 2 + words.shape[-1]] = words
    return stored


def restore_int4_reference(stored: Tensor, dim: int) -> Tensor:
    """Return stored rows, uint8 `[..., int4_row_bytes(dim)]`, as float32 `[..., dim]`."""
    packed = stored[..., : dim // 2].unflatten(-1, (dim // INT4_GROUP, INT4_GROUP // 2))
    words = stored[..., dim // 2 : dim // 2 + 4 * (dim // INT4_GROUP)].contiguous().view(torch.bfloat16)
    scale, offset = words.unflatten(-1, (-1, 2)).float().unbind(-1)
    codes = torch.cat([packed & 15, packed >> 4], -1).float()
    return (codes * scale[..., None] + offset[..., None]).flatten(-2)


@triton.jit
def _bits_of(number):
    return number.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _steps_of(numbers, offset, scale):
    steps = tl.floor((numbers - offset[:, :, None]) / scale[:, :, None] + 0.5)
    return tl.minimum(tl.maximum(steps, 0.0), _STEPS * 1.0).to(tl.int32)


@triton.jit
def _store_int4_kernel(
    rows, centre, stored, num_tokens, row_head, row_token, to_head, to_token,
    DIM: tl.constexpr, WIDE: tl.constexpr, HAS_CENTRE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    group, byte = tl.arange(0, WIDE // _GROUP), tl.arange(0, _GROUP // 2)[None, None, :]
    dim = (group * _GROUP)[None, :, None] + byte
    is_group = (token < num_tokens)[:, None] & (group * _GROUP < DIM)[None, :]
    inside = is_group[:, :, None]
    at = rows + head * row_head + token[:, None, None] * row_token + dim
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + _GROUP // 2, mask=inside, other=0.0).to(tl.float32)
    if HAS_CENTRE:
        middle = centre + head * DIM + dim
        low -= tl.load(middle, mask=dim < DIM, other=0.0)
        high -= tl.load(middle + _GROUP // 2, mask=dim < DIM, other=0.0)
    least, most = tl.minimum(tl.min(low, 2), tl.min(high, 2)), tl.maximum(tl.max(low, 2), tl.max(high, 2))
    of_offset = _bits_of(least)
    offset = of_offset.to(tl.float32, bitcast=True)
    of_scale = _bits_of((most - offset) / _STEPS)
    scale = tl.maximum(of_scale.to(tl.float32, bitcast=True), _LEAST_STEP)
    packed = _steps_of(low, offset, scale) | (_steps_of(high, offset, scale) << 4)
    row = stored + head * to_head + token[:, None] * to_token
    tl.store(row[:, :, None] + (group * (_GROUP // 2))[None, :, None] + byte, packed.to(tl.uint8), mask=inside)
    word = ((of_scale >> 16) & 0xFFFF) | (of_offset & -65536)
    tl.store((row + DIM // 2 + 4 * group[None, :]).to(tl.pointer_type(tl.int32)), word, mask=is_group)


@triton.jit
def int4_rows(at, is_there, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Return rows, float32 `[tokens, WIDE]`, 0 behind DIM. at: uint8 pointers `[tokens]`, multiples of 16 bytes."""
    group, byte = tl.arange(0, WIDE // _GROUP), tl.arange(0, _GROUP // 2)
    is_group = is_there[:, None] & (group * _GROUP < DIM)[None, :]
    codes = tl.multiple_of(at[:, None, None], [1, 1, 16]) + (group * (_GROUP // 2))[None, :, None]
    packed = tl.load(codes + byte[None, None, :], mask=is_group[:, :, None], other=0).to(tl.int32)
    words = (at[:, None] + DIM // 2 + 4 * group[None, :]).to(tl.pointer_type(tl.int32))
    word = tl.load(words, mask=is_group, other=0)
    scale, offset = (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    numbers = tl.permute(tl.join(packed & 15, (packed >> 4) & 15), (0, 1, 3, 2)).to(tl.float32)
    numbers = numbers * scale[:, :, None, None] + offset[:, :, None, None]
    return tl.reshape(numbers, [at.shape[0], WIDE])


@triton.jit
def _restore_int4_kernel(
    stored, centre, rows, num_tokens, from_head, from_token, row_head, row_token,
    DIM: tl.constexpr, WIDE: tl.constexpr, HAS_CENTRE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_there, column = token < num_tokens, tl.arange(0, WIDE)[None, :]
    row = int4_rows(stored + head * from_head + token * from_token, is_there, DIM, WIDE)
    if HAS_CENTRE:
        row += tl.load(centre + head * DIM + column, mask=column < DIM, other=0.0)
    to = rows + head * row_head + token[:, None] * row_token + column
    tl.store(to, row.to(rows.dtype.element_ty), mask=is_there[:, None] & (column < DIM))


def store_int4(rows: Tensor, centre: Tensor | None, stored: Tensor) -> None:
    """Write rows `[heads, tokens, dim]`, less the centre if there is one, to uint8 `[heads, tokens,
    int4_row_bytes(dim)]`.

    centre: float32 `[heads, dim]`. Heads and tokens of both may be strided.
    """
    if not runs_on_triton(rows) or rows.numel() == 0:
        stored.copy_(store_int4_reference(rows if centre is None else rows - centre[:, None]))
        return
    check_dtype("store_int4", rows)
    heads, tokens, dim = rows.shape
    _store_int4_kernel[(triton.cdiv(tokens, BLOCK_TOKENS), heads)](
        rows, rows if centre is None else centre.contiguous(), stored, tokens, *rows.stride()[:2],
        *stored.stride()[:2], DIM=dim, WIDE=triton.next_power_of_2(dim), HAS_CENTRE=centre is not None,
        BLOCK_TOKENS=BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip


def restore_int4(stored: Tensor, centre: Tensor | None, rows: Tensor) -> None:
    """Write what `store_int4` stored, plus the centre, to rows `[heads, tokens, dim]` of any float type."""
    heads, tokens, dim = rows.shape
    if not runs_on_triton(rows) or rows.numel() == 0:
        found = restore_int4_reference(stored, dim)
        rows.copy_(found if centre is None else found + centre[:, None])
        return
    check_dtype("restore_int4", rows)
    _restore_int4_kernel[(triton.cdiv(tokens, BLOCK_TOKENS), heads)](
        stored, rows if centre is None else centre.contiguous(), rows, tokens, *stored.stride()[:2],
        *rows.stride()[:2], DIM=dim, WIDE=triton.next_power_of_2(dim), HAS_CENTRE=centre is not None,
        BLOCK_TOKENS=BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip

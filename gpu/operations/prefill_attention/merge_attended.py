"""Merge outputs over disjoint sets of keys into one, in one pass and in the model's dtype.

    lse = log(sum of exp(lse_i))      out = sum of exp(lse_i - lse) out_i

Each piece saw at least one key for every query, so no lse is -inf. Bytes moved: (sides + 1) * itemsize * tokens * heads
* dim, and the lses. (`transfer.merge` merges float32 partials of any sets, also empty ones.)
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, runs_on_triton

MOST_PIECES = 7  # of one pass, besides the last side
ROWS_PER_PROGRAM = 8


def merge_attended_reference(
    outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute `merge_attended` in plain torch; in float64 where the lses are."""
    stacked = torch.stack([*lses])  # [sides, tokens, heads]
    lse = torch.logsumexp(stacked, 0)
    weights = (stacked - lse).exp()[..., None]
    out = torch.zeros_like(weights[0] * outs[0])
    for weight, side in zip(weights, outs, strict=True):
        out += weight * side
    return out.to(dtype), lse


@triton.jit
def _merge_attended_kernel(
    out_0, out_1, out_2, out_3, out_4, out_5, out_6, lse_0, lse_1, lse_2, lse_3, lse_4, lse_5, lse_6,
    last_out, last_lse, out, lse, rows, heads, lse_token, lse_head, last_lse_token, last_lse_head,
    PIECES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    inside = row < rows
    token, head = row // heads, row % heads
    address = row[:, None] * DIM + column[None, :]
    reads = inside[:, None] & (column < DIM)[None, :]
    place = token * lse_token + head * lse_head
    top = tl.load(last_lse + token * last_lse_token + head * last_lse_head, mask=inside, other=0.0)
    mass = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    merged = tl.load(last_out + address, mask=reads, other=0.0).to(tl.float32)
    if PIECES > 0:
        top, mass, merged = _add(out_0, lse_0, place, address, inside, reads, top, mass, merged)
    if PIECES > 1:
        top, mass, merged = _add(out_1, lse_1, place, address, inside, reads, top, mass, merged)
    if PIECES > 2:
        top, mass, merged = _add(out_2, lse_2, place, address, inside, reads, top, mass, merged)
    if PIECES > 3:
        top, mass, merged = _add(out_3, lse_3, place, address, inside, reads, top, mass, merged)
    if PIECES > 4:
        top, mass, merged = _add(out_4, lse_4, place, address, inside, reads, top, mass, merged)
    if PIECES > 5:
        top, mass, merged = _add(out_5, lse_5, place, address, inside, reads, top, mass, merged)
    if PIECES > 6:
        top, mass, merged = _add(out_6, lse_6, place, address, inside, reads, top, mass, merged)
    merged = merged / mass[:, None]
    tl.store(out + address, merged.to(out.dtype.element_ty), mask=reads)
    tl.store(lse + row, top + tl.log(mass), mask=inside)


@triton.jit
def _add(piece, lses, place, address, inside, reads, top, mass, merged):
    """Add one side, of mass exp(lse). `merged` and `mass` are relative to exp(top)."""
    lse = tl.load(lses + place, mask=inside, other=0.0)
    rows = tl.load(piece + address, mask=reads, other=0.0).to(tl.float32)
    higher = tl.maximum(top, lse)
    kept, added = tl.exp(top - higher), tl.exp(lse - higher)
    return higher, mass * kept + added, merged * kept[:, None] + rows * added[:, None]


def merge_attended(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge the outputs of several sides, and return new tensors, out in `dtype`.

    outs: `[tokens, heads, dim]` in any floating dtype. lses: float32 `[tokens, heads]`, natural log; they are read in
    place if all but the last have the same strides. Raises ValueError if shapes do not fit.
    """
    shape, device = outs[0].shape, outs[0].device
    for out, lse in zip(outs, lses, strict=True):
        check("merge_attended", "out", out, tuple(shape), out.dtype, device)
        if lse.shape != shape[:-1] or lse.dtype != torch.float32:
            raise ValueError(
                f"merge_attended: lse is {tuple(lse.shape)} {lse.dtype}; wanted {tuple(shape[:-1])} float32"
            )
    if not runs_on_triton(outs[0]) or outs[0].numel() == 0:
        return merge_attended_reference(outs, lses, dtype)
    outs, lses = [out.contiguous() for out in outs], list(lses)
    if any(lse.stride() != lses[0].stride() for lse in lses[:-1]):
        lses = [lse.contiguous() for lse in lses]
    last_out, last_lse = outs.pop(), lses.pop()
    for first in range(0, max(1, len(outs)), MOST_PIECES):
        own = slice(first, first + MOST_PIECES)
        is_end = own.stop >= len(outs)
        last_out, last_lse = _launch(outs[own], lses[own], last_out, last_lse, dtype if is_end else torch.float32)
    return last_out, last_lse


def _launch(
    outs: Sequence[Tensor], lses: Sequence[Tensor], last_out: Tensor, last_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = last_out.shape
    out = torch.empty(tokens, heads, dim, dtype=dtype, device=last_out.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=last_out.device)
    unused = MOST_PIECES - len(outs)
    piece_lse = lses[0] if lses else last_lse
    _merge_attended_kernel[(triton.cdiv(tokens * heads, ROWS_PER_PROGRAM),)](
        *outs, *[last_out] * unused, *lses, *[last_lse] * unused, last_out, last_lse, out, lse, tokens * heads, heads,
        piece_lse.stride(0), piece_lse.stride(1), last_lse.stride(0), last_lse.stride(1),
        PIECES=len(outs), DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out, lse

"""Merge softmax partials over disjoint token sets, any number in one pass: plain torch and one Triton kernel.

    lse = log(sum of exp(lse_i))      out = sum of exp(lse_i - lse) out_i

A side with lse = -inf contributes exactly nothing, even if its `out` is NaN; if all sides are so, the result is
(0, -inf). Bytes moved: (sides + 1) * 4 * tokens * heads * (dim + 1).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_MASS = float("-inf")
ROWS_PER_PROGRAM = 4
MOST_SIDES = 4  # near, far, the host's, and what was fetched or is reused


def merge_outputs_reference(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge in plain torch, in any floating dtype. outs: `[tokens, heads, dim]`. lses: `[tokens, heads]`, natural log.
    Returns new tensors.
    """
    stacked = torch.stack([*lses])  # [sides, tokens, heads]
    top = stacked.amax(0).clamp_min_(torch.finfo(stacked.dtype).min)
    masses = (stacked - top).exp_()
    mass = masses.sum(0)
    shares = masses / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    merged = torch.zeros_like(outs[0])
    for out, share in zip(outs, shares.unsqueeze(-1), strict=True):
        merged += torch.where(share == 0, 0.0, out * share)
    return merged, mass.log_().add_(top)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_0, out_1, out_2, out_3, lse_0, lse_1, lse_2, lse_3, out, lse, rows,
    SIDES: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    inside = row < rows
    nothing = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    first = tl.load(lse_0 + row, mask=inside, other=float("-inf"))
    second = tl.load(lse_1 + row, mask=inside, other=float("-inf")) if SIDES > 1 else nothing
    third = tl.load(lse_2 + row, mask=inside, other=float("-inf")) if SIDES > 2 else nothing
    fourth = tl.load(lse_3 + row, mask=inside, other=float("-inf")) if SIDES > 3 else nothing
    top = tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth))
    top = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.exp(first - top) + tl.exp(second - top) + tl.exp(third - top) + tl.exp(fourth - top)
    scale = 1.0 / tl.where(mass == 0.0, 1.0, mass)
    address = row[:, None] * DIM + column[None, :]
    reads = inside[:, None] & (column < DIM)[None, :]
    merged = _share(out_0, address, reads, tl.exp(first - top), scale)
    if SIDES > 1:
        merged += _share(out_1, address, reads, tl.exp(second - top), scale)
    if SIDES > 2:
        merged += _share(out_2, address, reads, tl.exp(third - top), scale)
    if SIDES > 3:
        merged += _share(out_3, address, reads, tl.exp(fourth - top), scale)
    tl.store(out + address, merged, mask=reads)
    tl.store(lse + row, top + tl.log(mass), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _share(out, address, reads, mass, scale):  # type: ignore[no-untyped-def]
    rows = tl.load(out + address, mask=reads & (mass != 0.0)[:, None], other=0.0)
    return rows * (mass * scale)[:, None]


def _is_reached(first: Tensor, second: Tensor) -> bool:
    return first.device == second.device or (first.is_cuda and second.is_pinned())


def merge_outputs(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge one to MOST_SIDES float32 outs `[tokens, heads, dim]` and their lses `[tokens, heads]`. Return new tensors
    on the device of the first.

    If the first is on CUDA, the others may be in pinned host memory: the kernel reads them over the link. Raises
    ValueError if shapes, dtypes or devices differ, an lse does not fit its out, or there are more sides.
    """
    if not 1 <= len(outs) == len(lses) <= MOST_SIDES:
        raise ValueError(f"merge: {len(outs)} outs and {len(lses)} lses; wanted as many, 1 to {MOST_SIDES}")
    first = outs[0]
    if any(out.shape != first.shape for out in outs) or any(lse.shape != first.shape[:-1] for lse in lses):
        got = f"out {[tuple(out.shape) for out in outs]}, lse {[tuple(lse.shape) for lse in lses]}"
        raise ValueError(f"merge: {got}; wanted equal [tokens, heads, dim] and [tokens, heads]")
    if any(tensor.dtype != first.dtype for tensor in (*outs, *lses)):
        raise ValueError(f"merge: {[tensor.dtype for tensor in (*outs, *lses)]}; wanted one dtype")
    if not all(_is_reached(first, tensor) for tensor in (*outs, *lses)) or lses[0].device != first.device:
        raise ValueError(f"merge: on {[str(tensor.device) for tensor in (*outs, *lses)]}; wanted one device")
    if not (first.is_cuda or triton.knobs.runtime.interpret) or first.numel() == 0:
        return merge_outputs_reference(outs, lses)
    if first.dtype != torch.float32:
        raise ValueError(f"merge: dtype is {first.dtype}; on {first.device} wanted torch.float32")
    outs, lses = [out.contiguous() for out in outs], [lse.contiguous() for lse in lses]
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    rows, dim, unused = lse.numel(), out.shape[-1], MOST_SIDES - len(outs)
    _merge_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        *outs, *outs[:1] * unused, *lses, *lses[:1] * unused, out, lse, rows,
        SIDES=len(outs), DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out, lse

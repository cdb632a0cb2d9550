"""Merge attention sinks: one more logit in each query head's softmax, which takes mass and has no value.

A sink is a partial with mass exp(sink) and no output, merged last: `out * exp(lse) / (exp(lse) + exp(sink))`. So code
that reads or estimates keys and values is the same with and without sinks. Bytes moved: 2 * itemsize * tokens * heads *
dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, runs_on_triton

ROWS_PER_PROGRAM = 8


def add_sinks_reference(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Compute `add_sinks` in plain torch, in place."""
    shares = torch.sigmoid(lse - sinks.to(lse.dtype))
    return out.mul_(shares.to(out.dtype)[..., None])


@triton.jit
def _add_sinks_kernel(
    out, lse, sinks, rows, heads, out_token, out_head, lse_token, lse_head,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    inside = row < rows
    token, head = row // heads, row % heads
    mass = tl.load(lse + token * lse_token + head * lse_head, mask=inside, other=0.0)
    share = tl.sigmoid(mass - tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32))
    address = out + token[:, None] * out_token + head[:, None] * out_head + column[None, :]
    reads = inside[:, None] & (column < DIM)[None, :]
    values = tl.load(address, mask=reads, other=0.0).to(tl.float32)
    tl.store(address, (values * share[:, None]).to(out.dtype.element_ty), mask=reads)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale attention's output `[tokens, heads, dim]` in place by the mass that sinks leave, and return it.

    lse: float32 `[tokens, heads]`, natural log, of all that was attended to. sinks: `[heads]` of any float type. Raises
    ValueError for another shape.
    """
    tokens, heads, dim = out.shape
    if lse.shape != (tokens, heads):
        raise ValueError(f"add_sinks: lse is {tuple(lse.shape)}; wanted {(tokens, heads)}")
    check("add_sinks", "sinks", sinks, (heads,), sinks.dtype, out.device)
    if not runs_on_triton(out) or out.numel() == 0:
        return add_sinks_reference(out, lse, sinks)
    if out.stride(2) != 1:
        raise ValueError(f"add_sinks: out has strides {out.stride()}; wanted dim contiguous")
    _add_sinks_kernel[(triton.cdiv(tokens * heads, ROWS_PER_PROGRAM),)](
        out, lse, sinks, tokens * heads, heads, out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out

"""RMSNorm of each query and key head before its rotation, in place.

It refuses to know rotations and values, which it leaves as they are. Arithmetic: `gpu.kernels.rms_norm`. Bytes moved
per token: 2 * (heads + kv_heads) * dim * itemsize.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, check_dtype, runs_on_triton
from gpu.kernels.rms_norm import rms_norm_reference

BLOCK_HEADS = 4


def head_norm_reference(qkv: Tensor, query_norm: Tensor, key_norm: Tensor, eps: float, num_heads: int,
                        kv_heads: int) -> None:  # fmt: skip
    """Plain torch; see `head_norm`."""
    heads = qkv.view(len(qkv), -1, len(query_norm))
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + kv_heads]
    query.copy_(rms_norm_reference(query, query_norm, eps))
    key.copy_(rms_norm_reference(key, key_norm, eps))


@triton.jit
def _head_norm_kernel(
    qkv, query_norm, key_norm, qkv_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_DIM)[None, :]
    is_column = column < DIM
    inside = (head < HEADS + KV_HEADS) & is_column
    dtype = qkv.dtype.element_ty
    address = qkv + token * qkv_stride + head * DIM + column
    rows = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    normed = rows * tl.rsqrt(tl.sum(rows * rows, 1) / DIM + eps)[:, None]
    if query_norm.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    of_query = tl.load(query_norm + column, mask=is_column, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(address, (normed * tl.where(head < HEADS, of_query, of_key)).to(dtype), mask=inside)


def head_norm(qkv: Tensor, query_norm: Tensor, key_norm: Tensor, eps: float, num_heads: int, kv_heads: int) -> None:
    """qkv `[tokens, (heads + 2 * kv_heads) * dim]`: the first heads + kv_heads heads of each token become their norms.

    query_norm, key_norm: `[dim]`, both of qkv's dtype or both float32. Raises ValueError for another shape, dtype or
    device.
    """
    op, (tokens, width), dim = "head_norm", qkv.shape, len(query_norm)
    if width != (num_heads + 2 * kv_heads) * dim:
        raise ValueError(f"{op}: qkv is {width} wide; wanted ({num_heads} + 2 * {kv_heads}) heads of {dim}")
    dtype = torch.float32 if query_norm.dtype == torch.float32 else qkv.dtype
    check(op, "query_norm", query_norm, (dim,), dtype, qkv.device)
    check(op, "key_norm", key_norm, (dim,), dtype, qkv.device)
    if not runs_on_triton(qkv) or tokens == 0:
        head_norm_reference(qkv, query_norm, key_norm, eps, num_heads, kv_heads)
        return
    check_dtype(op, qkv)
    check(op, "qkv", qkv, (tokens, width), qkv.dtype, qkv.device)
    _head_norm_kernel[(tokens, triton.cdiv(num_heads + kv_heads, BLOCK_HEADS))](
        qkv, query_norm, key_norm, qkv.stride(0), eps,
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_HEADS=BLOCK_HEADS, BLOCK_DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )  # fmt: skip

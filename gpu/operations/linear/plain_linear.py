"""Compute the projections of a decode step, with RMSNorm, SwiGLU and the residual fused in if one token is decoded.

For one token and a bf16 weight on CUDA the weight's bytes are the whole cost, and one Triton kernel streams them. With
several tokens, `plain_tiles` multiplies if tiles are given, else the vendor's matrix product. A program owns whole
output rows, so a result does not depend on how programs are scheduled. Bytes moved: the weight once; each program reads
the token (and the norm's weight) again, from L1 and L2.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Activation, is_gated
from gpu.operations.arguments import check, runs_on_triton
from gpu.operations.linear.plain_tiles import MOST_TILED_TOKENS, Tiles, plain_tiles
from gpu.operations.rms_norm import check_norm, rms_norm
from gpu.operations.swiglu import activated, swiglu

# Shape class: block_rows, block_inner, num_warps, num_stages, unroll. `gated` programs read two rows for each output.
CONFIGS = {
    "narrow": (4, 512, 2, 1, 1),
    "wide": (1, 1024, 2, 1, 4),
    "vocabulary": (1, 2048, 4, 1, 2),
    "gated": (2, 1024, 4, 1, 4),
}
WIDE_INNER = 8192
VOCABULARY_ROWS = 32_000


def linear_reference(x: Tensor, weight: Tensor, residual: Tensor | None = None, overwrites: bool = False) -> Tensor:
    """Compute `x @ weight.T (+ residual)` in plain torch.

    overwrites: write the sum over the residual. Otherwise a kernel copies the residual. `torch.addmm` would order a
    memory copy, which in a captured step is a node without a priority: it would wait for every block of kernels in
    lanes with a lower priority.
    """
    x = x.to(weight.dtype)
    if residual is None:
        return F.linear(x, weight)
    return (residual if overwrites else torch.mul(residual, 1)).addmm_(x, weight.t())


@triton.jit
def _gemv_kernel(
    x, weight, norm_weight, residual, out, eps, num_rows,
    INNER: tl.constexpr, NORMS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr,
    ADDS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = INNER % BLOCK_INNER == 0
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    source_row = tl.minimum(row, num_rows - 1).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK_INNER)[None, :]
    sums = tl.zeros([BLOCK_ROWS, BLOCK_INNER], tl.float32)
    up_sums = sums
    squares = tl.zeros([1, BLOCK_INNER], tl.float32)
    for begin in tl.range(0, INNER, BLOCK_INNER, num_stages=STAGES, loop_unroll_factor=UNROLL):
        inner = begin + column
        inside = (inner < INNER) if not EVEN else None
        other = 0.0 if not EVEN else None
        address = weight + source_row * INNER + inner
        rows = tl.load(address, mask=inside, other=other, eviction_policy="evict_first").to(tl.float32)
        ups = rows
        if GATES:
            address += num_rows.to(tl.int64) * INNER
            ups = tl.load(address, mask=inside, other=other, eviction_policy="evict_first").to(tl.float32)
        values = tl.load(x + inner, mask=inside, other=other).to(tl.float32)
        if NORMS:
            squares += values * values
            values *= tl.load(norm_weight + inner, mask=inside, other=other).to(tl.float32)
        sums += rows * values
        if GATES:
            up_sums += ups * values
    result = tl.sum(sums, 1)
    scale = 1.0
    if NORMS:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / INNER + eps)
        result *= scale
    if ACTIVATION != "none":
        result = activated(result, tl.sum(up_sums, 1) * scale, ACTIVATION)
    if ADDS_RESIDUAL:
        result += tl.load(residual + row, mask=row < num_rows, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < num_rows)


def linear(
    x: Tensor, weight: Tensor, residual: Tensor | None = None, tiles: Tiles | None = None, overwrites: bool = False
) -> Tensor:
    """Return `x @ weight.T (+ residual)`, `[tokens, out]`, in weight.dtype.

    x: `[tokens, in]`; it may be float32 if the weight is bf16 (a partial's output, for instance). weight: `[out, in]`.
    residual: `[tokens, out]`. tiles: how 2 to MOST_TILED_TOKENS tokens are multiplied, here as in other products; None:
    by the vendor's product. overwrites: the vendor's product may write the sum over the residual; otherwise all that is
    returned is new. Raises ValueError for another shape, or a residual of another dtype or device.
    """
    _check_inner("linear", x, weight)
    if residual is not None:
        check("linear", "residual", residual, (x.shape[0], weight.shape[0]), weight.dtype, weight.device)
    if tiles is not None and _is_tiled(x, weight):
        return plain_tiles(x, weight, residual, None, weight.dtype, tiles)
    if not _is_gemv(x, weight):
        return linear_reference(x, weight, residual, overwrites)
    return _launch(x, weight, None, 0.0, residual, None, weight.dtype)


def logits_linear(x: Tensor, weight: Tensor, tiles: Tiles | None = None) -> Tensor:
    """Return `x @ weight.T` in float32, `[tokens, vocab]`: x `[tokens, in]` and weight `[vocab, in]` of one dtype.

    On CUDA sums are never rounded to bf16: its spacing of 2**-4 at a logit of 16 would tie and reorder tokens. On the
    CPU bf16 products have no float32 output and are widened afterwards. Raises ValueError for another shape, dtype or
    device.
    """
    _check_inner("logits_linear", x, weight)
    check("logits_linear", "x", x, tuple(x.shape), weight.dtype, weight.device)
    if tiles is not None and _is_tiled(x, weight):
        return plain_tiles(x, weight, None, None, torch.float32, tiles)
    if _is_gemv(x, weight):
        return _launch(x, weight, None, 0.0, None, None, torch.float32)
    if weight.is_cuda and weight.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x, weight).float()


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Return `rms_norm(x, norm_weight, eps) @ weight.T (+ bias)`, `[tokens, out]`.

    x: `[tokens, hidden]`. weight: `[out, hidden]`. bias: `[out]`. norm_weight: `[hidden]` in weight.dtype or float32.
    Raises ValueError for another shape, dtype or device.
    """
    _check_inner("norm_linear", x, weight)
    check_norm("norm_linear", "norm_weight", norm_weight, x)
    if bias is not None:
        check("norm_linear", "bias", bias, (weight.shape[0],), weight.dtype, weight.device)
    if tiles is not None and _is_tiled(x, weight):
        return plain_tiles(rms_norm(x, norm_weight, eps), weight, bias, None, weight.dtype, tiles)
    if not _is_gemv(x, weight):
        return F.linear(rms_norm(x, norm_weight, eps), weight, bias)
    return _launch(x, weight, norm_weight, eps, bias, None, weight.dtype)


def norm_gate_up_swiglu(
    x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor, activation: Activation = "silu",
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Return `swiglu(rms_norm(x) @ gate_up_weight.T)`, `[tokens, intermediate]`.

    gate_up_weight: `[2 * intermediate, hidden]`, gate first, or `[intermediate, hidden]` for an activation without a
    gate. Raises ValueError for another shape, dtype or device.
    """
    _check_inner("norm_gate_up_swiglu", x, gate_up_weight)
    check_norm("norm_gate_up_swiglu", "norm_weight", norm_weight, x)
    if tiles is not None and _is_tiled(x, gate_up_weight):
        return gate_up_swiglu(rms_norm(x, norm_weight, eps), gate_up_weight, activation, tiles)
    if not _is_gemv(x, gate_up_weight):
        return swiglu(F.linear(rms_norm(x, norm_weight, eps), gate_up_weight), activation)
    return _launch(x, gate_up_weight, norm_weight, eps, None, activation, gate_up_weight.dtype)


def gate_up_swiglu(
    x: Tensor, gate_up_weight: Tensor, activation: Activation = "silu", tiles: Tiles | None = None
) -> Tensor:
    """Return `swiglu(x @ gate_up_weight.T)`, like `norm_gate_up_swiglu` without the norm."""
    _check_inner("gate_up_swiglu", x, gate_up_weight)
    if tiles is not None and _is_tiled(x, gate_up_weight):
        return plain_tiles(x, gate_up_weight, None, activation, gate_up_weight.dtype, tiles)
    if not _is_gemv(x, gate_up_weight):
        return swiglu(F.linear(x, gate_up_weight), activation)
    return _launch(x, gate_up_weight, None, 0.0, None, activation, gate_up_weight.dtype)


def _check_inner(op: str, x: Tensor, weight: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or x.device != weight.device:
        got = f"x {tuple(x.shape)} on {x.device}, weight {tuple(weight.shape)} on {weight.device}"
        raise ValueError(f"{op}: got {got}; wanted [tokens, in] and [out, in] on one device")


def _is_gemv(x: Tensor, weight: Tensor) -> bool:
    return x.shape[0] == 1 and _is_multiplied(x, weight)


def _is_tiled(x: Tensor, weight: Tensor) -> bool:
    return 1 < x.shape[0] <= MOST_TILED_TOKENS and _is_multiplied(x, weight)


def _is_multiplied(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels here support these tensors."""
    if not runs_on_triton(x) or weight.dtype != torch.bfloat16:
        return False
    return x.dtype in (torch.bfloat16, torch.float32) and x.stride(1) == 1 and weight.is_contiguous()


def shape_class(num_rows: int, inner: int, gated: bool) -> str:
    """Return the row of CONFIGS that serves a weight of `num_rows` (twice that if gated) by `inner`."""
    if gated:
        return "gated"
    if inner > WIDE_INNER:
        return "wide"
    return "vocabulary" if num_rows >= VOCABULARY_ROWS else "narrow"


def _launch(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    activation: Activation | None,
    dtype: torch.dtype,
) -> Tensor:
    gates = activation is not None and is_gated(activation)
    inner, num_rows = x.shape[1], weight.shape[0] // (2 if gates else 1)
    block_rows, block_inner, num_warps, num_stages, unroll = CONFIGS[shape_class(num_rows, inner, gates)]
    out = torch.empty(1, num_rows, dtype=dtype, device=weight.device)
    _gemv_kernel[(triton.cdiv(num_rows, block_rows),)](
        x, weight, weight if norm_weight is None else norm_weight, out if residual is None else residual.contiguous(),
        out, eps, num_rows, INNER=inner, NORMS=norm_weight is not None, GATES=gates,
        ACTIVATION=activation or "none", ADDS_RESIDUAL=residual is not None,
        BLOCK_ROWS=block_rows, BLOCK_INNER=block_inner, STAGES=num_stages, UNROLL=unroll, num_warps=num_warps,
    )  # fmt: skip
    return out

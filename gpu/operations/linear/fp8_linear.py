"""Multiply tokens, rounded to FP8, by a matrix of FP8 numbers, with torch's scaled product or tiles of our own.

Each token is rounded to e4m3 with a scale of its own (its largest number becomes 448). The product's sums are scaled by
the token's and the row's scale. A packed matrix is read as it is stored: its words hold columns in an order of their
own (`word_layout`), and tokens are rounded into the same order. So no copy of the matrix is made. Bytes moved: the
matrix once for each tile of tokens; of tokens 2 bytes a number read, 1 written, and 1 read by the product.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from gpu.model.matrix_format import UNIT_WORDS, unit_columns
from gpu.model.spec import Activation, is_gated
from gpu.operations.arguments import check_dtype, runs_on_triton
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.plain_tiles import Tiles, plain_tiles
from gpu.operations.linear.word_layout import RUN_COLUMNS
from gpu.operations.rms_norm import check_norm, normed_row, rms_norm_reference
from gpu.operations.swiglu import activated, swiglu, swiglu_reference

Rounded = tuple[Tensor, Tensor]  # tokens in FP8 in the order of packed words, and their scales: of `round_tokens`

MOST_FP8 = 448.0  # the largest number of e4m3
LEAST_SCALE = 2.0**-100  # of a token of zeros
LEAST_ROUNDED_TOKENS = 16  # fewer tokens are not rounded: kernels that widen the matrix are faster

_RUN = tl.constexpr(RUN_COLUMNS)
_MOST, _LEAST, _DOWN = tl.constexpr(MOST_FP8), tl.constexpr(LEAST_SCALE), tl.constexpr(2.0**-120)


def round_tokens_reference(x: Tensor) -> Rounded:
    """Round tokens in plain torch, as `round_tokens` does without a norm.

    x: `[tokens, inner]`, any float dtype and device. Returns e4m3 numbers `[tokens, padded]` and float32 scales
    `[tokens, 1]`.
    """
    tokens, inner = x.shape
    scales = x.float().abs().amax(1, keepdim=True).div_(MOST_FP8).clamp_(min=LEAST_SCALE)
    codes = (x.float() * scales.reciprocal()).to(torch.float8_e4m3fn).view(torch.uint8)
    padded = F.pad(codes, (0, -inner % unit_columns(8)))
    halves = padded.view(tokens, -1, 2, UNIT_WORDS, 2).permute(0, 1, 3, 4, 2)
    return halves.reshape(tokens, -1).view(torch.float8_e4m3fn), scales


@triton.jit
def _e4m3_bits(numbers):
    """Round float32 numbers of magnitude 448 or less to e4m3, ties to even; NaN stays NaN. Return the bits as uint8.

    Times 2**-120, a number has e4m3's exponent as its own, also if it is subnormal. So no card needs FP8 conversions.
    """
    small = (tl.abs(numbers) * _DOWN).to(tl.int32, bitcast=True)
    code = (small + 0x7FFFF + ((small >> 20) & 1)) >> 20
    code = tl.where(numbers == numbers, code, 0x7F)
    return (code | tl.where(numbers < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def _round_kernel(
    x, norm, codes, scales, x_stride, eps, INNER: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = tl.load(x + token * x_stride + column, mask=column < INNER, other=0.0)
    if ACTIVATION != "none":
        gate = row.to(tl.float32)
        up = gate
        if GATES:
            up = tl.load(x + token * x_stride + INNER + column, mask=column < INNER, other=0.0).to(tl.float32)
        row = activated(gate, up, ACTIVATION).to(x.dtype.element_ty)
    if HAS_NORM:
        row = normed_row(row, tl.load(norm + column, mask=column < INNER, other=0.0), eps, INNER)
    wide = row.to(tl.float32)
    scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(wide), axis=0), _MOST), _LEAST)
    tl.store(scales + token, scale)
    code = _e4m3_bits(wide * tl.math.div_rn(1.0, scale))
    # A word's bytes hold columns 2 w of both of a unit's runs, then columns 2 w + 1 of both.
    runs = tl.reshape(code, [BLOCK // (2 * _RUN), 2, _RUN])
    tl.store(codes + token * PADDED + column, tl.reshape(tl.permute(runs, (0, 2, 1)), [BLOCK]), mask=column < PADDED)


def round_tokens(
    x: Tensor, norm: Tensor | None = None, eps: float = 0.0, activation: Activation | None = None
) -> Rounded:
    """Round tokens to FP8, after a norm or an activation if there is one.

    x: `[tokens, inner]`, bf16 or float32; with a gated activation `[tokens, 2 * inner]`, the gate first. norm:
    `[inner]`, of `rms_norm`; None with an activation, whose result has x's dtype before it is rounded. Returns e4m3
    numbers `[tokens, padded]`, in the order of packed words and with zeros behind them, and scales, float32
    `[tokens, 1]`. Raises ValueError for a norm of another shape, dtype or device.
    """
    if norm is not None:
        check_norm("round_tokens", "norm", norm, x)
    check_dtype("round_tokens", x)
    if not runs_on_triton(x) or x.numel() == 0:
        x = x if activation is None else swiglu_reference(x, activation)
        return round_tokens_reference(x if norm is None else rms_norm_reference(x, norm, eps))
    x = x if x.stride(1) == 1 else x.contiguous()
    gates = activation is not None and is_gated(activation)
    tokens, inner = len(x), x.shape[1] // (1 + gates)
    padded = -(-inner // unit_columns(8)) * unit_columns(8)
    codes = torch.empty(tokens, padded, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(padded)
    _round_kernel[(tokens,)](
        x, x if norm is None else norm, codes, scales, x.stride(0), eps,
        INNER=inner, PADDED=padded, BLOCK=block, HAS_NORM=norm is not None, ACTIVATION=activation or "none",
        GATES=gates, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def fp8_linear(
    rounded: Rounded, packed: Packed, added: Tensor | None = None, activation: Activation | None = None,
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Return the product of rounded tokens with an FP8 matrix `(+ added)`, or `activation(gate) * up` of it.

    rounded: what `round_tokens` returned. packed: FP8 with one scale a row, and a multiple of 16 rows. added:
    `[tokens, rows]` in packed.dtype, or `[rows]` for all tokens; None with an activation. tiles: how up to
    MOST_TILED_TOKENS tokens are multiplied; None: by torch's product. Returns `[tokens, rows]` of packed.dtype, new;
    with a gated activation half as many rows.
    """
    codes, scales = rounded
    numbers, row_scales = packed.words.view(torch.float8_e4m3fn), packed.scales.float()
    if tiles is not None:
        return plain_tiles(codes, numbers, added, activation, packed.dtype, tiles, (scales, row_scales))
    product = scaled_mm(
        codes, numbers.t(), scales, ScalingType.RowWise, row_scales.t(), ScalingType.RowWise,
        output_dtype=packed.dtype, use_fast_accum=packed.words.is_cuda,
    )  # fmt: skip
    if activation is not None:
        return swiglu(product, activation)
    return product if added is None else product.add_(added)


def why_no_scaled_product(device: torch.device) -> str | None:
    """Return the reason why torch cannot multiply FP8 with one scale a row on this device; None if it can."""
    numbers = torch.zeros(LEAST_ROUNDED_TOKENS, unit_columns(8), device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(len(numbers), 1, device=device)
    rows = ScalingType.RowWise
    try:
        scaled_mm(numbers, numbers.t(), scales, rows, scales.t(), rows, use_fast_accum=device.type == "cuda")
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        return str(error).splitlines()[0]
    return None

"""Multiply tokens by a matrix of 4 or 8 bits, which is widened in registers; or widen the matrix.

Up to MOST_PACKED_TOKENS tokens use `packed_tiles`, with bias, residual and, for the fewest, SwiGLU fused in. On the CPU
up to MOST_MULTIPLIED_TOKENS (any number for float32 in tiles) use `numba_packed_linear`. With more (prefill) the matrix
is widened once and multiplied by the vendor's product. A program owns whole output rows, so a result does not depend on
how programs are scheduled. Bytes moved: words, scales and zero points once for each tile of tokens; a widened matrix is
also written.
"""

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.matrix_format import MOST_MULTIPLIED_TOKENS, MOST_PACKED_TOKENS, UNIT_WORDS
from gpu.model.spec import Activation
from gpu.operations.arguments import check, runs_on_triton
from gpu.operations.linear.numba_packed_linear import multiplies, packed_product, widen_packed
from gpu.operations.linear.packed_matrix import Packed, unpack_reference
from gpu.operations.linear.packed_numbers import layout, scales_of, widened
from gpu.operations.linear.packed_tiles import packed_tiles, tensors_of
from gpu.operations.linear.word_layout import RUN_COLUMNS
from gpu.operations.rms_norm import check_norm, rms_norm
from gpu.operations.swiglu import swiglu

UNPACK_BLOCK = (8, 128)  # rows, words: a thread reads 16 bytes of words and writes 16 at once

Widen = Callable[[Packed], Tensor]

_UNIT, _RUN = tl.constexpr(UNIT_WORDS), tl.constexpr(RUN_COLUMNS)


@triton.jit
def _unpack_kernel(
    words, scales, zeros, out, num_rows,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, NUM_WORDS: tl.constexpr, GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr, IS_FINE: tl.constexpr, NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, CUTS_RUNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    PLACES: tl.constexpr = 4 if KIND % 8 == 4 else 2  # numbers in half a word
    first = (tl.program_id(0) * BLOCK_ROWS).to(tl.int64)
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    is_row = first + row < num_rows
    at = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
    packed = tl.load(words + first * NUM_WORDS + row * NUM_WORDS + at, mask=is_row & (at < NUM_WORDS), other=0)
    number = 2 * tl.program_id(1) * BLOCK_WORDS + tl.arange(0, 2 * BLOCK_WORDS)[None, :]
    rows_out = out + first * INNER + row * INNER
    unit = at // _UNIT * COLUMNS
    for PLACE in tl.static_range(PLACES):
        # Words of a unit, or of a run, have one scale where its groups end with it: then it is loaded once for them.
        grouped = unit
        if IS_FINE:
            grouped += PLACE * _RUN
        if CUTS_RUNS:
            grouped += at % _UNIT * 2
        if PLACE == 0 or IS_FINE:
            less, gain = scales_of(
                scales, zeros, first + row, grouped, is_row & (grouped < INNER), HAS_ZEROS, KIND, ROW_BLOCK, GROUP,
                NUM_GROUPS, NUM_RUNS,
            )  # fmt: skip
        low = widened(packed, less, gain, PLACE, KIND, NUM_RUNS)
        high = widened(packed, less, gain, PLACE + PLACES, KIND, NUM_RUNS)
        pairs = tl.reshape(tl.join(low, high), [BLOCK_ROWS, 2 * BLOCK_WORDS])
        column = number // _RUN * COLUMNS + PLACE * _RUN + number % _RUN
        tl.store(rows_out + column, pairs.to(out.dtype.element_ty), mask=is_row & (column < INNER))


def packed_linear(
    x: Tensor, packed: Packed, residual: Tensor | None = None, widened: Widen | None = None, overwrites: bool = False
) -> Tensor:
    """Return `x @ packed.T (+ residual)`, `[tokens, rows]`, in packed.dtype.

    x: `[tokens, inner]` of any float type. residual: `[tokens, rows]` in packed.dtype. overwrites: the sum may be
    written over the residual, for more than MOST_PACKED_TOKENS tokens; otherwise the result is new. widened: widens the
    matrix for more than MOST_PACKED_TOKENS tokens; None: `widen`. Raises ValueError for another shape, dtype or device.
    """
    x = _ordered("packed_linear", x, packed)
    if residual is not None:
        check("packed_linear", "residual", residual, (len(x), packed.rows), packed.dtype, x.device)
    return _product(x, packed, residual, None, packed.dtype, widened, overwrites)


def packed_logits(x: Tensor, packed: Packed) -> Tensor:
    """Return `x @ packed.T` in float32; kernels never round it to bf16.

    Raises ValueError for another shape or device.
    """
    x = _ordered("packed_logits", x, packed)
    most = MOST_PACKED_TOKENS if runs_on_triton(x) else most_multiplied(packed) or len(x)
    if len(x) <= most:
        return _product(x, packed, None, None, torch.float32, None)
    return torch.cat([_product(part, packed, None, None, torch.float32, None) for part in x.split(most)])


def packed_norm_linear(
    x: Tensor, norm: Tensor, eps: float, packed: Packed, bias: Tensor | None, widened: Widen | None = None
) -> Tensor:
    """Return `rms_norm(x, norm, eps) @ packed.T (+ bias)`: norm `[inner]` of x.dtype or float32, bias `[rows]`.

    Raises ValueError for another shape, dtype or device.
    """
    check_norm("packed_norm_linear", "norm", norm, x)
    if bias is not None:
        check("packed_norm_linear", "bias", bias, (packed.rows,), packed.dtype, x.device)
    x = _ordered("packed_norm_linear", rms_norm(x, norm, eps), packed)
    return _product(x, packed, bias, None, packed.dtype, widened)


def packed_gate_up(x: Tensor, packed: Packed, activation: Activation, widened: Widen | None = None) -> Tensor:
    """Return `activation(gate) * up` of `x @ packed.T`, like `packed_norm_gate_up` without the norm."""
    return _product(_ordered("packed_gate_up", x, packed), packed, None, activation, packed.dtype, widened)


def packed_norm_gate_up(
    x: Tensor, norm: Tensor, eps: float, packed: Packed, activation: Activation, widened: Widen | None = None
) -> Tensor:
    """Return `activation(gate) * up` of `rms_norm(x, norm, eps) @ packed.T`, gate first: `[tokens, rows / 2]`.

    For an activation without a gate it is `[tokens, rows]`. Raises ValueError for another shape, dtype or device.
    """
    check_norm("packed_norm_gate_up", "norm", norm, x)
    return packed_gate_up(rms_norm(x, norm, eps), packed, activation, widened)


def unpack(packed: Packed) -> Tensor:
    """Return `[rows, inner]` of packed.dtype, each number rounded once, columns in the order of tokens."""
    wide = widen(packed)
    if packed.order is None:
        return wide
    placed = torch.empty_like(wide)
    placed[:, packed.order] = wide
    return placed


def most_multiplied(packed: Packed) -> int:
    """Return up to how many tokens the CPU multiplies by the matrix as it is stored; 0: it has no code for it.

    In integers that is faster for any number of tokens than a library's float32 product: 2.7 to 3 times at 512 tokens.
    """
    if not multiplies(packed):
        return 0
    return (
        sys.maxsize
        if packed.in_tiles and packed.dtype == torch.float32
        else MOST_MULTIPLIED_TOKENS[packed.dtype.itemsize]
    )


def check_tokens(op: str, x: Tensor, packed: Packed) -> None:
    """Raise ValueError unless x is tokens `[tokens, inner]` of the matrix, on its device."""
    if x.ndim != 2 or x.shape[1] != packed.inner or x.device != packed.words.device:
        got = f"x {tuple(x.shape)} on {x.device}, a matrix {packed.rows, packed.inner} on {packed.words.device}"
        raise ValueError(f"{op}: got {got}; wanted [tokens, in] and [out, in] on one device")


def _ordered(op: str, x: Tensor, packed: Packed) -> Tensor:
    """Return x with its columns in the matrix's order. Raises ValueError for another shape or device."""
    check_tokens(op, x, packed)
    x = x if x.dtype in (torch.bfloat16, torch.float32) else x.float()
    return x if packed.order is None else x.index_select(1, packed.order)


def _product(
    x: Tensor, packed: Packed, added: Tensor | None, activation: Activation | None, dtype: torch.dtype,
    widened: Widen | None, overwrites: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply x, whose columns are in the matrix's order. added: `[tokens, rows]`, or `[rows]` for all tokens.

    overwrites: with a widened matrix, write the sum over what is added, `[tokens, rows]`.
    """
    if runs_on_triton(x) and 0 < len(x) <= MOST_PACKED_TOKENS:
        return packed_tiles(x, packed, added, activation, dtype)
    if not runs_on_triton(x) and 0 < len(x) <= most_multiplied(packed):
        product = packed_product(x.float().contiguous(), packed)
    else:
        wide = (widened or widen)(packed).t()
        if added is not None and overwrites and activation is None:
            return added.addmm_(x.to(packed.dtype), wide)
        product = x.to(packed.dtype) @ wide
    if activation is not None:
        product = swiglu(product, activation)
    return (product if added is None else product.add_(added)).to(dtype)


def widen(packed: Packed, out: Tensor | None = None) -> Tensor:
    """Return `[rows, inner]` like `unpack`, but with columns in the matrix's own order.

    out: where it is written, or None.
    """
    if not runs_on_triton(packed.words):
        wide = _widen_on_cpu(packed)
        return wide if out is None else out.copy_(wide)
    block_rows, block_words = UNPACK_BLOCK
    if out is None:
        out = torch.empty(packed.rows, packed.inner, dtype=packed.dtype, device=packed.words.device)
    grid = triton.cdiv(packed.rows, block_rows), triton.cdiv(packed.num_words, block_words)
    _unpack_kernel[grid](
        *tensors_of(packed), out, packed.rows, **layout(packed),
        CUTS_RUNS=packed.cuts_runs, BLOCK_ROWS=block_rows, BLOCK_WORDS=block_words, num_warps=4,
    )  # fmt: skip
    return out


def _widen_on_cpu(packed: Packed) -> Tensor:
    if multiplies(packed):
        return widen_packed(packed)
    wide = unpack_reference(packed, torch.float32).to(packed.dtype)
    return wide if packed.order is None else wide.index_select(1, packed.order)

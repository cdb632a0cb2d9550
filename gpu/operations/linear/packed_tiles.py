"""Multiply several tokens by a packed matrix: tiles of numbers are made in registers and multiplied by tensor cores.

Bias and residual are fused in. Numbers are the first operand, so that they go from words to tensor cores without shared
memory. They are exact integers (or FP8 numbers) in bf16. Scales multiply the sums of a group, and offsets multiply the
sums of its tokens, which a product with ones gives. A product has a run of 32 columns, or half a run if groups have 16
(GGUF's Q6_K). If groups are finer still, numbers are scaled in float32 and rounded once, and scales are loaded for each
word. Up to MOST_FEW tokens a program has few rows, and its warps share a row's columns, so that a small matrix fills
the device; up to MOST_GATED tokens SwiGLU is fused in. Beyond, a program has many rows, and the tokens of a tile are
loaded once for all of them. A program owns whole output rows, so a result does not depend on how programs are
scheduled. Bytes moved: words, scales and zero points once for each tile of tokens. Scales are loaded one turn of the
loop ahead (`packed_numbers.beside`); those of whole rows multiply once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.matrix_format import UNIT_WORDS, unit_columns
from gpu.model.spec import Activation, is_gated
from gpu.operations.arguments import INTERPRETED
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.packed_numbers import (
    beside,
    exact_pairs,
    group_of_pairs,
    group_of_run,
    layout,
    no_byte,
    ones_like,
    run_of,
    scale_of,
    scales_of,
    widened,
    zeros_of,
)
from gpu.operations.linear.word_layout import RUN_COLUMNS
from gpu.operations.swiglu import activated, swiglu

MOST_FEW, MOST_GATED = 16, 8  # tokens
WIDE_INNER = 8192  # if rows are longer than this, more warps share them
MANY_ROWS = 16_384  # so many fill the device in blocks of 128
MOST_AHEAD = 4  # groups whose scales and offsets come in one load of 8 bytes

HALF_RUN = RUN_COLUMNS // 2  # columns, the fewest of a tensor core's product

_UNIT, _RUN = tl.constexpr(UNIT_WORDS), tl.constexpr(RUN_COLUMNS)


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of a product.

    splits: parts of a row's columns that warps share; 1: tiles have no third axis, as Hopper's widest product requires.
    unroll: of the loop over columns.
    """

    tokens: int
    rows: int
    splits: int
    num_warps: int
    num_stages: int
    unroll: int = 1


def tiles_for(tokens: int, rows: int, inner: int, dtype: torch.dtype, is_short: bool, is_halved: bool) -> Tiles:
    """Return the tiles for so many rows of the result.

    is_short: whether a unit takes hardly longer than the overhead of a turn of the loop over columns; then a turn has
    two units. is_halved: whether products have half a run of columns; then few tokens have too few bytes for eight
    warps to copy ahead.
    """
    if dtype != torch.bfloat16:  # products of float32 are not for speed
        return Tiles(8, 16, 2, 4, 1) if tokens <= MOST_GATED else Tiles(16, 16, 1, 4, 1)
    at_once, has_many = max(8, triton.next_power_of_2(tokens)), rows >= MANY_ROWS
    if at_once == 8 or (at_once <= MOST_FEW and not has_many):
        splits = 8 if inner > WIDE_INNER and at_once < MOST_FEW else 4
        return Tiles(at_once, 16, splits, splits, 3, unroll=2 if is_short else 1)
    if has_many and not (is_halved and at_once <= MOST_FEW):
        return Tiles(min(64, at_once), 128, 1, 8, 3)
    at_once = min(32 if tokens <= 64 else 64, at_once)
    return Tiles(at_once, 64, 1, 4, 4 if at_once < 64 else 3)


def is_short(bits: int, group: int) -> bool:
    """Return whether a unit has few columns, and scales that are not needed for each single number."""
    return bits == 8 and group % RUN_COLUMNS == 0


def is_halved(group: int, inner: int, has_runs: bool) -> bool:
    """Return whether products have half a run of columns, which then has one group.

    Not if there are zero points, which are bytes (see `row_tile`); no file has such groups.
    """
    return has_runs and group < inner and group % RUN_COLUMNS != 0 and group % HALF_RUN == 0


@triton.jit
def row_tile(
    sums, x, words, scales, zeros, scale, zero, row, token, step, is_token, x_stride,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, NUM_WORDS: tl.constexpr, GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr, IS_FINE: tl.constexpr, NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_EXACT: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr,
    DTYPE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Add the products of a unit of columns to the sums of each split, and return the sums.

    scale, zero: from `beside`. Scales of whole rows are left to `scaled`. AT_ONCE: columns of a product, a run or half
    a run. Half a run goes without `no_byte`: four threads of eight columns would hold them twice, and Triton 3.6
    multiply them twice.
    """
    PLACES: tl.constexpr = 4 if KIND % 8 == 4 else 2
    IS_WHOLE: tl.constexpr = NUM_GROUPS == 1 and NUM_RUNS == 0 and not HAS_ZEROS
    MIDDLE: tl.constexpr = 8 if KIND == 4 else 128
    if SPLITS > 1:
        word, column = tl.arange(0, AT_ONCE // 2)[None, None, :], tl.arange(0, AT_ONCE)[None, None, :]
    else:
        word, column = tl.arange(0, AT_ONCE // 2)[None, :], tl.arange(0, AT_ONCE)[None, :]
    unit = step * COLUMNS
    part = sums if IS_WHOLE else tl.zeros_like(sums)
    total = tl.zeros_like(sums)
    if IS_EXACT:
        byte = no_byte(words, unit) if AT_ONCE == _RUN else unit * 0
    for PART in tl.static_range(_RUN // AT_ONCE):
        packed = tl.load(words + row * NUM_WORDS + step * _UNIT + PART * (AT_ONCE // 2) + word, mask=unit < INNER,
                         other=0, eviction_policy="evict_first")  # fmt: skip
        for PLACE in tl.static_range(PLACES):
            first = unit + PLACE * _RUN + PART * AT_ONCE
            group = first if IS_FINE else unit
            values = tl.load(x + token * x_stride + first + column, mask=is_token & (first + column < INNER), other=0.0)
            values = tl.permute(values, (0, 2, 1)) if SPLITS > 1 else tl.trans(values)
            values = values.to(DTYPE)
            if IS_EXACT:
                less = tl.zeros([1] * len(packed.shape), tl.int32)
                if HAS_ZEROS:
                    less = zeros_of(zeros, row, group, group < INNER, HAS_ZEROS, KIND, ROW_BLOCK, GROUP, NUM_GROUPS)
                elif NUM_RUNS == 0:
                    less += MIDDLE
                pairs = exact_pairs(packed, less, byte, PLACE, KIND)
            else:
                each = first + 2 * word
                less, gain = scales_of(
                    scales, zeros, row, each, each < INNER, HAS_ZEROS, KIND, ROW_BLOCK, GROUP, NUM_GROUPS, NUM_RUNS
                )  # fmt: skip
                low = widened(packed, less, gain, PLACE, KIND, NUM_RUNS)
                high = widened(packed, less, gain, PLACE + PLACES, KIND, NUM_RUNS)
                pairs = tl.join(low.to(DTYPE), high.to(DTYPE))
            if SPLITS > 1:
                numbers = pairs.reshape(SPLITS, BLOCK_ROWS, AT_ONCE).to(DTYPE)
            else:
                numbers = pairs.reshape(BLOCK_ROWS, AT_ONCE).to(DTYPE)
            part = tl.dot(numbers, values, part, input_precision="ieee")
            if IS_EXACT and NUM_RUNS > 0:
                ones = ones_like(packed, byte).reshape(numbers.shape).to(DTYPE)
                total = tl.dot(ones, values, total, input_precision="ieee")
            if IS_EXACT and NUM_RUNS > 0:
                if AHEAD == 0:
                    run = run_of(zeros, row, first, first < INNER, GROUP, NUM_GROUPS, NUM_RUNS)
                    offset, gain = group_of_run(scales, run, row, first, first < INNER, GROUP, NUM_GROUPS)
                else:
                    offset, gain = group_of_pairs(scale, zero, (PLACE * _RUN + PART * AT_ONCE) * AHEAD // COLUMNS)
                sums += part * gain
                sums -= total * offset
                part, total = tl.zeros_like(sums), tl.zeros_like(sums)
            elif IS_EXACT and not IS_WHOLE and (IS_FINE or PLACE == PLACES - 1):
                if AHEAD == 0:
                    at = (row // ROW_BLOCK) * NUM_GROUPS + group // GROUP
                    scale = tl.load(scales + at, mask=group < INNER, other=0.0)
                sums += part * scale_of(scale, KIND)
                part = tl.zeros_like(sums)
    return part if IS_WHOLE else sums + part


@triton.jit
def scaled(sums, scale, NUM_GROUPS: tl.constexpr, NUM_RUNS: tl.constexpr, HAS_ZEROS: tl.constexpr, KIND: tl.constexpr):
    """Scale the sums of `row_tile` if a row has one scale and no zero point: the one `beside` its first unit."""
    return sums * scale_of(scale, KIND) if NUM_GROUPS == 1 and NUM_RUNS == 0 and not HAS_ZEROS else sums


@triton.jit
def _packed_tiles_kernel(
    x, words, scales, zeros, residual, out, num_tokens, num_rows, x_stride, residual_stride,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, NUM_WORDS: tl.constexpr, GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr, IS_FINE: tl.constexpr, NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_EXACT: tl.constexpr, AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, ADDS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr, SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    source_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    source_token = tl.minimum(token, num_tokens - 1).to(tl.int64)
    is_token = token < num_tokens
    if SPLITS > 1:
        source_row, source_token = source_row[None, :, None], source_token[None, :, None]
        is_token = is_token[None, :, None]
        split = tl.arange(0, SPLITS)[:, None, None]
        sums = tl.zeros([SPLITS, BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    else:
        source_row, source_token, is_token = source_row[:, None], source_token[:, None], is_token[:, None]
        split = tl.zeros([1, 1], tl.int32)
        sums = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    up_sums = sums
    scale, zero = beside(scales, zeros, source_row, split * COLUMNS, INNER, GROUP, NUM_GROUPS, NUM_RUNS, ROW_BLOCK,
                         AHEAD)  # fmt: skip
    up_scale, up_zero = scale, zero
    if GATES:
        up_scale, up_zero = beside(scales, zeros, source_row + num_rows, split * COLUMNS, INNER, GROUP, NUM_GROUPS,
                                   NUM_RUNS, ROW_BLOCK, AHEAD)  # fmt: skip
    for begin in tl.range(0, STEPS, SPLITS, loop_unroll_factor=UNROLL):
        now, zero_now, up_now, up_zero_now = scale, zero, up_scale, up_zero
        if AHEAD > 0 and NUM_GROUPS > 1:
            unit = (begin + SPLITS + split) * COLUMNS
            scale, zero = beside(scales, zeros, source_row, unit, INNER, GROUP, NUM_GROUPS, NUM_RUNS, ROW_BLOCK,
                                 AHEAD)  # fmt: skip
            if GATES:
                up_scale, up_zero = beside(scales, zeros, source_row + num_rows, unit, INNER, GROUP, NUM_GROUPS,
                                           NUM_RUNS, ROW_BLOCK, AHEAD)  # fmt: skip
        sums = row_tile(
            sums, x, words, scales, zeros, now, zero_now, source_row, source_token, begin + split, is_token, x_stride,
            INNER, COLUMNS, NUM_WORDS, GROUP, NUM_GROUPS, IS_FINE, NUM_RUNS, ROW_BLOCK, KIND, HAS_ZEROS, IS_EXACT,
            AT_ONCE, AHEAD, DTYPE, SPLITS, BLOCK_ROWS, BLOCK_TOKENS,
        )  # fmt: skip
        if GATES:
            up_sums = row_tile(
                up_sums, x, words, scales, zeros, up_now, up_zero_now, source_row + num_rows, source_token,
                begin + split, is_token, x_stride,
                INNER, COLUMNS, NUM_WORDS, GROUP, NUM_GROUPS, IS_FINE, NUM_RUNS, ROW_BLOCK, KIND, HAS_ZEROS, IS_EXACT,
                AT_ONCE, AHEAD, DTYPE, SPLITS, BLOCK_ROWS, BLOCK_TOKENS,
            )  # fmt: skip
    sums, up_sums = (
        scaled(sums, scale, NUM_GROUPS, NUM_RUNS, HAS_ZEROS, KIND),
        scaled(up_sums, up_scale, NUM_GROUPS, NUM_RUNS, HAS_ZEROS, KIND),
    )
    result = tl.sum(sums, 0) if SPLITS > 1 else sums
    if ACTIVATION != "none":
        result = activated(result, tl.sum(up_sums, 0) if SPLITS > 1 else up_sums, ACTIVATION)
    inside = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    if ADDS_RESIDUAL:
        place = token.to(tl.int64)[None, :] * residual_stride + row[:, None]
        result += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    place = token.to(tl.int64)[None, :] * num_rows + row[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


def tile_layout(packed: Packed) -> dict[str, object]:
    """Return the constants that `row_tile` needs of a matrix when it is compiled."""
    halves = is_halved(packed.group, packed.inner, packed.runs is not None)
    is_exact = halves or packed.scales.shape[1] == 1 or packed.group % RUN_COLUMNS == 0
    is_narrow = packed.dtype == torch.bfloat16 and not INTERPRETED  # the interpreter would multiply bits
    return {
        **layout(packed), "IS_EXACT": is_exact, "AT_ONCE": HALF_RUN if halves else RUN_COLUMNS,
        "AHEAD": groups_ahead(packed) if is_exact else 0,
        "DTYPE": tl.bfloat16 if is_narrow else tl.float32,
    }  # fmt: skip


def groups_ahead(packed: Packed) -> int:
    """Return the number of a unit's groups whose scales are loaded at once; 0: none are."""
    columns, groups = unit_columns(packed.bits), packed.scales.shape[1]
    if groups == 1 and packed.runs is None:
        return 1
    of_unit = max(1, columns // packed.group)
    if max(columns, packed.group) % min(columns, packed.group) or packed.run % columns or of_unit > MOST_AHEAD:
        return 0
    return of_unit if groups % of_unit == 0 and (of_unit == 1 or packed.runs is not None) else 0


def tensors_of(packed: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Return words, scales, and zero points or runs, or a placeholder if there are neither."""
    beside = packed.zeros if packed.runs is None else packed.runs
    assert not packed.in_tiles, "only the CPU's products take rows in tiles"
    return packed.words, packed.scales, packed.scales if beside is None else beside


def packed_tiles(
    x: Tensor, packed: Packed, added: Tensor | None, activation: Activation | None, dtype: torch.dtype
) -> Tensor:
    """Multiply x `[tokens, inner]`, bf16 or float32, columns in the matrix's order; arguments are checked.

    added: `[tokens, rows]`, or `[rows]` for all tokens; None with an activation.
    """
    if activation is not None and len(x) > MOST_GATED:
        return swiglu(packed_tiles(x, packed, None, None, packed.dtype), activation).to(dtype)
    gates = activation is not None and is_gated(activation)
    tokens, num_rows = len(x), packed.rows // (2 if gates else 1)
    tiles = tiles_for(
        tokens, num_rows, packed.inner, packed.dtype, is_short(packed.bits, packed.group),
        is_halved(packed.group, packed.inner, packed.runs is not None),
    )  # fmt: skip
    x = x if x.stride(1) == 1 else x.contiguous()
    if tiles.splits == 1:
        x = x.to(packed.dtype)  # float32 rows would not fit in shared memory
    out = torch.empty(tokens, num_rows, dtype=dtype, device=x.device)
    residual, stride = (out, 0) if added is None else (added.contiguous(), 0 if added.ndim == 1 else num_rows)
    _packed_tiles_kernel[(triton.cdiv(num_rows, tiles.rows), triton.cdiv(tokens, tiles.tokens))](
        x, *tensors_of(packed), residual, out, tokens, num_rows, x.stride(0), stride, **tile_layout(packed),
        GATES=gates, ACTIVATION=activation or "none", ADDS_RESIDUAL=added is not None, BLOCK_TOKENS=tiles.tokens,
        BLOCK_ROWS=tiles.rows, SPLITS=tiles.splits, UNROLL=tiles.unroll,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out

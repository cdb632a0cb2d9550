"""Multiply several tokens by a matrix in bf16 or FP8: tiles of weights go through shared memory to tensor cores.

Bias or residual and the activation are fused in. The weight is the first operand, so that few tokens fill a product of
64 rows. A program owns rows of the result, or a part of their columns. In the latter case a second kernel adds up the
parts' sums in order, so a result does not depend on how programs are scheduled. FP8 tokens and weights have a scale a
token and a row (`fp8_linear`), which multiply the sums. Bytes moved: the weight once for each tile of tokens, and the
tokens once for each program, from L2.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Activation, is_gated
from gpu.operations.arguments import INTERPRETED
from gpu.operations.swiglu import activated

MOST_TILED_TOKENS = 64
LEAST_TOKENS = 16  # tokens of a tile
MANY_ROWS = 8192  # with so many, programs of whole rows fill a device
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """A way to cut a product into tiles.

    rows, columns: of the weight that are multiplied at a time. stages: how many such tiles are in flight. parts:
    programs that share the columns of their rows. splits: parts of these columns that the warps of a program share.
    """

    rows: int
    columns: int
    num_warps: int
    stages: int
    splits: int = 1
    parts: int = 1


def candidates(num_rows: int, inner: int, tokens: int, has_one_part: bool, itemsize: int = 2) -> list[Tiles]:
    """Return the tiles that are among the fastest for some product, of 40 that were timed on an H200 (lab/LAB.md).

    num_rows, tokens: of the result. has_one_part: whether columns must not be cut into parts, as with an activation.
    itemsize: bytes of a weight's number. Tiles of FP8 have twice the columns: as many bytes as those that were timed.
    """
    if itemsize == 1:
        halves = candidates(num_rows, inner // 2, tokens, has_one_part)
        return [replace(tiles, columns=2 * tiles.columns) for tiles in halves]
    if has_one_part or num_rows >= MANY_ROWS:
        return [Tiles(64, 128, 4, 4), Tiles(128, 128, 4, 3) if tokens <= 32 else Tiles(128, 64, 4, 4)]
    found = [Tiles(64, 128, 4, 4)]
    if inner % (2 * 128) == 0:
        found.append(Tiles(64, 128, 4, 4, parts=2))
    if tokens <= LEAST_TOKENS:
        found.append(Tiles(16, 64, 4, 4, splits=4))
    return found


def fitted(tiles: Tiles, tokens: int, x_itemsize: int, gates: bool, most_bytes: int, itemsize: int = 2) -> Tiles | None:
    """Return the tiles with as many stages as shared memory of `most_bytes` holds; None: it holds fewer than two.

    x_itemsize, itemsize: bytes of a token's and of a weight's number. gates: whether a program also reads the up rows
    of its gate rows.
    """
    of_weights = itemsize * tiles.rows * (1 + gates)
    stage = tiles.columns * tiles.splits * (of_weights + x_itemsize * block_of(tokens))
    stages = min(tiles.stages, most_bytes // stage)
    return replace(tiles, stages=stages) if stages >= 2 else None


def block_of(tokens: int) -> int:
    """Return the number of tokens of a tile, padding included."""
    return max(LEAST_TOKENS, triton.next_power_of_2(tokens))


@triton.jit
def _tile(
    sums, x, weight, row, token, column, is_token, inner, x_stride,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the product of one tile, of these columns, to the sums, and return the sums."""
    if EVEN:
        weights = tl.load(weight + row * inner + column, eviction_policy="evict_first")
        tokens = tl.load(x + token * x_stride + column, mask=is_token, other=0.0)
    else:
        inside = column < inner
        weights = tl.load(weight + row * inner + column, mask=inside, other=0.0, eviction_policy="evict_first")
        tokens = tl.load(x + token * x_stride + column, mask=is_token & inside, other=0.0)
    turned = tl.permute(tokens.to(DTYPE), (0, 2, 1)) if SPLITS > 1 else tl.trans(tokens.to(DTYPE))
    return tl.dot(weights.to(DTYPE), turned, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def _plain_tiles_kernel(
    x, weight, x_scales, scales, added, out, sums_out, num_tokens, num_rows, inner, x_stride, added_stride,
    GATES: tl.constexpr, ACTIVATION: tl.constexpr, ADDS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first_row, first_token = tl.program_id(0) * BLOCK_ROWS, tl.program_id(1) * BLOCK_TOKENS
    row = tl.minimum(tl.arange(0, BLOCK_ROWS), num_rows - 1 - first_row)
    token = first_token + tl.arange(0, BLOCK_TOKENS)
    is_token = token < num_tokens
    column = tl.arange(0, BLOCK_INNER)
    if SPLITS > 1:
        row, token, is_token = row[None, :, None], token[None, :, None], is_token[None, :, None]
        column = tl.arange(0, SPLITS)[:, None, None] * BLOCK_INNER + column[None, None, :]
        sums = tl.zeros([SPLITS, BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    else:
        row, token, is_token, column = row[:, None], token[:, None], is_token[:, None], column[None, :]
        sums = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    up_sums = sums
    own = weight + first_row.to(tl.int64) * inner
    ups = own + num_rows.to(tl.int64) * inner
    share = inner // PARTS
    first = tl.program_id(2) * share
    for begin in tl.range(first, first + share, BLOCK_INNER * SPLITS, num_stages=STAGES):
        sums = _tile(sums, x, own, row, token, begin + column, is_token, inner, x_stride, EVEN, SPLITS, DTYPE)
        if GATES:
            up_sums = _tile(up_sums, x, ups, row, token, begin + column, is_token, inner, x_stride, EVEN, SPLITS,
                            DTYPE)  # fmt: skip
    result = tl.sum(sums, 0) if SPLITS > 1 else sums
    ups_result = tl.sum(up_sums, 0) if SPLITS > 1 else up_sums
    row_out = first_row + tl.arange(0, BLOCK_ROWS)[:, None]
    token_out = (first_token + tl.arange(0, BLOCK_TOKENS)[None, :]).to(tl.int64)
    inside = (row_out < num_rows) & (token_out < num_tokens)
    if SCALES:
        of_token = tl.load(x_scales + token_out, mask=token_out < num_tokens, other=0.0)
        result *= tl.load(scales + row_out, mask=row_out < num_rows, other=0.0) * of_token
        if GATES:
            ups_result *= tl.load(scales + num_rows + row_out, mask=row_out < num_rows, other=0.0) * of_token
    if ACTIVATION != "none":
        result = activated(result, ups_result, ACTIVATION)
    place = token_out * num_rows + row_out
    if PARTS > 1:
        part = tl.program_id(2).to(tl.int64) * num_tokens
        tl.store(sums_out + part * num_rows + place, result, mask=inside)
    else:
        if ADDS:
            before = tl.load(added + token_out * added_stride + row_out, mask=inside, other=0.0)
            result += before.to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_parts_kernel(
    sums, added, out, num_tokens, num_rows, added_stride,
    ADDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    total = tl.zeros([BLOCK], tl.float32)
    for PART in tl.static_range(PARTS):
        total += tl.load(sums + (PART * num_tokens + token) * num_rows + row, mask=inside, other=0.0)
    if ADDS:
        total += tl.load(added + token * added_stride + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * num_rows + row, total.to(out.dtype.element_ty), mask=inside)


def plain_tiles(
    x: Tensor, weight: Tensor, added: Tensor | None, activation: Activation | None, dtype: torch.dtype, tiles: Tiles,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return `x @ weight.T (+ added)`, or `activation(gate) * up` of it, `[tokens, rows]` of `dtype`, new.

    The caller has checked the arguments. x: `[tokens, inner]`, bf16 or float32, of 2 to MOST_TILED_TOKENS tokens, its
    last axis contiguous. weight: bf16 `[rows, inner]`, contiguous; twice as many rows if the activation has a gate,
    gate first. added: `[tokens, rows]`, or `[rows]` for all tokens; None with an activation. scales: float32,
    `[tokens, 1]` and `[weight's rows, 1]`, where x and weight are FP8; None: they are not.
    """
    gates = activation is not None and is_gated(activation)
    (tokens, inner), num_rows = x.shape, len(weight) // (1 + gates)
    assert added is None or activation is None, "nothing is added to an activated product"
    assert tiles.parts == 1 or activation is None, "parts of a sum are not activated"
    assert tiles.parts == 1 or inner % (tiles.parts * tiles.columns * tiles.splits) == 0, "parts are whole tiles"
    block_tokens = block_of(tokens)
    out = torch.empty(tokens, num_rows, dtype=dtype, device=x.device)
    before, stride = (out, 0) if added is None else (added.contiguous(), 0 if added.ndim == 1 else num_rows)
    sums = out
    if tiles.parts > 1:
        sums = torch.empty(tiles.parts, tokens, num_rows, dtype=torch.float32, device=x.device)
    narrow = tl.bfloat16 if scales is None else tl.float8e4nv
    is_narrow = weight.dtype != torch.float32 and not INTERPRETED  # the interpreter would multiply bits
    x_scales, row_scales = scales or (x, weight)
    grid = triton.cdiv(num_rows, tiles.rows), triton.cdiv(tokens, block_tokens), tiles.parts
    _plain_tiles_kernel[grid](
        x, weight, x_scales, row_scales, before, out, sums, tokens, num_rows, inner, x.stride(0), stride,
        GATES=gates, ACTIVATION=activation or "none", ADDS=added is not None,
        EVEN=inner % (tiles.columns * tiles.splits * tiles.parts) == 0,
        DTYPE=narrow if is_narrow else tl.float32, SCALES=scales is not None, BLOCK_ROWS=tiles.rows,
        BLOCK_TOKENS=block_tokens, BLOCK_INNER=tiles.columns, SPLITS=tiles.splits, PARTS=tiles.parts,
        STAGES=tiles.stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    if tiles.parts > 1:
        _add_parts_kernel[(triton.cdiv(num_rows, SUM_BLOCK), tokens)](
            sums, before, out, tokens, num_rows, stride, ADDS=added is not None, PARTS=tiles.parts, BLOCK=SUM_BLOCK,
            num_warps=4,
        )  # fmt: skip
    return out

"""Score all blocks for the next step, for many heads and layers at once: the network of `network.py`, fused.

AttentionPredictor, section 4.2. Invariant: scores of a head depend on its own history and width alone.

A program takes a tile of one head's blocks through the rows of its window. An activation row of the first convolution
serves three output rows, so it is made once for each row: at a block's own column and its neighbours', in one product
[blocks, 16] x [16, 64]. Its inputs are three rows of five columns and a 1 for the bias; the last quarter of its outputs
is unused. The second convolution is three products, [blocks, 64] x [64, 32], one for each output row. Only scores are
written. For each block H bytes (uint8) or 2H (bf16) are read, for 2 * (144 + 4,608) * H operations: 3.6 TFLOP for each
token of an 8B model at 96K.

Few scores change in a step. A block that was neither read nor looked at has the values of the row before, and a score
depends on five columns. If these are equal in all rows of the window and in as many rows as the window has moved by
since the last call, the last call's score is kept. The other blocks of a chunk are listed and computed, a tile at a
time. If 5 % of what is read changes in each step, these are about three quarters of 2,048 blocks, or 40 % of 6,144.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, runs_on_triton
from gpu.predictor.history import STEPS_PER_OCTAVE, TOP_CODE, restore
from gpu.predictor.network import CHANNELS, WIDE_CHANNELS, PredictorNetwork

SIDES = 3  # columns at which activations are made: the one before a block's own, its own, the next
INPUTS = 3 * (SIDES + 2) + 1  # inputs of the first convolution for them: rows by columns, and a 1
SIDED_CHANNELS = 4 * CHANNELS  # channels of the three sides, rounded up to a power of two
REACH = 2  # blocks to either side whose history a score depends on
EDGE_BLOCKS = REACH + 1  # a new block changes the scores of the last REACH blocks and its own
BLOCKS_A_TILE = 64
BLOCKS_A_CHUNK = 256  # blocks of a chunk, of which a program computes those that have changed
ROWS_AT_ONCE = 8  # rows of a chunk compared at once; with more, only two programs fit on an SM (168 registers a thread)
_REACH = tl.constexpr(REACH)
CODE_SCALE, CODE_TOP = tl.constexpr(1 / STEPS_PER_OCTAVE), tl.constexpr(TOP_CODE)


@dataclass(frozen=True, slots=True)
class PackedNetwork:
    """The predictor's weights as its kernel reads them.

    first: `[16, 64]`, taps of three rows and five columns, and the bias, by side and channel.
    second: `[3, 64, 32]`, rows of taps, by side and channel. Both are float32 or bf16, the dtype of the products, with
        zeros where there is no tap.
    second_bias, last: float32 `[32]`.
    last_bias: float32 `[1]`.
    """

    first: Tensor
    second: Tensor
    second_bias: Tensor
    last: Tensor
    last_bias: Tensor


def pack(network: PredictorNetwork, dtype: torch.dtype, device: torch.device) -> PackedNetwork:
    """Return the network's parameters in the kernel's layout."""
    first = torch.zeros(INPUTS, SIDED_CHANNELS)
    taps = first[:-1].view(3, SIDES + 2, SIDED_CHANNELS)
    second = torch.zeros(3, SIDED_CHANNELS, WIDE_CHANNELS)
    for side in range(SIDES):
        own = slice(side * CHANNELS, (side + 1) * CHANNELS)
        taps[:, side : side + 3, own] = network.conv1.weight.detach()[:, 0].permute(1, 2, 0)
        first[-1, own] = network.conv1.bias.detach()
        second[:, own] = network.conv2.weight.detach()[..., side].permute(2, 1, 0)
    narrow = [tensor.to(device, dtype) for tensor in (first, second)]
    wide = (network.conv2.bias, network.conv3.weight[0, :, 0], network.conv3.bias)
    return PackedNetwork(*narrow, *(tensor.detach().to(device, torch.float32).contiguous() for tensor in wide))


def predict_reference(
    history: Tensor, oldest: Tensor, widths: Tensor, network: PackedNetwork, moved: int, dtype: torch.dtype
) -> Tensor:
    """Compute `predict_blocks` in plain torch, always for all blocks."""
    steps, blocks = history.shape[1] - moved, history.shape[2]
    slots = (oldest[:, None] + torch.arange(steps, device=history.device)) % history.shape[1]
    rows = restore(history.gather(1, slots[..., None].long().expand(-1, -1, blocks)), dtype)
    is_inside = (torch.arange(blocks, device=history.device) < widths[:, None])[:, None, None]
    conv = torch.nn.functional.conv2d
    first = network.first[:, CHANNELS : 2 * CHANNELS].to(dtype)  # a block's own column
    kernel = first[:-1].view(3, SIDES + 2, CHANNELS)[:, 1:-1].permute(2, 0, 1)[:, None]
    narrow = conv(rows[:, None] * is_inside, kernel, first[-1], padding=1).relu() * is_inside
    sides = network.second[:, : SIDES * CHANNELS].to(dtype).view(3, SIDES, CHANNELS, WIDE_CHANNELS)
    kernel = sides.permute(3, 2, 0, 1)
    wide = conv(narrow, kernel, network.second_bias.to(dtype), padding=1).relu().mean(2)  # [heads, 32, blocks]
    scores = torch.einsum("hcb,c->hb", wide, network.last.to(dtype)) + network.last_bias.to(dtype)
    return scores.masked_fill(~is_inside[:, 0, 0], -torch.inf)


@triton.jit
def _has_changed(history, row_stride, slots, column, width, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Return for each column whether rows of history differ there or in a neighbouring column: bool `[columns]`."""
    differing = tl.zeros([CHUNK], tl.int32)
    for side in tl.static_range(2 * _REACH + 1):
        at = column + (side - _REACH)
        is_inside = (at >= 0) & (at < width)
        first = tl.load(history + at, mask=is_inside, other=0)
        for begin in range(0, slots, ROWS):
            row = begin + tl.arange(0, ROWS)
            is_there = (row < slots)[:, None] & is_inside[None, :]
            rows = tl.load(history + (row * row_stride)[:, None] + at[None, :], mask=is_there, other=0)
            differing += tl.sum((is_there & (rows != first[None, :])).to(tl.int32), 0)
    return differing > 0


@triton.jit
def _read(history, row_stride, slots, oldest, row, column, width, STEPS: tl.constexpr):
    """Return the inputs of the first convolution for one row and its neighbours, as stored, `[columns, 16]`."""
    tap = tl.arange(0, 16)
    from_row, from_column = row + tap // 5 - 1, column[:, None] + (tap % 5 - 2)[None, :]
    is_there = ((tap < 15) & (from_row >= 0) & (from_row < STEPS))[None, :]
    is_there = is_there & (from_column >= 0) & (from_column < width)
    slot = (oldest + from_row + slots) % slots
    return tl.load(history + slot.to(tl.int64)[None, :] * row_stride + from_column, mask=is_there, other=0)


@triton.jit
def _activate(stored, column, width, first, CODED: tl.constexpr, PRODUCT: tl.constexpr):
    """Return the first convolution of one row at the columns and those beside them, `[columns, 64]`; 0 outside the
    head's blocks.
    """
    value = stored.to(tl.float32)
    if CODED:
        value = tl.where(value > 0, tl.exp2((value - CODE_TOP) * CODE_SCALE), 0.0)
    value = tl.where((tl.arange(0, 16) == 15)[None, :], 1.0, value)
    narrow = tl.maximum(tl.dot(value.to(PRODUCT), first, input_precision="ieee"), 0.0)
    at = column[:, None] + (tl.arange(0, 64) // 16 - 1)[None, :]
    return tl.where((at >= 0) & (at < width), narrow, 0.0).to(PRODUCT)


@triton.jit
def _predict_kernel(
    history, oldest_rows, widths, stale, scores, lists, first, second, second_bias, last, last_bias,
    head_stride, row_stride, blocks,
    STEPS: tl.constexpr, MOVED: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """Predict a chunk of a head's blocks. lists: int32 `[heads, blocks]`, scratch: for each chunk the blocks that are
    computed, which other threads read.
    """
    head, begin = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHUNK
    width = tl.load(widths + head)
    if width < 0:
        return
    column = begin + tl.arange(0, CHUNK)
    scores += head * blocks
    tl.store(scores + column, tl.full([CHUNK], float("-inf"), tl.float32), mask=(column >= width) & (column < blocks))
    if begin >= width:
        return
    history += head * head_stride
    oldest, slots = tl.load(oldest_rows + head), STEPS + MOVED
    has_changed = _has_changed(history, row_stride, slots, column, width, CHUNK, ROWS)
    is_made = (column < width) & (has_changed | (column >= tl.load(stale + head)))
    flag = is_made.to(tl.int32)
    mine = lists + head * blocks + begin
    tl.store(mine + tl.cumsum(flag, 0) - flag, column, mask=is_made)
    count = tl.sum(flag, 0)
    tl.debug_barrier()
    sided, wide = tl.arange(0, 64), tl.arange(0, 32)
    weights = tl.load(first + tl.arange(0, 16)[:, None] * 64 + sided[None, :])
    tile = second + sided[:, None] * 32 + wide[None, :]
    to_below, to_here, to_above = tl.load(tile), tl.load(tile + 2048), tl.load(tile + 4096)
    bias, final, constant = tl.load(second_bias + wide), tl.load(last + wide), tl.load(last_bias)
    for at in range(0, count, BLOCKS):
        item = at + tl.arange(0, BLOCKS)
        own = tl.load(mine + item, mask=item < count, other=0)
        above = tl.zeros([BLOCKS, 32], tl.float32) + bias[None, :]  # of the output row before this one
        here = above
        sums = tl.zeros([BLOCKS, 32], tl.float32)
        stored = _read(history, row_stride, slots, oldest, 0, own, width, STEPS)
        for row in range(STEPS):
            following = _read(history, row_stride, slots, oldest, row + 1, own, width, STEPS)
            narrow = _activate(stored, own, width, weights, CODED, first.dtype.element_ty)
            below = tl.dot(narrow, to_below, input_precision="ieee") + bias[None, :]
            here = tl.dot(narrow, to_here, here, input_precision="ieee")
            above = tl.dot(narrow, to_above, above, input_precision="ieee")
            sums += tl.where(row > 0, tl.maximum(above, 0.0), 0.0)  # the finished output row is row - 1
            above, here, stored = here, below, following
        sums += tl.maximum(above, 0.0)  # nothing comes behind the window: its last row is finished
        tl.store(scores + own, tl.sum(sums * final[None, :], 1) / STEPS + constant, mask=item < count)


def predict_blocks(
    history: Tensor, oldest: Tensor, widths: Tensor, stale: Tensor, scores: Tensor, network: PackedNetwork, moved: int
) -> None:  # fmt: skip
    """Write scores of the next step, float32 `[heads, blocks]`, -inf at and behind a head's width.

    history: `[heads, steps + moved, blocks]` float32, bf16 or uint8 (`gpu.predictor.history`), heads and rows strided.
        The axis may have heads of many layers and requests.
    oldest: int32 `[heads]`, the slot of the window's first row.
    widths: int32 `[heads]`; -1: the head's scores do not change.
    stale: int32 `[heads]`, the first block whose old score cannot be kept, because it was not computed `moved` steps
        ago, of the same rows and width. 0: none can be kept; a head's width: all can; EDGE_BLOCKS less if the head has
        grown by one block. Ignored without a GPU, where all blocks are computed.

    Raises ValueError for another shape, dtype or device.
    """
    op, (heads, slots, blocks), device = "predict_blocks", history.shape, history.device
    steps = slots - moved
    if steps < 1:
        raise ValueError(f"{op}: history of {slots} rows; wanted more than the {moved} steps between calls")
    if history.dtype not in (torch.float32, torch.bfloat16, torch.uint8) or history.stride(2) != 1:
        raise ValueError(
            f"{op}: history is {history.dtype}, strides {history.stride()}; wanted float32, bfloat16 or uint8, blocks "
            "contiguous"
        )
    check(op, "oldest", oldest, (heads,), torch.int32, device)
    check(op, "widths", widths, (heads,), torch.int32, device)
    check(op, "stale", stale, (heads,), torch.int32, device)
    check(op, "scores", scores, (heads, blocks), torch.float32, device)
    check(op, "network.first", network.first, (INPUTS, SIDED_CHANNELS), network.first.dtype, device)
    check(op, "network.second", network.second, (3, SIDED_CHANNELS, WIDE_CHANNELS), network.first.dtype, device)
    if not runs_on_triton(history):
        made = predict_reference(history, oldest, widths, network, moved, torch.float32)
        torch.where((widths >= 0)[:, None], made, scores, out=scores)
        return
    check_contiguous(op, "scores", scores)
    lists = torch.empty(heads, blocks, dtype=torch.int32, device=device)
    _predict_kernel[(triton.cdiv(blocks, BLOCKS_A_CHUNK), heads)](
        history, oldest, widths, stale, scores, lists,
        network.first, network.second, network.second_bias, network.last, network.last_bias,
        history.stride(0), history.stride(1), blocks,
        STEPS=steps, MOVED=moved, CHUNK=BLOCKS_A_CHUNK, BLOCKS=BLOCKS_A_TILE, ROWS=ROWS_AT_ONCE,
        CODED=history.dtype == torch.uint8, num_warps=4,
    )  # fmt: skip

"""Next-step scores of all blocks, for many heads and layers at once: the network of `network.py`, fused.

AttentionPredictor, section 4.2. It refuses to know layers, requests and who reads the scores. Invariant: scores of a
head depend on its own history and width alone.

A program takes one head's tile of blocks through the rows of its window. An activation row of the first convolution
serves the three output rows that it touches, so it is made once a row: at a block's own column and its neighbours', in
one product [blocks, 16] x [16, 64], whose inputs are three rows of five columns and a 1 for the bias (a fourth quarter
of its outputs is none). The second convolution is three products of that, [blocks, 64] x [64, 32], one an output row.
Nothing but scores is written: H bytes (uint8) or 2H (bf16) are read a block, for 2 * (144 + 4,608) * H operations,
3.6 TFLOP a token of an 8B model at 96K.

What steps change: from one call to the next the window moves by `moved` rows, and an output row depends on the five
rows around it. So `interior`, the sum over output rows that see no edge of the window, gains as many rows and loses as
many, and the rows at the edges, two at either end, are made again: 8 + 2 * moved rows of activations instead of 64.
Tiles from a head's first `stale` block on are made whole: its last ones where its width has grown, all of them where
older rows were changed. Whole, a tile takes its rows one after another, which is the longest that a launch can take
however few tiles there are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, runs_on_triton
from gpu.predictor.history import STEPS_PER_OCTAVE, TOP_CODE, restore
from gpu.predictor.network import CHANNELS, WIDE_CHANNELS, PredictorNetwork

SIDES = 3  # columns at which activations are made: the one before a block's own, its own, the next
INPUTS = 3 * (SIDES + 2) + 1  # of the first convolution there: rows by columns, and 1
SIDED_CHANNELS = 4 * CHANNELS  # of the three sides, to a power of two
EDGE_ROWS = 2  # output rows at either end of a window that see its edge
EDGE_BLOCKS = 3  # last ones whose scores a block behind them changes, and that block
BLOCKS_A_TILE = 64
CODE_SCALE, CODE_TOP = tl.constexpr(1 / STEPS_PER_OCTAVE), tl.constexpr(TOP_CODE)


@dataclass(frozen=True, slots=True)
class PackedNetwork:
    """first: `[16, 64]`, taps of three rows and five columns, and the bias, by sides and their channels. second:
    `[3, 64, 32]`, rows of taps, by sides and their channels. Both float32 or bf16, which is what products are made of,
    with zeros where there is no tap. second_bias, last: float32 `[32]`; last_bias: float32 `[1]`.
    """

    first: Tensor
    second: Tensor
    second_bias: Tensor
    last: Tensor
    last_bias: Tensor


def pack(network: PredictorNetwork, dtype: torch.dtype, device: torch.device) -> PackedNetwork:
    """The network's parameters as the kernel takes them."""
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
    """Plain torch in `dtype`: see `predict_blocks`; always whole."""
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
def _activate(
    history, row_stride, slots, oldest, row, low, high, column, width, first,
    CODED: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """The first convolution of one row at the columns and those beside them, `[columns, 64]`; 0 outside the window and
    the head's blocks."""
    tap = tl.arange(0, 16)
    from_row, from_column = row + tap // 5 - 1, column[:, None] + (tap % 5 - 2)[None, :]
    is_there = ((tap < 15) & (from_row >= low) & (from_row < high))[None, :]
    is_there = is_there & (from_column >= 0) & (from_column < width)
    slot = (oldest + from_row + slots) % slots
    stored = tl.load(history + slot.to(tl.int64)[None, :] * row_stride + from_column, mask=is_there, other=0)
    value = stored.to(tl.float32)
    if CODED:
        value = tl.where(value > 0, tl.exp2((value - CODE_TOP) * CODE_SCALE), 0.0)
    value = tl.where((tap == 15)[None, :], 1.0, value)
    narrow = tl.maximum(tl.dot(value.to(PRODUCT), first, input_precision="ieee"), 0.0)
    at = column[:, None] + (tl.arange(0, 64) // 16 - 1)[None, :]
    is_valid = (at >= 0) & (at < width) & (row >= low) & (row < high)
    return tl.where(is_valid, narrow, 0.0).to(PRODUCT)


@triton.jit
def _sum_rows(
    history, row_stride, slots, oldest, column, width, first, second, second_bias, last,
    LOW: tl.constexpr, HIGH: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr, INNER_BEGIN: tl.constexpr,
    INNER_END: tl.constexpr, BLOCKS: tl.constexpr, CODED: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """What output rows [BEGIN, END) of the window [LOW, HIGH) add to the scores, summed: of rows outside and inside of
    [INNER_BEGIN, INNER_END), `[columns]` each."""
    tile = second + tl.arange(0, 64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    to_below, to_here, to_above = tl.load(tile), tl.load(tile + 2048), tl.load(tile + 4096)
    above = tl.zeros([BLOCKS, 32], tl.float32) + second_bias[None, :]  # of the output row before this one
    here = tl.zeros([BLOCKS, 32], tl.float32) + second_bias[None, :]
    outer = tl.zeros([BLOCKS], tl.float32)
    inner = tl.zeros([BLOCKS], tl.float32)
    FIRST: tl.constexpr = BEGIN - 1 if BEGIN > LOW else BEGIN
    STOP: tl.constexpr = END + 1 if END < HIGH else END
    for row in range(FIRST, STOP):
        narrow = _activate(history, row_stride, slots, oldest, row, LOW, HIGH, column, width, first, CODED, PRODUCT)
        below = tl.dot(narrow, to_below, input_precision="ieee") + second_bias[None, :]
        here = tl.dot(narrow, to_here, here, input_precision="ieee")
        above = tl.dot(narrow, to_above, above, input_precision="ieee")
        adds = tl.sum(tl.maximum(above, 0.0) * last[None, :], 1)
        is_inner = (row > INNER_BEGIN) & (row <= INNER_END)  # the finished output row is row - 1
        inner += tl.where(is_inner, adds, 0.0)
        outer += tl.where((row > BEGIN) & (is_inner == 0), adds, 0.0)
        above = here
        here = below
    if END == HIGH:  # nothing comes behind the window: its last row is finished
        adds = tl.sum(tl.maximum(above, 0.0) * last[None, :], 1)
        if INNER_END == END:
            inner += adds
        else:
            outer += adds
    return outer, inner


@triton.jit
def _predict_kernel(
    history, oldest_rows, widths, stale, interior, scores, first, second, second_bias, last, last_bias,
    head_stride, row_stride, interior_stride, score_stride, blocks,
    STEPS: tl.constexpr, MOVED: tl.constexpr, BLOCKS: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    width, oldest = tl.load(widths + head), tl.load(oldest_rows + head)
    column = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    to = scores + head * score_stride + column
    if tl.program_id(0) * BLOCKS >= width:
        tl.store(to, float("-inf"), mask=column < blocks)
        return
    history += head * head_stride
    sided, wide = tl.arange(0, 64), tl.arange(0, 32)
    weights = tl.load(first + tl.arange(0, 16)[:, None] * 64 + sided[None, :])
    bias, final = tl.load(second_bias + wide), tl.load(last + wide)
    kept = interior + head * interior_stride + column
    is_mine = column < width
    # Window rows are 0 .. STEPS - 1, and those before them are spare. Inner output rows are 2 .. STEPS - 3.
    if tl.minimum((tl.program_id(0) + 1) * BLOCKS, width) > tl.load(stale + head):
        outer, inner = _sum_rows(
            history, row_stride, STEPS + MOVED, oldest, column, width, weights, second, bias, final,
            0, STEPS, 0, STEPS, 2, STEPS - 2, BLOCKS, CODED, first.dtype.element_ty,
        )  # fmt: skip
    else:
        outer, _unused = _sum_rows(
            history, row_stride, STEPS + MOVED, oldest, column, width, weights, second, bias, final,
            0, STEPS, 0, 2, 0, 0, BLOCKS, CODED, first.dtype.element_ty,
        )  # fmt: skip
        last_rows, entered = _sum_rows(
            history, row_stride, STEPS + MOVED, oldest, column, width, weights, second, bias, final,
            0, STEPS, STEPS - 2 - MOVED, STEPS, STEPS - 2 - MOVED, STEPS - 2, BLOCKS, CODED, first.dtype.element_ty,
        )  # fmt: skip
        left, _unused = _sum_rows(
            history, row_stride, STEPS + MOVED, oldest, column, width, weights, second, bias, final,
            -MOVED, STEPS, 2 - MOVED, 2, 0, 0, BLOCKS, CODED, first.dtype.element_ty,
        )  # fmt: skip
        outer += last_rows
        inner = tl.load(kept, mask=is_mine, other=0.0) + entered - left
    tl.store(kept, inner, mask=is_mine)
    score = (outer + inner) / STEPS + tl.load(last_bias)
    tl.store(to, tl.where(is_mine, score, float("-inf")), mask=column < blocks)


def predict_blocks(
    history: Tensor, oldest: Tensor, widths: Tensor, stale: Tensor, interior: Tensor, network: PackedNetwork,
    moved: int,
) -> Tensor:  # fmt: skip
    """Scores of the next step, float32 `[heads, blocks]`, -inf at and behind a head's width.

    history: `[heads, steps + moved, blocks]` float32, bf16 or uint8 (`gpu.predictor.history`), heads and rows strided;
    heads of many layers and requests stand for one axis. oldest: int32 `[heads]`, the slot of the window's first row.
    widths: int32 `[heads]`. interior: float32 `[heads, blocks]`, kept from call to call and written here. stale: int32
    `[heads]`, the first block whose `interior` is not of `moved` steps before, of the same rows and as wide (0: none
    is, a head's width: all are, EDGE_BLOCKS less where it has grown by one); ignored off the GPU, where all is made
    whole. Raises ValueError for another shape, dtype or device, and for fewer rows than the window moves by.
    """
    op, (heads, slots, blocks), device = "predict_blocks", history.shape, history.device
    steps, fewest = slots - moved, 2 * EDGE_ROWS + moved
    if steps < fewest:
        raise ValueError(f"{op}: history of {steps} steps; wanted {fewest} or more where {moved} lie between calls")
    if history.dtype not in (torch.float32, torch.bfloat16, torch.uint8) or history.stride(2) != 1:
        raise ValueError(
            f"{op}: history is {history.dtype}, strides {history.stride()}; wanted float32, bfloat16 or uint8, blocks "
            "contiguous"
        )
    check(op, "oldest", oldest, (heads,), torch.int32, device)
    check(op, "widths", widths, (heads,), torch.int32, device)
    check(op, "stale", stale, (heads,), torch.int32, device)
    check(op, "interior", interior, (heads, blocks), torch.float32, device)
    check(op, "network.first", network.first, (INPUTS, SIDED_CHANNELS), network.first.dtype, device)
    check(op, "network.second", network.second, (3, SIDED_CHANNELS, WIDE_CHANNELS), network.first.dtype, device)
    if not runs_on_triton(history):
        return predict_reference(history, oldest, widths, network, moved, torch.float32)
    scores = torch.empty(heads, blocks, dtype=torch.float32, device=device)
    _predict_kernel[(triton.cdiv(blocks, BLOCKS_A_TILE), heads)](
        history, oldest, widths, stale, interior, scores,
        network.first, network.second, network.second_bias, network.last, network.last_bias,
        history.stride(0), history.stride(1), interior.stride(0), scores.stride(0), blocks,
        STEPS=steps, MOVED=moved, BLOCKS=BLOCKS_A_TILE, CODED=history.dtype == torch.uint8, num_warps=4,
    )  # fmt: skip
    return scores

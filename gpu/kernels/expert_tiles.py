"""A mixture of experts for more tokens: tiles of one expert's tokens by its rows, on tensor cores.

Pairs come sorted by expert (`gpu.kernels.routing`). A launch has as many tiles as there can be, whoever takes whom, so
that a graph holds it; those without pairs end at once. Packed experts are widened in registers. It refuses to know how
experts are chosen. Invariant: a program owns whole outputs of its pairs, and a token's are summed in the order of their
places, so results do not depend on scheduling. Bytes moved: rows of the experts that are taken, once for each tile of
tokens; what each expert makes of a token is written and read once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check
from gpu.kernels.expert_rows import Stored, check_experts, dtype_of_sum, far_matrix
from gpu.kernels.far_experts import FarExperts, base_of, find_place, leaves_out, places_of
from gpu.kernels.packed import Packed
from gpu.kernels.packed_numbers import beside
from gpu.kernels.packed_tiles import row_tile, scaled, tensors_of, tile_layout
from gpu.kernels.routing import SORTED_BLOCKS, sort_pairs
from gpu.kernels.swiglu import gated
from gpu.model.spec import Activation, Experts

LEAST_PAIRS, MOST_PAIRS = 16, 128  # of a tile
MOST_PACKED_PAIRS = 64  # where numbers are widened in registers
# By pairs of a tile, of gated products and of others: rows, columns at once, num_warps, num_stages.
CONFIGS = {
    (16, True): (32, 128, 4, 4), (16, False): (64, 128, 4, 4),
    (32, True): (64, 64, 4, 4), (32, False): (64, 64, 4, 4),
    (64, True): (64, 64, 4, 3), (64, False): (128, 64, 4, 3),
    (128, True): (64, 64, 8, 3), (128, False): (128, 64, 8, 3),
}  # fmt: skip
PACKED_CONFIGS = {  # without columns: a unit of words
    (16, True): (64, 4, 3), (16, False): (64, 4, 4),
    (32, True): (64, 4, 3), (32, False): (64, 4, 4),
    (64, True): (64, 8, 3), (64, False): (64, 4, 3),
}  # fmt: skip
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """order, begins: of `routing.sort_pairs`; shares: weights, float32 `[tokens, per_token]`; per_tile: pairs of it."""

    order: Tensor
    begins: Tensor
    shares: Tensor
    per_tile: int

    @property
    def most_tiles(self) -> int:
        """As many as there can be: each expert's last one may be short."""
        num_pairs = len(self.order)
        return min(num_pairs, len(self.begins) - 1) + num_pairs // self.per_tile


@triton.jit
def _find_tile(begins, tile, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Its expert, NUM_EXPERTS or more if there is none; the first of its places, and where its expert's end."""
    expert = tl.arange(0, BLOCK_EXPERTS)
    inside = expert < NUM_EXPERTS
    begin = tl.load(begins + expert, mask=inside, other=0)
    end = tl.load(begins + expert + 1, mask=inside, other=0)
    last = tl.cumsum((end - begin + BLOCK_PAIRS - 1) // BLOCK_PAIRS, 0)  # tiles up to here
    is_before = last <= tile
    ours = tl.sum(is_before.to(tl.int32), 0)
    first = tl.max(tl.where(is_before, last, 0), 0)
    own = expert == ours
    place = tl.sum(tl.where(own, begin, 0), 0) + (tile - first) * BLOCK_PAIRS
    return ours, place, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def _tiles_kernel(
    x, weight, far, places, order, begins, shares, out,
    HAS_FAR: tl.constexpr, LEAVES_OUT: tl.constexpr, INNER: tl.constexpr, NUM_ROWS: tl.constexpr,
    PAIRS_OF_ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, GATES: tl.constexpr, GELU: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = INNER % BLOCK_INNER == 0
    expert, first, end = _find_tile(begins, tl.program_id(1), NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_PAIRS)
    if expert < NUM_EXPERTS:
        place = first + tl.arange(0, BLOCK_PAIRS)
        pair = tl.load(order + place, mask=place < end, other=0)
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        number, is_far = find_place(places, expert, HAS_FAR)
        source = number * (2 * NUM_ROWS if GATES else NUM_ROWS) + tl.minimum(row, NUM_ROWS - 1)
        column = tl.arange(0, BLOCK_INNER)
        values_at = x + (pair // PAIRS_OF_ROW).to(tl.int64)[:, None] * INNER + column[None, :]
        rows_at = base_of(weight, far, is_far, HAS_FAR) + source[None, :] * INNER + column[:, None]
        sums = tl.zeros([BLOCK_PAIRS, BLOCK_ROWS], tl.float32)
        up_sums = sums
        columns = INNER
        if LEAVES_OUT:
            columns = tl.where(is_far, 0, INNER)  # what it makes is zero
        for begin in tl.range(0, columns, BLOCK_INNER):
            inside = None if EVEN else begin + column < INNER
            values = tl.load(values_at + begin, mask=None if EVEN else inside[None, :], other=None if EVEN else 0.0)
            rows = tl.load(rows_at + begin, mask=None if EVEN else inside[:, None], other=None if EVEN else 0.0)
            sums = tl.dot(values, rows, sums, input_precision="ieee")
            if GATES:
                ups_at = rows_at + begin + NUM_ROWS * INNER
                ups = tl.load(ups_at, mask=None if EVEN else inside[:, None], other=None if EVEN else 0.0)
                up_sums = tl.dot(values, ups, up_sums, input_precision="ieee")
        _store_tile(sums, up_sums, shares, out, pair, row, place < end, NUM_ROWS, GATES, GELU)


@triton.jit
def _store_tile(
    sums, up_sums, shares, out, pair, row, is_pair, NUM_ROWS: tl.constexpr, GATES: tl.constexpr, GELU: tl.constexpr
):
    """Gated, or weighed."""
    if GATES:
        sums = gated(sums, up_sums, GELU)
    else:
        sums *= tl.load(shares + pair, mask=is_pair, other=0.0)[:, None]
    place = out + pair.to(tl.int64)[:, None] * NUM_ROWS + row[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & (row < NUM_ROWS)[None, :])


@triton.jit
def _packed_expert_tiles_kernel(
    x, words, scales, zeros, far_words, far_scales, far_zeros, places, order, begins, shares, out,
    HAS_FAR: tl.constexpr,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, NUM_WORDS: tl.constexpr, GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr, IS_FINE: tl.constexpr, NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_EXACT: tl.constexpr, AHEAD: tl.constexpr, DTYPE: tl.constexpr,
    NUM_ROWS: tl.constexpr, PAIRS_OF_ROW: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, GATES: tl.constexpr, GELU: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    expert, first, end = _find_tile(begins, tl.program_id(1), NUM_EXPERTS, BLOCK_EXPERTS, BLOCK_PAIRS)
    if expert < NUM_EXPERTS:
        place = first + tl.arange(0, BLOCK_PAIRS)
        pair = tl.load(order + place, mask=place < end, other=0)
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        number, is_far = find_place(places, expert, HAS_FAR)
        words = base_of(words, far_words, is_far, HAS_FAR)
        scales = base_of(scales, far_scales, is_far, HAS_FAR)
        zeros = base_of(zeros, far_zeros, is_far, HAS_FAR)
        source = (number * (2 * NUM_ROWS if GATES else NUM_ROWS) + tl.minimum(row, NUM_ROWS - 1))[:, None]
        token, is_pair = (pair // PAIRS_OF_ROW).to(tl.int64)[:, None], (place < end)[:, None]
        sums = tl.zeros([BLOCK_ROWS, BLOCK_PAIRS], tl.float32)
        up_sums = sums
        none = tl.zeros([1, 1], tl.int32)
        scale, zero = beside(scales, zeros, source, none, INNER, GROUP, NUM_GROUPS, NUM_RUNS, ROW_BLOCK, KIND,
                             False, AHEAD)  # fmt: skip
        up_scale, up_zero = scale, zero
        if GATES:
            up_scale, up_zero = beside(scales, zeros, source + NUM_ROWS, none, INNER, GROUP, NUM_GROUPS, NUM_RUNS,
                                       ROW_BLOCK, KIND, False, AHEAD)  # fmt: skip
        for begin in tl.range(0, STEPS):
            step = none + begin
            now, zero_now, up_now, up_zero_now = scale, zero, up_scale, up_zero
            if AHEAD > 0 and NUM_GROUPS > 1:
                unit = (step + 1) * COLUMNS
                scale, zero = beside(scales, zeros, source, unit, INNER, GROUP, NUM_GROUPS, NUM_RUNS, ROW_BLOCK, KIND,
                                     False, AHEAD)  # fmt: skip
                if GATES:
                    up_scale, up_zero = beside(scales, zeros, source + NUM_ROWS, unit, INNER, GROUP, NUM_GROUPS,
                                               NUM_RUNS, ROW_BLOCK, KIND, False, AHEAD)  # fmt: skip
            sums = row_tile(
                sums, x, words, scales, zeros, now, zero_now, source, token, step, is_pair, INNER,
                INNER, COLUMNS, NUM_WORDS, GROUP, NUM_GROUPS, IS_FINE, NUM_RUNS, ROW_BLOCK, KIND, HAS_ZEROS, IS_EXACT,
                AHEAD, False, DTYPE, 1, BLOCK_ROWS, BLOCK_PAIRS,
            )  # fmt: skip
            if GATES:
                up_sums = row_tile(
                    up_sums, x, words, scales, zeros, up_now, up_zero_now, source + NUM_ROWS, token, step, is_pair,
                    INNER,
                    INNER, COLUMNS, NUM_WORDS, GROUP, NUM_GROUPS, IS_FINE, NUM_RUNS, ROW_BLOCK, KIND, HAS_ZEROS,
                    IS_EXACT, AHEAD, False, DTYPE, 1, BLOCK_ROWS, BLOCK_PAIRS,
                )  # fmt: skip
        sums, up_sums = (
            scaled(sums, scale, NUM_GROUPS, NUM_RUNS, HAS_ZEROS),
            scaled(up_sums, up_scale, NUM_GROUPS, NUM_RUNS, HAS_ZEROS),
        )
        _store_tile(
            tl.trans(sums), tl.trans(up_sums), shares, out, pair, row, place < end, NUM_ROWS, GATES, GELU
        )  # fmt: skip


@triton.jit
def _sum_pairs_kernel(
    made, residual, out, residual_stride, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    sums = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(PER_TOKEN):
        sums += tl.load(made + (token * PER_TOKEN + place) * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    sums += tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, sums.to(out.dtype.element_ty), mask=inside)


def sizes_of_tiles(experts: Experts, most_tokens: int) -> list[int]:
    """Numbers of tokens, one for each size of tiles and of blocks that pairs are sorted in."""
    pairs = [size * experts.num_experts for size in (16, 32, 64, 128)] + list(SORTED_BLOCKS)
    return sorted({min(most_tokens, max(1, one // experts.per_token)) for one in pairs} | {most_tokens})


def pair_up(ids: Tensor, shares: Tensor, experts: Experts, has_packed: bool) -> SortedPairs:
    """Pairs of `routing.choose`'s ids and weights, in tiles of about as many as an expert has. has_packed: whether
    gate_up or down is: both are multiplied in these tiles.
    """
    order, begins = sort_pairs(ids, experts.num_experts)
    mean = -(-len(order) // experts.num_experts)
    most = MOST_PACKED_PAIRS if has_packed else MOST_PAIRS
    return SortedPairs(order, begins, shares, max(LEAST_PAIRS, min(most, triton.next_power_of_2(mean))))


def gate_up_tiles(
    normed: Tensor, pairs: SortedPairs, gate_up: Stored, experts: Experts, activation: Activation,
    far: FarExperts | None = None,
) -> Tensor:  # fmt: skip
    """`activation(gate) * up` of each pair, `[pairs, intermediate]` of normed's dtype, pairs by token and place.

    normed `[tokens, hidden]`, contiguous; gate_up: as in `gpu.model.weights.ExpertWeights`; far: of experts that lie
    elsewhere. Raises ValueError for another shape, dtype or device.
    """
    check_experts(
        "gate_up_tiles", "gate_up", gate_up, far, far and far.gate_up, experts, 2 * experts.intermediate, normed
    )  # fmt: skip
    there = far_matrix(gate_up, far, far and far.gate_up)
    return _launch(normed, gate_up, there, far, pairs, experts, experts.intermediate, experts.per_token, activation)


def down_tiles(
    product: Tensor, pairs: SortedPairs, down: Stored, residual: Tensor, experts: Experts,
    far: FarExperts | None = None,
) -> Tensor:  # fmt: skip
    """`residual` and what the experts make of `product`, weighed and summed: `[tokens, hidden]`, new, of its dtype, or
    float32 where some are left out.

    product: of `gate_up_tiles`; residual `[tokens, hidden]` of its dtype; down: as in
    `gpu.model.weights.ExpertWeights`; far: as in `gate_up_tiles`. Raises ValueError for another shape, dtype or device.
    """
    tokens, hidden = residual.shape
    check_experts("down_tiles", "down", down, far, far and far.down, experts, hidden, product)
    check("down_tiles", "residual", residual, (tokens, hidden), product.dtype, product.device)
    there = far_matrix(down, far, far and far.down)
    made = _launch(product, down, there, far, pairs, experts, hidden, 1, None)
    out = torch.empty(tokens, hidden, dtype=dtype_of_sum(product, far), device=product.device)
    block = min(SUM_BLOCK, triton.next_power_of_2(hidden))
    _sum_pairs_kernel[(tokens, triton.cdiv(hidden, block))](
        made, residual, out, residual.stride(0), HIDDEN=hidden, PER_TOKEN=experts.per_token, BLOCK=block, num_warps=4
    )
    return out


def _launch(
    x: Tensor, stored: Stored, there: Stored, far: FarExperts | None, pairs: SortedPairs, experts: Experts,
    num_rows: int, pairs_of_row: int, activation: Activation | None,
) -> Tensor:  # fmt: skip
    places = places_of(far, pairs.order)
    gates = activation is not None
    out = torch.empty(len(pairs.order), num_rows, dtype=x.dtype, device=x.device)
    common = {
        "HAS_FAR": far is not None,
        "NUM_ROWS": num_rows, "PAIRS_OF_ROW": pairs_of_row, "NUM_EXPERTS": experts.num_experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(experts.num_experts), "GATES": gates, "GELU": activation == "gelu_tanh",
        "BLOCK_PAIRS": pairs.per_tile,
    }  # fmt: skip
    if isinstance(stored, Packed) and isinstance(there, Packed):
        rows, num_warps, num_stages = PACKED_CONFIGS[pairs.per_tile, gates]
        if x.dtype == torch.float32:
            rows, num_warps, num_stages = 16, 4, 1
        _packed_expert_tiles_kernel[triton.cdiv(num_rows, rows), pairs.most_tiles](
            x, *tensors_of(stored), *tensors_of(there), places, pairs.order, pairs.begins, pairs.shares, out,
            **tile_layout(stored), **common, BLOCK_ROWS=rows, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        return out
    rows, block, num_warps, num_stages = CONFIGS[pairs.per_tile, gates]
    if x.dtype == torch.float32:
        block, num_stages = max(16, block // 2), 2
    _tiles_kernel[triton.cdiv(num_rows, rows), pairs.most_tiles](
        x, stored, there, places, pairs.order, pairs.begins, pairs.shares, out, **common,
        LEAVES_OUT=leaves_out(far), INNER=x.shape[1], BLOCK_ROWS=rows, BLOCK_INNER=block, num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    return out

"""Compute a mixture of experts for more tokens: tiles of one expert's tokens by its rows, on tensor cores.

For up to LEAST_PAIRS tokens the programs of gate and up find the pairs of token and expert themselves, from the
router's logits, and write them down for the down projection. For more tokens, tiles are listed beforehand (`routing`).
A launch has the largest possible number of tiles, so that it can be in a graph; tiles without pairs end at once. Packed
experts are widened in registers. If each expert has many tokens, a few experts at a time are widened in memory instead,
and multiplied as plain ones. A program owns whole outputs of its pairs, and a token's outputs are summed in the order
of their places, so results do not depend on scheduling. Bytes moved: the rows of chosen experts, once for each tile of
tokens; each expert's output for a token, written and read once; a widened matrix is also written.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.matrix_formats import LEAST_WIDENED_PAIRS, experts_at_once
from gpu.model.spec import Activation, Experts, first_rows, is_gated
from gpu.operations.arguments import check
from gpu.operations.experts.expert_rows import check_bias, check_experts, check_gains, dtype_of_sum, far_matrix
from gpu.operations.experts.far_experts import base_of, find_place, leaves_out, places_of
from gpu.operations.experts.mixture_matrices import ExpertMatrices
from gpu.operations.experts.routing import (
    OF_ALL,
    OF_ITSELF,
    SORTED_BLOCKS,
    keys_of,
    logit_of,
    take_experts,
    taking,
    tile_pairs,
)
from gpu.operations.experts.tile_configs import packed_config, plain_config
from gpu.operations.linear.packed_linear import widen
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.operations.linear.packed_numbers import beside
from gpu.operations.linear.packed_tiles import row_tile, scaled, tensors_of, tile_layout
from gpu.operations.swiglu import activated

LEAST_PAIRS, MOST_PAIRS = 16, 128  # pairs of a tile
FEWEST_PAIRS = 8  # pairs of a tile if both matrices are packed: pairs are then the second operand
MOST_PACKED_PAIRS = 64  # pairs of a tile if numbers are widened in registers
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs of tokens and experts, cut into tiles.

    experts, takers: as in `routing.tile_pairs`.
    shares: weights, float32 `[tokens, per_token]`, or numbers in proportion to a token's weights.
    logits: float32 `[tokens, experts]`, from which the programs of gate and up find and write all of these; None: they
        are already written.
    """

    experts: Tensor
    takers: Tensor
    shares: Tensor
    logits: Tensor | None

    @property
    def per_tile(self) -> int:
        return self.takers.shape[1]


@triton.jit
def _read_tile(tile_experts, takers, tile, BLOCK_PAIRS: tl.constexpr):
    """Return a tile's expert, negative if there is none, and its pairs; negative numbers are no pairs."""
    expert = tl.load(tile_experts + tile)
    lane = tl.arange(0, BLOCK_PAIRS)
    return expert, tl.load(takers + tile.to(tl.int64) * BLOCK_PAIRS + lane)


@triton.jit
def _find_tile(
    logits, tile_experts, takers, shares, tile, num_tokens, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr, WEIGHTS: tl.constexpr, BY_PAIR: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Find a tile from the logits of the tokens, of which there are no more than a tile has pairs; see `_read_tile`.

    A tile belongs to the expert of its number. BY_PAIR: it belongs to the expert of the pair of its number, unless an
    earlier token chooses that expert. The programs of row 0 write the results.
    """
    token = tl.arange(0, BLOCK_PAIRS)
    is_token = token < num_tokens
    number = tl.arange(0, BLOCK_EXPERTS)
    is_expert = number < NUM_EXPERTS
    expert = tile
    if BY_PAIR:
        place = tl.zeros([1], tl.int32) + tile % PER_TOKEN
        own = logits + (tile // PER_TOKEN).to(tl.int64) * NUM_EXPERTS
        found, _ = take_experts(own, place, NUM_EXPERTS, BLOCK_EXPERTS, PER_TOKEN, WEIGHTS)
        expert = tl.sum(found, 0)
    rows = logits + token.to(tl.int64) * NUM_EXPERTS
    values = tl.load(rows[:, None] + number[None, :], mask=is_token[:, None] & is_expert[None, :], other=0.0)
    keys = keys_of(values, is_expert[None, :])  # [tokens, experts]
    own_key = keys_of(tl.load(rows + expert, mask=is_token, other=0.0), is_token)
    ties = (keys == own_key[:, None]) & (number < expert)[None, :]
    place = tl.sum(((keys > own_key[:, None]) | ties).to(tl.int32), 1)
    takes = is_token & (place < PER_TOKEN)
    pair = tl.where(takes, token * PER_TOKEN + place, -1)
    if BY_PAIR:
        first = tl.min(tl.where(takes, token, BLOCK_PAIRS), 0)
        expert = tl.where(first == tile // PER_TOKEN, expert, -1)
    else:
        expert = tl.where(tl.max(pair, 0) >= 0, expert, -1)
    if tl.program_id(0) == 0:
        top = logit_of(tl.max(keys, 1))
        share = tl.exp(logit_of(own_key) - top)
        if WEIGHTS == OF_ITSELF:
            share = tl.exp(logit_of(own_key))
        elif WEIGHTS == OF_ALL:
            share /= tl.sum(tl.where(is_expert[None, :], tl.exp(values + 0.0 - top[:, None]), 0.0), 1)
        tl.store(tile_experts + tile, expert)
        tl.store(takers + tile * BLOCK_PAIRS + token, pair)
        tl.store(shares + pair, share, mask=takes)
    return expert, pair


@triton.jit
def _tile_of_program(
    logits, tile_experts, takers, shares, num_tokens, ROUTES: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, WEIGHTS: tl.constexpr, BY_PAIR: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Return a program's tile, either listed beforehand or found here."""
    tile = tl.program_id(1)
    if ROUTES:
        expert, taker = _find_tile(
            logits, tile_experts, takers, shares, tile, num_tokens, NUM_EXPERTS, BLOCK_EXPERTS, PER_TOKEN,
            WEIGHTS, BY_PAIR, BLOCK_PAIRS,
        )  # fmt: skip
    else:
        expert, taker = _read_tile(tile_experts, takers, tile, BLOCK_PAIRS)
    return expert, taker


@triton.jit(do_not_specialize=["num_tokens", "first", "end"])
def _tiles_kernel(
    x, weight, far, places, bias, gains, logits, tile_experts, takers, shares, out, num_tokens, first, end,
    IS_PART: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GAINS: tl.constexpr, ROUTES: tl.constexpr,
    PER_TOKEN: tl.constexpr, WEIGHTS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    HAS_FAR: tl.constexpr, LEAVES_OUT: tl.constexpr, INNER: tl.constexpr, NUM_ROWS: tl.constexpr,
    PAIRS_OF_ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = INNER % BLOCK_INNER == 0
    expert, taker = _tile_of_program(
        logits, tile_experts, takers, shares, num_tokens, ROUTES, NUM_EXPERTS, BLOCK_EXPERTS, PER_TOKEN, WEIGHTS,
        BY_PAIR, BLOCK_PAIRS,
    )  # fmt: skip
    if IS_PART:  # `weight` has only the experts from `first` to `end`
        expert = tl.where((expert >= first) & (expert < end), expert, -1)
    if expert >= 0:
        pair = tl.maximum(taker, 0)
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        number, is_far = find_place(places, expert, HAS_FAR)
        if IS_PART:
            number -= first
        source = number * (2 * NUM_ROWS if GATES else NUM_ROWS) + tl.minimum(row, NUM_ROWS - 1)
        column = tl.arange(0, BLOCK_INNER)
        values_at = x + (pair // PAIRS_OF_ROW).to(tl.int64)[:, None] * INNER + column[None, :]
        rows_at = base_of(weight, far, is_far, HAS_FAR) + source[None, :] * INNER + column[:, None]
        sums = tl.zeros([BLOCK_PAIRS, BLOCK_ROWS], tl.float32)
        up_sums = sums
        columns = INNER
        if LEAVES_OUT:
            columns = tl.where(is_far, 0, INNER)  # so its product is zero
        for begin in tl.range(0, columns, BLOCK_INNER):
            inside = None if EVEN else begin + column < INNER
            values = tl.load(values_at + begin, mask=None if EVEN else inside[None, :], other=None if EVEN else 0.0)
            rows = tl.load(rows_at + begin, mask=None if EVEN else inside[:, None], other=None if EVEN else 0.0)
            sums = tl.dot(values, rows, sums, input_precision="ieee")
            if GATES:
                ups_at = rows_at + begin + NUM_ROWS * INNER
                ups = tl.load(ups_at, mask=None if EVEN else inside[:, None], other=None if EVEN else 0.0)
                up_sums = tl.dot(values, ups, up_sums, input_precision="ieee")
        if HAS_BIAS:
            inside = row < NUM_ROWS
            if LEAVES_OUT:
                inside = inside & (is_far == 0)
            sums, up_sums = _add_bias(sums, up_sums, bias, expert, row, inside, NUM_ROWS, GATES)
        if HAS_GAINS:
            sums *= tl.load(gains + expert)
        _store_tile(sums, up_sums, out, pair, row, taker >= 0, NUM_ROWS, GATES, ACTIVATION)


@triton.jit
def _add_bias(sums, up_sums, bias, expert, row, inside, NUM_ROWS: tl.constexpr, GATES: tl.constexpr):
    """Add an expert's bias to sums, `[pairs, rows]`, for rows that are `inside`."""
    source = bias + expert.to(tl.int64) * (2 * NUM_ROWS if GATES else NUM_ROWS) + row
    sums += tl.load(source, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATES:
        up_sums += tl.load(source + NUM_ROWS, mask=inside, other=0.0).to(tl.float32)[None, :]
    return sums, up_sums


@triton.jit
def _store_tile(
    sums, up_sums, out, pair, row, is_pair, NUM_ROWS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr
):
    if ACTIVATION != "none":
        sums = activated(sums, up_sums, ACTIVATION)
    place = out + pair.to(tl.int64)[:, None] * NUM_ROWS + row[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_pair[:, None] & (row < NUM_ROWS)[None, :])


@triton.jit
def _leave_out(places, expert, taker, out, NUM_ROWS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the expert, or -1 if the CPU computes it: then its output is set to zero, and nothing of it is read."""
    _, is_far = find_place(places, tl.maximum(expert, 0), True)
    pair = tl.where(tl.where(is_far, expert, -1) >= 0, taker, -1)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = out + tl.maximum(pair, 0).to(tl.int64)[:, None] * NUM_ROWS + row[None, :]
    none = tl.zeros([BLOCK_PAIRS, BLOCK_ROWS], out.dtype.element_ty)
    tl.store(place, none, mask=(pair >= 0)[:, None] & (row < NUM_ROWS)[None, :])
    return tl.where(is_far, -1, expert)


@triton.jit(do_not_specialize=["num_tokens"])
def _packed_expert_tiles_kernel(
    x, words, scales, zeros, far_words, far_scales, far_zeros, places, bias, gains, logits, tile_experts, takers,
    shares, out, num_tokens, HAS_BIAS: tl.constexpr, HAS_GAINS: tl.constexpr, ROUTES: tl.constexpr,
    PER_TOKEN: tl.constexpr, WEIGHTS: tl.constexpr, BY_PAIR: tl.constexpr,
    HAS_FAR: tl.constexpr, LEAVES_OUT: tl.constexpr,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, NUM_WORDS: tl.constexpr, GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr, IS_FINE: tl.constexpr, NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, IS_EXACT: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr,
    DTYPE: tl.constexpr, NUM_ROWS: tl.constexpr, PAIRS_OF_ROW: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, GATES: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    expert, taker = _tile_of_program(
        logits, tile_experts, takers, shares, num_tokens, ROUTES, NUM_EXPERTS, BLOCK_EXPERTS, PER_TOKEN, WEIGHTS,
        BY_PAIR, BLOCK_PAIRS,
    )  # fmt: skip
    if LEAVES_OUT:
        expert = _leave_out(places, expert, taker, out, NUM_ROWS, BLOCK_PAIRS, BLOCK_ROWS)
    if expert >= 0:
        pair = tl.maximum(taker, 0)
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        number, is_far = find_place(places, expert, HAS_FAR)
        words = base_of(words, far_words, is_far, HAS_FAR)
        scales = base_of(scales, far_scales, is_far, HAS_FAR)
        zeros = base_of(zeros, far_zeros, is_far, HAS_FAR)
        source = number * (2 * NUM_ROWS if GATES else NUM_ROWS) + tl.minimum(row, NUM_ROWS - 1)
        token, is_pair = (pair // PAIRS_OF_ROW).to(tl.int64), taker >= 0
        if SPLITS > 1:
            source, token, is_pair = source[None, :, None], token[None, :, None], is_pair[None, :, None]
            split = tl.arange(0, SPLITS)[:, None, None]
            sums = tl.zeros([SPLITS, BLOCK_ROWS, BLOCK_PAIRS], tl.float32)
        else:
            source, token, is_pair = source[:, None], token[:, None], is_pair[:, None]
            split = tl.zeros([1, 1], tl.int32)
            sums = tl.zeros([BLOCK_ROWS, BLOCK_PAIRS], tl.float32)
        up_sums = sums
        scale, zero = beside(scales, zeros, source, split * COLUMNS, INNER, GROUP, NUM_GROUPS, NUM_RUNS, ROW_BLOCK,
                             AHEAD)  # fmt: skip
        up_scale, up_zero = scale, zero
        if GATES:
            up_scale, up_zero = beside(scales, zeros, source + NUM_ROWS, split * COLUMNS, INNER, GROUP, NUM_GROUPS,
                                       NUM_RUNS, ROW_BLOCK, AHEAD)  # fmt: skip
        for begin in tl.range(0, STEPS, SPLITS):
            step = begin + split
            now, zero_now, up_now, up_zero_now = scale, zero, up_scale, up_zero
            if AHEAD > 0 and NUM_GROUPS > 1:
                unit = (step + SPLITS) * COLUMNS
                scale, zero = beside(scales, zeros, source, unit, INNER, GROUP, NUM_GROUPS, NUM_RUNS, ROW_BLOCK,
                                     AHEAD)  # fmt: skip
                if GATES:
                    up_scale, up_zero = beside(scales, zeros, source + NUM_ROWS, unit, INNER, GROUP, NUM_GROUPS,
                                               NUM_RUNS, ROW_BLOCK, AHEAD)  # fmt: skip
            sums = row_tile(
                sums, x, words, scales, zeros, now, zero_now, source, token, step, is_pair, INNER,
                INNER, COLUMNS, NUM_WORDS, GROUP, NUM_GROUPS, IS_FINE, NUM_RUNS, ROW_BLOCK, KIND, HAS_ZEROS, IS_EXACT,
                AT_ONCE, AHEAD, DTYPE, SPLITS, BLOCK_ROWS, BLOCK_PAIRS,
            )  # fmt: skip
            if GATES:
                up_sums = row_tile(
                    up_sums, x, words, scales, zeros, up_now, up_zero_now, source + NUM_ROWS, token, step, is_pair,
                    INNER, INNER, COLUMNS, NUM_WORDS, GROUP, NUM_GROUPS, IS_FINE, NUM_RUNS, ROW_BLOCK, KIND, HAS_ZEROS,
                    IS_EXACT, AT_ONCE, AHEAD, DTYPE, SPLITS, BLOCK_ROWS, BLOCK_PAIRS,
                )  # fmt: skip
        sums, up_sums = (
            scaled(sums, scale, NUM_GROUPS, NUM_RUNS, HAS_ZEROS, KIND),
            scaled(up_sums, up_scale, NUM_GROUPS, NUM_RUNS, HAS_ZEROS, KIND),
        )
        if SPLITS > 1:
            sums, up_sums = tl.sum(sums, 0), tl.sum(up_sums, 0)
        sums, up_sums = tl.trans(sums), tl.trans(up_sums)
        if HAS_BIAS:
            sums, up_sums = _add_bias(sums, up_sums, bias, expert, row, row < NUM_ROWS, NUM_ROWS, GATES)
        if HAS_GAINS:
            sums *= tl.load(gains + expert)
        _store_tile(sums, up_sums, out, pair, row, taker >= 0, NUM_ROWS, GATES, ACTIVATION)


@triton.jit
def _sum_pairs_kernel(
    made, shares, residual, out, residual_stride, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr,
    DIVIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    sums = tl.zeros([BLOCK], tl.float32)
    total = 0.0
    for place in tl.static_range(PER_TOKEN):
        share = tl.load(shares + token * PER_TOKEN + place)
        rows = tl.load(made + (token * PER_TOKEN + place) * HIDDEN + column, mask=inside, other=0.0)
        sums += rows.to(tl.float32) * share
        total += share
    if DIVIDES:
        sums /= total
    sums += tl.load(residual + token * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, sums.to(out.dtype.element_ty), mask=inside)


def sizes_of_tiles(experts: Experts, most_tokens: int) -> list[int]:
    """Return numbers of tokens that cover every size of tiles, and every size of blocks in which pairs are sorted."""
    pairs = [size * experts.num_experts for size in (16, 32, 64, 128)] + list(SORTED_BLOCKS)
    return sorted({min(most_tokens, max(1, one // experts.per_token)) for one in pairs} | {most_tokens})


def pair_up(ids: Tensor, shares: Tensor, experts: Experts, has_packed: bool, has_far: bool = False) -> Tiles:
    """Cut the pairs of `routing.choose` into tiles, each about as large as an expert's number of pairs.

    has_packed: whether gate_up or down is packed; both are multiplied in these tiles. has_far: whether some experts are
    elsewhere, which are not widened in memory.
    """
    mean = -(-ids.numel() // experts.num_experts)
    most = MOST_PACKED_PAIRS if has_packed and (has_far or mean < LEAST_WIDENED_PAIRS) else MOST_PAIRS
    per_tile = max(LEAST_PAIRS, min(most, triton.next_power_of_2(mean)))
    return Tiles(*tile_pairs(ids, experts.num_experts, per_tile), shares, None)


def pair_few(logits: Tensor, experts: Experts, is_packed: bool = False) -> Tiles:
    """Return tiles for up to LEAST_PAIRS tokens, which the programs of gate and up fill from the router's logits.

    is_packed: whether both gate_up and down are packed.
    """
    tokens = len(logits)
    per_tile = FEWEST_PAIRS if is_packed and tokens <= FEWEST_PAIRS else LEAST_PAIRS
    check("pair_few", "logits", logits, (tokens, experts.num_experts), torch.float32, logits.device)
    if not 0 < tokens <= LEAST_PAIRS:
        raise ValueError(f"pair_few: logits are of {tokens} tokens; wanted 1 to {LEAST_PAIRS}")
    num_tiles = min(experts.num_experts, tokens * experts.per_token)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=logits.device)
    takers = torch.empty(num_tiles, per_tile, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, experts.per_token, dtype=torch.float32, device=logits.device)
    return Tiles(tile_experts, takers, shares, logits.contiguous())


def gate_up_tiles(
    normed: Tensor, tiles: Tiles, matrices: ExpertMatrices, experts: Experts, activation: Activation
) -> Tensor:
    """Return `activation(gate) * up` of each pair, `[pairs, intermediate]` in normed's dtype, by token and place.

    normed: `[tokens, hidden]`, contiguous. Raises ValueError for another shape, dtype or device.
    """
    op, far, num_rows = "gate_up_tiles", matrices.far, first_rows(activation, experts.intermediate)
    check_bias(op, matrices.gate_up_bias, experts, num_rows, normed)
    check_experts(op, "gate_up", matrices.gate_up, far, far and far.gate_up, experts, num_rows, normed)
    check(op, "normed", normed, (len(tiles.shares), normed.shape[1]), normed.dtype, tiles.shares.device)
    return _launch(normed, tiles, matrices, experts, activation, experts.intermediate)


def down_tiles(
    product: Tensor, tiles: Tiles, matrices: ExpertMatrices, residual: Tensor, experts: Experts,
    overwrites: bool = False,
) -> Tensor:  # fmt: skip
    """Return `residual` plus the weighted sum of the experts' outputs, `[tokens, hidden]`.

    The dtype is the residual's, or float32 if some experts are left out. product: from `gate_up_tiles`. residual:
    `[tokens, hidden]` in its dtype. overwrites: the sum may be written over it; otherwise it is new. Raises ValueError
    for another shape, dtype or device.
    """
    op, (tokens, hidden), far = "down_tiles", residual.shape, matrices.far
    check_bias(op, matrices.down_bias, experts, hidden, product)
    check_gains(op, matrices.gains, experts, product)
    check_experts(op, "down", matrices.down, far, far and far.down, experts, hidden, product)
    check(op, "residual", residual, (tokens, hidden), product.dtype, product.device)
    made = _launch(product, tiles, matrices, experts, None, hidden)
    dtype = dtype_of_sum(product, far)
    is_in_place = overwrites and residual.dtype == dtype and residual.is_contiguous()
    out = residual if is_in_place else torch.empty(tokens, hidden, dtype=dtype, device=product.device)
    block = min(SUM_BLOCK, triton.next_power_of_2(hidden))
    _sum_pairs_kernel[(tokens, triton.cdiv(hidden, block))](
        made, tiles.shares, residual, out, residual.stride(0), HIDDEN=hidden, PER_TOKEN=experts.per_token,
        DIVIDES=tiles.logits is not None and experts.is_normalised, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


def _launch(
    x: Tensor, tiles: Tiles, matrices: ExpertMatrices, experts: Experts, activation: Activation | None, num_rows: int
) -> Tensor:
    """Multiply tiles of pairs with gate and up, or, without an activation, with down; return `[pairs, num_rows]`.

    num_rows: rows of the result.
    """
    far, is_first = matrices.far, activation is not None
    gates = activation is not None and is_gated(activation)
    if is_first:
        stored, there, bias, gains = matrices.gate_up, far and far.gate_up, matrices.gate_up_bias, None
    else:
        stored, there, bias, gains = matrices.down, far and far.down, matrices.down_bias, matrices.gains
    there = far_matrix(stored, there)
    places = places_of(far, tiles.takers)
    vectors = x if bias is None else bias, tiles.shares if gains is None else gains
    routes = is_first and tiles.logits is not None
    out = torch.empty(tiles.shares.numel(), num_rows, dtype=x.dtype, device=x.device)
    listed = (tiles.experts if tiles.logits is None else tiles.logits, tiles.experts, tiles.takers, tiles.shares)
    common = {
        "HAS_BIAS": bias is not None, "HAS_GAINS": gains is not None, "ROUTES": routes,
        "BY_PAIR": routes and tiles.shares.numel() < experts.num_experts,
        "HAS_FAR": far is not None, "NUM_ROWS": num_rows, "PAIRS_OF_ROW": experts.per_token if is_first else 1,
        **taking(experts), "GATES": gates, "ACTIVATION": activation or "none", "BLOCK_PAIRS": tiles.per_tile,
    }  # fmt: skip
    if isinstance(stored, Packed) and isinstance(there, Packed) and tiles.per_tile <= MOST_PACKED_PAIRS:
        tokens = len(tiles.shares)
        rows, splits, num_warps, num_stages = packed_config(tokens, tiles.per_tile, gates, stored.kind, x.dtype)
        _packed_expert_tiles_kernel[triton.cdiv(num_rows, rows), len(tiles.experts)](
            x, *tensors_of(stored), *tensors_of(there), places, *vectors, *listed, out, len(tiles.shares),
            **tile_layout(stored), **common, LEAVES_OUT=leaves_out(far), BLOCK_ROWS=rows, SPLITS=splits,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        return out
    rows, block, num_warps, num_stages = plain_config(tiles.per_tile, gates, x)
    for part, first, end in _parts(stored, experts.num_experts):
        _tiles_kernel[triton.cdiv(num_rows, rows), len(tiles.experts)](
            x, part, part if far is None else there, places, *vectors, *listed, out, len(tiles.shares), first, end,
            **common, IS_PART=isinstance(stored, Packed), LEAVES_OUT=leaves_out(far), INNER=x.shape[1],
            BLOCK_ROWS=rows, BLOCK_INNER=block, num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return out


def _parts(stored: Stored, num_experts: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield a matrix of experts in plain parts, each with its range of experts."""
    if isinstance(stored, Tensor):
        yield stored, 0, num_experts
        return
    rows = stored.rows // num_experts
    at_once = experts_at_once(rows, stored.inner, stored.dtype.itemsize)
    if rows % stored.row_block:  # experts share scales
        at_once = num_experts
    for first in range(0, num_experts, at_once):
        end = min(num_experts, first + at_once)
        yield widen(stored.take_rows(first * rows, end * rows)), first, end

"""Compute a mixture of experts for a few tokens: each row of a chosen expert is a product of vectors.

With so few tokens hardly an expert is chosen twice, and the experts' bytes are the whole cost. A program owns whole
output rows of one token and sums over its experts in the order of their places. So a result depends neither on
scheduling nor on other tokens. Packed experts use tiles (`expert_tiles`). Bytes moved: rows of chosen experts, once for
each token that chooses them; a token's own row again for each program, from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Activation, Experts, first_rows, is_gated
from gpu.operations.arguments import check
from gpu.operations.experts.far_experts import FarExperts, base_of, find_place, leaves_out, places_of
from gpu.operations.experts.mixture_matrices import ExpertMatrices
from gpu.operations.experts.routing import take_experts, taking
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.operations.swiglu import activated

# Rows of each expert in a program, columns at once, num_warps, unroll. These are for programs with MIXED_PLACES
# experts; if a token chooses fewer, a program has more rows of each.
CONFIGS = {"gate_up": (1, 256, 4, 1), "down": (2, 256, 4, 3)}
MIXED_PLACES = 8


@triton.jit
def _lay_rows(token, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Lay out a program's rows: an equal number for each of its token's experts.

    Returns the place of the expert among the token's, the row in the expert, the pair, and whether it exists.
    """
    lane = tl.arange(0, SLOTS * BLOCK_ROWS)
    slot = lane % SLOTS
    return slot, tl.program_id(0) * BLOCK_ROWS + lane // SLOTS, token * PER_TOKEN + slot, slot < PER_TOKEN


@triton.jit
def _take_rows(
    logits, ids, shares, token, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Choose a token's experts.

    Return for each row of a program its row in the expert, pair, expert (int64), and validity.

    The program of row 0 writes which experts are chosen.
    """
    slot, row, place, is_ours = _lay_rows(token, PER_TOKEN, SLOTS, BLOCK_ROWS)
    expert, share = take_experts(
        logits + token * NUM_EXPERTS, slot, NUM_EXPERTS, BLOCK_EXPERTS, PER_TOKEN, WEIGHTS
    )  # fmt: skip
    tl.store(ids + place, expert, mask=is_ours & (row == 0))
    tl.store(shares + place, share, mask=is_ours & (row == 0))
    return row, place, expert.to(tl.int64), is_ours


@triton.jit
def _find_rows(ids, shares, token, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Return the same as `_take_rows`, and the expert's weight, from the choices that were written."""
    _, row, place, is_ours = _lay_rows(token, PER_TOKEN, SLOTS, BLOCK_ROWS)
    expert = tl.load(ids + place, mask=is_ours, other=0).to(tl.int64)
    return row, place, expert, tl.load(shares + place, mask=is_ours, other=0.0), is_ours


@triton.jit
def _gate_up_kernel(
    x, weight, far, places, bias, logits, ids, shares, out, HAS_FAR: tl.constexpr, LEAVES_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr, INTERMEDIATE: tl.constexpr, HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, WEIGHTS: tl.constexpr,
    GATES: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INNER: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = HIDDEN % BLOCK_INNER == 0
    ROWS: tl.constexpr = 2 * INTERMEDIATE if GATES else INTERMEDIATE
    token = tl.program_id(1).to(tl.int64)
    row, place, expert, is_ours = _take_rows(
        logits, ids, shares, token, NUM_EXPERTS, BLOCK_EXPERTS, PER_TOKEN, SLOTS, WEIGHTS, BLOCK_ROWS
    )  # fmt: skip
    number, is_far = find_place(places, expert, HAS_FAR)
    if LEAVES_OUT:
        is_ours = is_ours & (is_far == 0)
    source = number * ROWS + tl.minimum(row, INTERMEDIATE - 1)
    gate = base_of(weight, far, is_far[:, None], HAS_FAR) + source[:, None] * HIDDEN
    column = tl.arange(0, BLOCK_INNER)[None, :]
    x += token * HIDDEN + place[:, None] * 0  # as many rows as weights, which so stay in the threads that load them
    sums = tl.zeros([SLOTS * BLOCK_ROWS, BLOCK_INNER], tl.float32)
    up_sums = sums
    for begin in tl.range(0, HIDDEN, BLOCK_INNER, loop_unroll_factor=UNROLL):
        inner = begin + column
        inside = is_ours[:, None] if EVEN else is_ours[:, None] & (inner < HIDDEN)
        rows = tl.load(gate + inner, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        ups = rows
        if GATES:
            ups_at = gate + INTERMEDIATE * HIDDEN + inner
            ups = tl.load(ups_at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        values = tl.load(x + inner, mask=inside, other=0.0).to(tl.float32)
        sums += rows * values
        if GATES:
            up_sums += ups * values
    gates, ups = tl.sum(sums, 1), tl.sum(up_sums, 1)
    if HAS_BIAS:
        biases = bias + expert * ROWS + tl.minimum(row, INTERMEDIATE - 1)
        gates += tl.load(biases, mask=is_ours, other=0.0).to(tl.float32)
        if GATES:
            ups += tl.load(biases + INTERMEDIATE, mask=is_ours, other=0.0).to(tl.float32)
    result = activated(gates, ups, ACTIVATION)
    tl.store(out + place * INTERMEDIATE + row, result.to(out.dtype.element_ty), mask=is_ours & (row < INTERMEDIATE))


@triton.jit
def _down_kernel(
    product, weight, far, places, bias, gains, ids, shares, residual, out, residual_stride,
    HAS_FAR: tl.constexpr, LEAVES_OUT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GAINS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_INNER: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = INTERMEDIATE % BLOCK_INNER == 0
    token = tl.program_id(1).to(tl.int64)
    row, place, expert, share, is_ours = _find_rows(ids, shares, token, PER_TOKEN, SLOTS, BLOCK_ROWS)
    number, is_far = find_place(places, expert, HAS_FAR)
    if LEAVES_OUT:
        is_ours = is_ours & (is_far == 0)
    source = (number * HIDDEN + tl.minimum(row, HIDDEN - 1))[:, None] * INTERMEDIATE
    source = base_of(weight, far, is_far[:, None], HAS_FAR) + source
    column = tl.arange(0, BLOCK_INNER)[None, :]
    sums = tl.zeros([SLOTS * BLOCK_ROWS, BLOCK_INNER], tl.float32)
    for begin in tl.range(0, INTERMEDIATE, BLOCK_INNER, loop_unroll_factor=UNROLL):
        inner = begin + column
        inside = is_ours[:, None] if EVEN else is_ours[:, None] & (inner < INTERMEDIATE)
        rows = tl.load(source + inner, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        values = tl.load(product + place[:, None] * INTERMEDIATE + inner, mask=inside, other=0.0).to(tl.float32)
        sums += rows * values
    made = tl.sum(sums, 1)
    if HAS_BIAS:
        made += tl.load(bias + expert * HIDDEN + tl.minimum(row, HIDDEN - 1), mask=is_ours, other=0.0).to(tl.float32)
    if HAS_GAINS:
        share *= tl.load(gains + expert, mask=is_ours, other=0.0)
    _store_sum(made * share, residual, out, token, residual_stride, HIDDEN, SLOTS, BLOCK_ROWS)


@triton.jit
def _store_sum(
    weighed, residual, out, token, residual_stride, HIDDEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """Store a row's sum of expert outputs, `[rows * SLOTS]`, plus the residual."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < HIDDEN
    result = tl.sum(tl.reshape(weighed, [BLOCK_ROWS, SLOTS]), 1)
    result += tl.load(residual + token * residual_stride + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + row, result.to(out.dtype.element_ty), mask=inside)


def gate_up_rows(
    normed: Tensor, logits: Tensor, matrices: ExpertMatrices, experts: Experts, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `activation(gate) * up` of each token's experts, and the experts, ids int32 and weights float32.

    The product is `[tokens, per_token, intermediate]` in normed's dtype; experts are as `routing.choose` returns them.
    normed, logits: from `routing.router_logits`, contiguous. Raises ValueError for another shape, dtype or device, and
    for packed experts.
    """
    (tokens, hidden), gate_up, far, bias = normed.shape, matrices.gate_up, matrices.far, matrices.gate_up_bias
    own_rows = first_rows(activation, experts.intermediate)
    check_bias("gate_up_rows", bias, experts, own_rows, normed)
    _refuse_packed("gate_up_rows", "gate_up", gate_up, far and far.gate_up)
    check_experts("gate_up_rows", "gate_up", gate_up, far, far and far.gate_up, experts, own_rows, normed)
    check("gate_up_rows", "logits", logits, (tokens, experts.num_experts), torch.float32, normed.device)
    taken = (tokens, experts.per_token)
    ids = torch.empty(taken, dtype=torch.int32, device=normed.device)
    shares = torch.empty(taken, dtype=torch.float32, device=normed.device)
    out = torch.empty(*taken, experts.intermediate, dtype=normed.dtype, device=normed.device)
    there, places = far_matrix(gate_up, far and far.gate_up), places_of(far, ids)
    rows, block, num_warps, unroll, slots = _sized(CONFIGS["gate_up"], experts)
    _gate_up_kernel[triton.cdiv(experts.intermediate, rows), tokens](
        normed, gate_up, there, places, normed if bias is None else bias, logits, ids, shares, out, **taking(experts),
        HAS_FAR=far is not None, LEAVES_OUT=leaves_out(far), HAS_BIAS=bias is not None,
        INTERMEDIATE=experts.intermediate, HIDDEN=hidden, SLOTS=slots, GATES=is_gated(activation),
        ACTIVATION=activation, BLOCK_ROWS=rows, BLOCK_INNER=block, UNROLL=unroll, num_warps=num_warps,
    )  # fmt: skip
    return out, ids, shares


def down_rows(
    product: Tensor, ids: Tensor, shares: Tensor, matrices: ExpertMatrices, residual: Tensor, experts: Experts
) -> Tensor:
    """Return `residual` plus the weighted sum of the experts' outputs, `[tokens, hidden]`, new.

    The dtype is the residual's, or float32 if some experts are left out. product, ids, shares: from `gate_up_rows`.
    residual: `[tokens, hidden]` in product's dtype. Raises ValueError for another shape, dtype or device, and for
    packed experts.
    """
    (tokens, hidden), down, far = residual.shape, matrices.down, matrices.far
    bias, gains = matrices.down_bias, matrices.gains
    check_bias("down_rows", bias, experts, hidden, product)
    check_gains("down_rows", gains, experts, product)
    _refuse_packed("down_rows", "down", down, far and far.down)
    check_experts("down_rows", "down", down, far, far and far.down, experts, hidden, product)
    check("down_rows", "residual", residual, (tokens, hidden), product.dtype, product.device)
    out = torch.empty(tokens, hidden, dtype=dtype_of_sum(product, far), device=product.device)
    there, places = far_matrix(down, far and far.down), places_of(far, ids)
    rows, block, num_warps, unroll, slots = _sized(CONFIGS["down"], experts)
    _down_kernel[triton.cdiv(hidden, rows), tokens](
        product, down, there, places, product if bias is None else bias, shares if gains is None else gains, ids,
        shares, residual, out, residual.stride(0), HAS_FAR=far is not None, LEAVES_OUT=leaves_out(far),
        HAS_BIAS=bias is not None, HAS_GAINS=gains is not None,
        HIDDEN=hidden, INTERMEDIATE=experts.intermediate, PER_TOKEN=experts.per_token,
        SLOTS=slots, BLOCK_ROWS=rows, BLOCK_INNER=block, UNROLL=unroll, num_warps=num_warps,
    )  # fmt: skip
    return out


def dtype_of_sum(product: Tensor, far: FarExperts | None) -> torch.dtype:
    """Return the dtype of the experts' sum: float32 if some experts are left out, since their sum is added later."""
    return torch.float32 if leaves_out(far) else product.dtype


def far_matrix(near: Stored, stored: Stored | None) -> Stored:
    """Return the far matrix, or a placeholder if nothing is read there."""
    return near if stored is None else stored


def check_bias(op: str, bias: Tensor | None, experts: Experts, num_rows: int, x: Tensor) -> None:
    """Raise ValueError unless a bias has so many rows for each expert, on the card or not."""
    if bias is not None:
        check(op, "bias", bias, (experts.num_experts * num_rows,), x.dtype, x.device)


def check_gains(op: str, gains: Tensor | None, experts: Experts, x: Tensor) -> None:
    """Raise ValueError unless there is one factor for each expert's output."""
    if gains is not None:
        check(op, "gains", gains, (experts.num_experts,), torch.float32, x.device)


def check_experts(
    op: str, name: str, near: Stored, far: FarExperts | None, there: Stored | None, experts: Experts, num_rows: int,
    x: Tensor,
) -> None:  # fmt: skip
    """Raise ValueError unless the experts' matrices have so many rows each.

    They may be in one matrix, or in two, of which the far one, `there`, may be elsewhere.
    """
    if far is None:
        return check_stored(op, name, near, experts.num_experts * num_rows, x)
    for what, stored in ((name, near), (f"far {name}", there)):
        if stored is None:
            continue
        rows = len(stored) if isinstance(stored, Tensor) else stored.rows
        check_stored(op, what, stored, rows // num_rows * num_rows, x)
    return None


def check_stored(op: str, name: str, stored: Stored, rows: int, x: Tensor) -> None:
    """Raise ValueError unless a matrix of experts has so many rows and x's columns, and is on x's device."""
    inner, device = x.shape[-1], x.device
    if isinstance(stored, Tensor):
        return check(op, name, stored, (rows, inner), x.dtype, device)
    if (stored.rows, stored.inner) != (rows, inner) or stored.device != device or stored.order is not None:
        got = f"{(stored.rows, stored.inner)} on {stored.device}" + (
            ", columns in another order" * (stored.order is not None)
        )
        raise ValueError(f"{op}: {name} is {got}; wanted {(rows, inner)} on {device}, columns in order")
    return None


def _refuse_packed(op: str, name: str, near: Stored, there: Stored | None) -> None:
    for what, stored in ((name, near), (f"far {name}", there)):
        if isinstance(stored, Packed):
            raise ValueError(f"{op}: {what} is packed; wanted a tensor: packed experts are multiplied in tiles")


def _sized(config: tuple[int, int, int, int], experts: Experts) -> tuple[int, int, int, int, int]:
    """Return a configuration adapted to the number of chosen experts, and the padded number of places."""
    rows, block, num_warps, unroll = config
    slots = triton.next_power_of_2(experts.per_token)
    return max(1, rows * MIXED_PLACES // slots), block, num_warps, unroll, slots

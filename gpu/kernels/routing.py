"""Who takes whom in a mixture of experts: the router's logits behind the norm, a token's largest, and pairs by expert.

A pair is a token and one of those experts that it takes: pair `token * per_token + place`, places by falling weight. It
refuses to know what experts compute. Invariant: of equal logits the lower expert is taken first, and nothing depends
on how programs are scheduled. Bytes moved: the router once for each of a few tokens (from L2), or once for all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, runs_on_triton
from gpu.kernels.experts_reference import choose_reference
from gpu.kernels.linear import logits_linear
from gpu.kernels.rms_norm import check_norm, rms_norm
from gpu.model.spec import Experts

MOST_ROUTED = 64  # tokens whose logits are products of vectors; of more, the vendor's product is one of matrices
ROUTED_EXPERTS = 2  # of a program
SORTED_BLOCKS = (128, 1024, 4096)  # pairs that a program looks at together: few sizes, each is compiled


@triton.jit
def _router_logits_kernel(
    x, norm_weight, router, logits, normed, x_stride, eps, NUM_EXPERTS: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    expert = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    source = tl.minimum(expert, NUM_EXPERTS - 1)[:, None] * HIDDEN + column[None, :]
    rows = tl.load(router + source, mask=inside[None, :], other=0.0).to(tl.float32)
    values = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(norm_weight + column, mask=inside, other=0.0)
    values *= tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    if norm_weight.dtype.element_ty == x.dtype.element_ty:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    rounded = (values * gain.to(tl.float32)).to(x.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed + token * HIDDEN + column, rounded, mask=inside)
    sums = tl.sum(rows * rounded.to(tl.float32)[None, :], 1)
    tl.store(logits + token * NUM_EXPERTS + expert, sums, mask=expert < NUM_EXPERTS)


@triton.jit
def _in_order(bits):
    """Between the bits of a float32 and an int32 of the same order, both ways."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def take_experts(
    logits, slot, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
):  # fmt: skip
    """The expert at each place of `slot`, int32 of any length, and its weight, float32: of one token's logits. Integers
    of their order are compared: whatever is there, an expert is taken that there is.
    """
    TAKEN: tl.constexpr = -0x80000000
    expert = tl.arange(0, BLOCK_EXPERTS)
    values = tl.load(logits + expert, mask=expert < NUM_EXPERTS, other=float("-inf")) + 0.0  # no -0.0
    left = tl.where(expert < NUM_EXPERTS, _in_order(values.to(tl.int32, bitcast=True)), TAKEN)
    top = _in_order(tl.max(left, 0)).to(tl.float32, bitcast=True)
    total = tl.sum(tl.exp(values - top), 0)
    if IS_NORMALISED:
        total = 0.0
    ids = slot * 0
    weights = ids.to(tl.float32)
    for place in tl.static_range(PER_TOKEN):
        best = tl.max(left, 0)
        at = tl.min(tl.where(left == best, expert, BLOCK_EXPERTS), 0)
        share = tl.exp(_in_order(best).to(tl.float32, bitcast=True) - top)
        ids = tl.where(slot == place, at, ids)
        weights = tl.where(slot == place, share, weights)
        if IS_NORMALISED:
            total += share
        left = tl.where(expert == at, TAKEN, left)
    return ids, weights / total


@triton.jit
def _choose_kernel(
    logits, ids, weights, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr, IS_NORMALISED: tl.constexpr,
):  # fmt: skip
    token, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    taken, shares = take_experts(
        logits + token * NUM_EXPERTS, slot, NUM_EXPERTS, BLOCK_EXPERTS, PER_TOKEN, IS_NORMALISED
    )  # fmt: skip
    tl.store(ids + token * PER_TOKEN + slot, taken, mask=slot < PER_TOKEN)
    tl.store(weights + token * PER_TOKEN + slot, shares, mask=slot < PER_TOKEN)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs_kernel(ids, order, begins, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    expert, lane = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, num_pairs, BLOCK):
        taken = tl.load(ids + first + lane, mask=first + lane < num_pairs, other=NUM_EXPERTS)
        before += (taken < expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(begins + expert, place)
    for first in tl.range(0, num_pairs, BLOCK):
        taken = tl.load(ids + first + lane, mask=first + lane < num_pairs, other=NUM_EXPERTS)
        is_ours = (taken == expert).to(tl.int32)
        rank = tl.cumsum(is_ours, 0) - is_ours
        tl.store(order + place + rank, first + lane, mask=is_ours == 1)
        place += tl.sum(is_ours, 0)
    if expert == NUM_EXPERTS - 1:
        tl.store(begins + NUM_EXPERTS, num_pairs)


def router_logits(x: Tensor, norm: Tensor, eps: float, router: Tensor) -> tuple[Tensor, Tensor]:
    """`rms_norm(x)` of x's dtype, `[tokens, hidden]`, and its products with the router, float32 `[tokens, experts]`.

    x `[tokens, hidden]`, norm `[hidden]` of its dtype or float32, router `[experts, hidden]` of its dtype. Raises
    ValueError for another shape, dtype or device.
    """
    tokens, hidden = x.shape
    check_norm("router_logits", "norm", norm, x)
    check("router_logits", "router", router, (router.shape[0], hidden), x.dtype, x.device)
    if not runs_on_triton(x) or not 0 < tokens <= MOST_ROUTED:
        normed = rms_norm(x, norm, eps)
        return normed, logits_linear(normed, router)
    x = x if x.stride(1) == 1 else x.contiguous()
    normed = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    logits = torch.empty(tokens, len(router), dtype=torch.float32, device=x.device)
    _router_logits_kernel[(triton.cdiv(len(router), ROUTED_EXPERTS), tokens)](
        x, norm, router, logits, normed, x.stride(0), eps, NUM_EXPERTS=len(router), HIDDEN=hidden,
        BLOCK_EXPERTS=ROUTED_EXPERTS, BLOCK=triton.next_power_of_2(hidden), num_warps=4,
    )  # fmt: skip
    return normed, logits


def choose(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """ids int32 and weights float32 of those that each token takes, `[tokens, per_token]`, the largest first.

    logits float32 `[tokens, experts]`, contiguous. Raises ValueError for another shape or dtype.
    """
    tokens = len(logits)
    check("choose", "logits", logits, (tokens, experts.num_experts), torch.float32, logits.device)
    if not runs_on_triton(logits) or tokens == 0:
        ids, weights = choose_reference(logits, experts)
        return ids.to(torch.int32), weights
    ids = torch.empty(tokens, experts.per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, experts.per_token, dtype=torch.float32, device=logits.device)
    _choose_kernel[(tokens,)](
        logits.contiguous(), ids, weights, **taking(experts), SLOTS=triton.next_power_of_2(experts.per_token),
        num_warps=1,
    )  # fmt: skip
    return ids, weights


def taking(experts: Experts) -> dict[str, object]:
    """What `take_experts` asks of a mixture."""
    return {
        "NUM_EXPERTS": experts.num_experts, "BLOCK_EXPERTS": triton.next_power_of_2(experts.num_experts),
        "PER_TOKEN": experts.per_token, "IS_NORMALISED": experts.is_normalised,
    }  # fmt: skip


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs by expert, int32 `[pairs]`, those of one expert in their order; and where each expert's begin, int32
    `[experts + 1]`. ids: of `choose`. Raises ValueError for another dtype.
    """
    check("sort_pairs", "ids", ids, tuple(ids.shape), torch.int32, ids.device)
    num_pairs = ids.numel()
    if not runs_on_triton(ids) or num_pairs == 0:
        order = ids.flatten().argsort(stable=True).to(torch.int32)
        counts = torch.bincount(ids.flatten().long(), minlength=num_experts)
        return order, torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    begins = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    block = next((size for size in SORTED_BLOCKS if size >= num_pairs), SORTED_BLOCKS[-1])
    _sort_pairs_kernel[(num_experts,)](
        ids.contiguous(), order, begins, num_pairs, NUM_EXPERTS=num_experts, BLOCK=block,
        num_warps=min(8, block // 128),
    )  # fmt: skip
    return order, begins

"""Route a mixture of experts: compute the router's logits after the norm, choose experts, and cut pairs into tiles.

A pair is a token and one of the experts that it chooses: pair `token * per_token + place`, places by falling weight. A
tile is some pairs of one expert. Of equal logits the lower expert is chosen first, and nothing depends on how programs
are scheduled. Bytes moved: the router once per token for a few tokens (from L2), or once for all.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Experts
from gpu.operations.arguments import check, runs_on_triton
from gpu.operations.experts.experts_reference import choose_reference, fold_choice_reference
from gpu.operations.linear.plain_linear import logits_linear
from gpu.operations.rms_norm import check_norm, rms_norm

MOST_ROUTED = 64  # tokens whose logits are products of vectors; with more, the vendor's matrix product is used
ROUTED_EXPERTS = 2  # experts of a program
# A weight is the exponential of a logit over the sum of all experts', over that of the chosen ones, or by itself.
OF_ALL, OF_TAKEN, OF_ITSELF = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SORTED_BLOCKS = (128, 1024, 4096)  # pairs that a program reads together: few sizes, since each is compiled


@triton.jit
def _router_logits_kernel(
    x, norm_weight, router, bias, logits, normed, x_stride, eps, NUM_EXPERTS: tl.constexpr, HIDDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
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
    if HAS_BIAS:
        sums += tl.load(bias + expert, mask=expert < NUM_EXPERTS, other=0.0).to(tl.float32)
    tl.store(logits + token * NUM_EXPERTS + expert, sums, mask=expert < NUM_EXPERTS)


@triton.jit
def _in_order(bits):
    """Convert the bits of a float32 to an int32 with the same order, or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keys_of(values, is_expert):
    """Return integers in the order of the logits, such that existing experts come before padding whatever their logits
    are.
    """
    keys = _in_order((values + 0.0).to(tl.int32, bitcast=True))  # no -0.0
    return tl.where(is_expert, keys, -0x80000000)


@triton.jit
def logit_of(keys):
    """Return the float32 logit of a key, the reverse of `keys_of`."""
    return _in_order(keys).to(tl.float32, bitcast=True)


@triton.jit
def take_experts(
    logits, slot, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Return the expert at each place of `slot`, int32 of any length, and its weight, float32, from one token's logits.

    An expert's place is the number of experts before it. All are counted at once: if the largest were removed in
    rounds, all warps would wait for one another twice in each round.
    """
    expert = tl.arange(0, BLOCK_EXPERTS)
    is_expert = expert < NUM_EXPERTS
    keys = keys_of(tl.load(logits + expert, mask=is_expert, other=0.0), is_expert)
    ties = (keys[:, None] == keys[None, :]) & (expert[:, None] < expert[None, :])
    place = tl.sum(((keys[:, None] > keys[None, :]) | ties).to(tl.int32), 0)
    share = tl.where(is_expert, tl.exp(logit_of(keys) - logit_of(tl.max(keys, 0))), 0.0)
    if WEIGHTS == OF_ITSELF:
        total = tl.exp(-logit_of(tl.max(keys, 0)))
    else:
        total = tl.sum(tl.where(place < PER_TOKEN, share, 0.0) if WEIGHTS == OF_TAKEN else share, 0)
    is_there = (place[:, None] == slot[None, :]) & (slot < PER_TOKEN)[None, :]
    ids = tl.sum(tl.where(is_there, expert[:, None], 0), 0)
    return ids, tl.sum(tl.where(is_there, share[:, None], 0.0), 0) / total


@triton.jit
def _fold_choice_kernel(
    logits, correction, out, IS_SIGMOID: tl.constexpr, HAS_CORRECTION: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    GROUPS_TAKEN: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_EXPERTS)
    is_expert = expert < NUM_EXPERTS
    values = tl.load(logits + token * NUM_EXPERTS + expert, mask=is_expert, other=float("-inf"))
    if IS_SIGMOID:
        weights = tl.minimum(values, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(values)))
    else:
        top = tl.max(values, 0)
        weights = values - top - tl.log(tl.sum(tl.exp(values - top), 0))
    wanted = tl.exp(weights)
    if HAS_CORRECTION:
        wanted += tl.load(correction + expert, mask=is_expert, other=0.0)
    keys = keys_of(wanted, is_expert)
    before = (keys[:, None] > keys[None, :]) | ((keys[:, None] == keys[None, :]) & (expert[:, None] < expert[None, :]))
    if GROUPS > 1:
        own = expert // (NUM_EXPERTS // GROUPS)
        in_group = tl.sum((before & (own[:, None] == own[None, :])).to(tl.int32), 0)
        group = tl.arange(0, BLOCK_GROUPS)
        is_best = (own[:, None] == group[None, :]) & (in_group < GROUP_BEST)[:, None] & is_expert[:, None]
        best = keys_of(tl.sum(tl.where(is_best, wanted[:, None], 0.0), 0), group < GROUPS)
        ahead = (best[:, None] > best[None, :]) | ((best[:, None] == best[None, :]) & (group[:, None] < group[None, :]))
        is_taken = tl.sum(ahead.to(tl.int32), 0) < GROUPS_TAKEN
        is_left = tl.sum(((own[:, None] == group[None, :]) & is_taken[None, :]).to(tl.int32), 1) > 0
        before = before & is_left[:, None]
        place = tl.where(is_left, tl.sum(before.to(tl.int32), 0), PER_TOKEN)
    else:
        place = tl.sum(before.to(tl.int32), 0)
    folded = tl.where(place < PER_TOKEN, weights, float("-inf"))
    tl.store(out + token * NUM_EXPERTS + expert, folded, mask=is_expert)


@triton.jit
def _choose_kernel(
    logits, ids, weights, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    token, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    taken, shares = take_experts(
        logits + token * NUM_EXPERTS, slot, NUM_EXPERTS, BLOCK_EXPERTS, PER_TOKEN, WEIGHTS
    )  # fmt: skip
    tl.store(ids + token * PER_TOKEN + slot, taken, mask=slot < PER_TOKEN)
    tl.store(weights + token * PER_TOKEN + slot, shares, mask=slot < PER_TOKEN)


@triton.jit(do_not_specialize=["num_pairs"])
def _tile_pairs_kernel(
    ids, tile_experts, takers, num_pairs, NUM_EXPERTS: tl.constexpr, PER_TILE: tl.constexpr, BLOCK: tl.constexpr
):
    expert, lane = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, num_pairs, BLOCK):
        taken = tl.load(ids + first + lane, mask=first + lane < num_pairs, other=NUM_EXPERTS)
        before += (taken < expert).to(tl.int32)
    begin = tl.sum(before, 0)
    tile = begin // PER_TILE + expert  # its first tile, after as many as earlier experts can have
    own = takers + tile.to(tl.int64) * PER_TILE
    count = begin * 0
    for first in tl.range(0, num_pairs, BLOCK):
        taken = tl.load(ids + first + lane, mask=first + lane < num_pairs, other=NUM_EXPERTS)
        is_ours = (taken == expert).to(tl.int32)
        rank = tl.cumsum(is_ours, 0) - is_ours
        tl.store(own + count + rank, first + lane, mask=is_ours == 1)
        count += tl.sum(is_ours, 0)
    num_tiles = (begin + count) // PER_TILE + expert + 1 - tile
    rest = count + tl.arange(0, 2 * PER_TILE)
    tl.store(own + rest, rest * 0 - 1, mask=rest < num_tiles * PER_TILE)
    for first in tl.range(0, num_tiles, BLOCK):
        at = first + lane
        tl.store(tile_experts + tile + at, tl.where(at * PER_TILE < count, expert, -1), mask=at < num_tiles)


def router_logits(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x)` in x's dtype, `[tokens, hidden]`, and its product with the router, float32 `[tokens,
    experts]`.

    x: `[tokens, hidden]`. norm: `[hidden]` in x's dtype or float32. router: `[experts, hidden]`, bias: `[experts]`, in
    x's dtype. Raises ValueError for another shape, dtype or device.
    """
    tokens, hidden = x.shape
    if bias is not None:
        check("router_logits", "bias", bias, (router.shape[0],), x.dtype, x.device)
    check_norm("router_logits", "norm", norm, x)
    check("router_logits", "router", router, (router.shape[0], hidden), x.dtype, x.device)
    if not runs_on_triton(x) or not 0 < tokens <= MOST_ROUTED:
        normed = rms_norm(x, norm, eps)
        logits = logits_linear(normed, router)
        return normed, logits if bias is None else logits.add_(bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    normed = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    logits = torch.empty(tokens, len(router), dtype=torch.float32, device=x.device)
    _router_logits_kernel[(triton.cdiv(len(router), ROUTED_EXPERTS), tokens)](
        x, norm, router, router if bias is None else bias, logits, normed, x.stride(0), eps, NUM_EXPERTS=len(router),
        HIDDEN=hidden, HAS_BIAS=bias is not None, BLOCK_EXPERTS=ROUTED_EXPERTS,
        BLOCK=triton.next_power_of_2(hidden), num_warps=4,
    )  # fmt: skip
    return normed, logits


def fold_choice(logits: Tensor, experts: Experts, correction: Tensor | None) -> Tensor:
    """Compute `fold_choice_reference`, in a new tensor.

    Of equal weights, or equal sums of groups, the first is chosen.

    logits: float32 `[tokens, experts]`. correction: float32 `[experts]` or None. Raises ValueError for another shape,
    dtype or device.
    """
    tokens = len(logits)
    check("fold_choice", "logits", logits, (tokens, experts.num_experts), torch.float32, logits.device)
    if correction is not None:
        check("fold_choice", "correction", correction, (experts.num_experts,), torch.float32, logits.device)
    if not runs_on_triton(logits) or tokens == 0:
        return fold_choice_reference(logits, experts, correction)
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    _fold_choice_kernel[(tokens,)](
        logits, logits if correction is None else correction, out, IS_SIGMOID=experts.is_sigmoid,
        HAS_CORRECTION=correction is not None, NUM_EXPERTS=experts.num_experts,
        BLOCK_EXPERTS=triton.next_power_of_2(experts.num_experts), PER_TOKEN=experts.per_token, GROUPS=experts.groups,
        BLOCK_GROUPS=triton.next_power_of_2(experts.groups), GROUPS_TAKEN=experts.groups_taken,
        GROUP_BEST=experts.group_best, num_warps=8,
    )  # fmt: skip
    return out


def choose(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return the experts that each token chooses, ids int32 and weights float32 `[tokens, per_token]`, largest first.

    logits: float32 `[tokens, experts]`, contiguous. Raises ValueError for another shape or dtype.
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
        num_warps=4,
    )  # fmt: skip
    return ids, weights


def taking(experts: Experts) -> dict[str, object]:
    """Return the arguments of `take_experts` for this mixture."""
    weights = OF_ITSELF if experts.keeps_weights else OF_TAKEN if experts.is_normalised else OF_ALL
    return {
        "NUM_EXPERTS": experts.num_experts, "BLOCK_EXPERTS": triton.next_power_of_2(experts.num_experts),
        "PER_TOKEN": experts.per_token, "WEIGHTS": weights.value,
    }  # fmt: skip


def tile_pairs(ids: Tensor, num_experts: int, per_tile: int) -> tuple[Tensor, Tensor]:
    """Return each tile's expert, int32 `[tiles]`, and its pairs, int32 `[tiles, per_tile]`.

    There are `pairs // per_tile + experts` tiles. A tile without pairs has expert -1, and unused places have pair -1.
    An expert's pairs are in order. ids: from `choose`. Raises ValueError for another dtype.
    """
    check("tile_pairs", "ids", ids, tuple(ids.shape), torch.int32, ids.device)
    num_pairs = ids.numel()
    num_tiles = num_pairs // per_tile + num_experts
    if not runs_on_triton(ids) or num_pairs == 0:
        return _tile_pairs_reference(ids.flatten(), num_experts, per_tile, num_tiles)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    takers = torch.empty(num_tiles, per_tile, dtype=torch.int32, device=ids.device)
    block = next((size for size in SORTED_BLOCKS if size >= num_pairs), SORTED_BLOCKS[-1])
    _tile_pairs_kernel[(num_experts,)](
        ids.contiguous(), tile_experts, takers, num_pairs, NUM_EXPERTS=num_experts, PER_TILE=per_tile, BLOCK=block,
        num_warps=min(8, block // 128),
    )  # fmt: skip
    return tile_experts, takers


def _tile_pairs_reference(ids: Tensor, num_experts: int, per_tile: int, num_tiles: int) -> tuple[Tensor, Tensor]:
    """Compute `tile_pairs` in plain torch."""
    counts = torch.bincount(ids.long(), minlength=num_experts)
    begins = counts.cumsum(0) - counts
    order = ids.argsort(stable=True)
    expert = ids[order].long()
    first = begins // per_tile + torch.arange(num_experts, device=ids.device)
    place = first[expert] * per_tile + torch.arange(len(ids), device=ids.device) - begins[expert]
    tile_experts, takers = (ids.new_full((size,), -1) for size in (num_tiles, num_tiles * per_tile))
    takers[place] = order.to(torch.int32)
    tile_experts[place // per_tile] = expert.to(torch.int32)
    return tile_experts, takers.view(num_tiles, per_tile)

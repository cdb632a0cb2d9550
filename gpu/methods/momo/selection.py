"""Keep a row's best key blocks as blocks pass: exactly, on chip, or by an estimated threshold (MOMO, section 3).

Invariant: scores go in once, in ascending blocks, so of equal scores the earlier block stays; a row that meets no more
blocks than it may keep keeps all of them. Exact: k scores and blocks a row in registers, and their minimum. Estimated:
k_exact in the same way; any other block is kept if its score exceeds a threshold (eq. 6), which comes from the mean and
variance of all scores so far. The share to keep is the free slots over the remaining blocks. The paper's third way, a
tournament tree in device memory, is left out: the whole pass took 2.4 times as long as with the exact one at k = 64,
and 5.5 times as long as with the estimated one at k = 256.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.momo.settings import Selection


def select_reference(scores: Tensor, num_blocks: Tensor, selection: Selection) -> Tensor:
    """Return the blocks that rows keep, int32 `[rows, heads, k]`, -1 in free slots; `scores [rows, heads, blocks]`, any
    float, of which a row sees its first `num_blocks`, int64 `[rows]`.
    """
    rows, heads, most = scores.shape
    if selection.name != "estimated":
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., : selection.k]
        kept = torch.where(order < num_blocks[:, None, None], order, -1)
        return torch.nn.functional.pad(kept, (0, selection.k - kept.shape[-1]), value=-1).int()
    kept = torch.full((rows, heads, selection.k), -1, dtype=torch.int32, device=scores.device)
    best = torch.full((rows, heads, selection.k_exact), -torch.inf, dtype=scores.dtype, device=scores.device)
    count = torch.zeros(rows, heads, dtype=torch.int64, device=scores.device)
    mean, squares = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0])
    for block in range(most):
        sees = (block < num_blocks)[:, None].expand(rows, heads)
        score = scores[..., block]
        step = torch.where(sees, score - mean, 0)
        mean = mean + step / (block + 1)
        squares = squares + torch.where(sees, step * (score - mean), 0)
        lowest, slot = best.min(-1)
        wins = sees & (score > lowest)
        left = torch.where(wins, lowest, score)
        left_block = torch.where(wins, kept.gather(-1, slot[..., None])[..., 0], block)
        best.scatter_(-1, slot[..., None], torch.where(wins, score, lowest)[..., None])
        kept.scatter_(
            -1, slot[..., None], torch.where(wins, block, kept.gather(-1, slot[..., None])[..., 0])[..., None]
        )
        slots = selection.k - selection.k_exact - count
        share = slots.to(scores.dtype) / (num_blocks[:, None] - block)
        deviation = (squares / (block + 1)).clamp(min=0).sqrt()
        threshold = mean + 2**0.5 * deviation * torch.erfinv(1 - 2 * share)
        takes = sees & (left > -torch.inf) & (slots > 0) & ((share >= 1) | (left > threshold))
        place = torch.where(takes, selection.k_exact + count, 0)[..., None]
        kept.scatter_(-1, place, torch.where(takes, left_block, kept[..., 0]).int()[..., None])
        count += takes
    return kept


@triton.jit
def erfinv_of_share(share):
    """Return erf^-1(1 - 2 * share) for shares in (0, 1), float32 (Giles 2010), without the cancellation in 1 - 2 *
    share.
    """
    far = -tl.log(4.0 * share * (1.0 - share))
    near = far - 2.5
    a = 2.81022636e-08
    a = 3.43273939e-07 + a * near
    a = -3.5233877e-06 + a * near
    a = -4.39150654e-06 + a * near
    a = 0.00021858087 + a * near
    a = -0.00125372503 + a * near
    a = -0.00417768164 + a * near
    a = 0.246640727 + a * near
    a = 1.50140941 + a * near
    root = tl.sqrt(tl.maximum(far, 0.0)) - 3.0
    b = -0.000200214257
    b = 0.000100950558 + b * root
    b = 0.00134934322 + b * root
    b = -0.00367342844 + b * root
    b = 0.00573950773 + b * root
    b = -0.0076224613 + b * root
    b = 0.00943887047 + b * root
    b = 1.00167406 + b * root
    b = 2.83297682 + b * root
    return tl.where(far < 5.0, a, b) * (1.0 - 2.0 * share)


@triton.jit
def begin_selection(ROWS: tl.constexpr, K_CHIP: tl.constexpr):
    """Return the state of a tile of rows: best, held `[rows, K_CHIP]`; the lowest of them and its slot; count, mean and
    sum of squares of the estimate, each `[rows]`.
    """
    best = tl.full([ROWS, K_CHIP], float("-inf"), tl.float32)
    held = tl.full([ROWS, K_CHIP], -1, tl.int32)
    lowest = tl.full([ROWS], float("-inf"), tl.float32)
    slot = tl.zeros([ROWS], tl.int32)
    count = tl.zeros([ROWS], tl.int32)
    mean = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    return best, held, lowest, slot, count, mean, squares


@triton.jit
def offer_block(
    best, held, lowest, slot, count, mean, squares, score, block, sees, num_blocks, to_blocks, to_scores,
    K: tl.constexpr, K_CHIP: tl.constexpr, IS_ESTIMATED: tl.constexpr,
):  # fmt: skip
    """Offer one block's score for every row that sees it. to_blocks, to_scores: each row's k slots in device memory."""
    wins = sees & (score > lowest)
    left = score
    left_block = tl.zeros(slot.shape, tl.int32) + block
    if tl.max(wins.to(tl.int32), 0) > 0:
        here = (tl.arange(0, K_CHIP)[None, :] == slot[:, None]) & wins[:, None]
        if IS_ESTIMATED:
            left = tl.where(wins, lowest, left)
            left_block = tl.where(wins, tl.sum(tl.where(here, held, 0), 1), left_block)
        best = tl.where(here, score[:, None], best)
        held = tl.where(here, block, held)
        lowest, slot = tl.min(best, 1, return_indices=True)
    if IS_ESTIMATED:
        step = tl.where(sees, score - mean, 0.0)
        mean += step / (block + 1)
        squares += tl.where(sees, step * (score - mean), 0.0)
        free = K - K_CHIP - count
        remaining = tl.maximum(num_blocks - block, 1)
        share = free.to(tl.float32) / remaining.to(tl.float32)
        inside = tl.minimum(tl.maximum(share, 1e-6), 0.999999)
        deviation = tl.sqrt(tl.maximum(squares, 0.0) / (block + 1))
        threshold = mean + 1.4142135623730951 * deviation * erfinv_of_share(inside)
        takes = sees & (left > float("-inf")) & (free > 0) & ((free >= remaining) | (left > threshold))
        tl.store(to_blocks + K_CHIP + count, left_block, mask=takes)
        tl.store(to_scores + K_CHIP + count, left, mask=takes)
        count += takes.to(tl.int32)
    return best, held, lowest, slot, count, mean, squares

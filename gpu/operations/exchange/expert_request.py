"""Write a decode step's request for experts in host memory into pinned memory, and add the CPU's answer on the card.

As in `exchange_pack`, each row has a program, which writes, meets its own threads at a barrier and stores the row's
flag with release order. And every program counts every request, so that launches of any size keep the same count. Bytes
over the link per row: 4 * hidden and 8 per chosen expert to the host, 4 * hidden back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, runs_on_triton
from gpu.operations.exchange.exchange_pack import BLOCK, store_release
from transfer.exchange import LAST_STAMP
from transfer.expert_exchange import NOT_HERE, ExpertSlot

_LAST_STAMP = tl.constexpr(LAST_STAMP)
_NOT_HERE = tl.constexpr(NOT_HERE)
ADD_BLOCK = 1024


def request_experts_reference(
    normed: Tensor, ids: Tensor, shares: Tensor, on_card: int, slots: Tensor | None, counters: Tensor, slot: ExpertSlot
) -> None:
    """Compute `request_experts` in plain torch on the CPU."""
    rows = len(normed)
    is_here = ids >= on_card
    if slots is not None:
        is_here &= (slots >= 0)[:, None]
    slot.hidden[:rows] = normed
    slot.experts[:rows] = torch.where(is_here, ids - on_card, NOT_HERE)
    slot.shares[:rows] = shares
    counters.add_(1).bitwise_and_(LAST_STAMP)
    slot.flags[:rows] = counters[:rows]


@triton.jit
def _request_experts_kernel(
    normed, ids, shares, slots, counters, to_hidden, to_experts, to_shares, flags, rows, on_card,
    HAS_SLOTS: tl.constexpr, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stamp = (tl.load(counters + row) + 1) & _LAST_STAMP
    if row < rows:
        for begin in tl.static_range(0, HIDDEN, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            values = tl.load(normed + row * HIDDEN + column, mask=column < HIDDEN, other=0.0)
            tl.store(to_hidden + row * HIDDEN + column, values.to(tl.float32), mask=column < HIDDEN)
        place = tl.arange(0, PLACES)
        inside = place < PER_TOKEN
        expert = tl.load(ids + row * PER_TOKEN + place, mask=inside, other=0) - on_card
        is_here = expert >= 0
        if HAS_SLOTS:
            is_here = is_here & (tl.load(slots + row) >= 0)
        tl.store(to_experts + row * PER_TOKEN + place, tl.where(is_here, expert, _NOT_HERE), mask=inside)
        share = tl.load(shares + row * PER_TOKEN + place, mask=inside, other=0.0)
        tl.store(to_shares + row * PER_TOKEN + place, share, mask=inside)
        tl.debug_barrier()
        store_release(flags + row, stamp)
    tl.debug_barrier()
    tl.store(counters + row, stamp)


@triton.jit
def _add_answer_kernel(made, answer, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(made + at, mask=at < count, other=0.0) + tl.load(answer + at, mask=at < count, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


def request_experts(
    normed: Tensor, ids: Tensor, shares: Tensor, on_card: int, slots: Tensor | None, counters: Tensor, slot: ExpertSlot
) -> None:
    """Request the outputs of experts `on_card` and beyond for rows `[rows, hidden]`. May be captured.

    The host's side of it is `slot.advance(rows)`. normed: float32 or bfloat16, contiguous. ids: int32 `[rows,
    per_token]`. shares: float32 `[rows, per_token]`, their weights. slots: int32 `[rows]`, below 0 in rows that are not
    in use and request nothing; None: all are in use. counters: from `exchange_pack.new_counters`, on the rows' device.
    Raises ValueError for another shape, dtype or device.
    """
    op, (rows, hidden), device = "request_experts", normed.shape, normed.device
    max_rows, per_token = slot.experts.shape
    if rows > max_rows or slot.hidden.shape[1] != hidden:
        raise ValueError(f"{op}: got {rows} rows of {hidden}; the slot has {max_rows} of {slot.hidden.shape[1]}")
    check(op, "ids", ids, (rows, per_token), torch.int32, device)
    check(op, "shares", shares, (rows, per_token), torch.float32, device)
    check(op, "counters", counters, (max_rows,), torch.int32, device)
    for name, tensor in (("normed", normed), ("ids", ids), ("shares", shares)):
        check_contiguous(op, name, tensor)
    if slots is not None:
        check(op, "slots", slots, (rows,), torch.int32, device)
    if not runs_on_triton(normed):
        request_experts_reference(normed, ids, shares, on_card, slots, counters, slot)
        return
    _request_experts_kernel[(max_rows,)](
        normed, ids, shares, ids if slots is None else slots, counters, slot.hidden, slot.experts, slot.shares,
        slot.flags, rows, on_card, HAS_SLOTS=slots is not None, HIDDEN=hidden, PER_TOKEN=per_token,
        PLACES=triton.next_power_of_2(per_token), BLOCK=min(BLOCK, triton.next_power_of_2(hidden)), num_warps=8,
    )  # fmt: skip


def add_answer(made: Tensor, slot: ExpertSlot, dtype: torch.dtype) -> Tensor:
    """Return `made` plus the answer to the last request: `[rows, hidden]` of `dtype`, rounded once.

    made: float32 `[rows, hidden]`, contiguous. There must be an answer. Raises ValueError for another dtype.
    """
    op, (rows, hidden) = "add_answer", made.shape
    check(op, "made", made, (rows, slot.out.shape[1]), torch.float32, made.device)
    check_contiguous(op, "made", made)
    if not runs_on_triton(made):
        return (made + slot.out[:rows].to(made.device)).to(dtype)
    out = torch.empty(rows, hidden, dtype=dtype, device=made.device)
    count = rows * hidden
    _add_answer_kernel[triton.cdiv(count, ADD_BLOCK),](made, slot.out, out, count, BLOCK=ADD_BLOCK, num_warps=4)
    return out

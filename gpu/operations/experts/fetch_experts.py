"""Fetch the experts that a step's tokens chose from host memory to slots on the card, each one once.

The device reads pinned memory itself, so the choice of experts can be made inside a captured step. An expert that
several tokens chose has one slot. Slots are in the order of experts, so a step's list depends on its tokens alone.
Bytes moved: each chosen expert once over the link, and as many bytes written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, runs_on_triton

BLOCK_WORDS = 4096  # int32 in flight per program: with PROGRAMS programs 1 MiB, ten times what fills a link
PROGRAMS = 64  # so few that other kernels have multiprocessors, too
_PAIRS = 64  # pairs that are read together


class Listed(NamedTuple):
    """Where a step's tokens find their experts.

    places: int32 `[experts]`: for an expert on the card its number there; for one in host memory `~slot`, or `~0` if no
    token chose it. wanted: int32 `[slots]`, for each slot the expert's number among those in host memory; the first
    `count`, int32 `[1]`, are valid.
    """

    places: Tensor
    wanted: Tensor
    count: Tensor


def list_experts_reference(
    chosen: Tensor, num_on_card: int, num_experts: int, num_slots: int, rows: Tensor | None, total: Tensor | None
) -> Listed:
    """Compute `list_experts` in plain torch."""
    live = chosen if rows is None else chosen[rows >= 0]
    own = live[live >= num_on_card].unique() - num_on_card  # ascending
    wanted = torch.full((num_slots,), -1, dtype=torch.int32, device=chosen.device)
    wanted[: len(own)] = own
    if total is not None:
        total += len(own)
    places = torch.arange(num_experts, dtype=torch.int32, device=chosen.device)
    places[num_on_card:] = ~0
    places[num_on_card + own.long()] = ~torch.arange(len(own), dtype=torch.int32, device=chosen.device)
    return Listed(places, wanted, torch.tensor([len(own)], dtype=torch.int32, device=chosen.device))


@triton.jit
def _list_experts_kernel(
    chosen, rows, places, wanted, count, total, num_pairs, num_on_card, num_experts,
    CHOSEN: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_TOTAL: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    taken = tl.zeros([EXPERTS], tl.int32)
    for begin in range(0, num_pairs, PAIRS):
        at = begin + tl.arange(0, PAIRS)
        live = at < num_pairs
        if HAS_ROWS:
            live = live & (tl.load(rows + at // CHOSEN, mask=live, other=-1) >= 0)
        own = tl.load(chosen + at, mask=live, other=-1)
        taken = tl.maximum(taken, tl.max((own[:, None] == expert[None, :]).to(tl.int32), 0))
    on_host = (expert >= num_on_card) & (taken != 0)
    listed = on_host.to(tl.int32)
    slot = tl.cumsum(listed, 0) - listed
    tl.store(wanted + slot, expert - num_on_card, mask=on_host)
    place = tl.where(expert < num_on_card, expert, -1 - slot * listed)
    tl.store(places + expert, place, mask=expert < num_experts)
    found = tl.sum(listed, 0)
    tl.store(count, found)
    if HAS_TOTAL:
        tl.atomic_add(total, found.to(tl.int64))  # lanes list side by side


@triton.jit
def _fetch_experts_kernel(source, into, wanted, count, words, blocks, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    for item in range(tl.program_id(0), tl.load(count) * blocks, PROGRAMS):
        slot = item // blocks
        at = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(wanted + slot).to(tl.int64)
        rows = tl.load(source + expert * words + at, mask=at < words, other=0, eviction_policy="evict_first")
        tl.store(into + slot.to(tl.int64) * words + at, rows, mask=at < words)


def list_experts(
    chosen: Tensor, num_on_card: int, num_experts: int, num_slots: int, rows: Tensor | None = None,
    total: Tensor | None = None,
) -> Listed:  # fmt: skip
    """Give a slot to each expert in host memory that some token chose.

    chosen: int32 `[tokens, chosen]`, contiguous, in `[0, num_experts)`; the first `num_on_card` experts are on the
    card. num_slots: at least as many as may be listed. rows: int32 `[tokens]`, below 0 in those that are not in use and
    need nothing; None: all are in use. total: int64 `[1]`, to which the number of listed experts is added, or None.
    Raises ValueError for another shape or dtype.
    """
    op, device = "list_experts", chosen.device
    tokens, per_token = chosen.shape
    on_host = num_experts - num_on_card
    check(op, "chosen", chosen, (tokens, per_token), torch.int32, device)
    check_contiguous(op, "chosen", chosen)
    if rows is not None:
        check(op, "rows", rows, (tokens,), torch.int32, device)
    if total is not None:
        check(op, "total", total, (1,), torch.int64, device)
    if num_slots < min(on_host, tokens * per_token):
        raise ValueError(f"{op}: {num_slots} slots for {tokens} tokens of {per_token} of {on_host} experts; too few")
    if not runs_on_triton(chosen):
        return list_experts_reference(chosen, num_on_card, num_experts, num_slots, rows, total)
    found = Listed(*(torch.empty(size, dtype=torch.int32, device=device) for size in (num_experts, num_slots, 1)))
    _list_experts_kernel[(1,)](
        chosen, chosen if rows is None else rows, *found, chosen if total is None else total, tokens * per_token,
        num_on_card, num_experts, CHOSEN=per_token, HAS_ROWS=rows is not None, HAS_TOTAL=total is not None,
        EXPERTS=triton.next_power_of_2(num_experts), PAIRS=_PAIRS, num_warps=4,
    )  # fmt: skip
    return found


def fetch_experts(source: Tensor, into: Tensor, listed: Listed) -> None:
    """Copy the listed experts of one stack from pinned host memory to their slots, on the current stream.

    source: int32 `[experts, words]`, contiguous, in memory that the device can read. into: int32 `[slots, words]`, on
    the device. Raises ValueError for another shape or dtype.
    """
    op, words = "fetch_experts", source.shape[1]
    check(op, "source", source, tuple(source.shape), torch.int32, source.device)
    check(op, "into", into, (len(listed.wanted), words), torch.int32, into.device)
    check_contiguous(op, "source", source)
    check_contiguous(op, "into", into)
    if not runs_on_triton(into):
        count = int(listed.count)
        into[:count] = source[listed.wanted[:count].long()]
        return
    _fetch_experts_kernel[(PROGRAMS,)](
        source, into, listed.wanted, listed.count, words, triton.cdiv(words, BLOCK_WORDS),
        BLOCK=BLOCK_WORDS, PROGRAMS=PROGRAMS, num_warps=4,
    )  # fmt: skip


def words_of(stack: Tensor, num_experts: int) -> Tensor:
    """Return a view of a stack of experts as int32 `[experts, words]`, in which it is fetched.

    Raises ValueError if an expert's rows are not whole words.
    """
    op = "words_of"
    check_contiguous(op, "stack", stack)
    if stack.nbytes % (4 * num_experts):
        raise ValueError(f"{op}: a stack of {stack.nbytes:,} bytes is no {num_experts} experts of whole words")
    return stack.view(-1).view(torch.uint8).view(torch.int32).view(num_experts, -1)

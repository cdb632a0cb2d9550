"""A decode step's ask of the CPU: each row's query and codes written to pinned memory, and then the row's flag.

It refuses to know layers, and what the CPU does with an ask. One program a row: its threads write, meet at a barrier,
and one releases the flag for the whole system. Invariant: every program counts every ask, in a counter of its own row
on the device, also where the row is not in use: a stamp needs no kernel of its own, and captured launches of any batch
size keep count together. Bytes moved for a row: heads * (dim * itemsize + 2 * tables), over the link.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, runs_on_triton
from transfer.exchange import LAST_STAMP, ExchangeSlot

BLOCK = 4096

_LAST_STAMP = tl.constexpr(LAST_STAMP)


def new_counters(slot: ExchangeSlot, device: torch.device) -> Tensor:
    """The device's count of a slot's asks: int32 `[max_rows]`, all equal."""
    return torch.full((len(slot.flags),), slot.stamp, dtype=torch.int32, device=device)


def catch_up(counters: Tensor, slot: ExchangeSlot) -> None:
    """The host counts asks that it was not told of, of a warm-up, as answered; waits for the device. Counting back
    instead would give stamps twice, and a flag of the first time would be taken for one of the second.
    """
    slot.stamp = int(counters[0])
    slot.give_answer()


def exchange_pack_reference(queries: Tensor, codes: Tensor | None, counters: Tensor, slot: ExchangeSlot) -> None:
    """Plain torch on the CPU; see `exchange_pack`."""
    rows = len(queries)
    slot.queries[:rows] = queries
    if codes is not None and slot.codes is not None:
        slot.codes.view(torch.int16)[:rows] = codes.view(torch.int16)
    counters.add_(1).bitwise_and_(LAST_STAMP)
    slot.flags[:rows] = counters[:rows]


@triton.jit
def _pack_kernel(
    queries, codes, counters, to_queries, to_codes, flags, rows, query_stride,
    WIDTH: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stamp = (tl.load(counters + row) + 1) & _LAST_STAMP
    if row < rows:
        for begin in tl.static_range(0, WIDTH, BLOCK):
            element = begin + tl.arange(0, BLOCK)
            query = tl.load(queries + row * query_stride + element, mask=element < WIDTH)
            tl.store(to_queries + row * WIDTH + element, query, mask=element < WIDTH)
        for begin in tl.static_range(0, CODES, BLOCK):
            element = begin + tl.arange(0, BLOCK)
            code = tl.load(codes + row * CODES + element, mask=element < CODES)
            tl.store(to_codes + row * CODES + element, code, mask=element < CODES)
        tl.debug_barrier()
        tl.atomic_xchg(flags + row, stamp, sem="release", scope="sys")
    tl.debug_barrier()
    tl.store(counters + row, stamp)


def exchange_pack(queries: Tensor, codes: Tensor | None, counters: Tensor, slot: ExchangeSlot) -> None:
    """Ask with queries `[rows, heads, dim]` (slot's dtype; rows may be strided) and their codes, uint16 `[rows, heads,
    tables]` contiguous, or None where the slot has none. May be captured. `slot.advance(rows)` is the host's side.

    counters: of `new_counters`, on the queries' device. The answer is read by `transfer.merge.merge_outputs` straight
    from `slot.out` and `slot.lse`. Raises ValueError for another shape, dtype or device.
    """
    op, (rows, heads, dim), device = "exchange_pack", queries.shape, queries.device
    max_rows = len(slot.flags)
    check(op, "slot.queries", slot.queries, (max_rows, heads, dim), queries.dtype, slot.queries.device)
    check(op, "counters", counters, (max_rows,), torch.int32, device)
    if rows > max_rows or (codes is None) != (slot.codes is None):
        got = f"{rows} rows, codes {codes is not None}"
        raise ValueError(f"{op}: got {got}; slot has {max_rows} rows, codes {slot.codes is not None}")
    tables = 0
    if codes is not None and slot.codes is not None:
        tables = slot.codes.shape[2]
        check(op, "codes", codes, (rows, heads, tables), torch.uint16, device)
    if not runs_on_triton(queries):
        exchange_pack_reference(queries, codes, counters, slot)
        return
    if queries.stride()[1:] != (dim, 1):
        raise ValueError(f"{op}: queries have strides {queries.stride()}; wanted contiguous heads")
    _pack_kernel[(max_rows,)](
        queries, queries if codes is None else codes.view(torch.int16), counters,
        slot.queries, slot.queries if slot.codes is None else slot.codes.view(torch.int16), slot.flags,
        rows, queries.stride(0), WIDTH=heads * dim, CODES=heads * tables, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip

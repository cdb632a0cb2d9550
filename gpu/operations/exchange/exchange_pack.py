"""Write a decode step's request to the CPU into pinned memory: each row's query, codes and masks, then its flag.

There is one program per row. Its threads write and meet at a barrier. Then one of them stores the flag, with release
order for the whole system. (An atomic exchange would go over the link and back, and some links have none.) Every
program counts every request in its own row's counter on the device, even if the row is not in use. So a stamp needs no
kernel of its own, and captured launches of any batch size keep the same count. Bytes moved per row: heads * (dim *
itemsize + 2 * tables + 1) and the exclusions, over the link.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import INTERPRETED, check, runs_on_triton
from transfer.exchange import LAST_STAMP, ExchangeSlot, Handshake

BLOCK = 4096
FEW = 256  # elements of a mask or words of bits at once

_LAST_STAMP = tl.constexpr(LAST_STAMP)
_INTERPRETED = tl.constexpr(INTERPRETED)
_STORE_RELEASE = tl.constexpr(
    """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first st.release.sys.global.b32 [$1], $2;
        mov.u32 $0, $2;
    }"""
)


def new_counters(slot: Handshake, device: torch.device) -> Tensor:
    """Return the device's count of a slot's requests: int32 `[max_rows]`, all equal."""
    return torch.full((len(slot.flags),), slot.stamp, dtype=torch.int32, device=device)


def catch_up(counters: Tensor, slot: Handshake) -> None:
    """Mark requests that the host was not told of, such as those of a warm-up, as answered. Waits for the device.

    If the counters were set back instead, stamps would repeat, and an old flag could be taken for a new one.
    """
    slot.stamp = int(counters[0])
    slot.give_answer()


def exchange_pack_reference(
    queries: Tensor,
    codes: Tensor | None,
    counters: Tensor,
    slot: ExchangeSlot,
    wanted: Tensor | None = None,
    excluded: Tensor | None = None,
) -> None:
    """Compute `exchange_pack` in plain torch on the CPU."""
    rows = len(queries)
    slot.wanted[:rows] = 1 if wanted is None else wanted
    if slot.excluded is not None:
        slot.excluded[:rows] = 0 if excluded is None else excluded
    slot.queries[:rows] = queries
    if codes is not None and slot.codes is not None:
        slot.codes.view(torch.int16)[:rows] = codes.view(torch.int16)
    counters.add_(1).bitwise_and_(LAST_STAMP)
    slot.flags[:rows] = counters[:rows]


@triton.jit
def store_release(pointer, value):
    """Store an int32 such that its readers see all that the program stored before its last barrier."""
    if _INTERPRETED:  # the interpreter has no assembly and a single thread
        tl.store(pointer, value)
    else:
        tl.inline_asm_elementwise(
            _STORE_RELEASE, "=r,l,r", [pointer.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _pack_kernel(
    queries, codes, wanted, excluded, counters, to_queries, to_codes, to_wanted, to_excluded, flags, rows,
    query_stride,
    WIDTH: tl.constexpr, CODES: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr,
    MASKED: tl.constexpr, EXCLUDES: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
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
        for begin in tl.static_range(0, HEADS, FEW):
            element = begin + tl.arange(0, FEW)
            mask = tl.full([FEW], 1, tl.uint8)
            if MASKED:
                mask = tl.load(wanted + row * HEADS + element, mask=element < HEADS)
            tl.store(to_wanted + row * HEADS + element, mask, mask=element < HEADS)
        for begin in tl.static_range(0, WORDS, FEW):
            element = begin + tl.arange(0, FEW)
            word = tl.zeros([FEW], tl.int32)
            if EXCLUDES:
                word = tl.load(excluded + row * WORDS + element, mask=element < WORDS)
            tl.store(to_excluded + row * WORDS + element, word, mask=element < WORDS)
        tl.debug_barrier()
        store_release(flags + row, stamp)
    tl.debug_barrier()
    tl.store(counters + row, stamp)


def exchange_pack(
    queries: Tensor,
    codes: Tensor | None,
    counters: Tensor,
    slot: ExchangeSlot,
    wanted: Tensor | None = None,
    excluded: Tensor | None = None,
) -> None:
    """Send a request with queries `[rows, heads, dim]` (slot's dtype; rows may be strided). May be captured.

    The host's side of it is `slot.advance(rows)`. codes: uint16 `[rows, heads, tables]`, contiguous, or None if the
    slot has none. counters: from `new_counters`, on the queries' device. wanted: uint8 `[rows, heads]`, None: all heads
    ask. excluded: int32 `[rows, kv_heads, words]`, None: nothing; both as in the slot. `transfer.merge.merge_outputs`
    reads the answer directly from `slot.out` and `slot.lse`. Raises ValueError for another shape, dtype or device.
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
    if wanted is not None:
        check(op, "wanted", wanted, (rows, heads), torch.uint8, device)
    words = 0
    if slot.excluded is not None:
        words = slot.excluded[0].numel()
    if excluded is not None:
        have = (0, 0) if slot.excluded is None else tuple(slot.excluded.shape[1:])
        check(op, "excluded", excluded, (rows, *have), torch.int32, device)
    if not runs_on_triton(queries):
        exchange_pack_reference(queries, codes, counters, slot, wanted, excluded)
        return
    if queries.stride()[1:] != (dim, 1):
        raise ValueError(f"{op}: queries have strides {queries.stride()}; wanted contiguous heads")
    _pack_kernel[(max_rows,)](
        queries, queries if codes is None else codes.view(torch.int16), queries if wanted is None else wanted,
        queries if excluded is None else excluded, counters,
        slot.queries, slot.queries if slot.codes is None else slot.codes.view(torch.int16), slot.wanted,
        slot.queries if slot.excluded is None else slot.excluded, slot.flags, rows, queries.stride(0),
        WIDTH=heads * dim, CODES=heads * tables, HEADS=heads, WORDS=words, MASKED=wanted is not None,
        EXCLUDES=excluded is not None, BLOCK=BLOCK, FEW=FEW, num_warps=8,
    )  # fmt: skip

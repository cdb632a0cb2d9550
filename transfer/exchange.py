"""Where a decode step's queries wait for the CPU and its answers for the device: one slot a half batch.

It refuses to know layers and requests. Invariant: a row's flag holds the stamp of the ask that its query and codes
belong to, and is written after them, so a reader that sees the stamp sees the row.
"""

import time
from dataclasses import dataclass

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

LAST_STAMP = 2**31 - 1  # stamps are int32 and begin anew at 0 after this one
LOOKS = 1 << 16  # at a flag, between two looks at the clock: a few milliseconds

_I32 = ir.IntType(32)


class ExchangeError(Exception):
    """The device's ask has not come: the message names layer, row, the stamp that was awaited and the one seen."""


@dataclass(slots=True)
class ExchangeSlot:
    """Host memory that the device reads and writes (pinned where it is CUDA).

    queries: `[max_rows, heads, dim]`, the device's dtype, rotated; codes: uint16 `[max_rows, heads, tables]` or None;
    flags: int32 `[max_rows]`; out: float32 `[max_rows, heads, dim]`; lse: float32 `[max_rows, heads]`; rows: in use by
    the step under way; stamp: of the ask under way.
    """

    queries: Tensor
    codes: Tensor | None
    flags: Tensor
    out: Tensor
    lse: Tensor
    rows: int
    stamp: int

    def advance(self, rows: int) -> None:
        """Expect the next ask, of so many rows. The device counts the same way: once a pack, whatever the rows."""
        assert 0 < rows <= len(self.flags), f"exchange slot: asked {rows} rows, have {len(self.flags)}"
        self.rows = rows
        self.stamp = (self.stamp + 1) & LAST_STAMP


def new_slot(
    max_rows: int, heads: int, dim: int, tables: int, dtype: torch.dtype, device: torch.device
) -> ExchangeSlot:
    """A slot for asks of `device`, queries in `dtype`; `tables` 0: without codes. Its first ask has stamp 1."""
    is_pinned = device.type == "cuda"

    def zeros(shape: tuple[int, ...], of: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, pin_memory=is_pinned)

    return ExchangeSlot(
        queries=zeros((max_rows, heads, dim), dtype),
        codes=zeros((max_rows, heads, tables), torch.uint16) if tables else None,
        flags=zeros((max_rows,), torch.int32),
        out=zeros((max_rows, heads, dim), torch.float32),
        lse=zeros((max_rows, heads), torch.float32),
        rows=0,
        stamp=0,
    )


def wait(slot: ExchangeSlot, layer: int, limit_s: float) -> None:
    """Spin, without the GIL, until the rows of the ask under way are there. Raises ExchangeError after `limit_s`."""
    address, deadline = slot.flags.data_ptr(), time.monotonic() + limit_s
    while (row := _await_rows(address, slot.rows, slot.stamp, LOOKS)) >= 0:
        if time.monotonic() > deadline:
            seen = int(slot.flags[row])
            raise ExchangeError(
                f"exchange: layer {layer}: row {row} of {slot.rows} has stamp {seen} after {limit_s:g} s, "
                f"wanted {slot.stamp}; the device is behind or has failed"
            )


@intrinsic
def _load_acquire(typing_context, address):  # type: ignore[no-untyped-def]
    """The int32 at `address`, read anew each time; what is read after it is not older."""

    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.load_atomic(builder.inttoptr(arguments[0], _I32.as_pointer()), "acquire", 4, typ=_I32)

    return types.int32(types.int64), emit


@intrinsic
def _pause(typing_context):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        function_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def _await_rows(address, rows, stamp, looks):  # type: ignore[no-untyped-def]
    """-1 when the flags of all rows have the stamp; else, after so many looks, the first row that has not."""
    for row in range(rows):
        while _load_acquire(address + 4 * row) != stamp:
            looks -= 1
            if looks <= 0:
                return row
            _pause()
    return -1

"""Hold a decode step's queries for the CPU and its answers for the device: one slot for each half batch.

Beside each query, the device writes which heads of the row request attention and which blocks of its context the answer
excludes. A row's flag holds the stamp of the host request that its query, codes, mask and exclusions belong to. It is
written after them, so a reader that sees the stamp sees the row. `answered` holds the stamp of the last answer in the
same way, so a device that is launched ahead of the answer can wait for it by itself.
"""

import time
from dataclasses import dataclass
from typing import Any

import numba
import torch
from torch import Tensor

from transfer.allocation import allocate_on_host
from transfer.simd.memory import load_acquire_int32
from transfer.simd.team import pause
from transfer.slot_shape import ANSWERED, SlotShape

LAST_STAMP = 2**31 - 1  # stamps are int32 and wrap around to 0 after this one
RELEASED = -1  # in place of an answer's stamp: the device does not wait for answers
LOOKS = 1 << 16  # looks at a flag between two looks at the clock: a few milliseconds


class ExchangeError(Exception):
    """The device's request did not come. The message names layer, row, the awaited stamp and the one found."""


@dataclass(slots=True, kw_only=True)
class Handshake:
    """Flags in host memory by which device and host tell each other their progress.

    flags: int32 `[max_rows]`, for each row the stamp of its host request, written after the request.
    answered: int32 `[1]`, the stamp of the last answer, or RELEASED.
    rows: number of rows of the current host request.
    stamp: stamp of the current host request.
    """

    flags: Tensor
    answered: Tensor
    rows: int = 0
    stamp: int = 0

    def advance(self, rows: int, requests: int = 1) -> None:
        """Move on by `requests` host requests, to one of `rows` rows. The device counts the same way: one stamp for
        each host request, however many rows it has.
        """
        assert 0 < rows <= len(self.flags), f"exchange slot: asked {rows} rows, have {len(self.flags)}"
        self.rows = rows
        self.stamp = (self.stamp + requests) & LAST_STAMP

    def give_answer(self) -> None:
        """Publish the slot's content as the answer to the current host request."""
        self.answered.fill_(self.stamp)

    @property
    def is_released(self) -> bool:
        return int(self.answered) == RELEASED

    def release(self) -> None:
        """Stop the device from waiting for answers until `give_answer`: it uses the slot's content as it is."""
        self.answered.fill_(RELEASED)


@dataclass(slots=True, kw_only=True)
class ExchangeSlot(Handshake):
    """A step's requests for attention, in host memory that is pinned if the device is CUDA.

    queries: `[max_rows, heads, dim]`, the device's dtype, rotated.
    codes: uint16 `[max_rows, heads, tables]` or None.
    wanted: uint8 `[max_rows, heads]`; 0: the head requests nothing, and gets the empty partial.
    excluded: int32 `[max_rows, kv_heads, words]` or None. Bit b of word w stands for block 32 w + b of BLOCK_TOKENS
        offloaded tokens of the row's context. If it is set, the answer leaves these tokens out; blocks beyond the last
        word are included. The choice of blocks must not depend on hash codes, or the sampled mass of the others is
        biased.
    out: float32 `[max_rows, heads, dim]`.
    lse: float32 `[max_rows, heads]`.
    covered: int32 `[max_rows, heads]` or None, the number of tokens that the answer covers.
    """

    queries: Tensor
    codes: Tensor | None = None
    wanted: Tensor
    excluded: Tensor | None = None
    out: Tensor
    lse: Tensor
    covered: Tensor | None = None


def new_slot(max_rows: int, shape: SlotShape, device: torch.device) -> ExchangeSlot:
    """Return a slot for host requests of `device`. Its first host request has stamp 1. Every head is wanted unless the
    device changes the mask.
    """
    arrays = {name: array.times(max_rows) for name, array in shape.row_arrays().items()}
    made: dict[str, Any] = allocate_on_host({**arrays, "answered": ANSWERED}, is_pinned=device.type == "cuda")
    made["wanted"].fill_(1)
    return ExchangeSlot(**made)


def wait(slot: Handshake, layer: int, limit_s: float) -> None:
    """Spin, without the GIL, until all rows of the current host request have come. Raises ExchangeError after
    `limit_s` seconds.
    """
    address, deadline = slot.flags.data_ptr(), time.monotonic() + limit_s
    while await_rows(address, slot.rows, slot.stamp, LOOKS) >= 0:
        if time.monotonic() > deadline:
            raise late(slot, layer, limit_s)


def late(slot: Handshake, layer: int, limit_s: float) -> ExchangeError:
    """Return the error for a host request that did not come within `limit_s` seconds, naming its first missing row."""
    row = int((slot.flags[: slot.rows] != slot.stamp).int().argmax())
    return ExchangeError(
        f"exchange: layer {layer}: row {row} of {slot.rows} has stamp {int(slot.flags[row])} after {limit_s:g} s, "
        f"wanted {slot.stamp}; the device is behind or has failed"
    )


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator, unused-ignore]
def await_rows(address, rows, stamp, looks):  # type: ignore[no-untyped-def]
    """Return -1 once the flags of all rows have the stamp; or, after `looks` looks, the first row without it."""
    for row in range(rows):
        while load_acquire_int32(address + 4 * row) != stamp:
            looks -= 1
            if looks <= 0:
                return row
            pause()
    return -1

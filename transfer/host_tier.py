"""Define what the device asks of the host tier: room for rows, rows back, and attention over them.

The device side (`gpu`) uses this protocol and never imports `cpu`, which implements it. Layers are named by their place
among the offloaded layers (`layer` 0 is the first of `TierShape.layers`). A context's offloaded tokens are a run that
begins after the sink; `begin, end` below count within that run. Rows are centred, `stored = row - centre`, per segment
and KV head; keys are rotated; a row is final once it is filled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from transfer.exchange import ExchangeSlot
from transfer.reading import Reading
from transfer.tier_shape import TierShape

__all__ = [
    "Attention",
    "ContextLostError",
    "ContextRead",
    "Filled",
    "HostMemoryError",
    "HostTier",
    "LayerRows",
    "LentRows",
    "Loan",
    "Reservation",
    "TierShape",
]


class HostMemoryError(Exception):
    """The host has no room, or refuses to pin; the message says what was asked, what there is, and what to change."""


class ContextLostError(HostMemoryError):
    """Rows of a context cannot come, since the host refused the memory of their copy. Other contexts are untouched."""

    def __init__(self, context_id: int, reason: str) -> None:
        super().__init__(reason)
        self.context_id = context_id


class Filled(Protocol):
    """Reports when copies into host memory have landed: a CUDA event, or nothing to wait for on the CPU."""

    def synchronize(self) -> None: ...


class Passed(Filled, Protocol):
    """Reports whether the device has passed a point, or waits for it."""

    def query(self) -> bool: ...


class Loan(Protocol):
    """A loan of rows that the device reads by itself: they stay where they are until it ends."""

    def end(self, done: Passed) -> None:
        """End the loan when `done` says so. Called once; returns at once."""


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Host memory of one layer of a run of tokens, pinned where the device is CUDA. Views: writes go to the store.

    keys, values: bfloat16 or int8 `[kv_heads, tokens, dim]`, or uint8 `[kv_heads, tokens, row_bytes]` that hold int4
        (`gpu.operations.host_rows.int4_rows`), the last dimension contiguous.
    codes: uint16 `[kv_heads, tables, tokens]` or None.
    centre: float32 `[kv_heads, dim]`.
    key_scale: float32 `[kv_heads]`.
    value_scale: float32 `[kv_heads, dim]` (scales: int8 rows only, else None; row = scale * stored, plus the centre for
        keys).
    """

    keys: Tensor
    values: Tensor
    codes: Tensor | None
    centre: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None


@dataclass(frozen=True, slots=True)
class LentRows:
    """The first rows of a context's run, `rows[layer]` in order: they stay where they are until `end`, which any thread
    may call, once.
    """

    rows: tuple[tuple[LayerRows, ...], ...]
    end: Callable[[], None]


class Reservation(Protocol):
    """Room for tokens `[begin, end)` of a context's run, in every layer.

    `has_centre`: centre and scales stand in `layer(...)` already and must be used (these rows join others); otherwise
    the device computes them, over exactly these tokens, and writes them with the rows.
    """

    begin: int
    end: int
    has_centre: bool

    def layer(self, layer: int) -> LayerRows: ...


@dataclass(frozen=True, slots=True)
class ContextRead:
    """What a row of a step reads: the first `num_tokens` of a context's run. 0: nothing, and then the row needs no
    context (None).
    """

    context_id: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Times of a step's host requests, from the first one's arrival to the last answer: seconds in which the host
    waited for the device, and in which it attended.
    """

    waited_s: float
    attended_s: float


class Attention(Protocol):
    """The attention of a decode step's rows over their host contexts. Made once per step, used once per layer, in layer
    order. It is fixed when it is made: whatever becomes of the contexts, the rows stay where they are until the last
    layer is answered, or `give_up`.
    """

    def run(self, layer: int, slot: ExchangeSlot) -> None:
        """Wait for the layer's queries in `slot`, attend, and write out and lse there (and covered, where the slot has
        it), then the answer's stamp. Raises ExchangeError if the device sends none.

        A wanted head's lse is natural, over all tokens that its row reads except the excluded blocks, with the
        centre's term added back. A row that reads nothing and a head that is not wanted get (0, -inf), unread.
        """

    def give_up(self) -> None:
        """End a step that will not be finished, and release what it holds. Calling it again does nothing."""

    def places(self, row: int) -> np.ndarray:
        """Return where the rows lie that this row of the step reads: a table of `transfer.places`, without pieces
        for a row that reads nothing.
        """

    def lend(self) -> Loan:
        """Lend the rows of `places` to a device, which may read longer than the host answers. Call it before the last
        layer is answered.
        """


class HostTier(Protocol):
    """Host contexts, by id. One thread calls all methods but `answer`, which another thread may run meanwhile, as well
    as one attention's `run`. Methods that wait for copies say so.
    """

    shape: TierShape

    def open(self, context_id: int, reading: Reading) -> None:
        """Open a new, empty context. `reading`: how attention reads it."""

    def fork(self, source_id: int, context_id: int, num_tokens: int, reading: Reading) -> None:
        """Open a context that shares the first `num_tokens` of another's run."""

    def close(self, context_id: int) -> None:
        """Close a context. Memory that no other shares is free once copies have landed and attentions that read it have
        ended. An unknown id is ignored.
        """

    def reserve(self, context_id: int, num_tokens: int) -> list[Reservation]:
        """Reserve room for so many more tokens, in order. Where memory of closed contexts is still read, it waits until
        that ends. Raises HostMemoryError, and then nothing has changed.
        """

    def fill(self, reservation: Reservation, layers: Sequence[int], done: Filled) -> None:
        """Announce that these layers' rows (and codes, centre, scales) are being copied; they have landed when `done`
        says so.
        """

    def rows(self, context_id: int, layer: int, num_tokens: int) -> list[LayerRows]:
        """Return the first `num_tokens` of the run, in order, to be read back. Waits for their copies.

        Raises HostMemoryError where rows cannot come.
        """

    def lend_rows(self, context_id: int, num_tokens: int) -> LentRows | None:
        """Lend the first `num_tokens` of the run to a thread that reads them, whatever becomes of the context; None
        where they are not all there now.
        """

    def is_ready(self, read: ContextRead) -> bool:
        """Return whether `attention` would begin without waiting, or fail at once. False if the context does not have
        so many tokens yet.
        """

    def attention(self, reads: Sequence[ContextRead]) -> Attention:
        """Return the attention of a decode step, a read for each row. Waits until the requested rows have landed and
        their tables are built, not for later tokens.

        Raises ContextLostError for the first context whose rows cannot come.
        """

    def attend_seconds(self, num_rows: int) -> float:
        """Return the seconds that attending to one token of one layer takes, for so many rows that read it together.
        Measures it: before the first step.
        """

    def leave_core(self, leaves: bool) -> None:
        """Set whether answers that begin from now on leave a core to the launching thread, which has other steps to
        launch beside them.
        """

    def answer(self, parts: Sequence[tuple[Attention, ExchangeSlot]]) -> Answered:
        """Answer all host requests of a step whose device goes from one to the next by itself: each layer's of every
        part, in turns. A slot's current host request is its first, and afterwards its last. Raises ExchangeError if the
        device sends none.
        """

"""Define the protocol between the device and the host tier: room for rows, reading rows back, attention over them.

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


class HostMemoryError(Exception):
    """The host has no room, or cannot pin memory. The message has what was asked, what there is, and what to change."""


class ContextLostError(HostMemoryError):
    """Rows of a context are lost, because the host had no memory for their copy. Other contexts are untouched."""

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
        """End the loan once `done` is reached. Called once; returns at once."""


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
    """The first rows of a context's run, `rows[layer]` in order. They stay where they are until `end` is called, once
    and from any thread.
    """

    rows: tuple[tuple[LayerRows, ...], ...]
    end: Callable[[], None]


class Reservation(Protocol):
    """Room for tokens `[begin, end)` of a context's run, in every layer.

    has_centre: `layer(...)` has the centre and scales already, and they must be used, because these rows join others.
    Otherwise the device computes them over exactly these tokens, and writes them with the rows.
    """

    begin: int
    end: int
    has_centre: bool

    def layer(self, layer: int) -> LayerRows: ...


@dataclass(frozen=True, slots=True)
class ContextRead:
    """What a row of a step reads: the first `num_tokens` of a context's run. With 0 tokens, context_id may be None."""

    context_id: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds of a step in which the host waited for the device and in which it attended, from the arrival of the first
    host request to the last answer.
    """

    waited_s: float
    attended_s: float


class Attention(Protocol):
    """The attention of a decode step's rows over their host contexts. Made once for a step, and used once for each
    layer, in order. Whatever happens to the contexts, the rows stay where they are until the last layer is answered, or
    `give_up` is called.
    """

    def run(self, layer: int, slot: ExchangeSlot) -> None:
        """Wait for the layer's queries in `slot`, attend, and write out, lse and covered (if the slot has it), then the
        answer's stamp. Raises ExchangeError if the device does not send the queries in time.

        A wanted head's lse is the natural logarithm, over all tokens that its row reads except excluded blocks, with
        the centre's term added back. Rows that read nothing and heads that are not wanted get (0, -inf) at no cost.
        """

    def give_up(self) -> None:
        """End a step that will not be finished, and release what it holds. A second call does nothing."""

    def places(self, row: int) -> np.ndarray:
        """Return the addresses of what row `row` of the step reads, as a table of `transfer.places`. A row that reads
        nothing has no pieces in it.
        """

    def lend(self) -> Loan:
        """Lend the rows of `places` to a device, which may read them after the host's last answer. Call it before that
        answer.
        """


class HostTier(Protocol):
    """Host contexts, by id. One thread calls all methods except `answer` and an attention's `run`, which another thread
    may call meanwhile. The docstrings say which methods wait for copies.
    """

    shape: TierShape

    def open(self, context_id: int, reading: Reading) -> None:
        """Open a new, empty context. reading: how attention reads it."""

    def fork(self, source_id: int, context_id: int, num_tokens: int, reading: Reading) -> None:
        """Open a context that shares the first `num_tokens` tokens of another's run."""

    def close(self, context_id: int) -> None:
        """Close a context; an unknown id is ignored. Memory that no other context shares is freed once copies to it
        have landed and attentions that read it have ended.
        """

    def reserve(self, context_id: int, num_tokens: int) -> list[Reservation]:
        """Reserve room for `num_tokens` more tokens, in order. May wait until memory of closed contexts is no longer
        read. Raises HostMemoryError without changing anything.
        """

    def fill(self, reservation: Reservation, layers: Sequence[int], done: Filled) -> None:
        """Announce that rows of these layers (with codes, centre and scales) are being copied. They have landed once
        `done` is reached.
        """

    def rows(self, context_id: int, layer: int, num_tokens: int) -> list[LayerRows]:
        """Return rows of the first `num_tokens` tokens of the run, in order, for a reload. Waits for their copies.

        Raises HostMemoryError if rows are lost.
        """

    def lend_rows(self, context_id: int, num_tokens: int) -> LentRows | None:
        """Lend rows of the first `num_tokens` tokens of the run to a thread that reads them, whatever happens to the
        context. None if they have not all landed.
        """

    def is_ready(self, read: ContextRead) -> bool:
        """Return whether `attention` would begin, or fail, without waiting. False if the context has fewer tokens."""

    def attention(self, reads: Sequence[ContextRead]) -> Attention:
        """Return the attention of a decode step. reads: one for each row. Waits until the requested rows have landed
        and their tables are built, but not for later tokens.

        Raises ContextLostError for the first context whose rows are lost.
        """

    def attend_seconds(self, num_rows: int) -> float:
        """Measure and return the seconds of attention to one token of one layer, for rows that read it together. Call
        it before the first step.
        """

    def leave_core(self, leaves: bool) -> None:
        """Set whether answers from now on leave a core to the launching thread, which has other steps to launch
        meanwhile.
        """

    def answer(self, parts: Sequence[tuple[Attention, ExchangeSlot]]) -> Answered:
        """Answer all host requests of a step in which the device goes from one to the next by itself: layer by layer,
        and in each layer part by part. A slot's current host request is its first one before the call, and its last one
        after it. Raises ExchangeError if the device does not send one in time.
        """

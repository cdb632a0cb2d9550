"""What the device asks of the host tier: room for rows, rows back, and attention over them.

The device side (`gpu`) speaks to this protocol and never imports `cpu`, which implements it. Layers are named by their
place among the layers that go down (`layer` 0 is the first of `TierShape.layers`). Tokens of a context that are down
are a run that begins after the sink; `begin, end` below count within that run. Invariants: rows are centred, `stored =
row - centre`, per segment and KV head; keys are rotated; a row is final once it is filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from transfer.exchange import ExchangeSlot
from transfer.reading import Reading
from transfer.tier_shape import TierShape

__all__ = [
    "Ask",
    "Attention",
    "ContextLostError",
    "Filled",
    "HostMemoryError",
    "HostTier",
    "LayerRows",
    "Loan",
    "Reservation",
    "TierShape",
]


class HostMemoryError(Exception):
    """The host has no room, or refuses to pin; the message says what was asked, what there is, and what to change."""


class ContextLostError(HostMemoryError):
    """Rows of a context cannot come, since the host refused what they were to be copied into. Others are untouched."""

    def __init__(self, context_id: int, reason: str) -> None:
        super().__init__(reason)
        self.context_id = context_id


class Filled(Protocol):
    """Says when copies into host memory have landed: a CUDA event, or nothing to wait for on the CPU."""

    def synchronize(self) -> None: ...


class Passed(Filled, Protocol):
    """Says when the device has passed a point, and whether it has."""

    def query(self) -> bool: ...


class Loan(Protocol):
    """Of rows that the device reads by itself: they stay where they are until it is over."""

    def end(self, done: Passed) -> None:
        """It is over when `done` says so; once. Returns at once."""


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Host memory of one layer of a run of tokens, pinned where the device is CUDA. Views: writes go to the store.

    keys, values: bfloat16 or int8 `[kv_heads, tokens, dim]`, the last dimension contiguous; codes: uint16 `[kv_heads,
    tables, tokens]` or None; centre: float32 `[kv_heads, dim]`; key_scale: float32 `[kv_heads]`; value_scale: float32
    `[kv_heads, dim]` (scales: int8 rows only, else None; row = scale * stored, plus the centre for keys).
    """

    keys: Tensor
    values: Tensor
    codes: Tensor | None
    centre: Tensor
    key_scale: Tensor | None
    value_scale: Tensor | None


class Reservation(Protocol):
    """Room for tokens `[begin, end)` of a context's run, in every layer.

    `has_centre`: centre and scales stand in `layer(...)` already and must be used (these rows join others); otherwise
    the device computes them, over exactly these tokens, and writes them down with the rows.
    """

    begin: int
    end: int
    has_centre: bool

    def layer(self, layer: int) -> LayerRows: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """What a row of a step asks for: the first `num_tokens` of a context's run. 0: nothing, and then the row needs no
    context (None).
    """

    context_id: int | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A step's asks, from the first one's arrival to the last answer: seconds in which the host waited for the device,
    and in which it attended.
    """

    waited_s: float
    attended_s: float


class Attention(Protocol):
    """A decode step's rows against what they ask of their deposited contexts. Made once a step, used once a layer, in
    layer order. It is frozen as it is made: whatever becomes of the contexts, what it reads stays where it is until the
    last layer is answered, or it is given up.
    """

    def run(self, layer: int, slot: ExchangeSlot) -> None:
        """Wait for the layer's queries in `slot`, which is the step's, attend, leave out and lse there (and covered,
        where the slot has it), and then the answer's stamp. Raises ExchangeError if the device does not ask.

        A wanted head's lse is natural, over all that its row asks for but the blocks that the slot excludes, the
        centre's term given back. A row that asks for nothing and a head that is not wanted get (0, -inf), unread.
        """

    def give_up(self) -> None:
        """The step will not be finished: what it holds is let go. Nothing happens where nothing is held any more."""

    def places(self, row: int) -> np.ndarray:
        """Where the rows lie that the step's row asks for: a table of `transfer.places`, without pieces for a row that
        asks for nothing.
        """

    def lend(self) -> Loan:
        """For as long as a device reads what `places` name, which may be longer than the host answers; before the last
        layer is answered.
        """


class HostTier(Protocol):
    """Deposited contexts, by id. All methods are called from one thread, but for `answer`, which another may be in
    meanwhile (as in an attention's `run`, one at a time); those that wait for copies say so.
    """

    shape: TierShape

    def open(self, context_id: int, reading: Reading) -> None:
        """A new, empty context. `reading`: how attention reads it."""

    def fork(self, source_id: int, context_id: int, num_tokens: int, reading: Reading) -> None:
        """A new context that shares the first `num_tokens` of another's run."""

    def close(self, context_id: int) -> None:
        """Forget a context; memory that no other shares is free once copies under way have landed and attentions that
        read it are over. Unknown: ignored.
        """

    def reserve(self, context_id: int, num_tokens: int) -> list[Reservation]:
        """Room for so many tokens more, in order. Where memory of closed contexts is still read, it waits until that is
        over. Raises HostMemoryError, and then nothing has changed.
        """

    def fill(self, reservation: Reservation, layers: Sequence[int], done: Filled) -> None:
        """These layers' rows (and codes, centre, scales) are on their way, and there when `done` says so."""

    def rows(self, context_id: int, layer: int, num_tokens: int) -> list[LayerRows]:
        """The first `num_tokens` of the run, in order, to be read back. Waits for copies under way.

        Raises HostMemoryError where rows cannot come.
        """

    def is_ready(self, ask: Ask) -> bool:
        """Whether `attention` would begin without a wait for it, or fail at once. Not if the context does not have so
        many tokens yet.
        """

    def attention(self, asks: Sequence[Ask]) -> Attention:
        """For a decode step, an ask a row. Waits for the rows that are asked for to land and their tables to stand; for
        what lies behind them it does not.

        Raises ContextLostError for the first context whose rows cannot come.
        """

    def leave_core(self, leaves: bool) -> None:
        """Whether answers that begin from now on leave a core to the thread that launches: it has other steps to launch
        beside them.
        """

    def answer(self, parts: Sequence[tuple[Attention, ExchangeSlot]]) -> Answered:
        """All asks of a step whose device goes from one to the next by itself: each layer's of every part, in turns. A
        slot's ask under way is its first, and afterwards its last. Raises ExchangeError if the device does not ask.
        """

"""The device side of a method: hooks before and after a decode step reads a layer, and on keys that are offloaded.

Invariant: what a method does is ordered by the device's stream alone and takes no decision on the host, so a step with
it may be captured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.attention.step_rows import StepRows
from gpu.methods.method import ProfilePart, Slot, Where
from gpu.model.architecture import Architecture
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from gpu.step import HostRead, PartId, RingGrowth, RingWrite
from transfer.host_tier import Loan
from transfer.partial import Owner, Partial
from transfer.tier_shape import BLOCK_TOKENS, WORD_BITS, TierShape


@dataclass(frozen=True, slots=True)
class Site:
    """Where a method runs.

    tier_shape: shape of the offloaded rows, or None.
    sink_tokens: tokens in front of them that stay on the device.
    max_running: slots.
    dtype: of the model's activations.
    stored: dtype of rows in pages (`kv_rows`).
    window_tokens: that an offloaded context keeps at its end.
    pages: of each layer its keys, values and page table, as `paged_decode_attention` takes them.
    ring_pages: that a method's rings share; None: nobody counts them, and each ring has its own.
    """

    architecture: Architecture
    tier_shape: TierShape | None
    sink_tokens: int
    max_running: int
    dtype: torch.dtype
    stored: torch.dtype
    device: torch.device
    window_tokens: int = 0
    pages: Sequence[tuple[Tensor, Tensor, Tensor]] = ()
    ring_pages: int | None = None

    @property
    def exclusion_words(self) -> int:
        """Return the int32 words of `LayerReads.excluded`: a bit for each block of the longest context."""
        blocks = -(-self.architecture.max_context_tokens // BLOCK_TOKENS)
        return -(-blocks // WORD_BITS)


@dataclass(slots=True)
class LayerReads:
    """What one layer reads for each row; methods change it before it is read.

    rows: of all profiles; `RingSide.ring_of_slot` says which ones are a method's own. query, pre_rope_query: `[rows,
    heads, dim]`, rotated and not. bounds, has_far, maxima: of what is on the device, see `paged_decode_attention`
    (bounds None: all of each context). window: of the layer, in cells, or None: bounds say so already, and methods have
    no part in it.

    reads_host: whether the CPU is asked in this layer for the rows' host reads. What it is asked:
    - codes: of the query, uint16 `[rows, heads, tables]`; None: there are no hash tables.
    - wanted: uint8 `[rows, heads]`, 0: the head asks for nothing; None: all heads ask. Combine with `&`.
    - excluded: int32 `[rows, kv_heads, site.exclusion_words]`; None: nothing is excluded. Bit b of word w stands for
      tokens `[16 n, 16 n + 16)` of the row's host read, `n = 32 w + b`, counted from `rows.skips[0]`: if it is set, the
      CPU leaves them out. Bits behind the end of a host read mean nothing. Combine with `|`.
    skips: whether rows skip their host reads in this layer: where the CPU is asked, or methods read all of it.

    kept: what methods keep of the layer from before they read it until after. fetched: what methods read themselves, a
    partial each. attended: all that was read, merged, by methods that do that themselves; None: nobody has.
    """

    layer: int
    rows: StepRows
    query: Tensor
    pre_rope_query: Tensor
    reads_host: bool
    skips: bool = False
    bounds: Tensor | None = None
    has_far: bool = False
    maxima: Tensor | None = None
    codes: Tensor | None = None
    wanted: Tensor | None = None
    excluded: Tensor | None = None
    kept: dict["DeviceSide", Any] = field(default_factory=dict)
    fetched: list[Partial] = field(default_factory=list)
    attended: Partial | None = None
    window: int | None = None


class Lent(Protocol):
    """What a step's rows ask for in host memory, where it lies: see `transfer.host_tier.Attention.places`."""

    def places(self, row: int) -> np.ndarray: ...

    def lend(self) -> Loan: ...


class DeviceSide:
    """The default device side of a method: every hook does nothing, and a method overrides those that it needs.

    needs_host_reads: whether it is left out of steps without host reads.
    reuses: whether it takes part only in steps in which a row holds one of its rings, and is told of rings and prompts.
    makes_codes: whether it makes codes of offloaded keys for the host's hash tables; at most one method of a deployment
        does.
    """

    needs_host_reads: ClassVar[bool] = False
    reuses: ClassVar[bool] = False
    makes_codes: ClassVar[bool] = False

    def before(self, reads: LayerReads) -> None:
        """Change what a layer reads. Keys and values of the step's tokens are written, and nothing is read yet."""

    def read(self, reads: LayerReads, on_device: DevicePartials) -> None:
        """Read what the method reads itself, into `fetched`; the host is asked, if it is, and near and far are read."""

    def after(self, reads: LayerReads, on_device: DevicePartials, filled: Sequence[Partial]) -> None:
        """Look at what was read, or merge results of its own into it.

        filled: partials of the ranges that the device skipped, from fetched blocks and from the host; not merged yet.
        """

    def finish(self, rows: StepRows) -> None:
        """Wait, in stream order, for what it has begun aside; the step's last layer is computed."""

    def counts(self) -> Mapping[str, Sequence[int]]:
        """Return the method's counters without waiting, of steps that are over at least: one number, or one a layer."""
        return {}

    def encode_keys(self, keys: Tensor, codes: Tensor) -> None:
        """Encode keys as they are stored, `[kv_heads, tokens, dim]`, to uint16 `[kv_heads, tables, tokens]`."""


_ORDER = get_args(Slot)

TimeSteps = Callable[[int, int], tuple[float, float]]
"""Returns the seconds of a step without a method and with it, of so many rows with contexts of so many tokens."""


class RingSide(DeviceSide):
    """The device side of a method with rings: it takes part in the steps of rows that hold one, and is told of prompts.

    borrows: it reads rows in host memory by itself, and is told where they lie before each step with a host read.
    takes_turns: rows of one slot take turns in its ring (`StepRows.turns`).
    reads_alone: a row that holds one of its rings requests nothing of the CPU (`Reading.device_reads_all`). held: rings
    by slot, as the host knows them in the order of plans; resting: those that take no part until they are woken.
    ring_of_slot: int32 `[max_running + 1]` on the device, -1: none; the last is of padding rows.
    """

    reuses: ClassVar[bool] = True
    borrows: ClassVar[bool] = False
    reads_alone: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = False
    # Of a method that goes by times of steps; forced: while these are timed, they go through the method or without it.
    forced: bool | None = None
    num_rings: int = 0
    num_pages: int = 0  # that the rings share
    num_layers: int = 0  # that it works in

    def __init__(self, site: Site) -> None:
        self.held: dict[int, int] = {}
        self.resting: dict[int, int] = {}
        self.ring_of_slot = torch.full((site.max_running + 1,), -1, dtype=torch.int32, device=site.device)

    def assign(self, write: RingWrite) -> None:
        """Give a slot a ring, empty or a copy of another's front; asynchronous."""
        self.held[write.slot] = write.ring
        self.ring_of_slot[write.slot].fill_(write.ring)

    def grow(self, growth: RingGrowth) -> None:
        """Give a ring that is held further pages; asynchronous. A method whose rings share pages overrides this."""
        raise NotImplementedError(f"{type(self).__name__}: its rings share no pages")

    def figures_of(self, slot: int) -> Mapping[str, int]:
        """Return the method's figures of the request in a slot that holds a ring, since it was assigned: without
        waiting, of steps that are over at least.
        """
        return {}

    def release(self, slot: int) -> None:
        """Take back the slot's ring, if it holds one; asynchronous."""
        self.resting.pop(slot, None)
        if self.held.pop(slot, None) is not None:
            self.ring_of_slot[slot].fill_(-1)

    def rest(self, slot: int) -> None:
        """Let the slot's ring take no part in steps until `wake`, as if the slot held none; asynchronous."""
        self.resting[slot] = self.held.pop(slot)
        self.ring_of_slot[slot].fill_(-1)

    def wake(self, slot: int) -> None:
        """Let the slot's ring take part again; asynchronous."""
        self.held[slot] = self.resting.pop(slot)
        self.ring_of_slot[slot].fill_(self.held[slot])

    def has_ring(self, slot: int) -> bool:
        return slot in self.held

    def see_prompt(self, slot: int, query: PrefillQuery, attend: Callable[[PrefillQuery], Attended]) -> None:
        """Look at queries of the slot's prompt, in order, with the keys up to them. attend: dense, with an lse."""

    @property
    def goes_by_times(self) -> bool:
        """Return whether the method chooses by times of steps; see `learn_times`."""
        return False

    def learn_times(self, time: TimeSteps, sizes: Sequence[int], longest: int, where: Where) -> None:
        """Time what it chooses by, when an engine starts. sizes: rows of steps; longest: tokens of a context."""

    def forget_counts(self) -> None:
        """Forget what steps were counted so far, which were none of a request."""

    def takes_part(self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> bool:
        """Return whether it has a part in a step of these rows, which write to `cells`: if some hold a ring."""
        return any(slot in self.held for slot in slots)

    def prepare(self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> None:
        """Prepare a step of these rows, which write to `cells`, before anything of it is launched."""

    def borrow(
        self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None], lent: Lent
    ) -> None:
        """Prepare a step of these rows that is about to be launched. lent: to read from until the device has passed."""

    def give_up(self) -> None:
        """Wait, in stream order, for what was begun beside a step that came to nothing."""

    def covered(self, reads: LayerReads) -> Mapping[Owner, Tensor]:
        """Return cells that the method answers for or drops, int32 `[rows, heads]` by owner; for debug runs."""
        return {}

    def end_step(self) -> None:
        """Follow a step in which it had a part, on the same stream."""


def make_device_sides(
    parts: Sequence[ProfilePart],
    site: Site,
    num_rings: Mapping[PartId, int],
    ring_pages: Mapping[PartId, int] = MappingProxyType({}),
) -> dict[PartId, DeviceSide]:
    """Return the sides of the parts that do something on the device, by part.

    What reuses comes before what reads host memory: heads that take something over ask for nothing there.

    num_rings: of the parts with rings; ring_pages: of the parts whose rings share some.
    """
    sides: dict[PartId, DeviceSide] = {}
    for part in sorted(parts, key=lambda one: _ORDER.index(one.method.slot)):
        if part.method.device_side is None:
            continue
        module = import_module(part.method.device_side)
        if part.method.has_rings:
            of_part = replace(site, ring_pages=ring_pages.get(part.id))
            sides[part.id] = module.make_ring_side(part.settings, of_part, num_rings[part.id])
        else:
            sides[part.id] = module.make_device_side(part.settings, site)
    return sides

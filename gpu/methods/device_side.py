"""Define what a method does on the device: hooks around the attention of each decode layer, and on keys being
offloaded.

Invariant: only the device's stream orders what a method does, and the host takes no decision in it. So a step with the
method can be captured as a CUDA graph.
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
    """Describes where a method runs: the model, the memory and the device.

    tier_shape: shape of the offloaded rows, or None.
    sink_tokens: tokens in front of the offloaded ones that stay on the device.
    max_running: number of slots.
    dtype: of the model's activations.
    stored: dtype of rows in pages (`kv_rows`).
    window_tokens: tokens at the end of an offloaded context that stay on the device.
    pages: keys, values and page table of each layer, as `paged_decode_attention` takes them.
    ring_pages: number of pages that a method's rings share; None: there is no such number, and each ring has its own
        memory.
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
    """What one decode layer reads for each row. Methods change it before the layer attends.

    rows: rows of all profiles; `RingSide.ring_of_slot` says which ones are a method's own. query, pre_rope_query:
    `[rows, heads, dim]`, after and before RoPE. bounds, has_far, maxima: which resident cells are read, see
    `paged_decode_attention` (bounds None: all of each context). window: the layer's sliding window in cells, or None.
    In a layer with a window `bounds` already express it, and methods take no part.

    reads_host: whether this layer asks the CPU to attend to the rows' host reads. The request consists of:
    - codes: hash codes of the query, uint16 `[rows, heads, tables]`; None: there are no hash tables.
    - wanted: uint8 `[rows, heads]`, 0: the head asks for nothing; None: all heads ask. Combine with `&`.
    - excluded: int32 `[rows, kv_heads, site.exclusion_words]`; None: nothing is excluded. Bit b of word w stands for
      tokens `[16 n, 16 n + 16)` of the row's host read, `n = 32 w + b`, counted from `rows.skips[0]`. The CPU leaves
      out tokens whose bit is set. Bits behind the end of a host read mean nothing. Combine with `|`. A row's host
      read is `[sink, evicted)`. With `residency: adaptive` it is empty while pages are free, so that nothing is left
      out; try a method with `host: {residency: fixed, resident_tokens: 256}`. A method that sets `excluded` also
      counts those of these tokens that it does not read itself, as DROPPED in `RingSide.covered`.

    skips: whether rows skip their host reads on the device in this layer, because the CPU is asked or methods read all
    of them.

    kept: what methods pass from `before` to `after`. fetched: partials of what methods read themselves. attended: the
    merged result, set by a method that merges itself; None: the caller merges.
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
    """Where a step's host reads lie in host memory: see `transfer.host_tier.Attention.places`."""

    def places(self, row: int) -> np.ndarray: ...

    def lend(self) -> Loan: ...


class DeviceSide:
    """The default device side of a method: every hook does nothing, and a method overrides those that it needs.

    needs_host_reads: whether the method is left out of steps without host reads.
    reuses: whether it takes part only in steps in which a row holds one of its rings, and is notified of rings and
        prompts.
    makes_codes: whether it encodes offloaded keys for the host's hash tables. At most one method of a deployment does.
    """

    needs_host_reads: ClassVar[bool] = False
    reuses: ClassVar[bool] = False
    makes_codes: ClassVar[bool] = False

    def before(self, reads: LayerReads) -> None:
        """Change what a layer reads. The step's own keys and values are already written, and nothing is read yet."""

    def read(self, reads: LayerReads, on_device: DevicePartials) -> None:
        """Read what the method reads itself, and append it to `reads.fetched`.

        The CPU has been asked by now, if it is asked at all, and the near and far cells have been attended to.
        """

    def after(self, reads: LayerReads, on_device: DevicePartials, filled: Sequence[Partial]) -> None:
        """Inspect what was read, or merge the method's own results into it.

        filled: partials, not merged yet, of the ranges that the device skipped: from fetched blocks and from the host.
        """

    def finish(self, rows: StepRows) -> None:
        """Wait, in stream order, for the method's work on other streams. Called after the step's last layer."""

    def counts(self) -> Mapping[str, Sequence[int]]:
        """Return the method's counters without waiting: a single number, or one per layer.

        They cover at least all finished steps.
        """
        return {}

    def encode_keys(self, keys: Tensor, codes: Tensor) -> None:
        """Encode stored keys, `[kv_heads, tokens, dim]`, into `codes`, uint16 `[kv_heads, tables, tokens]`."""


_ORDER = get_args(Slot)

TimeSteps = Callable[[int, int], tuple[float, float]]
"""Takes a number of rows and of context tokens. Returns the seconds of such a step without a method, and with it."""


class RingSide(DeviceSide):
    """The device side of a method with rings: it acts on rows that hold a ring, and is notified of prompts.

    borrows: whether it reads host memory by itself, and is told where the rows lie before each step with a host read.
    takes_turns: whether rows of one slot take turns in its ring (`StepRows.turns`).
    reads_alone: whether a row with one of its rings requests nothing of the CPU (`Reading.device_reads_all`).
    held: rings by slot, as the host knows them in the order of plans. resting: rings that take no part until `wake`.
    ring_of_slot: int32 `[max_running + 1]` on the device, -1: no ring; the last entry is for padding rows.
    """

    reuses: ClassVar[bool] = True
    borrows: ClassVar[bool] = False
    reads_alone: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = False
    # While `learn_times` runs: True sends steps through the method, False around it. None: the method chooses.
    forced: bool | None = None
    num_rings: int = 0
    num_pages: int = 0  # that the rings share
    num_layers: int = 0  # that it works in

    def __init__(self, site: Site) -> None:
        self.held: dict[int, int] = {}
        self.resting: dict[int, int] = {}
        self.ring_of_slot = torch.full((site.max_running + 1,), -1, dtype=torch.int32, device=site.device)

    def assign(self, write: RingWrite) -> None:
        """Give a slot a ring that is empty or a copy of the front of another ring; asynchronous."""
        self.held[write.slot] = write.ring
        self.ring_of_slot[write.slot].fill_(write.ring)

    def grow(self, growth: RingGrowth) -> None:
        """Give more pages to a ring that a slot holds; asynchronous. Methods whose rings share pages override this."""
        raise NotImplementedError(f"{type(self).__name__}: its rings share no pages")

    def figures_of(self, slot: int) -> Mapping[str, int]:
        """Return the method's figures of the request in a slot that holds a ring, counted since the ring was assigned.

        Does not wait; the figures cover at least all finished steps.
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

    @property
    def sees_prompts(self) -> bool:
        """Return whether `see_prompt` observes anything. If so, prefill computes all queries of such prompts."""
        return False

    def see_prompt(self, slot: int, query: PrefillQuery, attend: Callable[[PrefillQuery], Attended]) -> None:
        """Observe queries of the slot's prompt, in order, with the keys up to them.

        attend: dense attention that returns an lse.
        """

    @property
    def goes_by_times(self) -> bool:
        """Return whether the method makes choices from measured step times; see `learn_times`."""
        return False

    def learn_times(self, time: TimeSteps, sizes: Sequence[int], longest: int, where: Where) -> None:
        """Time the steps that the method chooses between, when an engine starts.

        sizes: numbers of rows in a step. longest: tokens of the longest context.
        """

    def forget_counts(self) -> None:
        """Reset the counters, after steps that belong to no request, such as those that were timed."""

    def takes_part(self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> bool:
        """Return whether the method takes part in a step of these rows, which is so if some row holds a ring.

        cells: the cells that the rows write to.
        """
        return any(slot in self.held for slot in slots)

    def prepare(self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None]) -> None:
        """Prepare for a step of these rows before any of it is launched. cells: the cells that the rows write to."""

    def borrow(
        self, slots: Sequence[int], cells: Sequence[int], host_reads: Sequence[HostRead | None], lent: Lent
    ) -> None:
        """Prepare for a step with host reads that is about to be launched.

        lent: host rows, which the method may read until the device has passed the step.
        """

    def give_up(self) -> None:
        """Wait, in stream order, for work that was begun beside a step that failed."""

    def covered(self, reads: LayerReads) -> Mapping[Owner, Tensor]:
        """Return how many cells the method answers for or drops, int32 `[rows, heads]` by owner; used in debug runs."""
        return {}

    def end_step(self) -> None:
        """Follow up on a step in which the method took part, on the same stream."""


def make_device_sides(
    parts: Sequence[ProfilePart],
    site: Site,
    num_rings: Mapping[PartId, int],
    ring_pages: Mapping[PartId, int] = MappingProxyType({}),
) -> dict[PartId, DeviceSide]:
    """Return the device sides of the parts that have one, by part.

    Sides of the slot `reuse` come before those of `host`, because a head that reuses a result asks the host for
    nothing.

    num_rings: by part, for parts with rings. ring_pages: by part, for parts whose rings share pages.
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

"""What a method does on the device: before and after a layer of a decode step is read, and to keys that go down.

It refuses to know the other methods, graphs and how the host attends. Invariant: what a method does is ordered by the
device's stream alone and takes no decision on the host, so a step with it may be captured.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.attention.step_rows import StepRows
from gpu.methods.method import ProfilePart
from gpu.model.architecture import Architecture
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from gpu.step import HostRead, RingWrite
from transfer.partial import Owner, Partial
from transfer.tier_shape import TierShape


@dataclass(frozen=True, slots=True)
class Site:
    """Where a method runs. tier_shape: of what goes down, or None; sink_tokens: that stay in front of that;
    max_running: slots; dtype: of the model's activations; stored: of rows in pages (`kv_rows`).
    """

    architecture: Architecture
    tier_shape: TierShape | None
    sink_tokens: int
    max_running: int
    dtype: torch.dtype
    stored: torch.dtype
    device: torch.device


@dataclass(slots=True)
class LayerReads:
    """What one layer reads for each row; methods change it before it is read.

    query, pre_rope_query: `[rows, heads, dim]`, rotated and not; bounds, has_far, maxima: of what is on the device, see
    `paged_decode_attention` (bounds None: all of each context). asks: whether the host is asked in this
    layer, and then codes: of the query, uint16 `[rows, heads, tables]`, wanted and excluded: as in the exchange slot.
    kept: what methods keep of the layer from before they read it until after. fetched: what methods read themselves, a
    partial each. attended: all that was read, merged, by methods that do that themselves; None: nobody has. window: of
    the layer, in cells, or None: bounds say so already, and methods have no part in it.
    """

    layer: int
    rows: StepRows
    query: Tensor
    pre_rope_query: Tensor
    asks: bool
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


@dataclass(frozen=True, slots=True)
class FetchCounts:
    """What was fetched since the start, by KV head of rows that ask, summed over layers. hole_tokens: of their contexts
    that are in host memory alone; read_tokens: of these, in blocks that were fetched; dropped_tokens: read by nobody;
    fetched_blocks: that came over the link; looked_blocks: whose keys alone did; late_blocks: that did not come since
    the step was over.
    """

    hole_tokens: int
    read_tokens: int
    dropped_tokens: int
    fetched_blocks: int
    looked_blocks: int
    late_blocks: int


class Lent(Protocol):
    """What a step's rows ask for in host memory, where it lies: see `transfer.tier.Attention.places`."""

    def places(self, row: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class ReuseCounts:
    """What reuse did since the start, by layer. tries: heads of rows that looked for a match; hits: that found one;
    context_cells: of all that looked; skipped_cells: that hits took over and did not read; gaps, ages: of hits,
    positions back to the match and to the oldest part of its summary; kv_cells: that KV heads read, once for their
    query groups; whole_groups: KV heads of which every query head hit; refused: heads that missed though an entry was
    near enough, since its prefix held too much of its own attention. is_matching: now; num_stops: how often the layer
    stopped; ring_bytes: read and written of rings by all that looked.
    """

    tries: list[int]
    hits: list[int]
    context_cells: list[int]
    skipped_cells: list[int]
    gaps: list[int]
    ages: list[int]
    kv_cells: list[int]
    whole_groups: list[int]
    refused: list[int]
    is_matching: list[bool]
    num_stops: list[int]
    ring_bytes: list[int]


class DeviceSide:
    """Does nothing; a method overrides what it has a part in.

    asks_only: it has no part in steps that ask the host nothing, which may then go without it. reuses: it has one in
    steps alone in which a row holds one of its rings, and is told of these and of prompts. makes_codes: whether it
    makes those of keys that go down, for the host's hash tables; at most one method of a deployment does.
    """

    asks_only: ClassVar[bool] = False
    reuses: ClassVar[bool] = False
    makes_codes: ClassVar[bool] = False

    def before(self, reads: LayerReads) -> None:
        """Keys and values of the step's tokens are written, and nothing is read yet."""

    def read(self, reads: LayerReads, on_device: DevicePartials) -> None:
        """The host is asked, if it is, and near and far are read: what a method reads itself goes to `fetched`."""

    def after(self, reads: LayerReads, on_device: DevicePartials, filled: Sequence[Partial]) -> None:
        """What others filled the holes with is there as well, `fetched` and the host's; nothing is merged yet."""

    def finish(self, rows: StepRows) -> None:
        """The step's last layer is computed: what it has set going aside is waited for, in stream order."""

    def encode_keys(self, keys: Tensor, codes: Tensor) -> None:
        """Codes of keys as they are stored, `[kv_heads, tokens, dim]`, to uint16 `[kv_heads, tables, tokens]`."""


class RingSide(DeviceSide, ABC):
    """Of a method whose sequences hold rings. Which slot holds which is known on the host, in the order of plans, and
    on the device, where steps read it. borrows: whether it reads rows in host memory by itself, and is told where they
    lie before each step that asks.
    """

    reuses: ClassVar[bool] = True
    borrows: ClassVar[bool] = False

    @abstractmethod
    def assign(self, write: RingWrite) -> None:
        """A slot holds a ring from now on, empty or a copy of another's front; asynchronous."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """The slot holds no ring any more, if it held one; asynchronous."""

    @abstractmethod
    def has_ring(self, slot: int) -> bool:
        """Whether the slot holds one."""

    @abstractmethod
    def see_prompt(self, slot: int, query: PrefillQuery, attend: Callable[[PrefillQuery], Attended]) -> None:
        """Queries of the slot's prompt, in order, with the keys up to them. attend: dense attention, with an lse."""

    def borrow(self, slots: Sequence[int], cells: Sequence[int], asks: Sequence[HostRead | None], lent: Lent) -> None:
        """Rows of a step that is about to be launched, and what is lent for them until the device has passed it."""

    def give_up(self) -> None:
        """A step that borrowed came to nothing: what it has set going aside is waited for, in stream order."""

    def fetch_counts(self) -> FetchCounts | None:
        """Of one that fetches, as the host knows them: those of steps that are over, at least. It waits for nothing."""
        return None

    @abstractmethod
    def covered(self, reads: LayerReads) -> Mapping[Owner, Tensor]:
        """Cells of each head that neither the resident attention nor the host answers for, int32 `[rows, heads]`, by
        who does: for debug runs.
        """

    @abstractmethod
    def end_step(self) -> None:
        """A step in which it had a part is launched; behind it, on the same stream."""


class ReuseSide(RingSide, ABC):
    """Of a method that takes over what others have read."""

    @abstractmethod
    def counts(self) -> ReuseCounts:
        """As the host knows them: those of steps that are over, at least. It waits for nothing."""


def make_device_sides(
    parts: Sequence[ProfilePart], site: Site, num_rings: Mapping[str, int]
) -> tuple[tuple[DeviceSide, ...], dict[str, RingSide]]:
    """Of the methods among these that do something on the device; of these, by the parts that plans name, those whose
    sequences hold rings. num_rings: of those parts.
    """
    sides: list[DeviceSide] = []
    reusing: dict[str, RingSide] = {}
    for part in parts:
        if part.method.device_side is None:
            continue
        module = import_module(part.method.device_side)
        if part.method.rings is None:
            sides.append(module.make_device_side(part.settings, site))
        else:
            reusing[str(part)] = module.make_ring_side(part.settings, site, num_rings[str(part)])
            sides.append(reusing[str(part)])
    return tuple(sides), reusing

"""What a method does on the device: before and after a layer of a decode step is read, and to keys that go down.

It refuses to know the other methods, graphs and how the host attends. Invariant: what a method does is ordered by the
device's stream alone and takes no decision on the host, so a step with it may be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from gpu.decode.rows import StepRows
from gpu.kernels.paged_decode_attention import Reading
from gpu.profiles import Part
from transfer.partial import Partial
from transfer.tier_shape import TierShape


@dataclass(frozen=True, slots=True)
class Site:
    """Where a method runs. tier_shape: of what goes down, or None; dtype: of the model's activations."""

    tier_shape: TierShape | None
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class LayerReads:
    """What one layer reads for each row; methods change it before it is read.

    query, pre_rope_query: `[rows, heads, dim]`, rotated and not; bounds, has_far, maxima: of what is on the device, see
    `gpu.kernels.paged_decode_attention` (bounds None: all of each context). asks: whether the host is asked in this
    layer, and then codes: of the query, uint16 `[rows, heads, tables]`, wanted and excluded: as in the exchange slot.
    window: of the layer, in cells, or None: bounds say so already, and methods have no part in it.
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
    window: int | None = None


class DeviceSide:
    """Does nothing; a method overrides what it has a part in.

    asks_only: it has no part in steps that ask the host nothing, which may then go without it. makes_codes: whether it
    makes those of keys that go down, for the host's hash tables; at most one method of a deployment does.
    """

    asks_only: ClassVar[bool] = False
    makes_codes: ClassVar[bool] = False

    def before(self, reads: LayerReads) -> None:
        """Keys and values of the step's tokens are written, and nothing is read yet."""

    def after(self, reads: LayerReads, on_device: Reading, filled: Sequence[Partial]) -> None:
        """Near and far are read, and what others filled the holes with is there; nothing is merged yet."""

    def encode_keys(self, keys: Tensor, codes: Tensor) -> None:
        """Codes of keys as they are stored, `[kv_heads, tokens, dim]`, to uint16 `[kv_heads, tables, tokens]`."""


def make_device_sides(parts: Sequence[Part], site: Site) -> tuple[DeviceSide, ...]:
    """Of the methods among these that do something on the device."""
    modules = [(part.method.device_side, part.settings) for part in parts]
    return tuple(import_module(name).make_device_side(settings, site) for name, settings in modules if name is not None)

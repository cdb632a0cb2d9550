"""Hold a segment: offloaded tokens of all offloaded layers, their memory, and the progress of each layer.

Rows below `used` never change once they have landed. A sealed segment no longer grows, and only then are its codes
turned into tables, in place. Memory is released when the last holder lets go. The store's condition guards all state
that background threads change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from threading import Condition

import numpy as np
import torch
from torch import Tensor

from cpu.pieces import as_columns, new_pieces
from transfer.host_memory import lay_out_centre, lay_out_layer, num_offsets
from transfer.host_tier import LayerRows
from transfer.slabs import Slab, SlabPool
from transfer.tier_shape import TierShape

ROW_TYPES = {"bfloat16": (np.uint16, torch.bfloat16), "int8": (np.int8, torch.int8), "int4": (np.uint8, torch.uint8)}


class TableState(IntEnum):
    """The state of one layer's tables. CODES: not begun. FAILED: they could not be built, and the layer stays exact."""

    CODES = 0
    BUILDING = 1
    BUILT = 2
    FAILED = 3


class Centre:
    """The mean keys, and the scales of int8, that rows of a segment and of its continuations are stored relative to."""

    def __init__(self, shape: TierShape, slab: Slab, pool: SlabPool) -> None:
        self._shape, self._layout, self._slab, self._pool = shape, lay_out_centre(shape), slab, pool
        self._holders = 0

    def arrays(self, layer: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Return float32 centre `[kv_heads, dim]`, key scale `[kv_heads]` and value scale `[kv_heads, dim]` (int8, else
        None).

        Waits for the memory; raises HostMemoryError if the host has none.
        """
        shape, layout = self._shape, self._layout
        memory = self._slab.wait()[layer * layout.layer_bytes :]
        centre = _view(memory, 0, (shape.num_kv_heads, shape.dim), np.float32)
        if shape.rows != "int8":
            return centre, None, None
        key_scale = _view(memory, layout.key_scale, (shape.num_kv_heads,), np.float32)
        return centre, key_scale, _view(memory, layout.value_scale, centre.shape, np.float32)

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._pool.release([self._slab])


@dataclass(eq=False, slots=True)
class Fill:
    """Rows `[begin, end)` of some layers that are being copied into a segment."""

    segment: "Segment"
    layers: tuple[int, ...]
    begin: int
    end: int


class Segment:
    """Room for `capacity` tokens, of which `used` are reserved. sealed_tokens: the final number; None: it is open.

    owner_id: the context that may append; None: the next one that does. Methods that change state are called with the
    condition held.
    """

    def __init__(
        self, shape: TierShape, capacity: int, centre: Centre, slabs: Sequence[Slab], pool: SlabPool, changed: Condition
    ) -> None:
        """shape: with num_tables 0 for a segment that is never sampled. slabs: one for each layer."""
        self.shape, self.capacity, self.centre = shape, capacity, centre
        self.used = 0
        self.sealed_tokens: int | None = None
        self.owner_id: int | None = None
        self.is_background = False  # the target of a merge that is not due yet: its jobs are not urgent
        num_layers = len(shape.layers)
        self.tables = [TableState.CODES] * num_layers
        self.announced = [0] * num_layers  # tokens whose fill was announced
        self.fills: list[list[Fill]] = [[] for _ in range(num_layers)]  # announced, not yet landed
        self.copies = [0] * num_layers  # copies under way that need the codes as they are
        self.error: Exception | None = None  # a fill that failed: rows are missing
        self._layout = lay_out_layer(shape, capacity)
        self._slabs, self._pool, self._changed = list(slabs), pool, changed
        self._holders = self._readers = 0  # readers: contexts, and a merge that is not due yet
        self._places: np.ndarray | None = None
        centre.hold()

    @property
    def has_codes(self) -> bool:
        return self.shape.num_tables > 0

    @property
    def is_open(self) -> bool:
        return self.sealed_tokens is None

    @property
    def room(self) -> int:
        """Return how many tokens may still be appended."""
        return self.capacity - self.used if self.is_open else 0

    @property
    def is_alive(self) -> bool:
        return self._holders > 0

    @property
    def is_whole(self) -> bool:
        """Return whether the segment is sealed and all its rows are announced, so that tables will be built."""
        return all(announced == self.sealed_tokens for announced in self.announced)

    def is_wanted(self) -> bool:
        """Return whether a context or merge needs it. If not, it lives until copies, builds and steps have ended."""
        return self._readers > 0

    def may_append(self, context_id: int, tokens: int) -> bool:
        """Return whether a context with the first `tokens` may append: it has all, and no other context owns it."""
        return tokens == self.used and self.owner_id in (None, context_id)

    def leave(self, context_id: int) -> None:
        """Give up ownership, so that the next context may append."""
        if self.owner_id == context_id:
            self.owner_id = None

    def take(self, num_tokens: int) -> int:
        """Reserve room for `num_tokens` tokens and return the first one's place. A full segment is sealed."""
        begin = self.used
        self.used += num_tokens
        assert self.is_open, "segment: room is given out of open segments"
        assert self.used <= self.capacity, "segment: no more room is given out than there is"
        if self.used == self.capacity:
            self.seal()
        return begin

    def seal(self) -> None:
        self.sealed_tokens, self._places = self.used, None

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        """Remove one holder; the last one releases the memory."""
        self._holders -= 1
        if self._holders == 0:
            self._pool.release(self._slabs)
            self._slabs = []
            self.centre.let_go()
        self._changed.notify_all()

    def want(self) -> None:
        self._readers += 1
        self.hold()

    def give_up(self) -> None:
        self._readers -= 1
        self.let_go()

    def wait_for_memory(self, layer: int) -> None:
        """Wait for a layer's memory. Raises HostMemoryError if the host has none."""
        self._slabs[layer].wait()

    def keys(self, layer: int) -> np.ndarray:
        """Return `[kv_heads, capacity, row_width]`: bf16 as uint16, int8, or int4 as uint8."""
        return self._array(layer, 0, (self.capacity, self.shape.row_width), ROW_TYPES[self.shape.rows][0])

    def values(self, layer: int) -> np.ndarray:
        """Return the values, in the shape of `keys`."""
        return self._array(
            layer, self._layout.values, (self.capacity, self.shape.row_width), ROW_TYPES[self.shape.rows][0]
        )

    def codes(self, layer: int) -> np.ndarray:
        """Return uint16 `[kv_heads, tables, capacity]`: codes by token, or, once built, the entries of tables."""
        return self._array(layer, self._layout.codes, (self.shape.num_tables, self.capacity), np.uint16)

    def offsets(self, layer: int) -> np.ndarray:
        """Return int32 `[kv_heads, tables, offsets]` of the tables of a sealed segment."""
        assert self.sealed_tokens is not None, "segment: tables are a sealed segment's"
        room = (self.shape.num_tables, num_offsets(self.shape.bits_per_table, self.capacity))
        needed = num_offsets(self.shape.bits_per_table, self.sealed_tokens)
        return self._array(layer, self._layout.offsets, room, np.int32)[:, :, :needed]

    def rows(self, layer: int, begin: int, end: int, with_codes: bool) -> LayerRows:
        """Return views of tokens `[begin, end)`. Ask for codes only to write them, before the segment is sealed."""
        kind = ROW_TYPES[self.shape.rows][1]
        centre, key_scale, value_scale = self.centre.arrays(layer)
        codes = self.codes(layer)[:, :, begin:end] if with_codes and self.has_codes else None
        return LayerRows(
            torch.from_numpy(self.keys(layer)[:, begin:end]).view(kind),
            torch.from_numpy(self.values(layer)[:, begin:end]).view(kind),
            None if codes is None else torch.from_numpy(codes),
            torch.from_numpy(centre),
            _tensor(key_scale),
            _tensor(value_scale),
        )

    def places(self) -> np.ndarray:
        """Return the addresses of all layers: PIECE as int64 `[layers, COLUMNS]`. The caller sets ranges and modes.
        Waits for memory.
        """
        if self._places is None:
            places = new_pieces(len(self.shape.layers))
            for layer, place in enumerate(places):
                self._describe(layer, place)
            self._places = as_columns(places)
        return self._places

    def _describe(self, layer: int, place: np.void) -> None:
        keys, values = self.keys(layer), self.values(layer)
        centre, key_scale, value_scale = self.centre.arrays(layer)
        place["tokens"] = self.capacity
        place["keys"], place["key_head_bytes"], place["key_row_bytes"] = keys.ctypes.data, *keys.strides[:2]
        place["values"], place["value_head_bytes"], place["value_row_bytes"] = values.ctypes.data, *values.strides[:2]
        place["centre"] = centre.ctypes.data
        if key_scale is not None and value_scale is not None:
            place["key_scale"], place["value_scale"] = key_scale.ctypes.data, value_scale.ctypes.data
        if self.has_codes and self.sealed_tokens is not None:
            codes, offsets = self.codes(layer), self.offsets(layer)
            place["tokens"] = self.sealed_tokens
            place["entries"], place["entry_head_bytes"], place["entry_table_bytes"] = (
                codes.ctypes.data,
                *codes.strides[:2],
            )
            place["offsets"] = offsets.ctypes.data
            place["offset_head_bytes"], place["offset_table_bytes"] = offsets.strides[:2]

    def _array(self, layer: int, begin: int, shape: tuple[int, int], kind: type) -> np.ndarray:
        return _view(self._slabs[layer].wait(), begin, (self.shape.num_kv_heads, *shape), kind)


def _view(memory: np.ndarray, begin: int, shape: tuple[int, ...], kind: type) -> np.ndarray:
    num_bytes = math.prod(shape) * np.dtype(kind).itemsize
    return memory[begin : begin + num_bytes].view(kind).reshape(shape)


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)

"""Keep packed matrices in the form in which prefill multiplies them, from one unit of a layer to the next.

Prefill goes layer by layer, chunk after chunk, so a kept matrix is widened once per layer and not once per chunk. A
layer's largest matrices have their own places. Those that do not fit beside them share the room that is left, and are
widened on every use. Kept matrices are written and read on one stream. On other streams, and in a captured step,
matrices are widened in new memory. A captured layer of prefill runs on that one stream and reads the same places, so
matrices with their own places are widened before its graph is replayed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.operations.linear.packed_linear import widen
from gpu.operations.linear.packed_matrix import Packed

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Place:
    """The bytes of a widened matrix. is_own: no other matrix of its layer uses them."""

    begin: int
    end: int
    is_own: bool


class Widened:
    """Matrices widened to the compute dtype, in `most_bytes` of memory; a larger matrix is not kept.

    It belongs to the stream that creates it. A result is valid until the next matrix is requested.
    """

    def __init__(self, most_bytes: int, device: torch.device) -> None:
        self.most_bytes = most_bytes
        self._memory: Tensor | None = None  # of bytes, from the first matrix on
        self._places: dict[int, _Place] = {}  # by the address of a matrix's words
        self._kept: dict[int, _Place] = {}  # the matrices that are in memory now
        self._noted: list[Packed] | None = None  # the matrices that the layer being captured uses
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def lay_out(self, layer: Sequence[Packed]) -> None:
        """Assign places to the matrices of a layer, the largest first, since keeping these saves the most."""
        sizes = [(_bytes_of(packed), packed.words.data_ptr()) for packed in layer]
        left = sorted((size for size in sizes if size[0] <= self.most_bytes), reverse=True)
        begin, shared = 0, []
        while left:
            size, key = left.pop(0)
            behind = begin + -(-size // _ALIGNMENT) * _ALIGNMENT
            most_shared = max((other for other, _ in left[:1] + shared), default=0)
            if (behind + most_shared if most_shared else begin + size) <= self.most_bytes:
                self._places[key] = _Place(begin, begin + size, True)
                begin = behind
            else:
                shared.append((size, key))
        self._places |= {key: _Place(begin, begin + size, False) for size, key in shared}

    def __call__(self, packed: Packed) -> Tensor:
        """Return the matrix, `[rows, inner]` of packed.dtype, columns in the matrix's order.

        The caller must not write to it.
        """
        place = self._places.get(packed.words.data_ptr())
        if place is None:
            return widen(packed)
        if self._noted is not None:
            self._noted.append(packed)
            memory = self._memory_of(packed, place)
            return memory if place.is_own else widen(packed, memory)
        if not self._is_ours:
            return widen(packed)
        self.make_ready(packed)
        memory = self._memory_of(packed, place)
        return memory if place.is_own else widen(packed, memory)

    def make_ready(self, packed: Packed) -> None:
        """Widen a matrix that has its own place, unless it is there, and forget what the place held before."""
        key = packed.words.data_ptr()
        place = self._places[key]
        if key in self._kept:
            return
        self._kept = {
            other: held for other, held in self._kept.items() if held.end <= place.begin or place.end <= held.begin
        }
        if place.is_own:
            widen(packed, self._memory_of(packed, place))
            self._kept[key] = place

    @contextmanager
    def noted(self, noted: list[Packed]) -> Iterator[None]:
        """List the matrices that are used while a layer is captured.

        A matrix with its own place is not widened in the graph: before each replay the caller calls `make_ready` with
        each of the list.
        """
        noted.clear()
        self._noted = noted
        try:
            yield
        finally:
            self._noted = None

    def _memory_of(self, packed: Packed, place: _Place) -> Tensor:
        """Return the memory of a place as a matrix `[rows, inner]`."""
        if self._memory is None:
            self._memory = torch.empty(self.most_bytes, dtype=torch.uint8, device=packed.words.device)
        return self._memory[place.begin : place.end].view(packed.dtype).view(packed.rows, packed.inner)

    @property
    def _is_ours(self) -> bool:
        if self._stream is None:
            return True
        is_same = torch.cuda.current_stream(self._stream.device) == self._stream
        return is_same and not torch.cuda.is_current_stream_capturing()


def _bytes_of(packed: Packed) -> int:
    return packed.rows * packed.inner * packed.dtype.itemsize

"""Matrices of few bits as prefill multiplies them, kept from one unit of a layer to the next.

Prefill goes layer by layer, chunk after chunk, so a kept matrix is widened once a layer and not once a chunk. A layer's
largest matrices have a place each; those that do not fit beside these share the room behind them, and are widened
whenever they are asked for. What is kept is written and read on one stream; for other streams, and in a captured step,
matrices are widened in new memory. A captured layer of a prefill, which runs on that stream, reads the same places:
what has a place of its own is made ready in front of it.
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
    """The bytes of a widened matrix. is_own: no other matrix of its layer has them."""

    begin: int
    end: int
    is_own: bool


class Widened:
    """Matrices widened to the compute dtype, in `most_bytes`; a larger one is not kept. It belongs to the stream that
    it is made on. What it returns is valid until the next matrix is asked for.
    """

    def __init__(self, most_bytes: int, device: torch.device) -> None:
        self.most_bytes = most_bytes
        self._memory: Tensor | None = None  # of bytes, from the first matrix on
        self._places: dict[int, _Place] = {}  # by the address of a matrix's words
        self._kept: dict[int, _Place] = {}  # those that are there now
        self._noted: list[Packed] | None = None  # what a layer that is captured asks for
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def lay_out(self, layer: Sequence[Packed]) -> None:
        """Give the matrices of a layer their places. Of a large one most is saved, so these come first."""
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
        """Return `[rows, inner]` of packed.dtype, columns in the matrix's order; not to be written to."""
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
        """Widen a matrix that has a place of its own, if it is not there, and forget what its place had."""
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
        """Note what is asked for, in the graph of a layer that is captured. What has a place of its own is not widened:
        whoever replays the graph calls `make_ready` with each of the list before.
        """
        noted.clear()
        self._noted = noted
        try:
            yield
        finally:
            self._noted = None

    def _memory_of(self, packed: Packed, place: _Place) -> Tensor:
        """Return a place as a matrix `[rows, inner]`."""
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

"""Matrices of few bits as prefill multiplies them, kept from one unit of a layer to the next.

Prefill goes layer by layer, chunk after chunk, so a kept matrix is widened once a layer and not once a chunk. They
stand behind each other in one piece of memory; at its end the first place is the next one's. What is kept is written
and read on one stream; for other streams, and in a graph that is being captured, matrices are widened anew: in the same
memory where the graph is of a prefill's layer, which runs on that stream, else in the graph's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpu.operations.linear.packed_linear import widen
from gpu.operations.linear.packed_matrix import Packed

_ALIGNMENT = 256


class Widened:
    """Matrices widened to the compute dtype, in `most_bytes`; a larger one is not kept. It belongs to the stream that
    it is made on. What it returns is valid until the next matrix is asked for.
    """

    def __init__(self, most_bytes: int, device: torch.device) -> None:
        self.most_bytes = most_bytes
        self._memory: Tensor | None = None  # of bytes, from the first matrix on
        self._kept: dict[int, tuple[int, Tensor]] = {}  # by the address of their words: the first byte, the matrix
        self._end = 0  # of the one that was widened last
        self._is_in_place = False
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def __call__(self, packed: Packed) -> Tensor:
        """Return `[rows, inner]` of packed.dtype, columns in the matrix's order; not to be written to."""
        num_bytes = packed.rows * packed.inner * packed.dtype.itemsize
        if num_bytes > self.most_bytes:
            return widen(packed)
        if self._is_in_place:
            return widen(packed, self._place(packed, 0))
        if not self._is_ours:
            return widen(packed)
        key = packed.words.data_ptr()
        if key not in self._kept:
            begin = self._end if self._end + num_bytes <= self.most_bytes else 0
            self._end = begin + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._kept = {
                other: (first, matrix)
                for other, (first, matrix) in self._kept.items()
                if first + matrix.nbytes <= begin or self._end <= first
            }
            self._kept[key] = begin, widen(packed, self._place(packed, begin))
        return self._kept[key][1]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Widen each matrix anew in the first place, also in a graph that is captured. Whoever replays such a graph
        calls `forget` before.
        """
        self.forget()
        self._is_in_place = True
        try:
            yield
        finally:
            self._is_in_place = False

    def forget(self) -> None:
        """Keep nothing: a graph writes where matrices are."""
        self._kept.clear()
        self._end = 0

    def _place(self, packed: Packed, begin: int) -> Tensor:
        """Return the memory from a byte on as a matrix `[rows, inner]`."""
        if self._memory is None:
            self._memory = torch.empty(self.most_bytes, dtype=torch.uint8, device=packed.words.device)
        end = begin + packed.rows * packed.inner * packed.dtype.itemsize
        return self._memory[begin:end].view(packed.dtype).view(packed.rows, packed.inner)

    @property
    def _is_ours(self) -> bool:
        if self._stream is None:
            return True
        is_same = torch.cuda.current_stream(self._stream.device) == self._stream
        return is_same and not torch.cuda.is_current_stream_capturing()

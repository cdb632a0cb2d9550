"""Matrices of few bits as prefill multiplies them, kept from one unit of a layer to the next.

Prefill goes layer by layer, chunk after chunk, so a kept matrix is widened once a layer and not once a chunk. The least
recently used one is evicted first. A kept matrix is written and read on one stream; for other streams, and in a graph
that is being captured, matrices are widened anew.
"""

from collections import OrderedDict

import torch
from torch import Tensor

from gpu.operations.linear.packed_linear import widen
from gpu.operations.linear.packed_matrix import Packed


class Widened:
    """Matrices widened to the compute dtype, at most `most_bytes`; a larger one is not kept. It belongs to the stream
    that it is made on.
    """

    def __init__(self, most_bytes: int, device: torch.device) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[int, Tensor] = OrderedDict()  # by the address of their words
        self._bytes = 0
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def __call__(self, packed: Packed) -> Tensor:
        """Return `[rows, inner]` of packed.dtype, columns in the matrix's order; not to be written to."""
        num_bytes = packed.rows * packed.inner * packed.dtype.itemsize
        if num_bytes > self.most_bytes or not self._is_ours:
            return widen(packed)
        key = packed.words.data_ptr()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        while self._bytes + num_bytes > self.most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
            del oldest  # its memory is the next one's
        self._kept[key] = widen(packed)
        self._bytes += num_bytes
        return self._kept[key]

    @property
    def _is_ours(self) -> bool:
        if self._stream is None:
            return True
        is_same = torch.cuda.current_stream(self._stream.device) == self._stream
        return is_same and not torch.cuda.is_current_stream_capturing()

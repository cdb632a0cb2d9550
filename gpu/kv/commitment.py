"""Commit memory of KV pages and windows: on a GPU all of it from the start, on the CPU device row by row on request.

On the CPU, arenas are reserved addresses, and rows are committed when a request needs them. So a shortage of memory is
noticed in time, instead of a page fault that ends the process. Rows stay committed. Rows that are not committed read as
zeros.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from transfer.host_pages import populate, reserve_pages
from transfer.machine import available_memory

SPARE_BYTES = 256 * 2**20  # left free for what steps allocate, and for other programs
LEAST_COMMITTED_BYTES = 16 * 2**20  # committed at once, at least, since finding out what is free costs time


def allocate_arena(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: allocated on a GPU, only reserved on the CPU. Raises OSError if the system refuses."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(reserve_pages(num_bytes)).view(dtype).view(shape)


class Commitment:
    """Arenas whose rows are committed on request. arenas: `[layers, rows, ...]`, as `allocate_arena` makes them.
    available: bytes that may still be taken.
    """

    def __init__(self, arenas: Sequence[Tensor], available: Callable[[], int] = available_memory) -> None:
        self._layers = [layer for arena in arenas for layer in arena]
        self._available = available

    @property
    def least_rows(self) -> int:
        """Return the fewest rows that are worth committing at once."""
        row_bytes = sum(layer[0].nbytes for layer in self._layers if len(layer))
        return max(1, LEAST_COMMITTED_BYTES // row_bytes) if row_bytes else 1

    def commit(self, begin: int, end: int) -> bool:
        """Populate the memory of rows `[begin, end)` in all layers; return False if the host has too little left or
        refuses.
        """
        rows = [layer[begin:end] for layer in self._layers]
        if sum(one.nbytes for one in rows) + SPARE_BYTES > self._available():
            return False
        return all(populate(one.data_ptr(), one.nbytes) for one in rows if one.nbytes)

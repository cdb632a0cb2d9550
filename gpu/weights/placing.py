"""Plan how a tensor gets from its file to its place: which ranges of the file are read, and how each is placed.

Rows that can be loaded one by one are placed directly; if the place is host memory of the file's type and order, they
are read into it. Rows of packed matrices are gathered on the device first: all of them, or as many as are rounded at
once. So are rows of a tensor that is changed as a whole. A GPU holds one gathered tensor at a time.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpu.model.spec import ModelError
from gpu.weights.file_reader import RANGE_BYTES, FileRange
from gpu.weights.file_tensor import FileTensor
from gpu.weights.stored import StoredError, StoredTensor


def placings(
    tensor: FileTensor, place: StoredTensor, source: str, called: str, device: torch.device
) -> Iterator["Placing"]:
    """Yield placings of a tensor, or of as many of its rows as its place takes at once; see `Placing`."""
    step, fill_rows = place.rows_at_once, place.fill_rows
    if step is None or fill_rows is None or tensor.change is not None:
        yield Placing(tensor, place, source, called, device)
        return
    for begin in range(0, tensor.shape[0], step):
        part = replace(place, fill=partial(fill_rows, begin), fill_rows=None)
        yield Placing(tensor.rows(begin, min(begin + step, tensor.shape[0])), part, source, called, device)


class Placing:
    """The placing of a tensor, or of some of its rows. source, called: its file and name for errors. device: of
    places.
    """

    def __init__(self, tensor: FileTensor, place: StoredTensor, source: str, called: str, device: torch.device) -> None:
        self._tensor, self._place, self._device = tensor, place, device
        self._source, self._called = source, called
        self._dtype = tensor.stored_dtype
        self._fill_rows = place.fill_rows if tensor.change is None else None
        self._gathered: Tensor | None = None
        self._bytes_left = tensor.num_bytes

    def ranges(self, file: int) -> Iterator[FileRange]:
        """Yield ranges of rows, of at most RANGE_BYTES each. file: the descriptor of the open file."""
        tensor, target = self._tensor, self._target()
        row_bytes = tensor.num_bytes // (tensor.shape[0] if tensor.shape else 1)
        step = max(1, RANGE_BYTES // row_bytes) * row_bytes
        for begin in range(0, tensor.num_bytes, step):
            end = min(begin + step, tensor.num_bytes)
            part = None if target is None else target[begin:end]
            done = partial(self._done, begin // row_bytes, begin)
            yield FileRange(file, self._source, tensor.offset + begin, end - begin, part, done)

    def _target(self) -> Tensor | None:
        """Return the place as uint8 `[bytes]`, if bytes can be read directly into it; else None."""
        if self._fill_rows is None:
            place = self._gather() if self._device.type == "cpu" else None
        else:
            place = self._place.as_is
        if place is None or place.dtype != self._dtype or place.device.type != "cpu":
            return None
        return place.view(-1).view(torch.uint8)

    def _gather(self) -> Tensor:
        if self._gathered is None:
            self._gathered = torch.empty(self._tensor.stored_shape, dtype=self._dtype, device=self._device)
        return self._gathered

    def _done(self, row: int, begin: int, read: Tensor) -> None:
        is_there = self._target() is not None
        if self._fill_rows is not None:
            if not is_there:
                self._fill_rows(row, read.view(self._dtype).view(-1, *self._tensor.shape[1:]))
            return
        if not is_there:
            self._gather().view(-1).view(torch.uint8)[begin : begin + len(read)].copy_(read, non_blocking=True)
        self._bytes_left -= len(read)
        if self._bytes_left == 0:
            self._fill(self._gather())
            self._gathered = None

    def _fill(self, stored: Tensor) -> None:
        assert self._place.fill is not None, "what has no place is passed over"
        try:
            self._place.fill(stored if self._tensor.change is None else self._tensor.change(stored))
        except StoredError as error:
            raise ModelError(f"model: {self._source}: tensor {self._called} {error}") from None

"""Cut a checkpoint's tensors to one device's share of a split model.

A share of a tensor is smaller in one axis. If that is the rows, only the share's rows are read from the file. If it is
the columns, whole rows are read and cut when they are placed.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from gpu.model.matrix_formats import layer_tensors, matrix_parts
from gpu.model.spec import Architecture, Share
from gpu.weights.file_tensor import FileTensor
from gpu.weights.stored import StoredTensor

FUSED = ("qkv", "gate_up")  # tensors that in some families stack several parts by rows; each part is split


def own_part(
    tensor: FileTensor, place: StoredTensor, name: str, architecture: Architecture
) -> Iterator[tuple[FileTensor, StoredTensor]]:
    """Yield the parts of a tensor that this device reads, each with its place. name: the tensor's canonical name."""
    share = architecture.share
    if share is None or tensor.shape in place.shapes:
        yield tensor, place
        return
    (wanted,) = place.shapes
    (axis,) = (axis for axis, size in enumerate(wanted) if size != tensor.shape[axis])
    if axis:
        yield tensor, _of_columns(place, share.rows(tensor.shape[1]))
        return
    done = 0
    for begin, rows in _parts(name, tensor.shape[0], share):
        own = share.rows(rows)
        cut = tensor.rows(begin + own.start, begin + own.stop)
        yield cut, _of_rows(place, done, cut.shape[0])
        done += cut.shape[0]


def _parts(name: str, num_rows: int, share: Share) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of each part of the whole tensor that is split separately."""
    whole = share.whole
    for layer, spec in enumerate(whole.layers):
        table, begin = layer_tensors(whole, spec), whole.layer_name(layer) + "."
        what = table.get(name.removeprefix(begin), "") if name.startswith(begin) else ""
        fused = what.removesuffix("_bias")
        if fused.startswith("gate_up of "):  # an expert's
            return [(0, num_rows // 2), (num_rows // 2, num_rows // 2)]
        if fused in FUSED:
            counts = [rows for _, rows in matrix_parts(whole, spec, fused)]
            return [(sum(counts[:index]), rows) for index, rows in enumerate(counts)]
    return [(0, num_rows)]


def _of_rows(place: StoredTensor, first: int, count: int) -> StoredTensor:
    """Return a place's rows from `first` on."""
    fill_rows, whole = place.fill_rows, count == place.shapes[0][0]
    if whole:
        return place
    assert fill_rows is not None, "parts of a tensor are placed row by row"

    def fill(rows: Any) -> None:
        fill_rows(first, rows)

    def fill_later(begin: int, rows: Tensor) -> None:
        fill_rows(first + begin, rows)

    as_is = None if place.as_is is None else place.as_is[first : first + count]
    return replace(place, fill=fill, fill_rows=fill_later, as_is=as_is)


def _of_columns(place: StoredTensor, own: slice) -> StoredTensor:
    fill, fill_rows = place.fill, place.fill_rows
    assert fill is not None, "a tensor that is split has a place"

    def fill_whole(rows: Any) -> None:
        fill(rows[:, own].contiguous())

    def fill_some(begin: int, rows: Tensor) -> None:
        assert fill_rows is not None, "the place takes rows"
        fill_rows(begin, rows[:, own].contiguous())

    return replace(place, fill=fill_whole, fill_rows=None if fill_rows is None else fill_some, as_is=None)

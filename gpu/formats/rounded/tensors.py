"""Name and pack the tensors of modules that are rounded as they are loaded."""

from collections.abc import Sequence

from torch import Tensor

from gpu.model.matrix_format import MatrixFormat
from gpu.weights.rounding import round_rows, rows_at_once
from gpu.weights.stored import PLAIN, ModuleRows, StoredTensor


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return the tensors of a module, which are gathered and rounded in parts.

    Parts are gathered one at a time unless rows are put in order: an output matrix that is gathered and rounded as a
    whole takes gigabytes, beside weights that leave less.
    """

    def fill(weight: Tensor) -> None:
        for place, rows in part.parts(at_once):
            _put(place, weight[rows], stored)

    def fill_rows(begin: int, rows: Tensor) -> None:
        _put(part.cut(begin, begin + len(rows)), rows, stored)

    at_once, shape = rows_at_once(part.packed.inner), (part.rows, part.packed.inner)
    if part.order is not None:
        return {".weight": StoredTensor((shape,), PLAIN, fill)}
    return {".weight": StoredTensor((shape,), PLAIN, fill, fill_rows=fill_rows, rows_at_once=at_once)}


def stacked_tensors(
    stored: MatrixFormat, experts: Sequence[ModuleRows], is_transposed: bool
) -> dict[str, StoredTensor]:
    """Return the tensor of all experts, `[experts, rows, inner]`, which are rounded one by one. is_transposed: each
    one's rows are columns.
    """
    shape = (experts[0].rows, experts[0].packed.inner)

    def fill_rows(begin: int, weights: Tensor) -> None:
        for place, rows in zip(experts[begin : begin + len(weights)], weights, strict=True):
            _put(place, rows.T if is_transposed else rows, stored)

    whole = (len(experts), *(shape[::-1] if is_transposed else shape))
    return {
        "": StoredTensor((whole,), PLAIN, lambda weights: fill_rows(0, weights), fill_rows=fill_rows, rows_at_once=1)
    }


def _put(place: ModuleRows, rows: Tensor, stored: MatrixFormat) -> None:
    numbers, scales, zeros = round_rows(rows, stored)
    place.put_numbers(numbers)
    place.put_scales(scales, 1)
    if zeros is not None:
        place.put_zeros(zeros)

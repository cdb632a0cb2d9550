"""Tensors of modules that are rounded as they are loaded."""

from torch import Tensor

from gpu.model.matrix_format import MatrixFormat
from gpu.weights.rounding import round_rows, rows_at_once
from gpu.weights.stored import PLAIN, ModuleRows, StoredTensor


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return the tensors of a module, which are gathered and rounded in parts.

    Parts are gathered one at a time unless rows are put in order: an output matrix that is gathered and rounded as a
    whole takes gigabytes, beside weights that leave less.
    """

    def put(place: ModuleRows, rows: Tensor) -> None:
        numbers, scales, zeros = round_rows(rows, stored)
        place.put_numbers(numbers)
        place.put_scales(scales, 1)
        if zeros is not None:
            place.put_zeros(zeros)

    def fill(weight: Tensor) -> None:
        for place, rows in part.parts(at_once):
            put(place, weight[rows])

    def fill_rows(begin: int, rows: Tensor) -> None:
        put(part.cut(begin, begin + len(rows)), rows)

    at_once, shape = rows_at_once(part.packed.inner), (part.rows, part.packed.inner)
    if part.order is not None:
        return {".weight": StoredTensor((shape,), PLAIN, fill)}
    return {".weight": StoredTensor((shape,), PLAIN, fill, fill_rows=fill_rows, rows_at_once=at_once)}

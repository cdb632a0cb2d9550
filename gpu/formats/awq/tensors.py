"""Name and pack the tensors of AWQ modules."""

from torch import Tensor

from gpu.model.matrix_format import MatrixFormat
from gpu.weights.stored import INTEGER, SCALES, ModuleRows, StoredTensor, unpack_numbers

# Of eight columns, where AWQ's kernels have each of a word's nibbles, from the lowest up.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLES = tuple(_ORDER.index(column) for column in range(8))


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    rows, inner, groups = part.rows, part.packed.inner, part.num_groups

    def numbers(words: Tensor) -> Tensor:
        """Unpack int32 `[lines, rows / 8]` to uint8 `[rows, lines]`."""
        nibbles = unpack_numbers(words, 4).view(len(words), -1, 8)
        return nibbles[:, :, list(_NIBBLES)].flatten(1).t().contiguous()

    return {
        ".qweight": StoredTensor(((inner, rows // 8),), INTEGER, lambda words: part.put_numbers(numbers(words))),
        ".qzeros": StoredTensor(((groups, rows // 8),), INTEGER, lambda words: part.put_zeros(numbers(words))),
        ".scales": StoredTensor(((groups, rows),), SCALES, lambda scales: part.put_scales(scales.t(), 1)),
    }

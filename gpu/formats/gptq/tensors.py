"""Name and pack the tensors of GPTQ modules."""

from collections.abc import Callable

from torch import Tensor

from gpu.model.matrix_format import BITS, MatrixFormat
from gpu.weights.stored import (
    INTEGER,
    PLAIN,
    SCALES,
    ModuleRows,
    StoredError,
    StoredTensor,
    group_order,
    unpack_numbers,
)


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return the tensors of a module. The first version stores a zero point of z as z - 1, wrapped around."""
    is_one_less = scheme == "gptq"
    rows, inner, groups, bits = part.rows, part.packed.inner, part.num_groups, BITS[stored.kind]
    planes = 32 // bits

    def fill_numbers(words: Tensor) -> None:  # [inner / planes, rows]
        part.put_numbers(unpack_numbers(words.t().contiguous(), bits))

    def fill_zeros(words: Tensor) -> None:  # [groups, rows / planes]
        zeros = unpack_numbers(words, bits)
        part.put_zeros(((zeros + is_one_less) & (2**bits - 1)).t())

    return {
        ".qweight": StoredTensor(((inner // planes, rows),), INTEGER, fill_numbers),
        ".qzeros": StoredTensor(((groups, rows // planes),), INTEGER, fill_zeros),
        ".scales": StoredTensor(((groups, rows),), SCALES, lambda scales: part.put_scales(scales.t(), 1)),
        ".g_idx": group_order(stored, part),
        ".bias": StoredTensor(((rows,),), PLAIN, _refuse_bias(), is_needed=False),
    }


def _refuse_bias() -> Callable[[Tensor], None]:
    """Return what refuses a bias that is not zero: some files have one of zeros for every product."""

    def fill(bias: Tensor) -> None:
        if bool(bias.any()):
            raise StoredError("is not zero; wanted zeros, since this model has no bias here")

    return fill

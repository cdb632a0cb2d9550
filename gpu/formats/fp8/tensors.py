"""Name and pack the tensors of FP8 modules."""

from gpu.model.matrix_format import MatrixFormat
from gpu.weights.stored import WIDE_SCALES, ModuleRows, StoredTensor, fp8_weight, input_scale, row_scales


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return the tensors of a module; scales of blocks have a name of their own."""
    name = ".weight_scale_inv" if scheme == "fp8 blocks" else ".weight_scale"
    return {".weight": fp8_weight(part), name: row_scales(stored, part, row_block, WIDE_SCALES)} | input_scale()

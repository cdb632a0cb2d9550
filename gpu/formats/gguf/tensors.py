"""Tensors of GGUF files. Each kind of block has scales of its own; here all parts of a matrix have the same."""

from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.matrix_format import MatrixFormat
from gpu.weights.gguf_blocks import Blocks, read_fp4, read_numbers
from gpu.weights.stored import ModuleRows, StoredTensor


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return the one tensor of a module."""

    def fill(blocks: Blocks) -> None:
        for place, rows in part.parts(blocks.rows_at_once):
            if stored.kind == "fp4":
                codes, exponents = read_fp4(blocks.rows(rows))
                place.put_numbers(codes)
                place.put_exponents(exponents)
                continue
            numbers = read_numbers(blocks.rows(rows))
            if stored.run is not None:
                place.put_numbers(numbers.q)
                place.put_runs(numbers)
                continue
            place.put_numbers(numbers.q + (place.packed.middle - blocks.layout.zero))
            place.put_scales(numbers.d, 1)

    return {".weight": StoredTensor(((part.rows, part.packed.inner),), tuple(BLOCK_KINDS), fill)}
